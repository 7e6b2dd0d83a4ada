"""The eigenvalue density of a symmetric operator from a few products, by Lanczos, and the outliers above its bulk."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

import torch
from torch import Tensor

from fedflat.errors import RecipeError
from fedflat.flatness.hessian import Operator
from fedflat.flatness.intervals import hall
from fedflat.flatness.krylov import krylov, ritz
from fedflat.flatness.traces import Trace


@dataclass(frozen=True)
class Density:
    """The eigenvalue density φ(t) = (1/d) Σ δ(t − λᵢ), as a sum of peaks.

    Each probe has nodes t and weights w that sum to 1. Means over the probes are unbiased: E Σ w g(t) = (1/d) tr g(H)
    for every g that the quadrature integrates exactly.
    """

    nodes: tuple[Tensor, ...]
    weights: tuple[Tensor, ...]
    size: int
    products: int

    def moment(self, power: int) -> float:
        """∫ tᵖ φ(t) dt, an estimate of (1/d) tr Hᵖ."""
        return fmean(self._moments(power))

    @property
    def trace(self) -> Trace:
        """d times the first moment, with the 95 % interval over the probes; fewer than eight have none."""
        found = hall([self.size * moment for moment in self._moments(1)])
        return Trace(found.mean, found.error, self.products, found.low, found.high)

    def on(self, grid: Tensor, width: float) -> Tensor:
        """φ on a grid of points, with each peak replaced by a normal density of standard deviation `width`."""
        nodes, weights = torch.cat(self.nodes), torch.cat(self.weights) / len(self.nodes)
        distance = (grid.double()[:, None] - nodes) / width
        return (-distance.square() / 2).exp() @ weights / (width * math.sqrt(2 * math.pi))

    def _moments(self, power: int) -> list[float]:
        return [float(w @ t.pow(power)) for t, w in zip(self.nodes, self.weights, strict=True)]


def density(operator: Operator, steps: int = 100, probes: int = 3, seed: int = 0) -> Density:
    """Estimates the eigenvalue density by stochastic Lanczos quadrature (Ubaru, Chen and Saad, 2017).

    Memory: steps · d floats, for the basis of one probe at a time.

    Args:
        operator: the matrix.
        steps: Lanczos steps, and so products, for each probe.
        probes: number of random start vectors.
        seed: seed of the start vectors.

    Raises:
        RecipeError: `steps` or `probes` is less than 1.
    """
    if min(steps, probes) < 1:
        raise RecipeError(f"density: steps = {steps} and probes = {probes} must be at least 1")
    chance = torch.Generator().manual_seed(seed)
    before = operator.products
    rules = []
    for _ in range(probes):
        start = torch.randn(operator.size, generator=chance, dtype=operator.dtype)
        rules.append(quadrature(operator, start, steps))
    nodes, weights = zip(*rules, strict=True)
    return Density(nodes, weights, operator.size, operator.products - before)


def quadrature(operator: Operator, start: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """The Gauss quadrature of a start vector, from the tridiagonal matrix of Lanczos.

    The nodes t and weights w satisfy Σ w p(t) = vᵀp(H)v, v = start/‖start‖, for each polynomial p of degree < 2·steps.
    If the Krylov space ends early there are fewer nodes, and the rule is exact for all functions.

    Args:
        operator: the matrix H.
        start: the start vector.
        steps: maximum number of Lanczos steps.

    Returns:
        The nodes and the weights.

    >>> class Diagonal:
    ...     size, dtype, products = 3, torch.float64, 0
    ...     def __matmul__(self, v: Tensor) -> Tensor:
    ...         return torch.tensor([1.0, 2.0, 5.0], dtype=v.dtype) * v
    >>> t, w = quadrature(Diagonal(), torch.ones(3, dtype=torch.float64), steps=10)
    >>> [round(x, 6) for x in t.tolist()], [round(x, 6) for x in w.tolist()]
    ([1.0, 2.0, 5.0], [0.333333, 0.333333, 0.333333])
    """
    found = krylov(operator, start, steps)
    nodes, vectors = ritz(found.alphas, found.betas)
    return nodes, vectors[0].square()


@dataclass(frozen=True)
class Outliers:
    """The eigenvalues that stand out above the bulk, in descending order, and the upper edge of the bulk."""

    values: list[float]
    edge: float

    @property
    def count(self) -> int:
        return len(self.values)


def outliers(found: Density, factor: float = 3.0) -> Outliers:
    """The eigenvalues above the bulk of a density, by the gaps between the nodes of its first probe.

    The nodes θ₁ > θ₂ > … of Lanczos fill the bulk densely, and each eigenvalue that stands apart gets one node of its
    own. Of the gaps θⱼ − θⱼ₊₁ above the median of the density, the lower half is taken for those of the bulk. Of the
    others, the lowest one that is `factor` times as wide as every gap below it separates the outliers from the bulk,
    whose edge is the node below that gap. Without such a gap there are no outliers: the spectrum falls off
    smoothly. More Lanczos steps resolve smaller gaps; take at least five for each outlier that is expected.

    For a classifier of K classes, K − 1 outliers are typical of a trained network (Sagun et al. 2017, Papyan 2020).

    Args:
        found: the density.
        factor: how many times wider than the gaps of the bulk the separating gap must be.
    """
    nodes, weights = found.nodes[0].flip(0), found.weights[0].flip(0)
    above = int((weights.cumsum(0) < 0.5).sum()) + 1  # the nodes down to the median
    top = nodes[:above].tolist()
    gaps = [a - b for a, b in pairwise(top)]
    for place in reversed(range(len(gaps) // 2)):
        if gaps[place] > factor * max(gaps[place + 1 :]):
            return Outliers(top[: place + 1], top[place + 1])
    return Outliers([], top[0])
