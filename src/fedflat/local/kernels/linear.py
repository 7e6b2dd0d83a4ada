"""Hand-written gradient of a chain of linear layers, for small layers where the overhead of autograd dominates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedflat.local.kernels.compiled_chain import CompiledChain
from fedflat.local.rule import LocalRule, Loss
from fedflat.models import Network

if TYPE_CHECKING:
    from fedflat.local.slope import Slope

aten = torch.ops.aten
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
MEAN, IGNORED = 1, -100  # the defaults of torch's cross-entropy


class Chain:
    """Linear layers with ReLU between them under the mean cross-entropy, one sample in each row of h and z:

        h₀ = x                              z_l = h_{l−1} W_lᵀ + b_l          h_l = max(z_l, 0)
        δ_L = (softmax(z_L) − y) / n        δ_{l−1} = δ_l W_l ⊙ [h_{l−1} > 0]
        ∇W_l = δ_lᵀ h_{l−1}                 ∇b_l = Σ δ_l

    Every ∇ is written directly to its place in a flat gradient. `compiled_chain.py` does this in one call; where it
    does not apply, the same torch kernels do that autograd calls.
    """

    def __init__(self, network: Network) -> None:
        layers = linear_layers(network)
        self._network = network
        self._layers: list[tuple[Tensor, Tensor | None]] = [(layer.weight, layer.bias) for layer in layers]
        self._sizes = [tensor.numel() for pair in self._layers for tensor in pair if tensor is not None]
        self._one = torch.ones_like(self._layers[0][0][0, 0].detach())
        self._compiled = _compiled([(weight.shape, bias is not None) for weight, bias in self._layers])

    def rows(self, weights: Tensor) -> Rows:
        """Return the same chain for several clients, whose weights are the rows of a matrix."""
        return Rows([(weight.shape, bias is not None) for weight, bias in self._layers], weights)

    @classmethod
    def of(cls, network: Network) -> Chain | None:
        """Return the network as a chain, or None if it is not one."""
        return cls(network) if linear_layers(network) else None

    def gradient(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean cross-entropy of a batch and its gradient as a new flat vector."""
        flat = torch.empty_like(self._network.weights)
        loss = self._compiled.gradient(self._network.weights, flat, inputs, labels)
        return self._gradient(flat, inputs, labels) if loss is None else loss, flat

    @torch.no_grad()
    def _gradient(self, flat: Tensor, inputs: Tensor, labels: Tensor) -> Tensor:
        loss, slopes = self._backward(inputs, labels)
        places = iter(flat.split(self._sizes))
        for (weight, bias), (delta, h) in zip(self._layers, slopes, strict=True):
            torch.mm(delta.t(), h, out=next(places).view(weight.shape))
            if bias is not None:
                torch.sum(delta, 0, out=next(places))
        return loss

    def descend(self, inputs: Tensor, labels: Tensor, lr: float, decay: float) -> Tensor:
        """Take the step w ← w − η (∇ + decay · w) without storing ∇, and return the mean cross-entropy of the batch."""
        loss = self._compiled.descend(self._network.weights, lr, decay, inputs, labels)
        return self._descend(inputs, labels, lr, decay) if loss is None else loss

    @torch.no_grad()
    def _descend(self, inputs: Tensor, labels: Tensor, lr: float, decay: float) -> Tensor:
        loss, slopes = self._backward(inputs, labels)
        ones = self._one.expand(len(labels))
        for (weight, bias), (delta, h) in zip(self._layers, slopes, strict=True):
            weight.addmm_(delta.t(), h, beta=1 - lr * decay, alpha=-lr)
            if bias is not None:
                bias.addmv_(delta.t(), ones, beta=1 - lr * decay, alpha=-lr)
        return loss

    def _backward(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Return the loss and (δ_l, h_{l−1}) of each layer."""
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


def linear_layers(network: Network) -> list[nn.Linear]:
    """Return the linear layers of a network that is a chain.

    The list is empty if the network has other, shared or frozen layers, other parameters or another order of them,
    hooks, a `forward` of its own or autocast. This is called for every client, so it only looks at the layers and does
    not traverse the whole module.
    """
    module = network.module
    if type(module) is not nn.Sequential or module._parameters or network.base or network.autocast:
        return []
    layers = list(module)
    if any("forward" in vars(m) or any(getattr(m, kind) for kind in HOOKS) for m in (module, *layers)):
        return []
    if layers and type(layers[0]) is nn.Flatten and (layers[0].start_dim, layers[0].end_dim) == (1, -1):
        layers = layers[1:]
    linear = [layer for layer in layers[::2] if type(layer) is nn.Linear]
    between = [layer for layer in layers[1::2] if type(layer) is nn.ReLU]
    if len(linear) != len(between) + 1 or len(linear) + len(between) != len(layers):
        return []
    held = [id(p) for layer in linear for p in (layer.weight, layer.bias) if p is not None]
    return linear if held == [*map(id, network.trained)] else []  # as they follow one another in the flat weights


class ChainGradient:
    """Computes the gradient of the cross-entropy of a chain; rules with loss terms use autograd."""

    def __init__(self, network: Network, rule: LocalRule) -> None:
        self._chain = Chain(network)

    @classmethod
    def fits(cls, network: Network, rule: LocalRule, loss: Loss, labels: Tensor) -> bool:
        classes = loss is F.cross_entropy and not labels.is_floating_point()
        return classes and not rule.terms and bool(linear_layers(network))

    def __call__(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return self._chain.gradient(inputs, labels)


class ChainStep:
    """Computes the whole step of a chain for rules whose step is exactly w ← w − η (∇loss + decay · w)."""

    own_velocity = False

    def __init__(self, network: Network, rule: LocalRule) -> None:
        self._chain, self._rule, self._decay = Chain(network), rule, rule.decay + rule.weight_decay

    @classmethod
    def fits(cls, network: Network, rule: LocalRule, loss: Loss, labels: Tensor) -> bool:
        return rule.plain and ChainGradient.fits(network, rule, loss, labels)

    def __call__(self, slope: Slope, velocity: Tensor | None, k: int) -> None:
        slope.note_loss(self._chain.descend(*slope.batch, self._rule.lr_at(k), self._decay))


class Rows:
    """`Chain` for several clients at once: W, b, h, z and δ have the client as an additional first dimension.

    `shares` are the weights of the samples in their client's mean: 1/n, or 0 for padding.
    """

    def __init__(self, layers: Sequence[tuple[torch.Size, bool]], weights: Tensor) -> None:
        self._shapes, self._weights = layers, weights
        self._layers = _views(layers, weights)
        self._compiled = _compiled(layers)

    def gradient(self, inputs: Tensor, labels: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of each client and the gradients as the rows of a new matrix."""
        flat = torch.empty_like(self._weights)
        found = self._compiled.gradient(self._weights, flat, inputs, labels, shares)
        if found is not None:
            return found, flat
        losses, slopes = self._backward(inputs, labels, shares)
        for (weight, bias), (delta, h) in zip(_views(self._shapes, flat), slopes, strict=True):
            torch.bmm(delta.mT, h, out=weight)
            if bias is not None:
                torch.sum(delta, 1, out=bias)
        return losses, flat

    def descend(self, inputs: Tensor, labels: Tensor, shares: Tensor, lr: float, decay: float) -> Tensor:
        """Take the step w ← w − η (∇ + decay · w) in every row, and return the loss of each client."""
        found = self._compiled.descend(self._weights, lr, decay, inputs, labels, shares)
        if found is not None:
            return found
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


def _compiled(layers: Sequence[tuple[torch.Size, bool]]) -> CompiledChain:
    """Return the compiled form of layers with these shapes, with or without biases."""
    widths = [layers[0][0][1], *(shape[0] for shape, _ in layers)]
    return CompiledChain(widths, [bias for _, bias in layers])


def _views(layers: Sequence[tuple[torch.Size, bool]], rows: Tensor) -> list[tuple[Tensor, Tensor | None]]:
    """Return views of W and b of each layer in a matrix whose rows are flat weights."""
    views: list[tuple[Tensor, Tensor | None]] = []
    end = 0
    for shape, bias in layers:
        start, end = end, end + shape.numel()
        weight = rows[:, start:end].unflatten(1, shape)
        start, end = end, end + bias * shape[0]
        views.append((weight, rows[:, start:end] if bias else None))
    return views
