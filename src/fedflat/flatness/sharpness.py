"""Sharpness: the rise of the mean loss after a step of length ρ, along the gradient or in a random direction."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedflat.errors import RecipeError
from fedflat.flatness.intervals import hall
from fedflat.flatness.objective import Objective
from fedflat.models import unit
from fedflat.progress import track


def ascent_sharpness(objective: Objective, rho: float = 0.05) -> float:
    """The rise of the loss after SAM's ascent step, f(w + ρ ∇f/‖∇f‖) − f(w); 0 if the gradient is zero.

    >>> x = torch.tensor([[1.0], [3.0]])
    >>> module = torch.nn.Linear(1, 1, bias=False)
    >>> f = Objective(module, lambda z, y: 0.5 * (z - y).square().mean(), [(x, x)])   # f(w) = 5/2 (w − 1)²
    >>> with f.at(torch.tensor([2.0])):
    ...     ascent_sharpness(f, rho=1.0)   # 5/2 (2² − 1²)
    7.5
    """
    _check(rho)
    (rise,) = rises(objective, [rho * unit(objective.gradient())])
    return rise


def adaptive_sharpness(objective: Objective, rho: float = 0.5) -> float:
    """The rise of the loss after ASAM's ascent step (Kwon et al. 2021).

        f(w + ε) − f(w),  ε = ρ T² ∇f/‖T ∇f‖,  T = |w| elementwise.

    Rescaling the weights without changing the function (one ReLU layer times c, the next divided by c) rescales ε in
    the same way and leaves this number unchanged. Unlike λ₁ and `ascent_sharpness` it compares minima and not their
    parametrisation.
    """
    _check(rho)
    scale = objective.weights.abs()
    (rise,) = rises(objective, [rho * scale * unit(scale * objective.gradient())])
    return rise


@dataclass(frozen=True)
class AverageSharpness:
    """The rise of f over random directions: the mean with its standard error and 95 % interval, and the largest rise.

    The error and the interval cover only the choice of directions; with one pair of directions they are NaN.
    """

    mean: float
    error: float
    low: float
    high: float
    largest: float
    directions: int


def average_sharpness(objective: Objective, rho: float = 0.05, directions: int = 30, seed: int = 0) -> AverageSharpness:
    """The mean of f(w + ρ û) − f(w) over directions û drawn uniformly from the unit sphere.

    To second order its expectation is ρ²/(2d) tr ∇²f(w), so it estimates the trace with forward passes only. The
    directions come in pairs ±û. In the mean of a pair the odd terms cancel, above all the slope ρ ∇f·û, which is far
    larger than the curvature for small ρ:

        ½ f(w + ρ û) + ½ f(w − ρ û) − f(w) = ½ ρ² ûᵀ∇²f û + O(ρ⁴) .

    Args:
        objective: the mean loss.
        rho: length of the step.
        directions: number of directions, an even number; half of them are drawn.
        seed: seed that draws them.

    Raises:
        RecipeError: `directions` is not a positive even number, or the radius is negative.
    """
    if directions < 2 or directions % 2:
        raise RecipeError(f"directions: {directions}; directions come in pairs ±u, so give an even number from 2 on")
    _check(rho)
    chance = torch.Generator().manual_seed(seed)
    home = objective.weights
    drawn = (torch.randn(objective.size, generator=chance, dtype=home.dtype).to(home) for _ in range(directions // 2))
    found = rises(objective, (sign * rho * unit(u) for u in drawn for sign in (1, -1)))
    mean = hall([(up + down) / 2 for up, down in zip(found[::2], found[1::2], strict=True)])
    return AverageSharpness(mean.mean, mean.error, mean.low, mean.high, max(found), directions)


def _check(rho: float) -> None:
    if not 0 <= rho < math.inf:
        raise RecipeError(f"rho = {rho}: the radius must be a number from 0 on")


def rises(objective: Objective, steps: Iterable[Tensor]) -> list[float]:
    """f(w + ε) − f(w) for each step ε. The weights are restored afterwards."""
    home, floor = objective.weights, objective.value()
    found = []
    for step in track(steps, "sharpness", 0):
        with objective.at(home + step):
            found.append(objective.value() - floor)
    return found
