"""A user's module, borrowed for a measurement: in evaluation mode, twice differentiable, and given back as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedflat.errors import RecipeError, TrainingError
from fedflat.flatness.samples import Fields


@contextmanager
def plain_attention() -> Iterator[None]:
    """Attention by matrix products. The fused kernels and the fast path of nn.Transformer have no second derivative."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


@contextmanager
def borrowed(module: nn.Module) -> Iterator[nn.Module]:
    """The module in evaluation mode. It takes `Fields` by name and returns the `logits` of a record that has them.

    Afterwards every submodule has its training flag again, and every buffer its object and values.

    Raises:
        TrainingError: a parameter is not finite.
        RecipeError: nothing in the module is trained.
    """
    check_weights(module)
    training = {part: part.training for part in module.modules()}
    buffers = [(part, name, b, b.clone()) for part in training for name, b in part._buffers.items() if b is not None]
    with ExitStack() as stack:
        stack.enter_context(plain_attention())
        stack.callback(module.register_forward_pre_hook(_spread, with_kwargs=True).remove)
        stack.callback(module.register_forward_hook(_logits).remove)
        try:
            yield module.eval()
        finally:
            for part, flag in training.items():
                part.training = flag
            with torch.no_grad():
                for part, name, buffer, before in buffers:
                    part._buffers[name] = buffer.copy_(before)


def check_weights(module: nn.Module) -> None:
    """Raises an error that names a parameter with NaN or infinite values, or says that no parameter is trained."""
    for name, parameter in module.named_parameters():
        if not bool(parameter.isfinite().all()):
            raise TrainingError(f"model: {name} has values that are not finite; the model has diverged")
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise RecipeError("model: no parameter requires a gradient, so there is no loss as a function of the weights")


def _spread(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    if len(arguments) == 1 and isinstance(arguments[0], Fields):
        return arguments[0].arguments(module)
    return None


def _logits(module: nn.Module, arguments: Any, output: Any) -> Any:
    return getattr(output, "logits", None)  # None leaves the output as it is
