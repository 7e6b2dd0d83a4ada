"""Puts a user's module into evaluation mode for a measurement, and restores it afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from fedflat.errors import RecipeError, TrainingError
from fedflat.flatness.samples import Fields


@contextmanager
def borrowed(module: nn.Module) -> Iterator[nn.Module]:
    """The module in evaluation mode. It takes `Fields` by name and returns the `logits` of a record or dictionary.

    Afterwards every submodule has its old training flag, and every buffer is the same object with its old values.

    Raises:
        TrainingError: a parameter is not finite.
        RecipeError: a trained parameter has less than 32 bits, or nothing in the module is trained.
    """
    check_weights(module)
    training = {part: part.training for part in module.modules()}
    sparse = [part for part in training if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse]
    buffers = [(part, name, b, b.clone()) for part in training for name, b in part._buffers.items() if b is not None]
    with ExitStack() as stack:
        stack.callback(module.register_forward_pre_hook(_spread, with_kwargs=True).remove)
        stack.callback(module.register_forward_hook(_logits).remove)
        try:
            for table in sparse:  # sparse gradients have no second derivative
                table.sparse = False
            yield module.eval()
        finally:
            for table in sparse:
                table.sparse = True
            for part, flag in training.items():
                part.training = flag
            with torch.no_grad():
                for part, name, buffer, before in buffers:
                    part._buffers[name] = buffer.copy_(before)


def check_weights(module: nn.Module) -> None:
    """Raises an error that names a parameter whose values or precision cannot be used, or if none is trained."""
    for name, parameter in module.named_parameters():
        if parameter.is_inference():
            raise RecipeError(f"model: {name} was made in torch.inference_mode(), so it has no derivative")
        if parameter.is_meta:
            raise RecipeError(f"model: {name} is on the meta device and has no values; load the weights first")
        if not bool(parameter.isfinite().all()):
            raise TrainingError(f"model: {name} has values that are not finite; the model has diverged")
    trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    for name, parameter in trained.items():
        if torch.finfo(parameter.dtype).eps > torch.finfo(torch.float32).eps:
            kind = str(parameter.dtype).removeprefix("torch.")
            raise RecipeError(f"model: {name} is {kind}, too coarse for second derivatives; measure model.float()")
    if not trained:
        raise RecipeError("model: no parameter requires a gradient, so there is no loss as a function of the weights")


def _spread(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    if len(arguments) == 1 and isinstance(arguments[0], Fields):
        return arguments[0].arguments(module)
    return None


def _logits(module: nn.Module, arguments: Any, output: Any) -> Any:
    """The logits of a record or a dictionary that has them. None leaves the output as it is."""
    return output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
