"""Reads runs for a report. Runs that differ only in the seed form one line with a band."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from fedflat.errors import RecipeError, RunError, nearest
from fedflat.files import read_whole
from fedflat.recipe import Recipe
from fedflat.rounds import flat_record
from fedflat.runs import Record, Result, read_recipe, read_record, summary

Source = str | PathLike[str] | Result
Sources = Source | Iterable[Source]
Settings = dict[str, Any]
MOST_NAMED = 3  # maximum number of settings in a line's name
# These settings follow from the data set, so its name is enough.
IMPLIED = ("data.mean", "data.std", "engine.group")


@dataclass(frozen=True)
class Run:
    """A run read from its directory, finished or not."""

    path: Path
    recipe: Recipe
    history: list[Record]

    @cached_property
    def settings(self) -> Settings:
        """All settings that affect the results, except the seed, by dotted name."""
        table = self.recipe.essentials()
        flat = {"method": str(table.pop("method")), "server.rounds": self.recipe.server.rounds}
        for section, fields in table.items():
            inside = (
                {f"{section}.{field}": value for field, value in fields.items()} if isinstance(fields, dict) else {}
            )
            flat |= inside or {section: fields}
        return {name: value for name, value in flat.items() if name not in ("seed", "split.seed")}

    def curve(self, metric: str) -> dict[int, Any]:
        """The values of a metric by round, for the rounds that recorded it."""
        flat = map(flat_record, self.history)
        return {record["round"]: record[metric] for record in flat if record.get(metric) is not None}

    def summary(self, target: float | None = None) -> Record:
        """The summary of the run, with the rounds to a target value of its metric."""
        if target is None:
            return summary(self.history, self.recipe)
        evaluation = self.recipe.evaluation.model_copy(update={"target": target})
        return summary(self.history, self.recipe.model_copy(update={"evaluation": evaluation}))


@dataclass(frozen=True)
class Band:
    """Mean, lowest and highest value of a metric, for the rounds that all runs of a line have."""

    rounds: list[int]
    mean: list[float]
    low: list[float]
    high: list[float]


@dataclass(frozen=True)
class Line:
    """Runs that differ only in the seed."""

    name: str
    runs: tuple[Run, ...]

    def band(self, metric: str) -> Band | None:
        """The band of a metric over all seeds that recorded it, or None if none did."""
        curves = [curve for run in self.runs if (curve := run.curve(metric))]
        rounds = sorted(set.intersection(*map(set, curves))) if curves else []
        if not rounds:
            return None
        values = np.array([[curve[round] for round in rounds] for curve in curves], dtype=float)
        return Band(rounds, *(reduce(values, axis=0).tolist() for reduce in (np.mean, np.min, np.max)))

    def megabytes(self) -> dict[int, float]:
        """The traffic up to each round in both directions, averaged over the seeds that reached it."""
        sent: dict[int, list[float]] = {}
        for run in self.runs:
            total = 0
            for record in run.history:
                total += record["bytes_down"] + record["bytes_up"]
                sent.setdefault(record["round"], []).append(total / 1e6)
        return {round: sum(each) / len(each) for round, each in sent.items()}

    @property
    def recipe(self) -> Recipe:
        return self.runs[0].recipe


def read_runs(sources: Iterable[Sources]) -> list[Run]:
    """Reads the runs of directories (of one or several runs) and of results, in the given order without duplicates."""
    found: dict[Path | int, Run | Path] = {}
    for source in each_of(sources):
        if isinstance(source, Result):
            found[id(source)] = Run(source.directory or Path("in memory"), source.recipe, source.history)
            continue
        for path in runs_in(Path(source)):
            found.setdefault(path.resolve(), path)
    return [each if isinstance(each, Run) else read_run(each) for each in found.values()]


def each_of(sources: Iterable[Sources]) -> Iterator[Source]:
    """The sources one by one, also those in lists."""
    for source in sources:
        if isinstance(source, str | PathLike | Result):
            yield source
        elif isinstance(source, Iterable):
            yield from each_of(source.values() if isinstance(source, Mapping) else source)
        else:
            raise RecipeError(
                f"runs: one is of type {type(source).__name__}; give directories of runs, or results of train"
            )


def read_lines(sources: Iterable[Sources], only: Iterable[str] = ()) -> list[Line]:
    """Reads runs and groups those that differ only in the seed into lines, in the given order.

    Args:
        sources: directories of runs or of several runs, results of `train`, or lists of them.
        only: conditions `setting=value` that select the runs.
    """
    runs = selected(read_runs(sources), only)
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(json.dumps(run.settings, sort_keys=True, default=str), []).append(run)
    ordered = [tuple(sorted(group, key=lambda run: run.recipe.seed)) for group in groups.values()]
    return [Line(name, group) for name, group in zip(_names(ordered), ordered, strict=True)]


def selected(runs: Sequence[Run], only: Iterable[str]) -> list[Run]:
    """The runs whose settings have these values; several values of one setting are alternatives.

    Raises:
        RecipeError: no run has such a setting or value.
    """
    left = list(runs)
    short = short_methods({run.settings["method"] for run in runs})
    wanted: dict[str, set[str]] = {}
    for text in only:
        name, equals, value = text.partition("=")
        names = [each for run in runs for each in run.settings if name in (each, each.rpartition(".")[2])]
        if not equals or not names:
            raise RecipeError(f"--only {text}: write it as setting=value, with a setting of the recipe")
        wanted.setdefault(names[0], set()).add(value)
    for name, values in wanted.items():
        told = [{str(run.settings.get(name)), short.get(str(run.settings.get(name)), "")} for run in left]
        left = [run for run, each in zip(left, told, strict=True) if each & values]
        if not left:
            known = {min(each, key=len) or max(each) for each in told}
            raise RecipeError(f"--only {name}={min(values)}: no run has it; {nearest(min(values), known)}")
    return left


def runs_in(path: Path) -> list[Path]:
    """The directories of runs in a directory, or the directory itself if it is a run."""
    if (path / "recipe.toml").is_file() or not path.is_dir():
        return [path]
    found = {recipe.parent for recipe in path.rglob("recipe.toml")}
    # A recipe inside a run's directory, such as that of its export, is not another run.
    return sorted(run for run in found if found.isdisjoint(run.parents)) or [path]


def read_run(path: Path) -> Run:
    """Reads a run up to its last complete record. A line that is still being written is ignored."""
    if path.suffix == ".json":
        raise RunError(f"{path}: a report needs a whole run; give its directory")
    recipe, metrics = read_recipe(path), path / "metrics.jsonl"
    whole = read_whole(metrics) if metrics.exists() else b""
    lines = whole[: whole.rfind(b"\n") + 1].splitlines()
    return Run(path, recipe, [_record(metrics, number, line) for number, line in enumerate(lines, 1)])


def _record(path: Path, number: int, line: bytes) -> Record:
    if record := read_record(line):
        return record
    raise RunError(f"{path}: line {number} is not a valid record; the file is damaged, so restore it from a backup")


def differing(settings: Sequence[Settings]) -> list[str]:
    """The names of the settings that differ between the runs."""
    names = dict.fromkeys(name for each in settings for name in each)
    return [name for name in names if any(each.get(name) != settings[0].get(name) for each in settings)]


def _names(groups: Sequence[tuple[Run, ...]]) -> list[str]:
    """A short name for each line: its method, with options if needed, and other settings that distinguish it."""
    settings = [runs[0].settings for runs in groups]
    short = short_methods({each["method"] for each in settings})
    others = [name for name in differing(settings) if name != "method" and name not in IMPLIED][:MOST_NAMED]
    names = [", ".join([short[each["method"]], *(f"{o}={each.get(o)}" for o in others)]) for each in settings]
    return [
        name if names.count(name) == 1 else f"{name} ({runs[0].path})" for name, runs in zip(names, groups, strict=True)
    ]


CALL = re.compile(r"([\w.:-]+)\(([^()]*)\)")


def short_methods(methods: Collection[str]) -> dict[str, str]:
    """A short text for each method, without the options that all of them share.

    >>> list(short_methods(["fedavg", "man(zeta=0.1, layers='all')", "man(zeta=0.2, layers='all')"]).values())
    ['fedavg', 'man(zeta=0.1)', 'man(zeta=0.2)']
    """
    seen: dict[str, set[str]] = {}
    for method in methods:
        for part, options in CALL.findall(method):
            seen.setdefault(part, set()).update(options.split(", "))
    names = {option.partition("=")[0] for options in seen.values() for option in options}
    vary = {
        (part, name)
        for part, options in seen.items()
        for name in names
        if len({option for option in options if option.partition("=")[0] == name}) > 1
    }

    def told(call: re.Match[str]) -> str:
        kept = [option for option in call[2].split(", ") if (call[1], option.partition("=")[0]) in vary]
        return call[1] + (f"({', '.join(kept)})" if kept else "")

    short = {method: CALL.sub(told, method) for method in methods}
    return short if len({*short.values()}) == len({*methods}) else {method: method for method in methods}


def thinned(count: int, most: int) -> list[int]:
    """At most `most` evenly spaced indices below `count`, including the first and the last.

    >>> thinned(9, 3), thinned(3, 9)
    ([0, 4, 8], [0, 1, 2])
    """
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int)).tolist() if count else []
