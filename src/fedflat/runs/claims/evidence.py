"""Results of studies as JSON lines, found again by a digest of their recipe, so that nothing is trained twice."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from fedflat.errors import RunError, shortened
from fedflat.files import read_whole, write_whole, written_to
from fedflat.recipe import Recipe
from fedflat.runs.folder import read_recipe
from fedflat.runs.record import read_record, read_summary
from fedflat.runs.shipped import shipped_folder
from fedflat.runs.sweep.plan import Point, Sweep
from fedflat.runs.sweep.results import Row, finished

UNSTABLE = {"engine": {"name", "workers", "address"}, "data": {"dir"}, "model": {"base"}}
MOST = 2**63  # whole numbers are below, as in the records of runs
ASIDE = dict.fromkeys(("trackers", "checkpoint", "deployment"), True)


def digest(point: Point) -> str:
    """The SHA-256 of all settings that a run's results depend on, shortened to 16 digits.

    Settings with their default value are left out. So a field that a later version adds, with a default that changes
    nothing, does not change the digests.
    """
    facts = {"recipe": _changed(point.recipe), "after": list(point.after)}
    facts |= {"base": _changed(point.base)} if point.base else {}
    text = json.dumps(facts, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _changed(recipe: Recipe) -> dict[str, Any]:
    """The settings without their default value."""
    table = recipe.model_dump(mode="json", exclude_defaults=True, exclude={**UNSTABLE, **ASIDE})
    return {name: value for name, value in table.items() if value != {}}


def shipped_evidence() -> Path:
    """The directory of the results that come with fedflat."""
    return shipped_folder("results", checkout="docs/results")


@dataclass
class Evidence:
    """The results that are known: for each study, a row for each digest of a recipe.

    A row has the digest, the grid `values`, the `metrics` of the sweep's table, and the `curve` of the followed metric
    as pairs of round and value. A row of a metric of which less is better says `best = "lowest"`.
    """

    rows: dict[str, dict[str, Row]] = field(default_factory=dict)

    @classmethod
    def read(cls, folders: Iterable[Path]) -> Evidence:
        """Reads `STUDY.jsonl` of all folders; where two have the same run, the later folder counts."""
        known = cls()
        for folder in folders:
            for path in sorted(folder.glob("*.jsonl")):
                known.rows.setdefault(path.stem, {}).update(_lines(path))
        return known

    def of(self, study: Sweep, point: Point) -> Row | None:
        """The row of a run, if it is known."""
        return self.rows.get(study.name, {}).get(digest(point))

    def missing(self, study: Sweep, points: Iterable[Point]) -> list[Point]:
        """The runs of a study that are not known."""
        return [point for point in points if self.of(study, point) is None]

    def gather(self, study: Sweep, folder: Path) -> None:
        """Adds the finished runs in the directory of a sweep."""
        for point in study.points:
            if self.of(study, point) is None and finished(folder / point.slug, point):
                self.rows.setdefault(study.name, {})[digest(point)] = row_of(folder / point.slug, point)

    def write(self, study: Sweep, folder: Path) -> None:
        """Writes the rows of a study in the order of its grid; rows of other settings are dropped.

        Rows that another process has added to the file in the meantime stay.
        """
        path = folder / f"{study.name}.jsonl"
        there = _lines(path) if path.is_file() else {}
        rows = [row for point in study.points if (row := self.of(study, point) or there.get(digest(point)))]
        if not rows:
            return
        with written_to(folder, "choose another --results"):
            folder.mkdir(parents=True, exist_ok=True)
            text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            write_whole(path, text.encode(), public=True)


def row_of(folder: Path, point: Point) -> Row:
    """The row of a finished run, from its directory."""
    result = json.loads(read_whole(folder / "result.json"))
    summary = read_summary(folder)
    metrics = {name: _short(value) for name, value in result["metrics"].items() if value is not None}
    recipe = read_recipe(folder)
    return {
        "digest": digest(point),
        "values": point.values,
        "metrics": metrics,
        "curve": _curve(folder, recipe.metric, summary["rounds"]),
        **({"best": "lowest"} if recipe.evaluation.best == "lowest" else {}),
        "versions": summary.get("versions", {}),
    }


def _curve(folder: Path, metric: str, rounds: int) -> list[tuple[int, float]]:
    records = [read_record(line) or {} for line in read_whole(folder / "metrics.jsonl").splitlines()]
    if [each.get("round") for each in records] != [*range(1, rounds + 1)]:
        raise RunError(f"{folder}/metrics.jsonl: lacks rounds of the run; delete its directory to train it again")
    return [(each["round"], _short(each[metric])) for each in records if each.get(metric) is not None]


def _short(value: float) -> float:
    """A number with seven digits, which is what float32 has."""
    return float(f"{value:.7g}") if isinstance(value, float) else value


def _lines(path: Path) -> dict[str, Row]:
    """The rows of a file by digest. Lines without a digest are ignored.

    Raises `RunError` if a line is damaged, or if two lines have different results of one run.
    """
    rows: dict[str, Row] = {}
    for number, line in enumerate(read_whole(path).splitlines(), 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            raise RunError(
                f"{path}: line {number} is not JSON; take the file from a backup, or delete the line"
            ) from None
        if isinstance(row, dict) and "digest" in row:
            if not _whole(row):
                raise RunError(f"{path}: line {number} is not a valid result; delete it to train its run again")
            if repr(rows.setdefault(row["digest"], row)) != repr(row):  # a NaN does not equal itself
                raise RunError(
                    f"{path}: line {number} has other results than an earlier line of the same run, "
                    f"{shortened(row['digest'])}; delete one of them"
                )
    return rows


def _whole(row: Mapping[str, Any]) -> bool:
    curve, metrics = row.get("curve"), row.get("metrics")
    return (
        isinstance(row["digest"], str)
        and isinstance(row.get("values"), dict)
        and isinstance(metrics, dict)
        and all(_number(value) for value in metrics.values())
        and isinstance(curve, list)
        and all(isinstance(pair, list) and len(pair) == 2 and _evaluated(*pair) for pair in curve)
        and all(before[0] < after[0] for before, after in pairwise(curve))
    )


def _evaluated(round: Any, value: Any) -> bool:
    return type(round) is int and 0 < round < MOST and _number(value) and math.isfinite(value)


def _number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < MOST)
