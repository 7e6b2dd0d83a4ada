"""What a search has found: the trials of each method, its best settings, and the table of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedflat.files import read_whole
from fedflat.runs.sweep.overrides import filled, spelled
from fedflat.runs.tune.space import Settings


@dataclass(frozen=True)
class Trial:
    """One combination of settings of a method, with its validation score at the end of each stage."""

    method: str
    settings: Settings
    scores: dict[int, float | None]


@dataclass(frozen=True)
class Tuned:
    """The result of the search for a method, and its budget.

    Attributes:
        method: the method, with names in braces.
        best: the settings with the best score in the last stage; None if every trial failed.
        score: its mean score over the search seeds, on validation samples.
        combinations: number of combinations in the method's grid.
        given: rounds that every method was given, over all search seeds.
        used: rounds that this method used; fewer than given if its grid is smaller than the number of trials.
        trials: all of its trials.
        lowest: whether less of the metric is better, so that the score is minus the metric.
    """

    method: str
    best: Settings | None
    score: float | None
    combinations: int
    given: int
    used: int
    trials: list[Trial]
    lowest: bool = False

    @property
    def filled(self) -> str:
        """The method with the best settings in place of the names."""
        return str(filled(self.method, self.best or {}))


def read_tuned(path: Path) -> list[Tuned]:
    """The result of a search from its `tuned.json`."""
    found = []
    for each in json.loads(read_whole(path)):
        trials = [
            Trial(t["method"], t["settings"], {int(r): score for r, score in t["scores"].items()})
            for t in each["trials"]
        ]
        found.append(Tuned(**{**each, "trials": trials}))
    return found


def rows(found: Sequence[Tuned]) -> list[dict[str, str]]:
    """The budget and the result of each method, as rows of a table."""
    return [
        {
            "method": each.method,
            "combinations": f"{len(each.trials)} of {each.combinations}{_failures(each)}",
            "rounds given": str(each.given),
            "rounds used": str(each.used),
            "values tried": "; ".join(f"{n}: {', '.join(map(spelled, some))}" for n, some in tried(each).items()),
            "best settings": _best_text(each) or "all failed",
            "validation": "" if each.score is None else f"{-each.score if each.lowest else each.score:.4f}",
        }
        for each in found
    ]


def _failures(tuned: Tuned) -> str:
    failed = sum(None in trial.scores.values() for trial in tuned.trials)
    return f", {failed} failed" if failed else ""


def tried(tuned: Tuned) -> dict[str, list[Any]]:
    """The values of each setting in the trials of a method; numbers in ascending order."""
    found: dict[str, list[Any]] = {}
    for trial in tuned.trials:
        for name, value in trial.settings.items():
            if value not in found.setdefault(name, []):
                found[name].append(value)
    return {name: sorted(values) if all(map(_is_number, values)) else values for name, values in found.items()}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _best_text(tuned: Tuned) -> str:
    """The best settings; "(edge)" marks the smallest or largest of several numbers that were tried."""
    values = tried(tuned)
    edges = {n: (each[0], each[-1]) for n, each in values.items() if len(each) > 1 and all(map(_is_number, each))}
    best = (tuned.best or {}).items()
    return ", ".join(f"{n} = {spelled(v)}{' (edge)' if v in edges.get(n, ()) else ''}" for n, v in best)
