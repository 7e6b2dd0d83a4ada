"""The tables of the papers: published numbers, measured numbers and differences in the settings."""

from __future__ import annotations

import math
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import product
from typing import Any

from rich.table import Table
from rich.text import Text

from fedflat.errors import RecipeError, nearest
from fedflat.report.numbers import Value, best, over_seeds
from fedflat.report.sheets import Cell, Sheet
from fedflat.runs import FULL, Row, flattened, load_sweep, shipped, spelled

VALUE = re.compile(r"(?P<mean>\d+(?:\.\d+)?)(?P<more>\+)?(?: ± (?P<std>\d*\.?\d+))?(?P<arrow> [↑↓])?(?P<note> .+)?")
FOLLOWS = ("data.mean", "data.std")  # these follow from the data set and are not reported as differences


@dataclass(frozen=True)
class Axis:
    """A row or column of a published table: its heads, and the grid values of its results."""

    heads: list[str]
    match: dict[str, Any]
    metric: str | None = None
    group: str = ""
    digits: int | None = None
    factor: float | None = None


@dataclass(frozen=True)
class Published:
    """A table from a paper.

    A result belongs to a cell if it has the grid values of the cell's row and column. Arrows compare a cell with the
    one that has the values of `baseline` instead. The `best` number of each column and group of rows is bold.
    """

    name: str
    title: str
    source: str
    metric: str
    factor: float
    digits: int
    best: str
    baseline: dict[str, Any]
    columns: list[Axis]
    rows: list[Axis]
    values: list[list[Value | None]]
    notes: list[str]


def published_names() -> list[str]:
    """The names of all published tables."""
    folder = resources.files("fedflat") / "published"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def published(name: str) -> Published:
    """Loads a published table by name, such as fedsol-table1. Raises `RecipeError` for an unknown name."""
    if name not in published_names():
        raise RecipeError(f"there is no table {name!r}; {nearest(name, published_names())}")
    table = tomllib.loads((resources.files("fedflat") / "published" / f"{name}.toml").read_text("utf-8"))
    rows, columns = table.pop("row"), table.pop("column")
    defaults = {"factor": 100.0, "digits": 2, "best": "", "baseline": {}, "notes": []}
    values = [[_value(text) for text in row.pop("values", [""] * len(columns))] for row in rows]
    heads = [row.pop("name") for row in rows]
    return Published(
        name,
        columns=[Axis(**{"match": {}, **column}) for column in columns],
        rows=[Axis([head], **{"match": {}, **row}) for head, row in zip(heads, rows, strict=True)],
        values=values,
        **{**defaults, **table},
    )


def _value(text: str) -> Value | None:
    """Parses a number as the paper prints it, such as '52.80 ± 2.66 ↑', '500+' or '10.00 (failed)'; '' gives None."""
    if not text:
        return None
    found = VALUE.fullmatch(text)
    if not found:
        raise RecipeError(f"published: {text!r} is not a valid table entry")
    return Value(math.inf if found["more"] else float(found["mean"]), text)


def compared(table: Published, rows: Sequence[Row]) -> Sheet:
    """Puts published and measured numbers into one table.

    If there are measured results, columns without any of them are left out. If the paper has no numbers, the table
    contains only the measured ones.

    Args:
        table: the published table.
        rows: the results of our runs; may be empty.

    Raises:
        RecipeError: the results come from different scales.
    """
    given, rows = len(rows), [row for row in rows if any(_belongs(row, place) for place in _places(table))]
    scales = sorted({row["scale"] for row in rows})
    if len(scales) > 1:
        raise RecipeError(f"the results mix the scales {' and '.join(scales)}; give those of one scale at a time")
    ours = [[_measured(table, row, column, rows) for column in table.columns] for row in table.rows] if rows else []
    everything = range(len(table.columns))
    shown = [j for j in everything if any(line[j] is not None for line in ours)] or [*everything]
    silent = rows and all(value is None for line in table.values for value in line)
    papers_bold, our_bold = _bold(table, table.values), _bold(table, ours) if rows else set()
    blocks = []
    for i, row in enumerate(table.rows):
        name = f"{row.group} {row.heads[0]}".strip()
        lines = [(name, "paper", [_cell(table.values[i][j], (i, j) in papers_bold) for j in shown])]
        if rows and any(ours[i]):
            arrows = {j: _arrow(table, row, table.columns[j], rows) for j in shown}
            lines.append((name, "ours", [_cell(ours[i][j], (i, j) in our_bold, arrows[j]) for j in shown]))
            lines.append((name, "Δ", [_differing_by(table, i, j, ours[i][j]) for j in shown]))
        blocks.append(lines[1:2] if silent else lines)
    blocks = [lines for lines in blocks if lines]
    heads = [list(level) for level in zip(*(table.columns[j].heads for j in shown), strict=True)]
    unmatched = [no_match(table, given)] if given and not rows else []
    notes = [*unmatched, f"Source: {table.source}", *(settings_notes(table.name, rows) if rows else ()), *table.notes]
    scale = f" (ours at scale {scales[0]})" if scales and scales[0] != FULL else ""
    return Sheet(table.title + scale, heads, blocks, notes)


def no_match(table: Published, given: int) -> str:
    """A sentence that says which grid values a result needs to belong to the table."""
    place = next(_places(table))
    example = ", ".join(f"{field} = {spelled(value)}" for field, value in place.items())
    return f"None of the {given} runs given belongs to this table; a run of it has, for example, {example}."


def _places(table: Published) -> Iterator[dict[str, Any]]:
    for row, column in product(table.rows, table.columns):
        yield {**row.match, **column.match}


def _belongs(row: Row, place: Mapping[str, Any]) -> bool:
    return all(row.get(field) == value for field, value in place.items())


def _measured(
    table: Published, row: Axis, column: Axis, rows: Iterable[Row], instead: Mapping[str, Any] | None = None
) -> Value | None:
    """Mean ± deviation of the results of a cell."""
    found = [each for each in rows if _belongs(each, {**row.match, **column.match, **(instead or {})})]
    metric = row.metric or column.metric or table.metric
    return over_seeds(found, metric, row.factor or column.factor or table.factor, _digits(table, row, column))


def _digits(table: Published, row: Axis, column: Axis) -> int:
    return next(digits for digits in (row.digits, column.digits, table.digits) if digits is not None)


def _cell(value: Value | None, bold: bool, arrow: str = "") -> Cell:
    return Cell("–") if value is None else Cell(value.text + arrow, bold)


def _differing_by(table: Published, i: int, j: int, ours: Value | None) -> Cell:
    """Our number minus the paper's, in row i and column j."""
    paper, digits = table.values[i][j], _digits(table, table.rows[i], table.columns[j])
    if ours is None or paper is None or not (math.isfinite(ours.mean) and math.isfinite(paper.mean)):
        return Cell("–")
    return Cell(f"{ours.mean - paper.mean:+.{digits}f}".replace("-", "−"))


def _bold(table: Published, values: Sequence[Sequence[Value | None]]) -> set[tuple[int, int]]:
    """The positions of the best number of each column within each group of rows."""
    if not table.best:
        return set()
    bold: set[tuple[int, int]] = set()
    for group in {row.group for row in table.rows}:
        for j in range(len(table.columns)):
            places = [(i, j) for i, row in enumerate(table.rows) if row.group == group]
            known = {place: value.mean for place in places if (value := values[place[0]][j]) is not None}
            bold |= best(known, table.best == "highest")
    return bold


def _arrow(table: Published, row: Axis, column: Axis, rows: Sequence[Row]) -> str:
    """An arrow for a number above or below the baseline, as in FedSoL's tables."""
    mine = _measured(table, row, column, rows)
    reference = _measured(table, row, column, rows, table.baseline) if table.baseline else None
    if mine is None or reference is None or mine.mean == reference.mean:
        return ""
    return " ↑" if mine.mean > reference.mean else " ↓"


def settings_notes(name: str, rows: Sequence[Row]) -> list[str]:
    """Notes on the settings in which the runs differ from the full-scale sweep `name`."""
    if name not in shipped():
        return [f"There is no sweep file {name}, so the settings cannot be compared."]
    points = load_sweep(name).points
    fields, seeds = list(points[0].values), {point.values.get("seed", 0) for point in points}
    wanted = {_place(point.values, fields): flattened(point.asked()) for point in reversed(points)}
    seeded = {(_place(point.values, fields), point.values.get("seed")): flattened(point.asked()) for point in points}
    counted: Counter[tuple[str, str, str]] = Counter()
    strangers = 0
    for row in rows:
        place, ours = _place(row, fields), flattened(row["asked"])
        paper = seeded.get((place, row.get("seed")), wanted.get(place))  # settings may depend on the seed
        strangers += paper is None
        counted.update(_differing(paper or ours, ours))
    notes = [
        f"{field}: {there} at full scale, {here} here{'' if n == len(rows) else f' ({n} of {len(rows)} runs)'}"
        for (field, there, here), n in counted.items()
    ]
    here = {row.get("seed", 0) for row in rows}
    if len(here) != len(seeds):
        notes.append(f"seeds: {len(seeds)} at full scale, {len(here)} here")
    if strangers:
        notes.append(f"{strangers} runs are not in the grid of the sweep")
    return notes or ["The settings are those of the sweep at full scale."]


def _place(values: Mapping[str, Any], fields: Iterable[str]) -> tuple[str, ...]:
    """The position in the grid, ignoring the seed."""
    return tuple(spelled(values.get(field)) for field in fields if field != "seed")


def _differing(paper: Mapping[str, Any], ours: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    for field in dict.fromkeys([*paper, *ours]):
        there, here = paper.get(field), ours.get(field)
        implied = field in FOLLOWS and paper.get("data.name") != ours.get("data.name")
        if there != here and field != "seed" and not implied:
            yield field, _shown(there), _shown(here)


def _shown(value: Any) -> str:
    return "not set" if value is None else spelled(value)


def summary_table(rows: Sequence[Row], title: str) -> Table:
    """A terminal table of a sweep's means over seeds: the metric, rounds to target and traffic."""
    names = list(rows[0])
    fields = [name for name in names[: names.index("runs") + 1] if name != "scale"]
    followed = next((name.removesuffix("_last_mean") for name in names if name.endswith("_last_mean")), "accuracy")
    columns = {"last": (f"{followed}_last", 4), "best": (f"{followed}_best", 4), "to target": ("rounds_to_target", 0)}
    shown = {head: column for head, column in columns.items() if any(_pair(row, *column) != "–" for row in rows)}
    table = Table(title=title, title_justify="left")
    for head in (*fields, *shown, "MB", "seconds"):
        table.add_column(head, justify="left" if head in fields else "right")
    for row in rows:
        places = (Text("–" if row.get(field) is None else spelled(row[field])) for field in fields)
        traffic = (row["bytes_up_mean"] + row["bytes_down_mean"]) / 1e6
        numbers = (_pair(row, *column) for column in shown.values())
        table.add_row(*places, *numbers, f"{traffic:.1f}", _pair(row, "seconds", 1))
    return table


def _pair(row: Row, name: str, digits: int) -> str:
    mean, std = row.get(f"{name}_mean"), row.get(f"{name}_std")
    if mean is None:
        return "–"
    return f"{mean:.{digits}f}" + ("" if std is None else f" ± {std:.{digits}f}")
