"""Numbers of several seeds as the cells of a table: mean ± deviation, and which one is the best."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TypeVar

from fedflat.runs import Row, mean_and_std

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Value:
    """A published or measured number. `text` is how it is shown, with its deviation and marks."""

    mean: float
    text: str


def over_seeds(found: Sequence[Row], metric: str, factor: float = 1.0, digits: int | None = None) -> Value | None:
    """The mean ± standard deviation of a metric over the results of several seeds, or None if no result has it.

    The deviation is over the seeds unless the metric has its own, `metric_std`. Rounds to a target that no seed reaches
    are shown as `500+`; if some seeds reach it, their mean is shown with their number.

    Args:
        found: the results.
        metric: the name of the metric.
        factor: multiplies the numbers; 100 gives per cent.
        digits: number of digits after the decimal point; by default four significant digits.
    """
    values = [each.get(metric) for each in found]
    if all(value is None for value in values):
        never = found and metric == "rounds_to_target"
        return Value(math.inf, f"{found[0]['asked']['server']['rounds']}+") if never else None
    mean, std = mean_and_std(values)
    if mean is None:
        reached = [value for value in values if value is not None]
        return Value(math.inf, f"{_written(fmean(reached), digits)} ({len(reached)} of {len(values)} seeds)")
    own = [each[f"{metric}_std"] for each in found if each.get(f"{metric}_std") is not None]
    std = fmean(own) if own else std
    if std is None:
        return Value(mean * factor, _written(mean * factor, digits))
    return Value(mean * factor, with_deviation(mean * factor, std * factor, digits))


def with_deviation(mean: float, std: float, digits: int | None = None) -> str:
    """The mean and its deviation with equally many digits after the point, by default two digits of the deviation.

    >>> with_deviation(7.9612, 0.9345), with_deviation(2.2861, 0.4), with_deviation(16, 1)
    ('7.96 ± 0.93', '2.29 ± 0.40', '16 ± 1')
    """
    if digits is None and std > 0 and 1e-3 < abs(mean) < 1e5:
        digits = min(max(1 - math.floor(math.log10(std)), 0), 6)
        while digits and all(_written(number, digits).endswith("0") for number in (mean, std)):
            digits -= 1
    return f"{_written(mean, digits)} ± {_written(std, digits, 2)}"


def _written(number: float, digits: int | None, significant: int = 4) -> str:
    return f"{number:.{significant}g}" if digits is None else f"{number:.{digits}f}"


def best(known: Mapping[Key, float], highest: bool) -> set[Key]:
    """The keys of the best number; an empty set if there is only one number.

    >>> sorted(best({"fedavg": 0.5, "fedsam": 0.7, "feddyn": 0.7}, highest=True)), best({"fedavg": 0.5}, highest=True)
    (['feddyn', 'fedsam'], set())
    """
    top = (max if highest else min)(known.values(), default=math.nan)
    return {place for place, mean in known.items() if len(known) > 1 and mean == top}
