"""Paired differences over seeds: coverage, and what is said where there is no interval."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from fedflat import flatness
from fedflat.errors import RecipeError
from fedflat.flatness import Measurement, paired_differences


def both(first, second, name="lambda1"):
    rows = [("a", s, x) for s, x in enumerate(first)] + [("b", s, x) for s, x in enumerate(second)]
    return [Measurement(method, seed, {name: value}) for method, seed, value in rows]


@pytest.mark.parametrize("seeds", [3, 5])
def test_the_interval_covers_the_expected_difference_in_95_of_100_repetitions(seeds):
    """The seeds move both methods by far more than the methods differ; the pairs cancel that."""
    chance, covered, widths = np.random.default_rng(0), 0, []
    for _ in range(2000):
        common = 10 * chance.normal(size=seeds)
        a, b = common + chance.normal(size=seeds), common + chance.normal(size=seeds) - 1.5
        (found,) = paired_differences(both(a, b))
        covered += found.low <= -1.5 <= found.high
        widths.append(found.high - found.low)
    assert 0.935 <= covered / 2000 <= 0.965
    assert np.median(widths) < 10


def test_mean_and_ends_are_students():
    (found,) = paired_differences(both([1.0, 2.0, 3.0], [2.0, 4.0, 3.0]))
    assert found.differences == [1.0, 2.0, 0.0] and found.seeds == [0, 1, 2]
    reach = 4.302652729749464 * 1 / math.sqrt(3)
    assert (found.mean, found.low, found.high) == pytest.approx((1, 1 - reach, 1 + reach))
    assert (found.method, found.reference, found.note, found.decided) == ("b", "a", "", False)
    (small,) = paired_differences(both([1.0, 2.0, 3.0], [1.1, 1.9, 3.0]))
    assert -0.5 < small.low < 0 < small.high < 0.5 and not small.decided
    near = [1.0, 2.0, 3.0], [2.0, 3.01, 4.0]
    assert all(paired_differences(both(*pair))[0].decided for pair in (near, near[::-1])), "above 0, and below"


def test_one_seed_has_no_interval_and_says_so():
    (found,) = paired_differences(both([1.0], [3.0]))
    assert (found.mean, found.note, found.decided) == (2.0, "one seed: no interval", False)
    assert math.isnan(found.low) and math.isnan(found.high)


def test_only_common_seeds_with_finite_values_are_paired():
    rows = [*both([1.0, 2.0, math.nan], [2.0, 4.0, 6.0]), Measurement("b", 7, {"lambda1": 0.0})]
    (found,) = paired_differences(rows)
    assert found.seeds == [0, 1] and found.mean == 1.5
    (apart,) = paired_differences([Measurement("a", 0, {"x": 1.0}), Measurement("b", 1, {"x": 1.0})])
    assert apart.note == "no common seed" and math.isnan(apart.mean)
    assert (apart.measure, apart.method, apart.reference) == ("x", "b", "a")
    for a, b in ({}, {"x": 1.0}), ({"x": 1.0}, {}):
        (missing,) = paired_differences([Measurement("a", 0, a), Measurement("b", 0, b)])
        assert missing.note == "no common seed" and missing.seeds == []
    late_first = [Measurement(m, s, {"x": v * s}) for m, v in (("a", 1.0), ("b", 3.0)) for s in (9, 2)]
    (found,) = paired_differences(late_first)
    assert (found.seeds, found.differences) == ([2, 9], [4.0, 18.0])


def test_every_method_is_compared_with_the_reference_in_every_measure():
    rows = [Measurement(m, 0, {"x": v, "y": 2 * v}) for m, v in (("a", 1.0), ("b", 2.0), ("c", 4.0))]
    assert [(d.method, d.measure, d.mean) for d in paired_differences(rows)] == [
        ("b", "x", 1), ("b", "y", 2), ("c", "x", 3), ("c", "y", 6),
    ]  # fmt: skip
    assert [(d.method, d.mean) for d in paired_differences(rows, "c") if d.measure == "x"] == [("a", -3), ("b", -2)]


@pytest.mark.parametrize(
    ("rows", "reference", "sentence"),
    [
        (both([1.0], []), None, "at least two methods"),
        (both([1.0], [1.0]), "fedsam", "the reference 'fedsam' has no result"),
        ([*both([1.0], [1.0]), Measurement("a", 0, {})], None, "'a' has seed 0 twice"),
    ],
)
def test_a_mistake_is_one_sentence(rows, reference, sentence):
    with pytest.raises(RecipeError, match=sentence):
        paired_differences(rows, reference)


def test_a_measurement_has_the_numbers_of_a_flatness_record():
    found = flatness.look(nn.Linear(3, 2), (torch.randn(30, 3), torch.arange(30) % 2), k=1, products=6)
    assert Measurement.of("fedavg", 4, found) == Measurement(method="fedavg", seed=4, values=found.numbers)
    assert found.numbers["loss"] == found.loss


def test_models_of_several_seeds_are_compared_by_pairs():
    x, y = torch.randn(30, 3), torch.arange(30) % 2
    models = {name: [nn.Linear(3, 2) for _ in range(3)] for name in ("a", "b")}
    found = flatness.compare(models, (x, y), k=1, products=6)
    by_hand = [
        flatness.look(b, (x, y), k=1, products=6).loss - flatness.look(a, (x, y), k=1, products=6).loss
        for a, b in zip(models["a"], models["b"], strict=True)
    ]
    (loss,) = [each for each in found.differences if each.measure == "loss"]
    assert loss.differences == pytest.approx(by_hand)
    (row,) = [row for row in found.rows() if row["quantity"] == "loss"]
    assert row["b − a"] == pytest.approx(np.mean(by_hand)) and row["b − a, low"] < row["b − a"] < row["b − a, high"]
    single = flatness.compare({name: many[0] for name, many in models.items()}, (x, y), k=1, products=6)
    assert all(math.isnan(each.low) and each.note == "one seed: no interval" for each in single.differences)
