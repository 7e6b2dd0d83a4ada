"""Differences between methods over the same seeds, with intervals instead of a ranking."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedflat.errors import RecipeError, nearest
from fedflat.flatness.intervals import student
from fedflat.flatness.measure import Flatness


@dataclass(frozen=True)
class Measurement:
    """The numbers of one model: which method trained it, from which seed, and what was measured."""

    method: str
    seed: int
    values: Mapping[str, float]

    @classmethod
    def of(cls, method: str, seed: int, found: Flatness) -> Measurement:
        """The numbers of a flatness record: loss, λ₁, trace, the three sharpness measures and the norms."""
        return cls(method, seed, found.numbers)


@dataclass(frozen=True)
class Difference:
    """One measure of a method minus that of the reference, paired by seed.

    Attributes:
        measure: the name of the measure.
        method: the method.
        reference: the method it is compared with.
        seeds: the seeds that both have, with a finite value for both.
        differences: the difference for each of these seeds.
        mean: their mean; NaN without a common seed.
        low: lower end of the 95 % interval of the mean; NaN if there is none.
        high: its upper end.
        note: why there is no interval; empty if there is one.
    """

    measure: str
    method: str
    reference: str
    seeds: list[int]
    differences: list[float]
    mean: float
    low: float
    high: float
    note: str = ""

    @property
    def decided(self) -> bool:
        """Whether the interval excludes 0."""
        return self.low > 0 or self.high < 0


def paired_differences(found: Sequence[Measurement], reference: str | None = None) -> list[Difference]:
    """Compares methods measure by measure with paired differences over the seeds they have in common.

    Seeds change the initial weights, the split and the order of samples, and so move all methods together. The
    difference within a seed removes this common part:

        d̄ ± t s_d/√n,   dₛ = x_method(s) − x_reference(s),

    with Student's t of n − 1 degrees of freedom. The interval covers the expected difference over seeds in 95 % of all
    repetitions if the differences are about normal. They are not adjusted for their number: one in twenty misses.

    Args:
        found: one entry for each method and seed.
        reference: the method to compare with; by default the first.

    Returns:
        A difference for each measure of each other method.

    Raises:
        RecipeError: there is nothing to compare, the reference is unknown, or a method has a seed twice.

    >>> rows = [("fedavg", 0, 5.0), ("fedavg", 1, 7.0), ("fedsam", 0, 4.0), ("fedsam", 1, 6.5)]
    >>> (one,) = paired_differences([Measurement(method, seed, {"lambda1": value}) for method, seed, value in rows])
    >>> one.differences, one.mean, one.decided
    ([-1.0, -0.5], -0.75, False)
    """
    methods: dict[str, dict[int, Mapping[str, float]]] = {}
    for each in found:
        if each.seed in methods.setdefault(each.method, {}):
            raise RecipeError(
                f"paired_differences: {each.method!r} has seed {each.seed} twice; give one result for each seed"
            )
        methods[each.method][each.seed] = each.values
    if len(methods) < 2:
        raise RecipeError("paired_differences: give the results of at least two methods")
    first = reference or next(iter(methods))
    if first not in methods:
        raise RecipeError(f"paired_differences: the reference {first!r} has no result; {nearest(first, methods)}")
    measures = dict.fromkeys(name for each in found for name in each.values)
    others = [method for method in methods if method != first]
    return [_difference(name, method, first, methods) for method in others for name in measures]


def _difference(
    name: str, method: str, reference: str, methods: Mapping[str, Mapping[int, Mapping[str, float]]]
) -> Difference:
    mine, theirs = methods[method], methods[reference]
    pairs = {seed: (mine[seed].get(name), theirs[seed].get(name)) for seed in mine if seed in theirs}
    known = {s: d for s, (a, b) in pairs.items() if a is not None and b is not None and math.isfinite(d := a - b)}
    seeds, values = sorted(known), [known[seed] for seed in sorted(known)]
    if not values:
        return Difference(name, method, reference, [], [], math.nan, math.nan, math.nan, "no common seed")
    mean = student(values)
    note = "one seed: no interval" if len(values) == 1 else ""
    return Difference(name, method, reference, seeds, values, mean.mean, mean.low, mean.high, note)
