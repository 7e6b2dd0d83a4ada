"""Changes of the weights that leave the function unchanged: permuting hidden units, and rescaling ReLU layers."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from fedflat.errors import RecipeError
from fedflat.models import ACTIVATIONS, Adapter, Colour, RectifiedPool

LAYERS = (nn.Linear, nn.Conv2d)
# These keep the units apart, and commute with a positive factor.
HOMOGENEOUS = (
    nn.ReLU, nn.LeakyReLU, RectifiedPool, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.Flatten, nn.Dropout,
    nn.Identity, nn.Upsample,
)  # fmt: skip
Layer = nn.Linear | nn.Conv2d


@dataclass(frozen=True)
class Hidden:
    """A hidden layer z = φ(W a + b), by its name, and the layer that reads it.

    Attributes:
        name: the layer's name.
        reader: the name of the next layer.
        homogeneous: whether φ(c z) = c φ(z) for every c > 0.
    """

    name: str
    reader: str
    homogeneous: bool


def hidden_layers(module: nn.Module) -> list[Hidden]:
    """The hidden layers of a chain of linear and convolutional layers, from input to output.

    Args:
        module: an `nn.Sequential`, possibly nested, of layers, activations, pooling and `nn.Flatten`. Of this
            library's networks these are mlp, fedavg-cnn, lenet64 and vgg11.

    Raises:
        RecipeError: the module is not such a chain.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    >>> [(layer.name, layer.reader, layer.homogeneous) for layer in hidden_layers(net)]
    [('0', '2', True), ('2', '4', False)]
    """
    layers: list[str] = []
    scales: dict[str, bool] = {}
    for name, part in _chain(module, ""):
        _refuse_adapter(name, part)
        if isinstance(part, LAYERS):
            layers.append(name)
            scales[name] = True
        elif layers and not isinstance(part, HOMOGENEOUS):
            scales[layers[-1]] = False
    _refuse_shared(module, layers)
    return [Hidden(name, reader, scales[name]) for name, reader in pairwise(layers)]


def _refuse_adapter(name: str, part: nn.Module) -> None:
    """Refuse a layer that computes with W + s·BA: a change of W alone would change the function."""
    if isinstance(part, Adapter):
        raise RecipeError(
            f"model: its hidden units cannot be reordered or rescaled, because {name} has a low-rank adapter; merge it "
            "(fedflat.models.merged, --parameters all)"
        )


def _chain(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """The parts of a chain in their order, with their names."""
    if type(module).forward is nn.Sequential.forward:
        for inner, part in module._modules.items():
            assert part is not None
            yield from _chain(part, f"{name}.{inner}" if name else inner)
    elif isinstance(module, (*LAYERS, *HOMOGENEOUS, *ACTIVATIONS, Colour)) and getattr(module, "groups", 1) == 1:
        yield name, module
    else:
        where = f"{name or 'it'} is a {type(module).__name__}"
        raise RecipeError(
            f"model: its hidden units cannot be reordered or rescaled, because {where}; this needs a chain of linear "
            "and convolutional layers with only activations and pooling between them (mlp, fedavg-cnn, lenet64, vgg11)"
        )


def _refuse_shared(module: nn.Module, names: list[str]) -> None:
    if len({id(module.get_submodule(name).weight) for name in names}) < len(names):
        raise RecipeError("model: two of its layers share a weight, so their units cannot be reordered or rescaled")


def layer(module: nn.Module, name: str) -> Layer:
    found = module.get_submodule(name)
    assert isinstance(found, LAYERS)
    return found


def by_unit(reader: Layer, units: int) -> Tensor:
    """The weight of a layer as outputs × units of the layer before × what reads each unit. It shares memory."""
    return reader.weight.detach().view(reader.weight.shape[0], units, -1)


@torch.no_grad()
def permuted(module: nn.Module, orders: Mapping[str, Tensor]) -> nn.Module:
    """A copy of the network with reordered hidden units. It computes the same function.

        W ← P W,  b ← P b,  W' ← W' Pᵀ   with W' the weight of the next layer

    Args:
        module: the network, see `hidden_layers`.
        orders: for each layer to reorder, which old unit takes each new place.

    Raises:
        RecipeError: the network is not a chain.
    """
    result = copy.deepcopy(module)
    for hidden in hidden_layers(result):
        if hidden.name in orders:
            own, order = layer(result, hidden.name), orders[hidden.name]
            for tensor in (own.weight, own.bias):
                if tensor is not None:
                    tensor.copy_(tensor[order])
            reading = by_unit(layer(result, hidden.reader), len(order))
            reading.copy_(reading[:, order])
    return result


@torch.no_grad()
def rescaled(module: nn.Module, factor: float = 10.0, name: str | None = None) -> nn.Module:
    """A copy of the network with one layer times c and the next divided by c. It computes the same function.

        W ← c W,  b ← c b,  W' ← W'/c   with W' the weight of the next layer, φ(c z) = c φ(z)

    Curvature changes with it: the Hessian becomes D H D, with D = 1/c on W and b, c on W', and 1 elsewhere.

    Args:
        module: the network, see `hidden_layers`.
        factor: c > 0. A power of two leaves every bit of the outputs unchanged.
        name: the layer; the first one that allows it by default.

    Raises:
        RecipeError: the factor is not positive, or the network has no such layer.
    """
    if not 0 < factor < float("inf"):
        raise RecipeError(f"rescaling: the factor is {factor}; it must be a positive number")
    result = copy.deepcopy(module)
    able = [each for each in hidden_layers(result) if each.homogeneous]
    chosen = next((each for each in able if name in (None, each.name)), None)
    if chosen is None:
        known = ", ".join(each.name for each in able)
        known = f"choose one of {known}" if able else "it has no hidden layer that is followed by a ReLU"
        raise RecipeError(f"rescaling: {'the network' if name is None else repr(name)} cannot be rescaled; {known}")
    own, reader = layer(result, chosen.name), layer(result, chosen.reader)
    own.weight.mul_(factor)
    if own.bias is not None:
        own.bias.mul_(factor)
    reader.weight.div_(factor)
    return result
