"""The overrides of a sweep file, and the values for names in braces."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedflat.errors import RecipeError, nearest

NAME = re.compile(r"\{(\w+)\}")  # a name that [fill] replaces, as in man({zeta})

Table = Mapping[str, Any]


@dataclass(frozen=True)
class Override:
    """Settings and fill values for the points with certain grid values, or an instruction to skip these points."""

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
        raise RecipeError("override: start each one with a line [[override]]")
    return [_override(f"override {number}", each, grid) for number, each in enumerate(tables, 1)]


def _override(where: str, table: Table, grid: Mapping[str, list[Any]]) -> Override:
    for name in table:
        if name not in ("when", "set", "fill", "skip"):
            raise RecipeError(f"{where}: {name!r} is unknown; the keys are when, set, fill and skip")
    when: dict[str, list[Any]] = {}
    for field, wanted in flattened(subtable(table, "when")).items():
        if field not in grid:
            raise RecipeError(f"{where}: when.{field} is not in the grid; {nearest(field, grid)}")
        when[field] = [value for each in listed(wanted) for value in _meant(where, field, each, grid[field])]
    return Override(when, subtable(table, "set"), subtable(table, "fill"), bool(table.get("skip", False)))


def _meant(where: str, field: str, wanted: Any, known: Sequence[Any]) -> list[Any]:
    """The grid values that a condition selects: one value, or all that match a pattern with a star."""
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
    """Replaces the names in braces in all strings of a value.

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
        raise RecipeError(f"{text!r}: {{{name}}} has no value; give it one in [fill], as in {name} = 0.1")
    return spelled(fill[name])


def names_in(*layers: Any) -> set[str]:
    """All names in braces.

    >>> sorted(names_in({"method": ["fedavg", "fedsam({rho}) + man({zeta})"]}))
    ['rho', 'zeta']
    """
    return {name for text in _texts(list(layers)) for name in NAME.findall(text)}


def refuse_unused(fill: Table, overrides: Sequence[Override], used: set[str]) -> None:
    """Raises `RecipeError` for a fill name that no value uses, which is probably misspelt."""
    for name in (*fill, *(name for override in overrides for name in override.fill)):
        if name not in used:
            raise RecipeError(f"fill.{name}: no value contains {{{name}}}; {nearest(name, used)}")


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from _texts(each)
    elif isinstance(value, str):
        yield value


def subtable(above: Table, name: str) -> Table:
    """The table `name` inside another table, or an empty one if it is missing."""
    found = above.get(name, {})
    if not isinstance(found, Mapping):
        raise RecipeError(f"{name} = {found!r}: must be a table")
    return found


def flattened(table: Table, above: str = "") -> dict[str, Any]:
    """Flattens nested tables into one with dotted names.

    >>> flattened({"seed": [0], "split": {"alpha": [0.1]}})
    {'seed': [0], 'split.alpha': [0.1]}
    """
    flat: dict[str, Any] = {}
    for name, value in table.items():
        flat |= flattened(value, f"{above}{name}.") if isinstance(value, Mapping) else {f"{above}{name}": value}
    return flat


def listed(value: Any) -> list[Any]:
    """The value itself if it is a list, otherwise a list of that one value."""
    return value if isinstance(value, list) else [value]


def spelled(value: Any) -> str:
    """A grid value as text: tables and lists as JSON, anything else with `str`."""
    return json.dumps(value) if isinstance(value, dict | list) else str(value)
