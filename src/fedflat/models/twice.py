"""Operations in forms that can be differentiated more than once."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode


@contextmanager
def twice_differentiable() -> Iterator[None]:
    """Within this context, compute operations whose second derivative torch does not have, or has wrong, in plain form.

    The fused kernels of attention, the fast path of nn.Transformer, `hardsigmoid` and `embedding_bag` have no second
    derivative. That of weight normalisation is wrong: torch's backward treats the norms as constants (torch 2.13), so
    the Hessian is not even symmetric.
    """
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH), _Plain():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


class _Plain(TorchFunctionMode):
    """Replaces the functions of `PLAIN`."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return PLAIN.get(func, func)(*args, **(kwargs or {}))


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """The weight g v/‖v‖, with a norm for each index of the dimension."""
    return v * (g / torch.norm_except_dim(v, 2, dim))


def _hardsigmoid(input: Tensor, inplace: bool = False) -> Tensor:
    return F.relu6(input + 3) / 6


def _embedding_bag(*args: Any, **options: Any) -> Tensor:
    """The sum or mean of the rows of each bag, for bags of equal size. Torch computes all other forms."""
    given = _BAG.bind(*args, **options)
    given.apply_defaults()
    bag = given.arguments
    tokens, weight, padding, mode = bag["input"], bag["weight"], bag["padding_idx"], bag["mode"]
    if tokens.ndim != 2 or mode == "max" or bag["max_norm"] is not None or bag["per_sample_weights"] is not None:
        return F.embedding_bag(*args, **options)
    counts = torch.ones_like(tokens, dtype=weight.dtype) if padding is None else (tokens != padding).to(weight.dtype)
    total = (F.embedding(tokens, weight, padding) * counts.unsqueeze(2)).sum(dim=1)
    return total / counts.sum(dim=1, keepdim=True).clamp(min=1) if mode == "mean" else total


_BAG = inspect.signature(F.embedding_bag)
PLAIN: dict[Any, Callable[..., Tensor]] = {
    torch._weight_norm: _weight_norm,
    F.hardsigmoid: _hardsigmoid,
    F.embedding_bag: _embedding_bag,
}
