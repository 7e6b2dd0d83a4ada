"""Checks the arguments of `train` that are Python objects; settings are checked as fields of the recipe."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from fedflat.errors import RecipeError
from fedflat.federation import Federation
from fedflat.tasks import Task


def check_arguments(federation: Any, model: Any, task: Any, callbacks: Any, out: Any) -> None:
    """Refuse what is of another type.

    Raises:
        RecipeError: the message names the argument, what it is and what it should be.
    """
    if not isinstance(federation, Federation):
        raise RecipeError(
            f"train: the federation is a {type(federation).__name__}; make one of your data by "
            "fedflat.federate(data, split, clients)"
        )
    if isinstance(model, type):
        raise RecipeError(f"train: the model is the class {model.__name__}; give an instance, {model.__name__}(…)")
    if not isinstance(task, str | Task | None):
        raise RecipeError(
            f"train: the task is a {type(task).__name__}; give a name or a fedflat.Task, and a function of outputs and "
            "labels as loss="
        )
    if not isinstance(callbacks, Iterable) or not all(map(callable, callbacks)):
        raise RecipeError(f"train: callbacks is a {type(callbacks).__name__}; give a list of functions of a record")
    if not isinstance(out, str | os.PathLike | None):
        raise RecipeError(f"train: out is of type {type(out).__name__}; give the path of the run's directory")
