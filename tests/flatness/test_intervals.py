"""Intervals of means: their defining equations, and what has none."""

import math

import numpy as np
import pytest
from scipy import stats

from fedflat.flatness import hall, stepped, student

SKEWED = [1.0, 1.5, 1.0, 4.0, 2.0, 11.0, 1.2, 0.5]


def test_students_interval_is_scipys():
    found, n = student(SKEWED), len(SKEWED)
    assert (found.mean, found.error) == pytest.approx((np.mean(SKEWED), stats.sem(SKEWED)))
    expected = stats.t.interval(0.95, n - 1, loc=np.mean(SKEWED), scale=stats.sem(SKEWED))
    assert (found.low, found.high) == pytest.approx(expected)


@pytest.mark.parametrize(("repeats", "level"), [(1, 0.968), (2, 0.95 + 1 / 80), (20, 0.95 + 1 / 800)])
def test_halls_ends_solve_his_equation_at_the_quantile_of_their_number(repeats, level):
    samples = SKEWED * repeats
    found, n, skewness = hall(samples), len(samples), stats.skew(samples)

    def g(t):
        cubic = t + skewness * t**2 / (3 * math.sqrt(n)) + skewness**2 * t**3 / (27 * n)
        return cubic + skewness / (6 * math.sqrt(n))

    quantile = stats.t.ppf((1 + level) / 2, n - 1)
    ends = [g((found.mean - end) / found.error) for end in (found.low, found.high)]
    assert ends == pytest.approx([quantile, -quantile])
    assert (found.mean, found.error) == pytest.approx((np.mean(samples), stats.sem(samples)))


def test_the_ends_of_mirrored_samples_are_mirrored():
    found, other = hall(SKEWED), hall([-each for each in SKEWED])
    assert (found.low, found.high) == pytest.approx((-other.high, -other.low))


@pytest.mark.parametrize("scale", [1e-120, 1e120])
def test_the_ends_follow_any_scale_of_the_samples(scale):
    """Their third power is no float64 any more."""
    found, plain = hall([scale * each for each in SKEWED]), hall(SKEWED)
    assert [found.low / scale, found.high / scale] == pytest.approx([plain.low, plain.high], rel=1e-12)


@pytest.mark.parametrize("shift", [0.0, 1e-9])
def test_without_skewness_the_ends_are_as_far_from_the_mean(shift):
    found = hall([*range(1, 8), 8.0 + shift])
    reach = stats.t.ppf(0.984, 7) * found.error
    assert (found.high - found.mean, found.mean - found.low) == pytest.approx((reach, reach), rel=1e-6)


def test_equal_samples_have_no_error():
    found = hall([2.0] * 8)
    assert (found.mean, found.error, found.low, found.high) == (2.0, 0.0, 2.0, 2.0)


def test_too_few_samples_have_no_interval():
    few, one = hall([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0]), student([3.0])
    assert few.mean == pytest.approx(127 / 7) and few.error == pytest.approx(stats.sem([1, 2, 4, 8, 16, 32, 64]))
    assert math.isnan(few.low) and math.isnan(few.high)
    assert one.mean == 3.0 and all(map(math.isnan, (one.error, one.low, one.high)))


@pytest.mark.parametrize(("draw", "mean"), [("normal", 0.0), ("chisquare", 1.0)])
@pytest.mark.parametrize("n", [8, 12, 40])
def test_normal_and_skewed_samples_are_covered_alike(draw, mean, n):
    chance = np.random.default_rng(0)
    drawn = chance.standard_normal((2000, n)) if draw == "normal" else chance.chisquare(1, (2000, n))
    found = [hall(samples) for samples in drawn]
    assert 0.93 <= sum(each.low <= mean <= each.high for each in found) / 2000 <= 0.97


def taus(chance, shape, runs, slope):
    """Kendall's τ of runs whose two values agree to some degree, many times over."""
    x, y = chance.normal(size=(2, *shape, runs))
    y = y + slope * x
    first, second = np.triu_indices(runs, 1)
    agree = np.sign(x[..., first] - x[..., second]) * np.sign(y[..., first] - y[..., second])
    return agree.mean(axis=-1)


@pytest.mark.parametrize("seeds", [3, 5, 10])
@pytest.mark.parametrize(("runs", "most"), [(10, 0.985), (5, 1.0), (3, 1.0)])
@pytest.mark.parametrize("slope", [0.0, 0.5, 2.0])
def test_kendalls_tau_over_seeds_is_covered_however_few_values_it_takes(runs, most, seeds, slope):
    """With few runs the interval is too long rather than too short."""
    chance = np.random.default_rng(7)
    expected = float(taus(chance, (30_000,), runs, slope).mean())
    found = [stepped(each, 4 / (runs * (runs - 1))) for each in taus(chance, (400, seeds), runs, slope).tolist()]
    assert 0.93 <= np.mean([each.low <= expected <= each.high for each in found]) <= most


def test_equal_ranks_are_known_to_half_a_step():
    found = stepped([1.0] * 4, step=0.2)
    reach = stats.t.ppf(1 - 0.05 * (1 - 0.36) / 2, 3) * 0.1 / 2
    assert (found.mean, found.error) == (1.0, pytest.approx(0.05))
    assert (found.low, found.high) == (pytest.approx(1 - reach), pytest.approx(1 + reach))
    assert math.isnan(stepped([1.0], 0.2).low)
