"""Models that take raw inputs and normalise them as the federation did in training."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedflat.federation.augment import normalise
from fedflat.federation.dataset import Dataset
from fedflat.tokens import is_tokens

SLACK = 1e-3  # how far numbers may be outside of [0, 1]


@dataclass(frozen=True)
class Normalisation:
    """A hook before a module's forward pass: bytes x become (x/255 − mean)/std, other numbers (x − mean)/std.

    Images as floating numbers are expected in [0, 1]; others get a warning. Token ids become int64, which embeddings
    need: a text has them in the smallest type that they fit in.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    pixels: bool

    def __call__(self, module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not arguments or not isinstance(arguments[0], Tensor):
            return None
        inputs = arguments[0]
        if self.pixels and inputs.is_floating_point() and not torch.compiler.is_compiling():
            self._check(inputs)
        like = next((p for p in module.parameters() if p.is_floating_point()), None)
        dtype = like.dtype if like is not None else inputs.dtype
        return (normalise(inputs, self.mean, self.std, dtype), *arguments[1:])

    def _check(self, inputs: Tensor) -> None:
        if torch._C._functorch.is_functorch_wrapped_tensor(inputs) or not inputs.numel():
            return
        low, high = map(float, torch.aminmax(inputs.detach()))
        if low < -SLACK or high > 1 + SLACK:
            warnings.warn(
                f"model: inputs from {low:.3g} to {high:.3g}; this model takes images as bytes, or in [0, 1], and "
                "normalises them itself",
                stacklevel=6,
            )


def taking_raw(module: nn.Module, dataset: Dataset) -> nn.Module:
    """Return a copy of a trained module that takes raw inputs, or the module itself if these need no normalisation."""
    inputs = dataset.train.inputs
    pixels = inputs.dtype == torch.uint8
    plain = not set(dataset.mean) - {0.0} and not set(dataset.std) - {1.0}
    if inputs.dtype == torch.int64 if is_tokens(inputs) else plain and not pixels:
        return module
    own = take_normalised(deepcopy(module))
    own.register_forward_pre_hook(Normalisation(dataset.mean, dataset.std, pixels))
    return own


def take_normalised(module: nn.Module) -> nn.Module:
    """Let a module take normalised inputs again, as in training; return the module."""
    for key in [key for key, hook in module._forward_pre_hooks.items() if isinstance(hook, Normalisation)]:
        del module._forward_pre_hooks[key]
    return module


@contextmanager
def normalised_inputs(module: nn.Module) -> Iterator[None]:
    """Within this context a module takes inputs that are normalised already, such as a federation's batches."""
    hooks = {key: hook for key, hook in module._forward_pre_hooks.items() if isinstance(hook, Normalisation)}
    take_normalised(module)
    try:
        yield
    finally:
        for hook in hooks.values():
            module.register_forward_pre_hook(hook)
