"""Max-pooling of 2×2 pixels by `compiled/pool.c`: the same numbers as torch's, to the bit, several times as fast."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fedflat.compiled import library

FEWEST_CHANNELS = 8  # fewer do not fill a vector


@cache
def pool_library(dtype: torch.dtype) -> ctypes.CDLL | None:
    """Return the library for maps of this type with the types of its arguments; None if it cannot be had here."""
    compiled = library("pool", dtype)
    for name in ("largest", "scatter", "gather") if compiled else ():
        function = getattr(compiled, name)
        function.argtypes, function.restype = [ctypes.c_long] * 4 + [ctypes.c_void_p] * 3, None
    return compiled


def pools(x: Tensor, window: Any, stride: Any, padding: Any, dilation: Any, ceil: bool, indices: bool) -> bool:
    """Return whether `pooled` computes this max-pool; the arguments are those of `F.max_pool2d`.

    vmap does not support its gradient.
    """
    usual = _pair(window) == (2, 2) == _pair(window if stride is None else stride) and not ceil and not indices
    usual = usual and _pair(padding) == (0, 0) and _pair(dilation) == (1, 1)
    if not usual or x.dim() != 4 or x.device.type != "cpu" or torch._C._are_functorch_transforms_active():
        return False
    samples, channels, height, width = x.shape
    large = samples > 0 and channels >= FEWEST_CHANNELS and min(height, width) > 1
    return large and x.is_contiguous(memory_format=torch.channels_last) and pool_library(x.dtype) is not None


def pooled(x: Tensor) -> Tensor:
    """Return the largest number of each 2×2 pixels of these maps, for which `pools` must be true."""
    y: Tensor = _Largest.apply(x)  # type: ignore[no-untyped-call]
    return y


def _pair(value: Any) -> tuple[Any, ...]:
    return tuple(value) * (2 if len(value) == 1 else 1) if isinstance(value, tuple | list) else (value, value)


class _Largest(torch.autograd.Function):
    """x ↦ y = x[place] with the place of the largest number of each window."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y, places = _halved(x, x.dtype), _halved(x, torch.uint8)
        _call("largest", x, y, places)
        ctx.save_for_backward(places)
        ctx.save_for_forward(places)
        ctx.maps = x.shape
        return y

    @staticmethod
    def jvp(ctx: Any, along: Tensor) -> Tensor:
        return _gathered(along, *ctx.saved_tensors)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        (places,) = ctx.saved_tensors
        return _scattered(slope, places, ctx.maps)


class _Scatter(torch.autograd.Function):
    """y ↦ x with x[place] = y, and zero elsewhere."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, places: Tensor, maps: torch.Size) -> Tensor:
        ctx.save_for_backward(places)
        odd = maps[2] % 2 or maps[3] % 2  # what is in no window gets no gradient
        x = torch.empty(maps, dtype=y.dtype, memory_format=torch.channels_last)
        _call("scatter", x.zero_() if odd else x, y.contiguous(memory_format=torch.channels_last), places)
        return x

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None]:
        return _gathered(slope, *ctx.saved_tensors), None, None


class _Gather(torch.autograd.Function):
    """x ↦ y = x[place]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.maps = x.shape
        y = _halved(x, x.dtype)
        _call("gather", x.contiguous(memory_format=torch.channels_last), y, places)
        return y

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        (places,) = ctx.saved_tensors
        return _scattered(slope, places, ctx.maps), None


def _scattered(y: Tensor, places: Tensor, maps: torch.Size) -> Tensor:
    x: Tensor = _Scatter.apply(y, places, maps)  # type: ignore[no-untyped-call]
    return x


def _gathered(x: Tensor, places: Tensor) -> Tensor:
    y: Tensor = _Gather.apply(x, places)  # type: ignore[no-untyped-call]
    return y


def _halved(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return new maps of half the height and width."""
    samples, channels, height, width = x.shape
    shape = samples, channels, height // 2, width // 2
    return torch.empty(shape, dtype=dtype, memory_format=torch.channels_last)


def _call(name: str, x: Tensor, y: Tensor, places: Tensor) -> None:
    samples, channels, height, width = x.shape
    function = getattr(pool_library(x.dtype), name)
    function(samples, height, width, channels, x.data_ptr(), y.data_ptr(), places.data_ptr())
