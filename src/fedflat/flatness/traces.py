"""The trace of a symmetric operator from a few products, with an interval that covers it."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedflat.errors import RecipeError
from fedflat.flatness.hessian import Operator
from fedflat.flatness.intervals import FEWEST as PROBES
from fedflat.flatness.intervals import Interval, hall, quantile, student
from fedflat.flatness.krylov import krylov
from fedflat.progress import track

FEWEST = 6  # products: three steps of Lanczos and three probes


@dataclass(frozen=True)
class Trace:
    """An estimate of tr H: its mean, its standard error, and the ends of its 95 % interval.

    The interval covers only the choice of probes: the samples that H is measured on are fixed. If the matrix was
    written out, the error is 0 and both ends are the trace itself. With fewer than eight probes both ends are NaN.
    """

    mean: float
    error: float
    products: int
    low: float
    high: float


def trace(
    operator: Operator,
    products: int = 32,
    seed: int = 0,
    relative_error: float | None = None,
    most: int = 2000,
) -> Trace:
    """Estimates tr H with half of the products for a Krylov space and half for probes (Chen and Hallman, 2023).

    With Q an orthonormal basis of the Krylov space of a random vector, and P = I − QᵀQ,

        tr H = tr QHQᵀ + tr PHP .

    Lanczos gives the first term exactly; the second is Hutchinson's mean of zᵀPHPz over n vectors z of random signs.
    The Krylov space holds the few large eigenvalues that a trained network's Hessian has, so they add no variance. The
    95 % interval is that of the n probes, Student's t with Hall's correction for their skewness (`intervals.hall`).
    A matrix of at most `products` rows is written out instead, which is exact. Memory: products/2 · d floats.

    With `relative_error` there is a second stage. The deviation s of the first n probes sets how many are needed,

        N = (t s / δ)²,      δ = relative_error · |tr H|,

    and the result is the mean and the interval of N new probes. Those of the first stage are not used again. Otherwise
    an s that is small by chance would lead to few probes and a short interval, which covers the trace less often. If
    the interval of the N probes is still too wide, more are added until it is narrow enough.

    Args:
        operator: the matrix H.
        products: number of products with H (of the first stage); at least 6, and for an interval 16.
        seed: seed of the start vector and the probes.
        relative_error: the largest half width of the interval relative to the trace, such as 0.05. None uses only
            `products`.
        most: maximum number of products in total. If they are not enough, the interval is wider than requested.

    Raises:
        RecipeError: `products` is less than 6, or `relative_error` is not positive.

    >>> class Diagonal:
    ...     size, dtype, products = 3, torch.float64, 0
    ...     def __matmul__(self, v: Tensor) -> Tensor:
    ...         return torch.tensor([1.0, 2.0, 5.0], dtype=v.dtype) * v
    >>> trace(Diagonal())
    Trace(mean=8.0, error=0.0, products=3, low=8.0, high=8.0)
    """
    if products < FEWEST:
        raise RecipeError(f"trace: products = {products} is too few; give at least {FEWEST} (better 32)")
    if relative_error is not None and not relative_error > 0:
        raise RecipeError(f"trace: relative_error = {relative_error}; it must be a positive number such as 0.05")
    if operator.size <= products:
        units = torch.eye(operator.size, dtype=operator.dtype)
        exact = sum(float(unit @ (operator @ unit).cpu()) for unit in units)
        return Trace(exact, 0.0, operator.size, exact, exact)
    chance = torch.Generator().manual_seed(seed)
    space = krylov(operator, signs(operator, chance), products // 2)
    known, spent = float(space.alphas.sum()), len(space.alphas)

    def probe() -> float:
        z = signs(operator, chance)
        z -= space.basis.T @ (space.basis @ z)
        return float(z @ (operator @ z).cpu())

    samples = [probe() for _ in track(range(products - spent), "trace")]
    found = hall(samples)
    if relative_error is not None and math.isfinite(found.mean):
        count = min(_wanted(samples, relative_error * abs(known + found.mean)), most - products)
        if count >= PROBES:
            spent, samples = products, []
            while count > 0:
                samples += [probe() for _ in track(range(count), "trace")]
                found = hall(samples)
                missing = _missing(found, len(samples), relative_error * abs(known + found.mean))
                count = min(missing, most - spent - len(samples))
    return Trace(known + found.mean, found.error, spent + len(samples), known + found.low, known + found.high)


def _missing(found: Interval, probes: int, half: float) -> int:
    """The number of further probes with which this interval of some probes becomes as narrow as ± half; 0 if it is."""
    wide = min((found.high - found.low) / 2 / max(half, sys.float_info.min), 1e100)
    return math.ceil(probes * (wide**2 - 1)) if wide > 1 else 0


def _wanted(samples: Sequence[float], half: float) -> int:
    """The number of probes that an interval of ± half needs, estimated from the deviation of these samples."""
    first = student(samples)
    deviation, t = first.error * math.sqrt(len(samples)), quantile(len(samples) - 1)
    return max(PROBES, math.ceil(min(t * deviation / max(half, sys.float_info.min), 1e100) ** 2))


def signs(operator: Operator, chance: torch.Generator) -> Tensor:
    """A probe vector of independent random signs ±1."""
    return torch.randint(0, 2, (operator.size,), generator=chance).to(operator.dtype).mul_(2).sub_(1)
