"""Norms of the weights, layer by layer, and the capacity that a generalisation bound makes of them."""

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


def weight_norm(module: nn.Module) -> float:
    """‖w‖, over all of the module's parameters.

    >>> weight_norm(nn.GroupNorm(2, 4))   # four ones and four zeros
    2.0
    """
    return math.hypot(*(float(parameter.detach().double().norm()) for parameter in module.parameters()))


@dataclass(frozen=True)
class LayerNorm:
    """The norms of one layer's weight w: ‖w‖_F of its entries, and two that are the same for a linear layer.

    `spectral` is the largest factor by which the layer, as the linear map that it is, stretches an input; `kernel` is
    the largest singular value of w as a matrix of outputs × everything else. For a convolution `kernel` depends neither
    on stride and padding nor on the image, and may be smaller or larger than `spectral`.
    """

    name: str
    frobenius: float
    spectral: float
    kernel: float


def layer_norms(module: nn.Module, sample: Tensor) -> list[LayerNorm]:
    """The norms of every Linear and Conv2d that a pass of `sample` (a batch of inputs) goes through, in module order.

    A convolution is measured on images of the size that reaches it, with its stride, padding, dilation and groups.
    A layer that the pass uses more than once counts once, on what it saw last. The module is put in evaluation mode.
    """
    shapes = _input_shapes(module, sample)
    if not shapes:
        raise RecipeError("model: no nn.Linear or nn.Conv2d found to take norms of")
    return [
        _norms(name, layer, shapes[name])
        for name, layer in module.named_modules()
        if name in shapes and isinstance(layer, nn.Linear | nn.Conv2d)
    ]


@dataclass(frozen=True)
class Capacity:
    """V_L, infinite where a float ends, its decimal logarithm (−∞ for V_L = 0), and the layers it is made of."""

    value: float
    log10: float
    layers: list[LayerNorm]


def capacity(module: nn.Module, sample: Tensor) -> Capacity:
    """The term of FedSMOO's generalisation bound that the weights decide, over the L layers of `layer_norms`:

        V_L = Π_l ‖w_l‖² · Σ_l ‖w_l‖_F²/‖w_l‖²

    ‖w_l‖, which the paper leaves unnamed beside ‖w_l‖_F, is taken to be `spectral`: the bound on the margin loss has
    the form of Neyshabur et al.'s PAC-Bayes bound (2018), whose product says how far the network can stretch an input.
    There ‖w_l‖_F measures perturbed parameters, so it is that of w_l's entries. (The paper's product runs over
    "L = 1 … L"; l is meant.) Biases and normalisation layers do not enter. V_L is the same for ReLU networks that
    differ only in how layers share their scales.

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
    """What a sample's pass hands to each layer that has norms: for an image its shape, by the layer's name."""
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
                f"sample: the model cannot take a batch of shape {tuple(sample.shape)} ({reason})"
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
    """AᵀA of a convolution x ↦ A x + b over inputs of one shape, as the gradient of ½‖A x‖²; in float64."""

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
    """‖A‖, the root of AᵀA's largest eigenvalue."""
    probe = torch.randn(gram.size, generator=torch.Generator().manual_seed(0), dtype=gram.dtype)
    image = gram @ probe
    # Lanczos needs more than one dimension, and a matrix that is not zero; this is exact for both.
    if gram.size == 1 or not image.any():
        return math.sqrt(float(image.norm() / probe.norm()))
    return math.sqrt(float(top_eigenvalues(gram, k=1, tolerance=1e-6).values[0]))
