"""The runs of a sweep, each with its recipe and a directory of its own."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedflat.errors import RecipeError, nearest
from fedflat.recipe import Recipe
from fedflat.runs.sweep.overrides import Table, spelled

FULL = "full"
BASE = "base"  # the directory of the run that is the base of the others
LONGEST = 100  # maximum length of a run's directory name; file systems allow 255 bytes


@dataclass(frozen=True)
class Point:
    """One run of a sweep: its grid values, its recipe, the commands after it, and the name of its directory.

    `base` is the recipe of the run whose model it starts from.
    """

    values: dict[str, Any]
    recipe: Recipe
    after: tuple[str, ...]
    slug: str
    base: Recipe | None = None

    @property
    def label(self) -> str:
        """The grid values in readable form."""
        return ", ".join(f"{field} {spelled(value)}" for field, value in self.values.items())

    def asked(self) -> dict[str, Any]:
        """All settings that the results of the run depend on."""
        asked = {**self.recipe.essentials(), "after": list(self.after)}
        asked["server"]["rounds"] = self.recipe.server.rounds
        if self.base:
            asked[BASE] = _base_point(self.base).asked()
        return dict(json.loads(json.dumps(asked, default=str)))


@dataclass(frozen=True)
class Sweep:
    """All runs of a sweep file at one scale."""

    name: str
    scale: str
    points: tuple[Point, ...]

    @property
    def base(self) -> Point | None:
        """The run that is trained before all others, which start from its model."""
        recipe = next((point.base for point in self.points), None)
        return _base_point(recipe) if recipe else None

    @property
    def runs(self) -> tuple[Point, ...]:
        """The base, if there is one, and all runs of the grid."""
        return (self.base, *self.points) if self.base else self.points

    @property
    def fields(self) -> list[str]:
        """The fields of the grid."""
        return list(dict.fromkeys(field for point in self.points for field in point.values))

    def only(self, wanted: Iterable[str]) -> Sweep:
        """Selects runs by grid value.

        Args:
            wanted: conditions of the form `field=value`. A run must match one value of every field that occurs.

        Raises:
            RecipeError: a condition is invalid, or no run matches.
        """
        chosen: dict[str, set[str]] = {}
        for text in wanted:
            field, equals, value = text.partition("=")
            known = {spelled(point.values[field]) for point in self.points if field in point.values}
            if not equals or not known:
                fields = ", ".join(self.fields)
                raise RecipeError(f"--only {text}: write it as field=value, with one of the grid's fields: {fields}")
            if value not in known:
                raise RecipeError(f"--only {text}: {field} has no such value in the grid; {nearest(value, known)}")
            chosen.setdefault(field, set()).add(value)
        kept = (p for p in self.points if all(spelled(p.values.get(f)) in values for f, values in chosen.items()))
        points = tuple(kept)
        if not points:
            raise RecipeError(f"--only {' '.join(wanted)}: no run of the grid matches all of these")
        return replace(self, points=points)


def _base_point(recipe: Recipe) -> Point:
    return Point({}, recipe, (), BASE)


def slug_of(values: Table) -> str:
    """The name of a run's directory, from its grid values.

    >>> slug_of({"method": "fedsam(0.1)", "split.alpha": 0.1, "seed": 0})
    'fedsam-0.1_alpha=0.1_seed=0'
    """
    pieces = []
    for field, value in values.items():
        name = field.rpartition(".")[2]
        text = spelled(value)
        pieces.append(text if isinstance(value, str) else f"{name}={text}")
    return "_".join(re.sub(r"[^\w.=]+", "-", piece).strip("-") for piece in pieces)


def told_apart(points: Sequence[Point]) -> tuple[Point, ...]:
    """Makes directory names unique: empty, long, ambiguous or taken names end with a digest of the grid values."""
    shared = Counter([BASE, *(point.slug.casefold() for point in points)])
    named = []
    for point in points:
        slug = point.slug
        if shared[slug.casefold()] > 1 or len(slug.encode()) > LONGEST or not slug.strip("."):
            digest = hashlib.sha256(json.dumps(point.values).encode()).hexdigest()[:8]
            slug = f"{slug.encode()[: LONGEST - 9].decode(errors='ignore')}-{digest}"
        named.append(replace(point, slug=slug))
    return tuple(named)
