"""The gradient of a chain of linear layers by hand: where layers are small, autograd costs more than the arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

aten = torch.ops.aten
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
MEAN, IGNORED = 1, -100  # the defaults of torch's cross-entropy


class Chain:
    """Linear layers with ReLU between them under the mean cross-entropy, one sample in each row of h and z:

        h₀ = x                              z_l = h_{l−1} W_lᵀ + b_l          h_l = max(z_l, 0)
        δ_L = (softmax(z_L) − y) / n        δ_{l−1} = δ_l W_l ⊙ [h_{l−1} > 0]
        ∇W_l = δ_lᵀ h_{l−1}                 ∇b_l = Σ δ_l

    Every ∇ is written straight to its place in a flat gradient, by the kernels that autograd would call.
    """

    def __init__(self, layers: list[nn.Linear]) -> None:
        pairs = [(layer.weight, layer.bias) for layer in layers]
        self._layers = [(weight.detach(), None if bias is None else bias.detach()) for weight, bias in pairs]
        self._sizes = [tensor.numel() for pair in self._layers for tensor in pair if tensor is not None]
        self._size = sum(self._sizes)
        self._one = torch.ones_like(self._layers[0][0][0, 0])

    def rows(self, weights: Tensor) -> Rows:
        """The same for several clients, whose weights are the rows of a matrix."""
        return Rows([(weight.shape, bias is not None) for weight, bias in self._layers], weights)

    @classmethod
    def of(cls, module: nn.Module) -> Chain | None:
        """The module as a chain, or None if it has other, shared or frozen layers, or hooks that must be run."""
        layers = list(module) if type(module) is nn.Sequential else []
        if layers and type(layers[0]) is nn.Flatten and (layers[0].start_dim, layers[0].end_dim) == (1, -1):
            layers = layers[1:]
        linear = [layer for layer in layers[::2] if type(layer) is nn.Linear]
        between = [layer for layer in layers[1::2] if type(layer) is nn.ReLU]
        plain = len(linear) == len(between) + 1 and len(linear) + len(between) == len(layers)
        hooked = any(getattr(m, kind) for m in module.modules() for kind in HOOKS)
        trained = all(parameter.requires_grad for parameter in module.parameters())
        shared = sum(len(list(layer.parameters())) for layer in linear) != len(list(module.parameters()))
        return cls(linear) if plain and trained and not hooked and not shared else None

    def gradient(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The mean cross-entropy of a batch, and its gradient as a new flat vector."""
        loss, slopes = self._backward(inputs, labels)
        flat = self._one.new_empty(self._size)
        places = iter(flat.split(self._sizes))
        for (weight, bias), (delta, h) in zip(self._layers, slopes, strict=True):
            torch.mm(delta.t(), h, out=next(places).view(weight.shape))
            if bias is not None:
                torch.sum(delta, 0, out=next(places))
        return loss, flat

    def descend(self, inputs: Tensor, labels: Tensor, lr: float, decay: float) -> Tensor:
        """The mean cross-entropy of a batch, and the step w ← w − η (∇ + decay · w), without ever writing ∇ down."""
        loss, slopes = self._backward(inputs, labels)
        ones = self._one.expand(len(labels))
        for (weight, bias), (delta, h) in zip(self._layers, slopes, strict=True):
            weight.addmm_(delta.t(), h, beta=1 - lr * decay, alpha=-lr)
            if bias is not None:
                bias.addmv_(delta.t(), ones, beta=1 - lr * decay, alpha=-lr)
        return loss

    def _backward(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """The loss, and each layer's (δ_l, h_{l−1})."""
        entered: list[Tensor] = []
        out = inputs.flatten(1)
        for weight, bias in self._layers:
            if entered:
                out = out.relu_()
            entered.append(out)
            out = torch.mm(out, weight.t()) if bias is None else torch.addmm(bias, out, weight.t())
        log_p = torch.log_softmax(out, 1)
        loss, total = aten.nll_loss_forward.default(log_p, labels, None, MEAN, IGNORED)
        slope = aten.nll_loss_backward.default(self._one, log_p, labels, None, MEAN, IGNORED, total)
        deltas = [aten._log_softmax_backward_data.default(slope, log_p, 1, log_p.dtype)]
        for (weight, _), h in zip(self._layers[:0:-1], entered[:0:-1], strict=True):
            deltas.append(aten.threshold_backward.default(torch.mm(deltas[-1], weight), h, 0))
        return loss, list(zip(reversed(deltas), entered, strict=True))


class Rows:
    """`Chain` for several clients at once: W, b, h, z and δ have one more dimension in front, the client.

    What a sample counts in its client's mean is its share: 1/n, or 0 for one that only fills a shorter batch up.
    """

    def __init__(self, layers: Sequence[tuple[torch.Size, bool]], weights: Tensor) -> None:
        self._shapes, self._weights = layers, weights
        self._layers = _views(layers, weights)

    def gradient(self, inputs: Tensor, labels: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
        """Each client's loss, and the gradients as the rows of a new matrix."""
        losses, slopes = self._backward(inputs, labels, shares)
        flat = torch.empty_like(self._weights)
        for (weight, bias), (delta, h) in zip(_views(self._shapes, flat), slopes, strict=True):
            torch.bmm(delta.mT, h, out=weight)
            if bias is not None:
                torch.sum(delta, 1, out=bias)
        return losses, flat

    def descend(self, inputs: Tensor, labels: Tensor, shares: Tensor, lr: float, decay: float) -> Tensor:
        """Each client's loss, and the step w ← w − η (∇ + decay · w)."""
        losses, slopes = self._backward(inputs, labels, shares)
        for (weight, bias), (delta, h) in zip(self._layers, slopes, strict=True):
            weight.baddbmm_(delta.mT, h, beta=1 - lr * decay, alpha=-lr)
            if bias is not None:
                bias.mul_(1 - lr * decay).sub_(delta.sum(1), alpha=lr)
        return losses

    def _backward(self, inputs: Tensor, labels: Tensor, shares: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        entered: list[Tensor] = []
        out = inputs.flatten(2)
        for weight, bias in self._layers:
            if entered:
                out = out.relu_()
            entered.append(out)
            out = torch.bmm(out, weight.mT) if bias is None else torch.baddbmm(bias.unsqueeze(1), out, weight.mT)
        log_p, chosen, shares = torch.log_softmax(out, 2), labels.unsqueeze(2), shares.unsqueeze(2)
        losses = -(log_p.gather(2, chosen) * shares).sum((1, 2))
        deltas = [log_p.exp().mul_(shares).scatter_add_(2, chosen, -shares)]
        for (weight, _), h in zip(self._layers[:0:-1], entered[:0:-1], strict=True):
            deltas.append(aten.threshold_backward.default(torch.bmm(deltas[-1], weight), h, 0))
        return losses, list(zip(reversed(deltas), entered, strict=True))


def _views(layers: Sequence[tuple[torch.Size, bool]], rows: Tensor) -> list[tuple[Tensor, Tensor | None]]:
    """Each layer's W and b in a matrix whose rows are flat weights."""
    views, end = list[tuple[Tensor, Tensor | None]](), 0
    for shape, bias in layers:
        start, end = end, end + shape.numel()
        weight = rows[:, start:end].unflatten(1, shape)
        start, end = end, end + bias * shape[0]
        views.append((weight, rows[:, start:end] if bias else None))
    return views
