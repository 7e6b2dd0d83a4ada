"""A linear layer whose frozen weight has a low-rank correction: W + s·BA."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def added(x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return W x + b + s·B(Ax), without forming BA."""
    return torch.add(F.linear(x, weight, bias), F.linear(F.linear(x, a), b), alpha=scale)


def summed(x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return the same value as `added`, computed as (W + s·BA) x + b, for frozen W and b."""
    y: Tensor = _Summed.apply(x, weight, bias, a, b, scale)  # type: ignore[no-untyped-call]
    return y


class _Summed(torch.autograd.Function):
    """y = x(W + s·BA)ᵀ + b, where the sum is formed once per pass and its gradient is never formed:

    ∂x = ∂y (W + s·BA),      ∂A = s·(∂y B)ᵀ x,      ∂B = s·∂yᵀ(x Aᵀ)

    Second derivatives use W x + s·B(Ax).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float) -> Tensor:
        whole = torch.addmm(weight, b, a, alpha=scale)
        ctx.save_for_backward(x, weight, bias, a, b, whole)
        ctx.scale = scale
        return F.linear(x, whole, bias)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, a, b, whole = ctx.saved_tensors
        if torch.is_grad_enabled():
            sought = [each for each in (x, a, b) if each.requires_grad]
            y = added(x, weight, bias, a, b, ctx.scale)
            slopes = iter(torch.autograd.grad(y, sought, slope, create_graph=True))
            found = [next(slopes) if each.requires_grad else None for each in (x, a, b)]
            return found[0], None, None, found[1], found[2], None
        rows, along = x.flatten(0, -2), slope.flatten(0, -2)
        of_x, *_, of_a, of_b, _ = ctx.needs_input_grad
        in_x = (along @ whole).view_as(x) if of_x else None
        in_a = ((along @ b).t() @ rows).mul_(ctx.scale) if of_a else None
        in_b = (along.t() @ (rows @ a.t())).mul_(ctx.scale) if of_b else None
        return in_x, None, None, in_a, in_b, None
