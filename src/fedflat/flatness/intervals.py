"""Confidence intervals of means: Student's t over independent samples, and its form for skewed ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LEVEL = 0.95
FEWEST = 8  # samples for an interval; with fewer, none covers 93 to 97 % for both normal and χ² draws
SYMMETRIC = 1e-6  # below this skewness, the correction is rounding error


@dataclass(frozen=True)
class Interval:
    """The mean of n independent samples, its standard error s/√n, and the ends of its 95 % interval.

    With too few samples there is no interval, and both ends are NaN. With a single sample the error is also NaN.
    """

    mean: float
    error: float
    low: float
    high: float


def student(samples: Sequence[float], level: float = LEVEL) -> Interval:
    """The interval  x̄ ± t s/√n, with t the quantile of Student's distribution with n − 1 degrees of freedom.

    It covers the expectation in 95 % of all draws (or another `level`) if the samples are normal, and nearly so if they
    are not too skewed.

    >>> student([1.0, 3.0])
    Interval(mean=2.0, error=1.0, low=-10.706204736174694, high=14.706204736174694)
    """
    n = len(samples)
    mean = float(np.mean(samples))
    if n < 2:
        return Interval(mean, math.nan, math.nan, math.nan)
    error = float(np.std(samples, ddof=1)) / math.sqrt(n)
    reach = quantile(n - 1, level) * error
    return Interval(mean, error, mean - reach, mean + reach)


def hall(samples: Sequence[float]) -> Interval:
    """Student's interval with Hall's correction for the skewness γ of the samples (Hall, 1992).

    The statistic T = (x̄ − μ)√n/s of skewed samples is not symmetric, but this function of it nearly is:

        g(T) = T + γT²/(3√n) + γ²T³/(27n) + γ/(6√n) .

    So the interval is x̄ − g⁻¹(±t) s/√n. A quadratic form zᵀHz with a few large eigenvalues is such a sample: Student's
    interval would cover its mean less often than stated, because it is too short on the upper side.

    γ is an estimate itself, which makes the interval of few samples too short. So t is the quantile for a coverage of
    0.95 + min(0.018, 1/(5n)). The interval then covers 93 to 97 % for normal and for skewed draws alike, from
    eight samples on. With fewer there is none.

    >>> found = hall([1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 3.0, 9.0])
    >>> found.mean - found.low < found.high - found.mean   # longer on the side of the long tail
    True
    """
    plain, n = student(samples), len(samples)
    if n < FEWEST:
        return Interval(plain.mean, plain.error, math.nan, math.nan)
    t = quantile(n - 1, widened(LEVEL, n))
    centred = np.asarray(samples) - plain.mean
    spread = float(np.mean(centred**2))
    skewness = float(np.mean((centred / math.sqrt(spread)) ** 3)) if spread > 0 else 0.0

    def inverse(y: float) -> float:
        if abs(skewness) < SYMMETRIC:
            return y
        return 3 * math.sqrt(n) / skewness * (math.cbrt(1 + skewness * (y / math.sqrt(n) - skewness / (6 * n))) - 1)

    return Interval(plain.mean, plain.error, *(plain.mean - plain.error * inverse(end) for end in (t, -t)))


def stepped(samples: Sequence[float], step: float, level: float = LEVEL) -> Interval:
    """Student's interval of samples that are multiples of a step, such as Kendall's τ of a few runs.

        x̄ ± t √((s² + step²/4)/n)

    Few samples with few possible values are often all equal, and then s = 0 says nothing about their spread. Half a
    step is added to it as a further deviation. t is the quantile for a level of 0.95 + min(0.018, 1/(5n)), as in
    `hall`, because such samples are also skewed.

    Args:
        samples: the samples.
        step: the distance between neighbouring values.
        level: the probability with which the interval covers the expectation.

    >>> stepped([1.0, 1.0, 1.0, 1.0], step=0.2).low < 0.85
    True
    """
    plain, n = student(samples), len(samples)
    error = math.hypot(plain.error, step / 2 / math.sqrt(n))
    reach = quantile(n - 1, widened(level, n)) * error
    return Interval(plain.mean, error, plain.mean - reach, plain.mean + reach)


def widened(level: float, n: int) -> float:
    """A level whose quantile makes the interval of n skewed samples long enough; 0.95 + min(0.018, 1/(5n)) for 0.95."""
    return 1 - (1 - level) * (1 - min(0.36, 4 / n))


def quantile(freedom: float, level: float = LEVEL) -> float:
    """The factor t with P(|T| ≤ t) = level for Student's T with these degrees of freedom."""
    from scipy.special import stdtrit  # a run that measures nothing does not load SciPy

    return float(stdtrit(freedom, (1 + level) / 2))
