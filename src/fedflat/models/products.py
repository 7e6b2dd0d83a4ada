"""Products of float32 matrices by the library that is fastest on this processor.

torch computes products by MKL, which uses the wide vectors of AVX-512 on Intel's processors only, and convolutions by
oneDNN, which uses them on all. AMD's Zen 5 computes such a vector at once, so products are up to twice as fast by
oneDNN; Zen 4 computes it in two halves.
"""

import re
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ZEN_5 = 26  # its family, and that of later ones
LARGE = 2**22  # multiplications of a linear layer beside which the call from Python costs little


@cache
def by_onednn() -> bool:
    """Return whether products are faster by oneDNN than by MKL on this processor."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not torch.backends.mkl.is_available():
        return False
    try:
        processor = Path("/proc/cpuinfo").read_text("utf-8")
    except OSError:
        return False
    family = re.search(r"^cpu family\s*: (\d+)$", processor, re.MULTILINE)
    wide = "AuthenticAMD" in processor and family is not None and int(family[1]) >= ZEN_5
    return wide and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return A Bᵀ for matrices, or for each matrix of a batch. Both gradients are contiguous."""
    found: Tensor = _Product.apply(a, b)  # type: ignore[no-untyped-call]
    return found


class _Product(torch.autograd.Function):
    """A, B ↦ C = A Bᵀ, with ∇A = ∇C B and ∇B = ∇Cᵀ A."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.save_for_forward(a, b)
        return _computed(a, b)

    @staticmethod
    def jvp(ctx: Any, along_a: Tensor, along_b: Tensor) -> Tensor:
        a, b = ctx.saved_tensors
        return _computed(along_a, b) + _computed(a, along_b)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, Tensor | None]:
        a, b = ctx.saved_tensors
        for_a, for_b = ctx.needs_input_grad
        return product(slope, b.mT) if for_a else None, product(slope.mT, a.mT) if for_b else None


def _computed(a: Tensor, b: Tensor) -> Tensor:
    if not _fits(a):
        return a @ b.mT
    if a.dim() == 2:
        return _by_onednn(a, b)
    return torch.stack([*map(_by_onednn, a, b)])


def _fits(x: Tensor) -> bool:
    return x.dtype == torch.float32 and x.device.type == "cpu" and by_onednn()


def _by_onednn(a: Tensor, b: Tensor) -> Tensor:
    c: Tensor = torch.ops.mkldnn._linear_pointwise(_dense(a), _dense(b), None, "none", [], "")
    return c


def _dense(x: Tensor) -> Tensor:
    """Return the matrix without gaps in memory: for some that have gaps, oneDNN has only a slow form."""
    return x if x.is_contiguous() or x.mT.is_contiguous() else x.contiguous()


def gains(x: Tensor, weight: Tensor) -> bool:
    """Return whether a linear layer is faster by `product`. vmap does not support its gradient."""
    large = weight.dim() == 2 and x.dim() >= 2 and x.numel() * len(weight) >= LARGE
    plain = not torch.is_autocast_enabled("cpu") and not torch._C._are_functorch_transforms_active()
    return large and plain and _fits(x) and _fits(weight)
