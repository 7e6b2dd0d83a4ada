"""Sharpness: how much the mean loss rises when the weights take a step of length ρ, uphill or anywhere."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from fedflat.errors import RecipeError
from fedflat.flatness.objective import Objective


def ascent_sharpness(objective: Objective, rho: float = 0.05) -> float:
    """SAM's one step of ascent:  f(w + ρ ∇f/‖∇f‖) − f(w), and 0 where the gradient is zero.

    >>> x = torch.tensor([[1.0], [3.0]])
    >>> module = torch.nn.Linear(1, 1, bias=False)
    >>> f = Objective(module, lambda z, y: 0.5 * (z - y).square().mean(), [(x, x)])   # f(w) = 5/2 (w − 1)²
    >>> with f.at(torch.tensor([2.0])):
    ...     ascent_sharpness(f, rho=1.0)   # 5/2 (2² − 1²)
    7.5
    """
    (rise,) = rises(objective, [rho * unit(objective.gradient())])
    return rise


def adaptive_sharpness(objective: Objective, rho: float = 0.5) -> float:
    """ASAM's step of ascent (Kwon et al. 2021):  f(w + ε) − f(w),  ε = ρ T² ∇f/‖T ∇f‖,  T = |w| elementwise.

    Weights that are rescaled without changing the function (a ReLU layer times c, the next one divided by c) rescale ε
    with them, so the number stays: unlike λ₁ and `ascent_sharpness` it compares minima, not their parametrisation.
    """
    scale = objective.weights.abs()
    (rise,) = rises(objective, [rho * scale * unit(scale * objective.gradient())])
    return rise


@dataclass(frozen=True)
class AverageSharpness:
    """The rise of f over random directions: its mean, the mean's standard error, and the largest one."""

    mean: float
    error: float
    largest: float
    directions: int


def average_sharpness(objective: Objective, rho: float = 0.05, directions: int = 30, seed: int = 0) -> AverageSharpness:
    """f(w + ρ û) − f(w) over û drawn uniformly from the unit sphere.

    To second order its expectation is ρ²/(2d) tr ∇²f(w): the trace, by forward passes alone.
    """
    if directions < 1:
        raise RecipeError(f"directions: {directions} gives nothing to average; take at least 1")
    chance = torch.Generator().manual_seed(seed)
    drawn = (torch.randn(objective.size, generator=chance, dtype=objective.dtype) for _ in range(directions))
    found = rises(objective, (rho * unit(u) for u in drawn))
    spread = float(np.std(found, ddof=1)) if directions > 1 else math.nan
    return AverageSharpness(float(np.mean(found)), spread / math.sqrt(directions), max(found), directions)


def rises(objective: Objective, steps: Iterable[Tensor]) -> list[float]:
    """f(w + ε) − f(w) for each step ε; the weights are where they were afterwards."""
    home, floor = objective.weights, objective.value()
    found = []
    for step in steps:
        with objective.at(home + step):
            found.append(objective.value() - floor)
    return found


def unit(vector: Tensor) -> Tensor:
    """x/‖x‖, and zero where x is zero."""
    return normalize(vector, dim=0, eps=torch.finfo(vector.dtype).tiny)
