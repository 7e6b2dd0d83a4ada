"""Puts a user's module into evaluation mode for a measurement, and restores it afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
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
    if isinstance(module, torch.jit.ScriptModule):
        raise RecipeError("model: is a compiled ScriptModule; give the nn.Module that it was made from")
    check_weights(module)
    training = {part: part.training for part in module.modules()}
    buffers = [(part, name, b, b.clone()) for part in training for name, b in part._buffers.items() if b is not None]
    with ExitStack() as stack:
        stack.callback(module.register_forward_pre_hook(_spread, with_kwargs=True).remove)
        stack.callback(module.register_forward_hook(_logits).remove)
        try:
            stack.enter_context(_plain_embeddings(training))
            yield module.eval()
        finally:
            for part, flag in training.items():
                part.training = flag
            with torch.no_grad():
                for part, name, buffer, before in buffers:
                    part._buffers[name] = buffer.copy_(before)


@contextmanager
def _plain_embeddings(parts: Iterable[nn.Module]) -> Iterator[None]:
    """Embeddings whose gradient is that of the loss and has a derivative, and that do not change their weights.

    Sparse gradients have no second derivative, and gradients that are scaled by frequency are not those of the loss.
    With `max_norm` a pass shortens long rows in place; without long rows it does nothing.

    Raises:
        RecipeError: a row is longer than `max_norm`.
    """
    options = {"sparse": False, "scale_grad_by_freq": False, "max_norm": None}
    tables = [part for part in parts if isinstance(part, nn.Embedding | nn.EmbeddingBag)]
    before = [(table, name, getattr(table, name)) for table in tables for name in options]
    for table in tables:
        longest = float(table.weight.detach().norm(table.norm_type, dim=1).max()) if table.max_norm else 0.0
        if table.max_norm and longest > table.max_norm * (1 + 1e-5):
            raise RecipeError(
                f"model: an embedding has a row of norm {longest:.4g}, above its max_norm {table.max_norm:g}, which a "
                "pass would shorten; run the model on all of its tokens once before"
            )
    try:
        for table, name, _ in before:
            setattr(table, name, options[name])
        yield
    finally:
        for table, name, value in before:
            setattr(table, name, value)


def check_weights(module: nn.Module) -> None:
    """Raises an error that names a parameter whose values or precision cannot be used, or if none is trained."""
    for name, parameter in module.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise RecipeError(f"model: {name} has no values yet; run the model once on a batch")
        if parameter.is_complex():
            raise RecipeError(f"model: {name} is complex; the curvature is that of a function of real weights")
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
