"""Replaces operations of a pass by forms that are faster on this processor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fedflat.models.pooling import pooled, pools
from fedflat.models.products import gains, product


@contextmanager
def faster_operations() -> Iterator[None]:
    """Within this context, large linear layers and max-pools use the fastest form that is known."""
    with _Faster():
        yield


class _Faster(TorchFunctionMode):
    """Replaces the functions of `FASTER`."""

    def __torch_function__(
        self, function: Any, types: Any, arguments: Sequence[Any] = (), named: Mapping[str, Any] | None = None
    ) -> Any:
        faster = FASTER.get(function)
        if faster is None or torch.compiler.is_compiling():  # a module of the user's, whose compiler has its own forms
            return function(*arguments, **(named or {}))
        return faster(*arguments, **(named or {}))


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if not gains(input, weight):
        return F.linear(input, weight, bias)
    y = product(input.reshape(-1, input.shape[-1]), weight).view(*input.shape[:-1], len(weight))
    return y if bias is None else y + bias


def _max_pool(
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    geometry: tuple[Any, ...] = (kernel_size, stride, padding, dilation, ceil_mode, return_indices)
    return pooled(input) if pools(input, *geometry) else F.max_pool2d(input, *geometry)


FASTER: dict[Any, Callable[..., Any]] = {F.linear: _linear, F.max_pool2d: _max_pool}
