"""Networks as lists of PyTorch layers, such as `["Flatten()", "Linear(64, 10)"]`, for use in a recipe.

Only layers of `torch.nn` with numbers, strings and tuples as arguments are created; no other code in the text is run.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fedflat.errors import RecipeError, nearest, shortened

LAYERS = (
    "Identity", "Flatten", "Unflatten", "Linear", "Bilinear", "Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d",
    "ConvTranspose2d", "BatchNorm1d", "BatchNorm2d", "GroupNorm", "LayerNorm", "RMSNorm", "InstanceNorm1d",
    "InstanceNorm2d", "LocalResponseNorm", "MaxPool1d", "MaxPool2d", "AvgPool1d", "AvgPool2d", "AdaptiveAvgPool1d",
    "AdaptiveAvgPool2d", "AdaptiveMaxPool1d", "AdaptiveMaxPool2d", "ReLU", "ReLU6", "LeakyReLU", "ELU", "SELU",
    "GELU", "SiLU", "Mish", "Tanh", "Sigmoid", "Softplus", "Hardtanh", "Hardswish", "PReLU", "Dropout",
    "Dropout1d", "Dropout2d", "Embedding", "ZeroPad2d", "ReflectionPad2d", "Upsample", "PixelShuffle",
)  # fmt: skip
Written = str | Sequence[Any]


def sequential(layers: Sequence[Written]) -> nn.Module:
    """Build `nn.Sequential` from layers as PyTorch prints them; a nested list is a block.

    Raises:
        RecipeError: if a layer is not one of `LAYERS`, or its arguments are not numbers, strings or tuples.

    >>> sequential(["Flatten()", "Linear(64, 32)", "ReLU()", "Linear(32, 10)"])(torch.zeros(5, 1, 8, 8)).shape
    torch.Size([5, 10])
    """
    if isinstance(layers, str) or not isinstance(layers, Sequence) or not layers:
        raise RecipeError(f'model.layers = {shortened(layers)!r}: give a list of layers, such as "Linear(64, 10)"')
    return nn.Sequential(*(_layer(each) if isinstance(each, str) else sequential(each) for each in layers))


def _layer(text: str) -> nn.Module:
    try:
        call = ast.parse(text.strip(), mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            raise ValueError
        name = call.func.id
        positional = [ast.literal_eval(each) for each in call.args]
        keywords = {each.arg or "": ast.literal_eval(each.value) for each in call.keywords}
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        raise RecipeError(
            f"model.layers: {shortened(text)!r} is not a layer with plain arguments, such as Linear(64, 10)"
        ) from None
    if name not in LAYERS:
        raise RecipeError(f"model.layers: there is no layer {shortened(name)!r}; {nearest(name, LAYERS)}")
    try:
        made: nn.Module = getattr(nn, name)(*positional, **keywords)
    except Exception as error:  # torch may raise any error for its arguments
        raise RecipeError(f"model.layers: {shortened(text)} cannot be made ({error})") from None
    return made


def written_layers(module: nn.Module) -> list[Any] | None:
    """Return the list from which `sequential` can rebuild this module, or None if that is not possible.

    The list does not contain weights. The result is None for modules with frozen parameters, hooks or other
    layers.

    >>> written_layers(nn.Sequential(nn.Flatten(), nn.Linear(4, 2, bias=False)))
    ['Flatten(start_dim=1, end_dim=-1)', 'Linear(in_features=4, out_features=2, bias=False)']
    """
    if type(module) is not nn.Sequential or not all(each.requires_grad for each in module.parameters()):
        return None
    layers = [written_layers(each) if type(each) is nn.Sequential else repr(each) for each in module]
    try:
        with torch.random.fork_rng(devices=[]):
            again = sequential([each for each in layers if each is not None])
    except RecipeError:
        return None
    same = {n: p.shape for n, p in module.state_dict().items()} == {n: p.shape for n, p in again.state_dict().items()}
    return layers if same and repr(again) == repr(module) and not _watched(module) else None


def _watched(module: nn.Module) -> bool:
    return any(each._forward_hooks or each._forward_pre_hooks or each._backward_hooks for each in module.modules())
