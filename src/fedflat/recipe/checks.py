"""Validates a table as a recipe; an error is one sentence that says what is wrong with it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from fedflat.errors import RecipeError, nearest, shortened
from fedflat.recipe.recipe import SECTIONS, TABLES, Recipe, section_fields

LONGEST_TEXT, DEEPEST = 10_000, 16  # characters of a value, levels of tables
WITHOUT_LIMIT = {("admission.max_norm", math.inf)}  # settings for which ∞ means that there is no limit


def validated(table: Mapping[str, Any]) -> Recipe:
    """Validate a table and return its recipe.

    Raises:
        RecipeError: if the table is not valid; the message says what is wrong.
    """
    _refuse_extremes(table)
    try:
        recipe = Recipe.model_validate(table)
    except ValidationError as error:
        # A field with two types is reported once for each type: one sentence per field is enough.
        sentences = {tuple(found["loc"][:2]): _sentence(found) for found in reversed(error.errors())}
        raise RecipeError(" ".join("; ".join(reversed(sentences.values())).split())) from None
    if isinstance(recipe.server.cohort, float) and recipe.server.cohort > 1:
        raise RecipeError(
            f"server.cohort = {recipe.server.cohort}: must be a whole count, or a ratio above 0 up to 1.0"
        )
    sampling = {"fedsol": "uniform", "fl-simulator": "bernoulli", "fedman": "bernoulli"}.get(recipe.server.draws)
    if sampling and recipe.server.sampling != sampling:
        raise RecipeError(
            f"server.draws = {recipe.server.draws!r}: those authors have server.sampling = {sampling!r} only; "
            "set it so, or server.draws = 'fedflat'"
        )
    if recipe.server.stop_loss is not None and not recipe.evaluation.every:
        raise RecipeError(
            f"server.stop_loss = {recipe.server.stop_loss}: the loss is looked at when the model is evaluated; "
            "set evaluation.every to 1 or more"
        )
    if recipe.engine.graph and recipe.engine.group > 1:
        raise RecipeError(
            f"engine.group = {recipe.engine.group}: with engine.graph = true clients train one by one; leave it out"
        )
    if not recipe.data.normalise and (set(recipe.data.mean or ()) - {0.0} or set(recipe.data.std or ()) - {1.0}):
        raise RecipeError("data.normalise = False: inputs stay in [0, 1], so leave data.mean and data.std out")
    return recipe


def _refuse_extremes(table: Mapping[str, Any]) -> None:
    """Refuse values that no field allows and that would overflow somewhere: NaN, ∞, huge numbers, deep nesting."""
    left: list[tuple[str, Any, int]] = [("", table, 0)]
    while left:
        path, value, depth = left.pop()
        name = path.removeprefix(".")
        if depth > DEEPEST:
            raise RecipeError(f"{shortened(name)}: is nested too deeply")
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise RecipeError(f"{name} = {shortened(value)}: does not fit into 64 bits")
        if isinstance(value, float) and not math.isfinite(value) and (name, value) not in WITHOUT_LIMIT:
            wrong = "is not a number" if math.isnan(value) else "must be a finite number"
            raise RecipeError(f"{name} = {value}: {wrong}")
        if isinstance(value, str) and len(value) > LONGEST_TEXT:
            raise RecipeError(f"{name}: has {len(value):,} characters, and {LONGEST_TEXT:,} are the most")
        if isinstance(value, Mapping):
            left += [(f"{path}.{shortened(key)}", inner, depth + 1) for key, inner in value.items()]
        elif isinstance(value, list | tuple):
            left += [(path, inner, depth + 1) for inner in value]


def _sentence(error: ErrorDetails) -> str:
    """Say what is wrong with which field. The path ends at the field: after it come only branches of its type."""
    steps = [str(step) for step in error["loc"]]
    section, *inside = steps[: 2 if steps[0] in SECTIONS else 1]
    known = section_fields(section) if inside else Recipe.model_fields
    path, name = ".".join([section, *inside]), (inside or [section])[0]
    if path in TABLES and len(steps) > 2:
        known, name, section = TABLES[path].model_fields, steps[2], path
        path = f"{path}.{name}"
    if error["type"] == "extra_forbidden":
        hint = nearest(name, known).replace("mean ", f"mean {section}." if inside else "mean ")
        if homes := [f"{other}.{name}" for other in SECTIONS if name in section_fields(other)]:
            hint = f"did you mean {' or '.join(homes)}?"
        return f"{path}: there is no such field; {hint}"
    meaning = f" ({known[name].description})" if known[name].description else ""
    return f"{path} = {shortened(repr(error['input']))}: {error['msg'][0].lower() + error['msg'][1:]}{meaning}"
