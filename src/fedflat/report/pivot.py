"""A table of your own runs: settings as rows and columns, a metric over the seeds in the cells."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fedflat.errors import RecipeError, RunError, nearest, shown
from fedflat.flatness import Measurement, paired_differences
from fedflat.report.lines import Run, Source, Sources, differing, each_of, read_runs, short_methods
from fedflat.report.measured import recorded
from fedflat.report.numbers import best as best_of
from fedflat.report.numbers import over_seeds
from fedflat.report.sheets import Cell, Sheet
from fedflat.runs import FULL, NAME, Result, Row, noted, places, read_rows, spelled
from fedflat.runs import columns as columns_of

Names = str | Sequence[str] | None
Key = tuple[str, ...]
ASIDE = ("seed", "scale")
SEEDS = 3  # no mark with fewer: two equal differences of a rounded accuracy would have an interval of width 0
# Words in the names of metrics for which lower is better.
LESS = ("loss", "rounds_to", "lambda", "trace", "sharpness", "bytes", "seconds", "consistency", "divergence", "discord",
        "forg", "mse", "perplexity", "epsilon", "_std", "gap", "rise", "norm")  # fmt: skip


def table(
    *sources: Sources,
    rows: Names = None,
    columns: Names = None,
    value: Names = None,
    only: Iterable[str] = (),
    best: Literal["highest", "lowest"] | None = None,
    reference: str | None = None,
    digits: int | None = None,
) -> Sheet:
    """Makes a table of sweeps or runs: mean ± standard deviation over the seeds, the best of each column in bold.

    A star marks a number that differs from that of the reference row: the 95 % interval of the paired difference over
    the seeds that both have, at least three, excludes 0 (`flatness.paired_differences`).

    Args:
        sources: directories of sweeps, of runs, or of several runs; results of `train`; or lists of them.
        rows: the settings that name the rows, by default the method. `alpha` is short for `split.alpha`, and `split`
            for all settings of that section.
        columns: the settings that name the columns, by default all others that vary.
        value: the metrics, by default the followed one after the last round. `accuracy` is short for `accuracy_last`.
        only: conditions `setting=value` that select the runs.
        best: which number of a column is the best; by default it follows from the metric's name.
        reference: the row to compare with, by default the first.
        digits: digits after the decimal point; by default accuracies are in per cent with two.

    Raises:
        RecipeError: a setting or a metric is unknown, or a cell would hold runs that differ in more than the seed.
        RunError: a source cannot be read.
    """
    found = _selected([row for source in _rows(sources) for row in source], only)
    grid = _Grid.of(found, rows, columns)
    values = [_metric(name, found) for name in _listed(value)] or [_followed(found)]
    keys = _ordered(map(grid.row, found))
    reference_key = _reference(reference, keys)
    places = [(column, metric) for column in _ordered(map(grid.column, found)) for metric in values]
    filling = [_column(found, grid, keys, place, best, digits, reference_key) for place in places]
    lines = [(*_split(key), [cells[key] for cells in filling]) for key in keys]
    blocks = [[line for line in lines if line[0] == name] for name in dict.fromkeys(line[0] for line in lines)]
    heads = [list(level) for level in zip(*(column for column, _ in places), strict=True)]
    if len(values) > 1 or not heads:
        heads.append([metric for _, metric in places])
    corner = _split(tuple(field.rpartition(".")[2] for field in grid.rows))
    named = ", ".join(f"{name} in %" if _in_percent(name, found) else name for name in values)
    title = f"{named}: mean ± standard deviation over seeds"
    return Sheet(title, heads, blocks, _notes(found, values, best, reference_key, filling), corner)


@dataclass(frozen=True)
class _Grid:
    """Which settings name the rows and the columns."""

    fields: Sequence[str]
    rows: Sequence[str]
    columns: Sequence[str]

    @classmethod
    def of(cls, found: Sequence[Row], rows: Names, columns: Names) -> _Grid:
        fields = [name for name in dict.fromkeys(f for row in found for f in places(row)) if name not in ASIDE]
        if not fields:
            raise RecipeError("table: the runs differ in their seed alone; give runs of several methods or settings")
        down = _fields(rows, fields) or (["method"] if "method" in fields else fields[:1])
        if columns is not None:
            return cls(fields, down, _fields(columns, fields))
        inside = {name for row in found for field in down for name in NAME.findall(str(row.get(field)))}
        vary = [field for field in fields if len({spelled(row.get(field)) for row in found}) > 1]
        return cls(fields, down, [field for field in vary if field not in down and field not in inside])

    def row(self, row: Row) -> Key:
        return tuple(_label(row, field, head=False) for field in self.rows)

    def column(self, row: Row) -> Key:
        return tuple(_label(row, field, head=True) for field in self.columns)

    def check(self, cell: Sequence[Row]) -> None:
        """Refuses a cell with runs that differ in more than their seed."""
        for field in self.fields:
            if field not in (*self.rows, *self.columns) and len({spelled(row.get(field)) for row in cell}) > 1:
                seen = " and ".join(dict.fromkeys(spelled(row.get(field)) for row in cell))
                raise RecipeError(
                    f"table: a cell would mix runs with {field} = {seen}; add it to the rows or columns, "
                    f"or select one value by --only {field}={spelled(cell[0].get(field))}"
                )
        seeds = [row.get("seed", 0) for row in cell]
        if len({*seeds}) < len(seeds):
            name = ", ".join((*self.row(cell[0]), *self.column(cell[0])))
            raise RecipeError(f"table: {name} has a seed twice; give each run once")


def _column(
    found: Sequence[Row],
    grid: _Grid,
    keys: Sequence[Key],
    place: tuple[Key, str],
    best: str | None,
    digits: int | None,
    reference: Key,
) -> dict[Key, Cell]:
    """The cells of one column by row: numbers, the best of them, and the marks of the paired differences."""
    column, metric = place
    cells = {key: [row for row in found if (grid.row(row), grid.column(row)) == (key, column)] for key in keys}
    for cell in cells.values():
        grid.check(cell)
    percent = _in_percent(metric, found)
    digits = 2 if percent and digits is None else digits
    numbers = {key: over_seeds(cell, metric, 100.0 if percent else 1.0, digits) for key, cell in cells.items()}
    known = {key: number.mean for key, number in numbers.items() if number is not None}
    bold, marked = best_of(known, _highest(metric, best)), _decided(cells, metric, reference)
    return {
        key: Cell("–") if number is None else Cell(number.text, key in bold, "*" if key in marked else "")
        for key, number in numbers.items()
    }


def _ordered(keys: Iterable[Key]) -> list[Key]:
    """Each key once, sorted level by level by the first occurrence of its parts."""
    unique = list(dict.fromkeys(keys))
    orders = [list(dict.fromkeys(level)) for level in zip(*unique, strict=True)]
    return sorted(unique, key=lambda key: [order.index(part) for order, part in zip(orders, key, strict=True)])


def _decided(cells: Mapping[Key, Sequence[Row]], metric: str, reference: Key) -> set[Key]:
    """The rows whose paired difference from the reference row has an interval without 0."""
    names = {" | ".join(key): key for key in cells}
    known = [
        Measurement(name, row.get("seed", 0), {metric: row[metric]})
        for name, key in names.items()
        for row in cells[key]
        if row.get(metric) is not None
    ]
    if " | ".join(reference) not in {each.method for each in known} or len({each.method for each in known}) < 2:
        return set()
    found = paired_differences(known, " | ".join(reference))
    return {names[each.method] for each in found if each.decided and len(each.seeds) >= SEEDS}


def _rows(sources: Sequence[Sources]) -> list[list[Row]]:
    """The results of each source: those of sweeps as they are, those of single runs with the settings that differ."""
    if not sources:
        raise RecipeError("table: there are no runs; give the directories of sweeps or runs")
    tables, others = list[list[Row]](), list[Source]()
    for source in each_of(sources):
        swept = not isinstance(source, Result) and (Path(source) / "results.jsonl").is_file()
        if not isinstance(source, Result) and (swept or Path(source).suffix == ".jsonl"):
            tables.append([_finite(row, source) for row in read_rows(Path(source))])
        else:
            others.append(source)
    return [*tables, _of_runs(read_runs(others))] if others else tables


def _finite(row: Row, source: object) -> Row:
    """A result of a file, with None in place of numbers that are not finite."""
    if not isinstance(row.get("seed", 0), int):
        raise RunError(f"{source}: the seed {shown(row['seed'])} of a result is not a whole number")
    return {name: None if isinstance(x, float) and not math.isfinite(x) else x for name, x in row.items()}


def _of_runs(runs: Sequence[Run]) -> list[Row]:
    settings = [run.settings for run in runs]
    short = short_methods({each["method"] for each in settings})
    others = [name for name in differing(settings) if name != "method"]
    found = []
    for run, each in zip(runs, settings, strict=True):
        place = {"method": short[each["method"]], **{o: each.get(o) for o in others}}
        metrics = {**noted(run.history[-1] if run.history else {}), **run.summary()}
        record = recorded(run.path)
        measured = columns_of({"runs": [record]}) if record else {}
        asked = {"asked": run.recipe.model_dump(mode="json")}
        found.append({**place, "seed": run.recipe.seed, "scale": FULL, **metrics, **measured, **place, **asked})
    return found


def _selected(found: Sequence[Row], only: Iterable[str]) -> list[Row]:
    chosen: dict[str, set[str]] = {}
    for text in only:
        field, equals, value = text.partition("=")
        known = {spelled(row[field]) for row in found if field in places(row)}
        if not equals or not known:
            fields = ", ".join(dict.fromkeys(field for row in found for field in places(row)))
            raise RecipeError(f"--only {text}: write it as setting=value, with one of {fields}")
        if value not in known:
            raise RecipeError(f"--only {text}: no run has it; {nearest(value, known)}")
        chosen.setdefault(field, set()).add(value)
    kept = [row for row in found if all(spelled(row.get(field)) in values for field, values in chosen.items())]
    if not kept:
        raise RecipeError("table: no run is left; give sweeps with finished runs, or fewer conditions")
    return kept


def _fields(wanted: Names, known: Sequence[str]) -> list[str]:
    """Finds settings by their full name, by its last part, or by a section, which means all of its settings."""
    found: list[str] = []
    for name in _listed(wanted):
        meant = [f for f in known if f == name] or [f for f in known if f.rpartition(".")[2] == name]
        meant = meant or [f for f in known if f.partition(".")[0] == name]
        if not meant:
            raise RecipeError(f"table: the runs do not vary in {name!r}; {nearest(name, known)}")
        found += [field for field in meant if field not in found]
    return found


def _metrics(found: Sequence[Row]) -> list[str]:
    """The names of all metrics that are numbers, in the order of the results."""
    known = dict.fromkeys(metric for row in found for metric in row if metric not in (*places(row), "asked"))
    return [metric for metric in known if all(_is_number(row.get(metric, 0)) for row in found)]


def _metric(name: str, found: Sequence[Row]) -> str:
    known = _metrics(found)
    for meant in (name, f"{name}_last"):
        if meant in known:
            return meant
    raise RecipeError(f"table: the runs have no metric {name!r}; {nearest(name, known)}")


def _is_number(value: Any) -> bool:
    """Whether a value is a number or None, such as the rounds to a target that was never reached."""
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _followed(found: Sequence[Row]) -> str:
    judged = (name for name in _metrics(found) if name.endswith("_last") and any(row.get(name) for row in found))
    name = next((name for name in judged if name not in ("loss_last", "train_loss_last")), None)
    if name is None:
        raise RecipeError("table: the runs have no metric after a last round; name one by --value")
    return name


def _highest(metric: str, best: str | None) -> bool:
    return best == "highest" if best else not any(word in metric for word in LESS)


def _reference(name: str | None, keys: Sequence[Key]) -> Key:
    known = {", ".join(key): key for key in keys}
    if name is not None and name not in known:
        raise RecipeError(f"table: there is no row {name!r} to compare with; {nearest(name, known)}")
    return keys[0] if name is None else known[name]


def _label(row: Row, field: str, head: bool) -> str:
    """A setting as text: names in braces are replaced by their values; numbers in a column's head get their name."""
    value = row.get(field)
    if value is None:
        return "–"
    if isinstance(value, str):
        return NAME.sub(lambda found: spelled(row.get(found[1], found[1])), value)
    text = str(value["name"]) if isinstance(value, dict) and {*value} == {"name"} else spelled(value)
    return f"{field.rpartition('.')[2]} = {text}" if head else text


def _split(key: Key) -> tuple[str, str]:
    """The names of a block and of a line in it; with a single row setting there are no blocks."""
    return ("", key[0]) if len(key) == 1 else (key[0], ", ".join(key[1:]))


def _in_percent(metric: str, found: Sequence[Row]) -> bool:
    return "accuracy" in metric and all(abs(row.get(metric) or 0) <= 1 for row in found)


def _notes(
    found: Sequence[Row],
    values: Sequence[str],
    best: str | None,
    reference: Key,
    filling: Sequence[Mapping[Key, Cell]],
) -> list[str]:
    seeds = len({row.get("seed", 0) for row in found})
    notes = [f"{len(found)} runs, {seeds} seed{'s' if seeds > 1 else ''}"]
    ways = {name: "highest" if _highest(name, best) else "lowest" for name in values}
    notes.append("bold: the best of its column, " + ", ".join(f"the {way} {name}" for name, way in ways.items()))
    name = ", ".join(reference)
    if any(cell.mark for cells in filling for cell in cells.values()):
        notes.append(f"*: the 95 % interval of the paired difference from {name} over the seeds excludes 0")
    elif len(filling[0]) > 1:
        few = f"no marks: paired differences need {SEEDS} seeds"
        notes.append(few if seeds < SEEDS else f"no paired difference from {name} has a 95 % interval without 0")
    scales = sorted({str(row["scale"]) for row in found} - {FULL})
    return [*notes, f"scale {' and '.join(scales)}"] if scales else notes


def _listed(names: Names) -> list[str]:
    given = [names] if isinstance(names, str) else list(names or ())
    return [name.strip() for each in given for name in each.split(",") if name.strip()]
