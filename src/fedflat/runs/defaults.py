"""The recipe of a run in full: what a user left out, filled in from the data, the task and the machine."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from fedflat import models
from fedflat.errors import RecipeError
from fedflat.federation import Federation, splits_by
from fedflat.recipe import Recipe, validated
from fedflat.runs.folder import Record
from fedflat.runs.launch import engine_of
from fedflat.tasks import Accuracy, Task


def judged_by(task: Task, recipe: Recipe) -> Recipe:
    """Return the recipe with the task's name, the metric to follow, and whether its highest or lowest value is best."""
    metric = task.metric(recipe.evaluation.metric)
    best = "highest" if metric.higher else "lowest"
    if metric is Accuracy and recipe.evaluation.target is not None and not 0 < recipe.evaluation.target <= 1:
        raise RecipeError(f"evaluation.target = {recipe.evaluation.target}: an accuracy is above 0 and at most 1")
    evaluation = recipe.evaluation.model_copy(update={"metric": metric.name, "best": best})
    return recipe.model_copy(update={"task": task.name, "evaluation": evaluation})


def in_full(recipe: Recipe, federation: Federation, group: int) -> Recipe:
    """Return the recipe with the defaults of its split, data set, model and engine filled in."""
    split = recipe.split.options()
    if known := splits_by(recipe.split.draws).get(recipe.split.name):
        split = _defaults(known, split)
    split |= {"clients": federation.clients, "seed": recipe.split_seed}
    own = recipe.model.name not in models.MODELS
    model = recipe.model.options() if own else _defaults(models.MODELS[recipe.model.name], recipe.model.options())
    data = {"mean": list(federation.dataset.mean), "std": list(federation.dataset.std)}
    kind, workers = engine_of(recipe)
    table = recipe.model_dump(exclude_none=True)
    for section, filled in ("data", data), ("split", split), ("model", model):
        table[section] |= filled
    engine = table["engine"] | {"name": kind, "workers": workers, "group": group}
    return validated(table | {"engine": engine})


def _defaults(function: Callable[..., Any], given: Record) -> Record:
    parameters = inspect.signature(function).parameters.values()
    own = [p for p in parameters if p.name not in models.OFFERED]
    known = {p.name: p.default for p in own if p.default not in (p.empty, None)}
    return {k: list(v) if isinstance(v, tuple) else v for k, v in {**known, **given}.items()}
