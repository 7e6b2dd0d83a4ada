"""Search spaces: lists of values for fields of a recipe and for names in the braces of a method."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedflat.errors import RecipeError, nearest, shortened
from fedflat.randomness import numpy_generator
from fedflat.recipe import Recipe, nested, read_table, stacked
from fedflat.runs.sweep.grid import is_field
from fedflat.runs.sweep.overrides import filled, flattened, listed, names_in, spelled

Settings = dict[str, Any]
MOST = 2**63 - 1  # combinations from which numpy draws; of a larger grid, those behind are left out
# Fields that the search itself sets for every trial, and how to choose them.
TAKEN = {
    "seed": "--seeds",
    "server.rounds": "--set server.rounds",
    "evaluation": "--validation, and --set for the rest",
    "method": '--method, with a name in braces for each option, as in "fedsam({rho})"',
}


@dataclass(frozen=True)
class Space:
    """The methods to tune, and the values to try.

    An axis is a field of the recipe (`local.lr`), which every method has, or a name in braces, which belongs to the
    methods that contain it: `rho` to `fedsam({rho})`.
    """

    methods: tuple[str, ...]
    axes: dict[str, list[Any]]

    def combinations(self, method: str) -> int:
        """The number of combinations of the values that a method has."""
        return math.prod(map(len, self._axes_of(method).values()))

    def drawn(self, method: str, trials: int, seed: int = 0) -> list[Settings]:
        """At most `trials` of the combinations, drawn without replacement and kept in the order of the grid.

        The grid itself is never written down: with ten values for each of eight settings it would not fit into memory.
        """
        axes, count = self._axes_of(method), self.combinations(method)
        if count <= trials:
            return [_combination(axes, index) for index in range(count)]
        chosen = numpy_generator(seed, f"tune {method}").choice(min(count, MOST), trials, replace=False)
        return [_combination(axes, index) for index in sorted(chosen.tolist())]

    def _axes_of(self, method: str) -> dict[str, list[Any]]:
        return {name: values for name, values in self.axes.items() if is_field(name) or name in names_in(method)}


def _combination(axes: dict[str, list[Any]], index: int) -> Settings:
    """The combination at a place of the grid, in which the last axis changes first."""
    found: Settings = {}
    for name, values in reversed(axes.items()):
        index, place = divmod(index, len(values))
        found[name] = values[place]
    return {name: found[name] for name in axes}


def read_space(methods: Sequence[str], written: Iterable[str], default: str = "fedavg") -> Space:
    """Reads a space from TOML files and from texts such as `local.lr=0.01,0.1`.

    Args:
        methods: the methods; a file may add more.
        written: files with a table `[space]`, and texts of one axis each.
        default: the method if there is no other.

    Raises:
        RecipeError: a file or text is invalid, or an axis belongs to no method.
    """
    found, axes = list(methods), dict[str, list[Any]]()
    for text in written:
        if text.endswith(".toml"):
            table = _table(Path(text))
            found += [str(method) for method in listed(table.get("method", []))]
            axes |= flattened(table.get("space", {}))
        else:
            name, equals, values = text.partition("=")
            if not equals or not values.strip():
                raise RecipeError(f"--space {shortened(text)}: write it as local.lr=0.01,0.1, or give a TOML file")
            axes[name.strip()] = _values(values)
    space = Space(tuple(dict.fromkeys(found or [default])), axes)
    _refuse(space)
    return space


def _table(path: Path) -> Mapping[str, Any]:
    table = read_table(path)
    if unknown := [name for name in table if name not in ("method", "space")]:
        raise RecipeError(f"{path}: {unknown[0]!r} is unknown; a space has `method` and a table [space]")
    if not isinstance(table.get("space", {}), Mapping):
        raise RecipeError(f"{path}: space: must be a table of lists, as in local.lr = [0.01, 0.1]")
    return table


def _values(text: str) -> list[Any]:
    """The values between commas, as TOML reads them; words may stand without quotes."""
    found = _toml(text)
    return found if found is not None else [(_toml(word) or [word.strip()])[0] for word in text.split(",")]


def _toml(text: str) -> list[Any] | None:
    try:
        return list(tomllib.loads(f"values = [{text}]")["values"])
    except (tomllib.TOMLDecodeError, RecursionError, ValueError):
        return None


def _refuse(space: Space) -> None:
    if not space.axes:
        raise RecipeError("--space: nothing to search; give values, as in --space local.lr=0.01,0.1")
    used = names_in(list(space.methods))
    for name, values in space.axes.items():
        if not isinstance(values, list) or not values or len({spelled(v) for v in values}) < len(values):
            raise RecipeError(f"--space {name}: must be a list of different values")
        _refuse_taken(name, values)
        if not is_field(name) and name not in used:
            known = ["local.lr", *sorted(used)]
            raise RecipeError(
                f"--space {name}: is not a field of a recipe, and no method has {{{name}}}; {nearest(name, known)}"
            )
    if missing := next((name for name in sorted(used) if name not in space.axes), None):
        raise RecipeError(f"--space: {{{missing}}} has no values; give some, as in --space {missing}=0.05,0.1")


def _refuse_taken(name: str, values: Sequence[Any]) -> None:
    """Refuse a field that every trial has from the search: its values would not differ, and no trial would fail."""
    for value in values:
        for field in flattened({name: value}):
            if taken := next((each for each in TAKEN if field == each or field.startswith(f"{each}.")), None):
                raise RecipeError(f"--space {field}: the search sets {taken} itself; choose it by {TAKEN[taken]}")


def tuned_recipe(base: Recipe, method: str, settings: Settings, layers: Sequence[Mapping[str, Any]] = ()) -> Recipe:
    """The recipe with a method, one combination of settings, and further tables on top."""
    table = {**base.model_dump(exclude_none=True), "preset": "none", "method": filled(method, settings)}
    fields = [nested(name, value) for name, value in settings.items() if is_field(name)]
    return stacked(table, *fields, *layers)
