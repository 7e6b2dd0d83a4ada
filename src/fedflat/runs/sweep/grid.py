"""Sweep files: from a grid of settings to the runs of a sweep.

A sweep file is a recipe file with additional tables::

    preset = "sol"
    after = ["personalize --epochs 1 5"]     # commands for each finished run; their results join its row

    [grid]                                   # every combination is a run
    method = ["fedavg", "fedsam({rho})"]
    split.alpha = [0.1, 0.5]
    size = ["small", "large"]                # not a field of a recipe: a label that overrides explain, or that other
                                             # values contain in braces; a run that does not contain it has none
    seed = [0, 1, 2]

    [fill]                                   # values for names in braces, here and in the rest of the file
    rho = 0.1

    [base]                                   # trained first, with these settings but no grid values: its model is the
    method = "fedavg + adamw"                # model.base of all runs

    [[override]]                             # settings for the runs with these grid values (or `skip = true`); a star
    when = { size = "large", method = "fed*" }              # matches anything
    set = { model.hidden = [512], local.lr = 0.05 }
    fill = { rho = 0.05 }

    [scale.laptop]                           # `--scale laptop` overrides everything; it may have its own grid, after
    server.rounds = 20                       # and overrides

The layers, from weak to strong: the file, the grid values, the overrides in their order, the scale, `--set`. Those of
the base are the file, `[base]`, the scale, its `[scale.NAME.base]`, `--set`.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from fedflat.errors import RecipeError, nearest
from fedflat.recipe import PRESETS, SECTIONS, Recipe, nested, parsed_override, read_table, stacked
from fedflat.runs.shipped import shipped_folder
from fedflat.runs.sweep.overrides import (
    Override,
    Table,
    filled,
    flattened,
    listed,
    names_in,
    overrides_of,
    refuse_unused,
    spelled,
    subtable,
)
from fedflat.runs.sweep.plan import BASE, FULL, Point, Sweep, slug_of, told_apart

AFTER = ("personalize", "flatness", "landscape", "duality", "cost")
OWN = ("grid", "fill", "override", "scale", "base")


def shipped() -> dict[str, Path]:
    """The sweep files that come with fedflat, by name."""
    return {path.stem: path for path in sorted(shipped_folder("recipes").glob("*.toml"))}


def load_sweep(source: str | Path, scale: str | None = None, overrides: Iterable[str] = ()) -> Sweep:
    """Loads a sweep.

    Args:
        source: a sweep file, or the name of one that comes with fedflat.
        scale: the name of a scale in the file; full scale by default.
        overrides: settings of the form `field=value`, which apply to every run.

    Raises:
        RecipeError: the file is missing or invalid.
    """
    path = Path(source)
    if not path.is_file():
        known = shipped()
        if str(source) not in known:
            if str(source) in PRESETS:
                raise RecipeError(f"{source}: is a preset, not a sweep; train it with `fedflat run {source}`")
            raise RecipeError(f"{source}: there is no such sweep file or name; {nearest(str(source), known)}")
        path = known[str(source)]
    table = read_table(path)
    try:
        points = tuple(_points(table, _scale(table, scale), [*map(parsed_override, overrides)]))
    except RecipeError as error:
        raise RecipeError(f"{path.name}: {error}") from None
    if not points:
        raise RecipeError(f"{path.name}: every run of the grid is skipped")
    return Sweep(path.stem, scale or FULL, told_apart(points))


def _scale(table: Table, name: str | None) -> Table:
    scales = subtable(table, "scale")
    if name is None or name == FULL:
        return {}
    if name not in scales:
        raise RecipeError(f"--scale {name}: there is no such scale; {nearest(name, [FULL, *scales])}")
    return subtable(scales, name)


def _points(table: Table, scale: Table, layers: Sequence[Table]) -> Iterator[Point]:
    grid = _checked(flattened(subtable(table, "grid")))
    axes = _checked(grid | flattened(subtable(scale, "grid")))
    file = {name: value for name, value in table.items() if name not in OWN}
    last = {name: value for name, value in scale.items() if name not in OWN}
    known = {field: [*grid.get(field, ()), *values] for field, values in axes.items()}
    common, scaled = (overrides_of(each, known) for each in (table, scale))
    fill, overrides = {**subtable(table, "fill"), **subtable(scale, "fill")}, [*common, *scaled]
    own = [subtable(each, BASE) for each in (table, scale)]
    if any("after" in each for each in own):
        raise RecipeError("[base]: after: no command follows the base; leave it out")
    begun = [file, own[0], last, own[1], *layers]
    used = names_in(begun, known, [override.set for override in overrides])
    refuse_unused(fill, overrides, used)
    _refuse_unexplained({field: values for field, values in axes.items() if field not in used}, overrides)
    explained = {field for override in overrides for field in override.when}
    inserted = {field for field in axes if field in used and not is_field(field) and field not in explained}
    first = _base(filled(begun, fill)) if {BASE} & {*table, *scale} else None
    found: dict[str, list[Point]] = {}
    for combination in product(*axes.values()):
        values = dict(zip(axes, combination, strict=True))
        met, narrowed = ([o for o in some if o.meets(values)] for some in (common, scaled))
        if any(override.skip for override in (*met, *narrowed)):
            continue
        given = (nested(field, value) for field, value in values.items() if is_field(field))
        here = {**fill, **values, **{name: value for o in (*met, *narrowed) for name, value in o.fill.items()}}
        stack = filled([file, *given, *(o.set for o in met), last, *(o.set for o in narrowed), *layers], here)
        commands: Any = next((each["after"] for each in reversed(stack) if "after" in each), [])
        recipe = stacked(*map(_settings, stack))
        if first and recipe.model.base is not None:
            raise RecipeError(f"model.base = {recipe.model.base!r}: the runs start from that of [base]; leave one out")
        point = Point(values, recipe, _commands(commands), "", first)
        if not inserted:
            yield replace(point, slug=slug_of(values))
            continue
        fixed = {field: value for field, value in values.items() if field not in inserted}
        found.setdefault(json.dumps([fixed, point.asked()]), []).append(point)
    for same in found.values():
        yield _without(same, inserted)


def _base(stack: Sequence[Table]) -> Recipe:
    """The recipe of the run that is trained first; its errors say where they are."""
    try:
        return stacked(*map(_settings, stack))
    except RecipeError as error:
        raise RecipeError(f"[base]: {error}") from None


def _settings(layer: Table) -> Table:
    return {name: value for name, value in layer.items() if name != "after"}


def _without(same: Sequence[Point], inserted: Collection[str]) -> Point:
    """The one run of several equal ones, without the labels in which they differ.

    With `method = ["fedavg", "fedsam({rho})"]` and `rho = [0.05, 0.1]`, FedAvg has no ρ and is trained once.
    """
    first = same[0].values
    idle = {name for name in inserted if any(each.values[name] != first[name] for each in same)}
    values = {field: value for field, value in first.items() if field not in idle}
    return replace(same[0], values=values, slug=slug_of(values))


def _checked(axes: dict[str, Any]) -> dict[str, list[Any]]:
    if not axes:
        raise RecipeError(
            "there is no [grid]; list the varying settings there, as in seed = [0, 1, 2], "
            "or train this recipe by `fedflat run`"
        )
    for field, values in axes.items():
        if not isinstance(values, list) or not values:
            raise RecipeError(f"grid.{field} = {values!r}: must be a list of at least one value")
        if len({spelled(value) for value in values}) < len(values):
            raise RecipeError(f"grid.{field}: a value is listed twice")
    return axes


def _refuse_unexplained(axes: Mapping[str, list[Any]], overrides: Sequence[Override]) -> None:
    """Raises `RecipeError` for a label that no override explains, which is probably a misspelt field."""
    for field, values in axes.items():
        explained = [value for override in overrides for value in override.when.get(field, ())]
        for value in values:
            if not is_field(field) and value not in explained:
                raise RecipeError(f"grid.{field}: a recipe has no such field, and no [[override]] explains {value!r}")


def is_field(path: str) -> bool:
    """Whether a dotted path is a field of a recipe. Any option of model and method counts as one.

    >>> is_field("split.alpha"), is_field("method.rho"), is_field("split.alhpa"), is_field("setting")
    (True, True, False, False)
    """
    section, _, name = path.partition(".")
    if section not in Recipe.model_fields:
        return False
    if not name or section in ("model", "method"):
        return True
    return section in SECTIONS and name in type(Recipe.model_fields[section].default).model_fields


def _commands(after: Any) -> tuple[str, ...]:
    for command in listed(after):
        if not isinstance(command, str) or command.split(" ")[0] not in AFTER:
            raise RecipeError(f"after: {command!r} cannot follow a run; use {', '.join(AFTER)} with options")
        try:
            words = shlex.split(command)
        except ValueError as error:
            raise RecipeError(f"after: {command!r} cannot be read ({error})") from None
        if any(word.startswith("--trust") for word in words):
            raise RecipeError(f"after: {command!r}: a file cannot say --trust; whoever runs the sweep can")
    return tuple(listed(after))
