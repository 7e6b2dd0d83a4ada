"""The papers' networks, and the user's own.

Every network here keeps three promises to the rest of the library:

* it ends in its head, an `nn.Linear` that is the last child; what enters the head is the feature vector;
* every activation is the output of its own activation module, so that a forward hook sees it (MAN needs this);
* it has no state but its parameters: weights alone are the model.

A grey image enters a network for colour images with its one channel repeated three times, as in the papers' code.
"""

import inspect
import re
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import nn

from fedflat.errors import RecipeError, nearest
from fedflat.models.networks import Shape, convnet_gn, fedavg_cnn, lenet64, mlp, resnet18, resnet18_gn, sl_vit, vgg11

Builder = Callable[..., nn.Module]

MODELS: dict[str, Builder] = {
    "fedavg-cnn": fedavg_cnn,
    "lenet64": lenet64,
    "convnet-gn": convnet_gn,
    "resnet18-gn": resnet18_gn,
    "resnet18": resnet18,
    "vgg11": vgg11,
    "sl-vit": sl_vit,
    "mlp": mlp,
}


def build(name: str, shape: Shape, classes: int, generator: torch.Generator | None = None, **options: Any) -> nn.Module:
    """The network `name` for samples of `shape`, its initial weights drawn from `generator` (or from seed 0).

    `name` is a key of `MODELS`, or the import path "package.module:function" of a class or function that returns an
    `nn.Module`; that one receives `shape` and `classes` if it has parameters of these names, and the options.

    >>> build("mlp", shape=(1, 28, 28), classes=10, hidden=(200,))(torch.zeros(5, 1, 28, 28)).shape
    torch.Size([5, 10])
    """
    builder, arguments = construction(name, shape, classes, options)
    seed = torch.randint(2**62, (), generator=generator or torch.Generator().manual_seed(0))
    # PyTorch's initialisers draw from the global generator: lend them one that starts at our seed.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int(seed))
        try:
            model = builder(**arguments)
        except RecipeError:
            raise
        except Exception as error:
            raise RecipeError(f"model {name} could not be built: {error}") from error
    if not isinstance(model, nn.Module):
        raise RecipeError(f"model {name} must return a torch.nn.Module, not {type(model).__name__}.")
    return model


def construction(name: str, shape: Shape, classes: int, options: dict[str, Any]) -> tuple[Builder, dict[str, Any]]:
    """The class or function that makes the network, and what to call it with."""
    if {"shape", "classes"} & options.keys():
        raise RecipeError(f"model {name}: shape and classes follow from the data and cannot be set")
    if classes < 1:
        raise RecipeError(f"model: it needs at least one class, not classes = {classes}.")
    builder = MODELS[name] if name in MODELS else _imported(name)
    return builder, _arguments(name, builder, {"shape": tuple(shape), "classes": classes}, options)


def _imported(name: str) -> Builder:
    """The class or function at "package.module:name"."""
    if ":" not in name:
        raise RecipeError(f"model: there is no {name!r}; {nearest(name, MODELS)}")
    if not re.fullmatch(r"\w+(\.\w+)*:\w+", name):
        raise RecipeError(f"model {name!r} is not an import path of the form package.module:function.")
    module, attribute = name.split(":")
    try:
        builder: Builder = getattr(import_module(module), attribute)
    except Exception as error:  # whatever the user's own module raises while it is imported
        raise RecipeError(f"model {name!r} cannot be imported: {error}") from error
    return builder


def _arguments(name: str, builder: Builder, offered: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """The options, and of what is offered as much as the builder's signature takes."""
    try:
        signature = inspect.signature(builder)
    except (TypeError, ValueError) as error:
        raise RecipeError(f"model {name} is not a Python class or function.") from error
    parameters = signature.parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for option in options:
        if option not in parameters and not takes_any:
            known = parameters.keys() - offered.keys()
            hint = nearest(option, known) if known else "it has none."
            raise RecipeError(f"model {name} has no option {option!r}; {hint}")
    arguments = {key: value for key, value in offered.items() if takes_any or key in parameters} | options
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise RecipeError(f"model {name} cannot be called with the given options: {error}.") from error
    return arguments
