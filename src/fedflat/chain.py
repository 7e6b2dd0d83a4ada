"""The gradient of a chain of linear layers by hand: where layers are small, autograd costs more than the arithmetic."""

from __future__ import annotations

import torch
from torch import Tensor, nn

aten = torch.ops.aten
MEAN, NONE_IGNORED = 1, -100


class Chain:
    """Linear layers with ReLU between them under the mean cross-entropy, one sample in each row of h and z:

        h₀ = x                              z_l = h_{l−1} W_lᵀ + b_l          h_l = max(z_l, 0)
        δ_L = (softmax(z_L) − y) / n        δ_{l−1} = δ_l W_l ⊙ [h_{l−1} > 0]
        ∇W_l = δ_lᵀ h_{l−1}                 ∇b_l = Σ δ_l

    Every ∇ is written straight to its place in the flat gradient, by the kernels that autograd would call.
    """

    def __init__(self, layers: list[nn.Linear]) -> None:
        self._layers = [(layer.weight, layer.bias) for layer in layers]

    @classmethod
    def of(cls, module: nn.Module) -> Chain | None:
        """The module as a chain, or None if it has other layers, frozen ones, or hooks that must be run."""
        layers = list(module) if type(module) is nn.Sequential else []
        if layers and type(layers[0]) is nn.Flatten and (layers[0].start_dim, layers[0].end_dim) == (1, -1):
            layers = layers[1:]
        linear = [layer for layer in layers[::2] if type(layer) is nn.Linear]
        between = [layer for layer in layers[1::2] if type(layer) is nn.ReLU]
        plain = len(linear) == len(between) + 1 and len(linear) + len(between) == len(layers)
        hooked = any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in module.modules())
        trained = all(parameter.requires_grad for parameter in module.parameters())
        return cls(linear) if plain and trained and not hooked else None

    @torch.no_grad()
    def __call__(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """The mean cross-entropy of a batch; its gradient is left in the parameters' `.grad`."""
        entered: list[Tensor] = []
        out = inputs.flatten(1)
        for weight, bias in self._layers:
            if entered:
                out = out.relu_()
            entered.append(out)
            out = torch.mm(out, weight.t()) if bias is None else torch.addmm(bias, out, weight.t())
        log_p = torch.log_softmax(out, 1)
        loss, total = aten.nll_loss_forward.default(log_p, labels, None, MEAN, NONE_IGNORED)
        slope = aten.nll_loss_backward.default(torch.ones_like(loss), log_p, labels, None, MEAN, NONE_IGNORED, total)
        delta = aten._log_softmax_backward_data.default(slope, log_p, 1, log_p.dtype)
        for (weight, bias), h in zip(reversed(self._layers), reversed(entered), strict=True):
            torch.mm(delta.t(), h, out=weight.grad)
            if bias is not None:
                torch.sum(delta, 0, out=bias.grad)
            if h is not entered[0]:
                delta = aten.threshold_backward.default(torch.mm(delta, weight), h, 0)
        result: Tensor = loss
        return result
