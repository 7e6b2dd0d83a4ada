"""What a sweep file says about places of its grid: overrides, and what stands for the names in braces."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedflat.errors import RecipeError, nearest

NAME = re.compile(r"\{(\w+)\}")  # what [fill] gives a value: man({zeta})

Table = Mapping[str, Any]


@dataclass(frozen=True)
class Override:
    """What is set where grid values meet, what fills the braces there, or that the point is left out."""

    when: dict[str, list[Any]]
    set: Table
    fill: Table
    skip: bool = False

    def meets(self, values: Table) -> bool:
        return all(values[field] in wanted for field, wanted in self.when.items())


def overrides_of(table: Table, grid: Mapping[str, list[Any]]) -> list[Override]:
    """The `[[override]]` tables of a sweep file or of one of its scales."""
    tables = table.get("override", [])
    if not isinstance(tables, list) or not all(isinstance(each, Mapping) for each in tables):
        raise RecipeError("override: write each one below a line [[override]]")
    return [_override(f"override {number}", each, grid) for number, each in enumerate(tables, 1)]


def _override(where: str, table: Table, grid: Mapping[str, list[Any]]) -> Override:
    for name in table:
        if name not in ("when", "set", "fill", "skip"):
            raise RecipeError(f"{where}: there is no {name!r}; it has when, set, fill and skip")
    when: dict[str, list[Any]] = {}
    for field, wanted in flattened(subtable(table, "when")).items():
        if field not in grid:
            raise RecipeError(f"{where}: when.{field} is not in the grid; {nearest(field, grid)}")
        when[field] = [value for each in listed(wanted) for value in _meant(where, field, each, grid[field])]
    return Override(when, subtable(table, "set"), subtable(table, "fill"), bool(table.get("skip", False)))


def _meant(where: str, field: str, wanted: Any, known: Sequence[Any]) -> list[Any]:
    """The grid's values that are meant: one, or with a star all that fit."""
    if wanted in known:
        return [wanted]
    if isinstance(wanted, str) and "*" in wanted:
        pattern = re.compile(re.escape(wanted).replace(r"\*", ".*"))
        found = [value for value in known if isinstance(value, str) and pattern.fullmatch(value)]
        if found:
            return found
    hint = nearest(spelled(wanted), map(spelled, known))
    raise RecipeError(f"{where}: when.{field} = {wanted!r} is not in the grid; {hint}")


def filled(value: Any, fill: Table) -> Any:
    """The value with its names in braces replaced, in all texts that it holds.

    >>> filled({"method": "fedsam({rho}) + man({zeta})"}, {"rho": 0.05, "zeta": 0.15})
    {'method': 'fedsam(0.05) + man(0.15)'}
    """
    if isinstance(value, Mapping):
        return {name: filled(each, fill) for name, each in value.items()}
    if isinstance(value, list):
        return [filled(each, fill) for each in value]
    return NAME.sub(lambda found: _filling(value, found[1], fill), value) if isinstance(value, str) else value


def _filling(text: str, name: str, fill: Table) -> str:
    if name not in fill:
        raise RecipeError(f"{text!r}: nothing fills {{{name}}}; give it a value in [fill], as in {name} = 0.1")
    return spelled(fill[name])


def names_in(*layers: Any) -> set[str]:
    """All names that stand in braces.

    >>> sorted(names_in({"method": ["fedavg", "fedsam({rho}) + man({zeta})"]}))
    ['rho', 'zeta']
    """
    return {name for text in _texts(list(layers)) for name in NAME.findall(text)}


def refuse_unused(fill: Table, overrides: Sequence[Override], used: set[str]) -> None:
    """A name that no text has in braces is a misspelt one."""
    for name in (*fill, *(name for override in overrides for name in override.fill)):
        if name not in used:
            raise RecipeError(f"fill.{name}: no value has {{{name}}} in it; {nearest(name, used)}")


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from _texts(each)
    elif isinstance(value, str):
        yield value


def subtable(above: Table, name: str) -> Table:
    """A table inside of another; an empty one where there is none."""
    found = above.get(name, {})
    if not isinstance(found, Mapping):
        raise RecipeError(f"{name} = {found!r}: must be a table")
    return found


def flattened(table: Table, above: str = "") -> dict[str, Any]:
    """Nested tables as one with dotted names.

    >>> flattened({"seed": [0], "split": {"alpha": [0.1]}})
    {'seed': [0], 'split.alpha': [0.1]}
    """
    flat: dict[str, Any] = {}
    for name, value in table.items():
        flat |= flattened(value, f"{above}{name}.") if isinstance(value, Mapping) else {f"{above}{name}": value}
    return flat


def listed(value: Any) -> list[Any]:
    """A list as it is, and anything else as a list of one."""
    return value if isinstance(value, list) else [value]


def spelled(value: Any) -> str:
    """A grid value as text: a table in JSON, anything else as it prints."""
    return json.dumps(value) if isinstance(value, dict | list) else str(value)
