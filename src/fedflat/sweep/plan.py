"""A sweep file, and the runs that it stands for.

It is a recipe file with tables of its own::

    preset = "sol"
    after = ["personalize --epochs 1 5"]     # commands on each finished run, whose numbers join its row

    [grid]                                   # every combination is a run
    method = ["fedavg", "fedsam({rho})"]
    split.alpha = [0.1, 0.5]
    size = ["small", "large"]                # not a field of a recipe: a label, whose meaning overrides give, or that
                                             # stands in braces elsewhere
    seed = [0, 1, 2]

    [fill]                                   # what stands for a name in braces, here and in the rest of the file
    rho = 0.1

    [[override]]                             # where these values meet, that is set (or `skip = true`); a star stands
    when = { size = "large", method = "fed*" }              # for anything
    set = { model.hidden = [512], local.lr = 0.05 }
    fill = { rho = 0.05 }

    [scale.laptop]                           # `--scale laptop`: laid over everything; may have grid, after and
    server.rounds = 20                       # overrides of its own

Grid values are laid over the file, then the overrides in their order, then the scale, then `--set`.
"""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from fedflat.errors import RecipeError, nearest
from fedflat.recipe import SECTIONS, Recipe, nested, parsed_override, stacked
from fedflat.sweep.overrides import (
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

AFTER = ("personalize", "flatness", "landscape", "duality")
OWN = ("grid", "fill", "override", "scale")
FULL = "full"
LONGEST = 100  # characters of a run's directory; file systems allow 255 bytes


@dataclass(frozen=True)
class Point:
    """One run of a sweep: its place in the grid, its recipe, what follows it, and the name of its directory."""

    values: dict[str, Any]
    recipe: Recipe
    after: tuple[str, ...]
    slug: str

    @property
    def label(self) -> str:
        """The place in the grid, as people read it."""
        return ", ".join(f"{field} {spelled(value)}" for field, value in self.values.items())

    def asked(self) -> dict[str, Any]:
        """All that the point's numbers depend on."""
        asked = {**self.recipe.essentials(), "after": list(self.after)}
        asked["server"]["rounds"] = self.recipe.server.rounds
        return dict(json.loads(json.dumps(asked, default=str)))


@dataclass(frozen=True)
class Sweep:
    """All runs of a sweep file at one scale."""

    name: str
    scale: str
    points: tuple[Point, ...]

    def only(self, wanted: Iterable[str]) -> Sweep:
        """Those whose grid values are the wanted ones, each written as `field=value`; of one field, any of them."""
        chosen: dict[str, set[str]] = {}
        for text in wanted:
            field, equals, value = text.partition("=")
            known = {spelled(point.values[field]) for point in self.points if field in point.values}
            if not equals or not known:
                fields = ", ".join(self.points[0].values)
                raise RecipeError(f"--only {text}: write it as field=value, with one of the grid's fields: {fields}")
            if value not in known:
                raise RecipeError(f"--only {text}: {field} has no such value in the grid; {nearest(value, known)}")
            chosen.setdefault(field, set()).add(value)
        kept = (p for p in self.points if all(spelled(p.values[f]) in values for f, values in chosen.items()))
        points = tuple(kept)
        if not points:
            raise RecipeError(f"--only {' '.join(wanted)}: no run of the grid has all of these")
        return replace(self, points=points)


def shipped() -> dict[str, Path]:
    """The sweep files that come with fedflat, by name."""
    package = Path(__file__).parents[1]
    # In the wheel they lie inside the package, in a checkout at the top.
    folder = next((f for f in (package / "recipes", package.parents[1] / "recipes") if f.is_dir()), package)
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def load_sweep(source: str | Path, scale: str | None = None, overrides: Iterable[str] = ()) -> Sweep:
    """The sweep of a file, or of one that comes with fedflat, by its name."""
    path = Path(source)
    if not path.is_file():
        known = shipped()
        if str(source) not in known:
            raise RecipeError(f"{source}: no such sweep file, and none of that name; {nearest(str(source), known)}")
        path = known[str(source)]
    table = _read(path)
    try:
        points = tuple(_points(table, _scale(table, scale), [*map(parsed_override, overrides)]))
    except RecipeError as error:
        raise RecipeError(f"{path.name}: {error}") from None
    if not points:
        raise RecipeError(f"{path.name}: every run of the grid is skipped")
    return Sweep(path.stem, scale or FULL, _told_apart(points))


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: cannot be read ({error})") from None
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"{path}: not valid TOML: {error}") from None


def _scale(table: Table, name: str | None) -> Table:
    scales = subtable(table, "scale")
    if name is None or name == FULL:
        return {}
    if name not in scales:
        raise RecipeError(f"--scale {name}: there is none of that name; {nearest(name, [FULL, *scales])}")
    return subtable(scales, name)


def _points(table: Table, scale: Table, layers: Sequence[Table]) -> Iterator[Point]:
    grid = _checked(flattened(subtable(table, "grid")))
    axes = _checked(grid | flattened(subtable(scale, "grid")))
    base = {name: value for name, value in table.items() if name not in OWN}
    last = {name: value for name, value in scale.items() if name not in OWN}
    known = {field: [*grid.get(field, ()), *values] for field, values in axes.items()}
    common, scaled = (overrides_of(each, known) for each in (table, scale))
    fill, overrides = {**subtable(table, "fill"), **subtable(scale, "fill")}, [*common, *scaled]
    used = names_in(base, last, known, [override.set for override in overrides])
    refuse_unused(fill, overrides, used)
    _refuse_unexplained({field: values for field, values in axes.items() if field not in used}, overrides)
    for combination in product(*axes.values()):
        values = dict(zip(axes, combination, strict=True))
        met, narrowed = ([o for o in some if o.meets(values)] for some in (common, scaled))
        if any(override.skip for override in (*met, *narrowed)):
            continue
        point = (nested(field, value) for field, value in values.items() if is_field(field))
        here = {**fill, **values, **{name: value for o in (*met, *narrowed) for name, value in o.fill.items()}}
        stack = filled([base, *point, *(o.set for o in met), last, *(o.set for o in narrowed), *layers], here)
        commands: Any = next((each["after"] for each in reversed(stack) if "after" in each), [])
        recipe = stacked(*({k: v for k, v in each.items() if k != "after"} for each in stack))
        yield Point(values, recipe, _commands(commands), _slug(values))


def _checked(axes: dict[str, Any]) -> dict[str, list[Any]]:
    if not axes:
        raise RecipeError("there is no [grid]; list there what varies, as in seed = [0, 1, 2]")
    for field, values in axes.items():
        if not isinstance(values, list) or not values:
            raise RecipeError(f"grid.{field} = {values!r}: must be a list of at least one value")
        if len({spelled(value) for value in values}) < len(values):
            raise RecipeError(f"grid.{field}: a value is listed twice")
    return axes


def _refuse_unexplained(axes: Mapping[str, list[Any]], overrides: Sequence[Override]) -> None:
    """A label without a meaning is a misspelt field."""
    for field, values in axes.items():
        explained = [value for override in overrides for value in override.when.get(field, ())]
        for value in values:
            if not is_field(field) and value not in explained:
                raise RecipeError(
                    f"grid.{field}: a recipe has no such field, and no [[override]] says what {value!r} means"
                )


def is_field(path: str) -> bool:
    """Whether a dotted path is a field of a recipe; those of model and method are not known here.

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
            raise RecipeError(f"after: {command!r} cannot follow a run; it may be {', '.join(AFTER)} with options")
    return tuple(listed(after))


def _slug(values: Table) -> str:
    """A directory's name from the grid values.

    >>> _slug({"method": "fedsam(0.1)", "split.alpha": 0.1, "seed": 0})
    'fedsam-0.1_alpha=0.1_seed=0'
    """
    pieces = []
    for field, value in values.items():
        name = field.rpartition(".")[2]
        text = spelled(value)
        pieces.append(text if isinstance(value, str) else f"{name}={text}")
    return "_".join(re.sub(r"[^\w.=]+", "-", piece).strip("-") for piece in pieces)


def _told_apart(points: Sequence[Point]) -> tuple[Point, ...]:
    """Names that are empty, too long, or the same but for what a directory cannot show end in the values' digest."""
    shared = Counter(point.slug.casefold() for point in points)
    named = []
    for point in points:
        slug = point.slug
        if shared[slug.casefold()] > 1 or len(slug.encode()) > LONGEST or not slug.strip("."):
            digest = hashlib.sha256(json.dumps(point.values).encode()).hexdigest()[:8]
            slug = f"{slug.encode()[: LONGEST - 9].decode(errors='ignore')}-{digest}"
        named.append(replace(point, slug=slug))
    return tuple(named)
