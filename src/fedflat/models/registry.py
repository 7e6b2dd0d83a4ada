"""Networks by name: those of the papers, and user-defined ones."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from fedflat.errors import RecipeError, nearest
from fedflat.models.hub import transformers
from fedflat.models.networks import (
    Shape,
    convnet_gn,
    fedavg_cnn,
    lenet64,
    mlp,
    resnet18,
    resnet18_gn,
    resnet18_pfllib,
    sl_vit,
    vgg11,
)
from fedflat.models.sequences import char_lstm, gpt
from fedflat.models.sequential import sequential
from fedflat.trusted import named_class

Builder = Callable[..., nn.Module]

MODELS: dict[str, Builder] = {
    "fedavg-cnn": fedavg_cnn,
    "lenet64": lenet64,
    "convnet-gn": convnet_gn,
    "resnet18-gn": resnet18_gn,
    "resnet18": resnet18,
    "resnet18-pfllib": resnet18_pfllib,
    "vgg11": vgg11,
    "sl-vit": sl_vit,
    "char-lstm": char_lstm,
    "gpt": gpt,
    "mlp": mlp,
}
# The arguments of a network that follow from the data.
OFFERED = ("shape", "classes", "vocabulary", "per_token")
# The networks above, models of other libraries, and lists of layers.
BUILDERS: dict[str, Builder] = {**MODELS, "transformers": transformers, "sequential": sequential}


def build(
    name: str,
    shape: Shape,
    classes: int,
    generator: torch.Generator | None = None,
    *,
    vocabulary: int = 0,
    per_token: bool = False,
    **options: Any,
) -> nn.Module:
    """Build the network `name` for samples of `shape`.

    Args:
        name: a key of `MODELS`, "transformers", "sequential", or the import path "package.module:Class" of a trusted
            `nn.Module` (see `fedflat.trust`).
        shape: the shape of one sample; passed on if the class has a parameter of this name.
        classes: the number of classes; passed on if the class has a parameter of this name.
        generator: the generator for the initial weights; by default one with seed 0.
        vocabulary: the number of tokens, if samples are token ids; passed on like `classes`.
        per_token: whether labels belong to every token instead of the whole sample; passed on like `classes`.
        options: passed to the class.

    Raises:
        RecipeError: if the name or an option is unknown, or the class is not trusted.

    >>> build("mlp", shape=(1, 28, 28), classes=10, hidden=(200,))(torch.zeros(5, 1, 28, 28)).shape
    torch.Size([5, 10])
    """
    builder, arguments = construction(name, shape, classes, options, vocabulary, per_token)
    seed = torch.randint(2**62, (), generator=generator or torch.Generator().manual_seed(0))
    # PyTorch's initialisers draw from the global generator: temporarily seed it with our seed.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int(seed))
        try:
            model = builder(**arguments)
        except RecipeError:
            raise
        except Exception as error:
            raise RecipeError(f"model {name} could not be built: {error}") from error
    return model


def construction(
    name: str, shape: Shape, classes: int, options: dict[str, Any], vocabulary: int = 0, per_token: bool = False
) -> tuple[Builder, dict[str, Any]]:
    """Return the callable that builds the network, and its arguments.

    Args:
        name: as in `build`.
        shape: the shape of one sample.
        classes: the number of classes.
        options: the options of the network.
        vocabulary: as in `build`.
        per_token: as in `build`.

    Raises:
        RecipeError: if the name or an option is unknown, or the class is not trusted.
    """
    offered = dict(zip(OFFERED, (tuple(shape), classes, vocabulary, per_token), strict=True))
    refuse_offered(name, options)
    if classes < 1:
        raise RecipeError(f"model: it needs at least one class, not classes = {classes}.")
    if name not in BUILDERS and ":" not in name:
        raise RecipeError(f"model: there is no {name!r}; {nearest(name, BUILDERS)}")
    builder = BUILDERS[name] if name in BUILDERS else named_class(name, nn.Module, "model.name")
    if vocabulary and name in MODELS and "vocabulary" not in inspect.signature(builder).parameters:
        raise RecipeError(f"model {name}: does not read the token ids of a text; take char-lstm, gpt or transformers")
    return builder, _arguments(name, builder, offered, options)


def refuse_offered(name: str, options: Iterable[str]) -> None:
    """Raise a RecipeError if the options include an argument that follows from the data."""
    if taken := [option for option in options if option in OFFERED]:
        raise RecipeError(f"model {name}: {', '.join(taken)} follows from the data and cannot be set")


def _arguments(name: str, builder: Builder, offered: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Return the options, and those offered arguments that the builder's signature accepts."""
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
