"""Norms of the weights, layer by layer, and the capacity term of a generalisation bound."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.linalg import matrix_norm

from fedflat.errors import DataError, RecipeError
from fedflat.flatness.hessian import top_eigenvalues
from fedflat.models import is_adapted, merged


def weight_norm(module: nn.Module) -> float:
    """‖w‖, over the module's trained parameters.

    >>> weight_norm(nn.GroupNorm(2, 4))   # four ones and four zeros
    2.0
    """
    return math.hypot(
        *(float(parameter.detach().double().norm()) for parameter in module.parameters() if parameter.requires_grad)
    )


@dataclass(frozen=True)
class LayerNorm:
    """The norms of one layer's weight w.

    For a linear layer `spectral` and `kernel` are equal. For a convolution `kernel` does not depend on stride, padding
    or image size, and may be smaller or larger than `spectral`.

    Attributes:
        name: the layer's name.
        frobenius: ‖w‖_F of the entries.
        spectral: the operator norm of the layer, the largest factor by which it stretches an input.
        kernel: the largest singular value of w as a matrix of outputs × everything else.
    """

    name: str
    frobenius: float
    spectral: float
    kernel: float


def layer_norms(module: nn.Module, sample: Tensor) -> list[LayerNorm]:
    """The norms of every nn.Linear and nn.Conv2d that a forward pass uses, in module order.

    A layer with an adapter has the weight W + s·BA. A convolution is measured on images of the size that reaches it,
    with its stride, padding, dilation and groups. A layer that the pass uses more than once counts once, with its last
    input.

    Args:
        module: the network. It is put into evaluation mode.
        sample: a batch of inputs, which sets the image sizes.

    Raises:
        RecipeError: the forward pass uses neither an nn.Linear nor an nn.Conv2d.
        DataError: the model cannot process the sample.
    """
    module = merged(module) if is_adapted(module) else module
    shapes = _input_shapes(module, sample)
    if not shapes:
        raise RecipeError("model: found no nn.Linear or nn.Conv2d whose norm could be computed")
    return [
        _norms(name, layer, shapes[name])
        for name, layer in module.named_modules()
        if name in shapes and isinstance(layer, nn.Linear | nn.Conv2d)
    ]


@dataclass(frozen=True)
class Capacity:
    """The capacity V_L (inf if it overflows a float), its decimal logarithm (−∞ for V_L = 0), and its layers."""

    value: float
    log10: float
    layers: list[LayerNorm]


def capacity(module: nn.Module, sample: Tensor) -> Capacity:
    """The weight-dependent term of FedSMOO's generalisation bound, over the L layers of `layer_norms`.

        V_L = Π_l ‖w_l‖² · Σ_l ‖w_l‖_F²/‖w_l‖²

    The paper does not define ‖w_l‖ (as opposed to ‖w_l‖_F). We take it to be `spectral`, because the bound on the
    margin loss has the form of the PAC-Bayes bound of Neyshabur et al. (2018), in which the product measures how far
    the network can stretch an input. In that bound ‖w_l‖_F measures perturbed parameters, so it is the norm of the
    entries of w_l. (The paper's product runs over "L = 1 … L"; l is meant.) Biases and normalisation layers are left
    out. V_L does not change when the layers of a ReLU network are rescaled without changing its function.

    Args:
        module: the network. It is put into evaluation mode.
        sample: a batch of inputs, which sets the image sizes.

    >>> net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)).requires_grad_(False)
    >>> _ = net[0].weight.copy_(3 * torch.eye(2)), net[2].weight.copy_(torch.tensor([[2.0, 0.0], [0.0, 0.0]]))
    >>> round(capacity(net, torch.ones(1, 2)).value, 6)   # 3² · 2² · (18/3² + 4/2²)
    108.0
    """
    layers = layer_norms(module, sample)
    log10 = _log10_capacity(layers)
    return Capacity(10.0**log10 if log10 < sys.float_info.max_10_exp else math.inf, log10, layers)


def _log10_capacity(layers: Sequence[LayerNorm]) -> float:
    if not all(layer.spectral for layer in layers):
        return -math.inf
    stretch = sum(2 * math.log10(layer.spectral) for layer in layers)
    return stretch + math.log10(sum((layer.frobenius / layer.spectral) ** 2 for layer in layers))


@torch.no_grad()
def _input_shapes(module: nn.Module, sample: Tensor) -> dict[str, torch.Size]:
    """The shape of the input of each nn.Linear and nn.Conv2d in a forward pass, by the layer's name."""
    shapes: dict[str, torch.Size] = {}
    with ExitStack() as hooks:
        for name, layer in module.named_modules():
            if isinstance(layer, nn.Linear | nn.Conv2d):
                hooks.callback(layer.register_forward_pre_hook(partial(_keep_shape, shapes, name)).remove)
        try:
            module.eval()(sample)
        except (RuntimeError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise DataError(
                f"sample: the model cannot process a batch of shape {tuple(sample.shape)} ({reason})"
            ) from error
    return shapes


def _keep_shape(shapes: dict[str, torch.Size], name: str, layer: nn.Module, arguments: Any) -> None:
    shapes[name] = arguments[0].shape[-3:]


def _norms(name: str, layer: nn.Linear | nn.Conv2d, shape: torch.Size) -> LayerNorm:
    weight = layer.weight.detach().double().flatten(1)
    kernel = float(matrix_norm(weight, 2))
    spectral = kernel if isinstance(layer, nn.Linear) else _stretch(Gram(layer, shape))
    return LayerNorm(name, float(weight.norm()), spectral, kernel)


class Gram:
    """AᵀA of a convolution x ↦ A x + b for inputs of one shape, computed in float64 as the gradient of ½‖A x‖²."""

    dtype = torch.float64

    def __init__(self, layer: nn.Conv2d, shape: torch.Size) -> None:
        self.layer = copy.deepcopy(layer).to("cpu", self.dtype).requires_grad_(False)
        self.layer.bias = None
        self.shape, self.size, self.products = shape, shape.numel(), 0

    def __matmul__(self, vector: Tensor) -> Tensor:
        self.products += 1
        gradient: Tensor = torch.func.grad(lambda x: 0.5 * self.layer(x).square().sum())(vector.view(1, *self.shape))
        return gradient.reshape(-1)


def _stretch(gram: Gram) -> float:
    """‖A‖, the square root of the largest eigenvalue of AᵀA."""
    probe = torch.randn(gram.size, generator=torch.Generator().manual_seed(0), dtype=gram.dtype)
    image = gram @ probe
    # Lanczos needs more than one dimension and a nonzero matrix. In both other cases this is exact.
    if gram.size == 1 or not image.any():
        return math.sqrt(float(image.norm() / probe.norm()))
    return math.sqrt(float(top_eigenvalues(gram, k=1, tolerance=1e-6).values[0]))
