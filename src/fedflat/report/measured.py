"""The measurements of a finished run for a report, with small settings that run quickly."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from fedflat.errors import FedflatError, RunError
from fedflat.files import read_whole
from fedflat.flatness import (
    Duality,
    Film,
    Flatness,
    Hessian,
    Landscape,
    LayerFlatness,
    Locality,
    Objective,
    Portion,
    Trajectory,
    decompose,
    eigen_plane,
    landscape,
    layers,
    layers_of,
    locality,
    measure,
    top_eigenvalues,
)
from fedflat.recipe import Recipe
from fedflat.report.flatness_table import flatness_cells, headline
from fedflat.rounds import Problem
from fedflat.runs import gather, last_lr, load_run
from fedflat.tokens import joined

Row = Mapping[str, Any]
OVER = ", over the rounds"
SAMPLES, PRODUCTS, POINTS, PAIRS, TWINS = 500, 16, 15, 300, 2000
MOST_CLIENTS = 20  # maximum number for which the local models are measured, with one Lanczos run each


@dataclass(frozen=True)
class Measured:
    """The measurements of one run. `duality` is None if the data or the layers do not support it.

    `locality` is None for a federation with many clients, or if a client's local round fails.
    """

    flatness: Flatness
    duality: Duality | None
    locality: Locality | None = None

    def row(self) -> dict[str, Any]:
        """The record that the flatness tables expect."""
        return self.flatness.record()


def measured(run: Path) -> Measured:
    """Measures the flatness by layer and the duality of the head. Writes RUN/landscape-eigen.npz if it is missing."""
    problem = load_run(run)
    objective = Portion(SAMPLES).pooled(problem)
    whole = replace(measure(objective, products=PRODUCTS), layers=_layers(objective))
    found = Measured(whole, _duality(problem), _locality(problem))
    plane = run / "landscape-eigen.npz"
    if not plane.exists():
        directions = eigen_plane(top_eigenvalues(Hessian(objective), 2))
        landscape(objective, directions, points=POINTS).save(plane)
    return found


def _layers(objective: Objective) -> list[LayerFlatness]:
    """The flatness of every layer; of none if no layer trains its weight, as in a model that trains only adapters."""
    try:
        return layers(objective)
    except FedflatError:
        return []


def _duality(problem: Problem) -> Duality | None:
    module, federation = problem.network.module, problem.federation
    linear = [name for name in layers_of(module) if isinstance(module.get_submodule(name), nn.Linear)]
    if not linear:
        return None
    train = joined(Portion(TWINS).batches(federation, range(federation.clients)))
    test = federation.held_out("test", 0, federation.size("test"))
    try:
        return decompose(module, problem.loss, train, test, linear[-1], k=50, limit=PAIRS, samples=SAMPLES)
    except FedflatError:
        return None


def _locality(problem: Problem) -> Locality | None:
    if problem.federation.clients > MOST_CLIENTS:
        return None
    try:
        return locality(problem, Portion(SAMPLES), lr=last_lr(problem.recipe), tolerance=1e-2)
    except FedflatError:
        return None


def landscapes(run: Path) -> Mapping[str, Film]:
    """The landscapes of a run by plane, except those without any finite value.

    Those of `fedflat animate` have a frame for each round, and `OVER` after the name of their plane; those of
    `fedflat landscape` have only one.
    """
    single = {file.stem.removeprefix("landscape-"): file for file in sorted(run.glob("landscape-*.npz"))}
    films = {file.stem.removeprefix("landscapes-"): file for file in sorted(run.glob("landscapes-*.npz"))}
    found = {f"{plane}{OVER}": Film.load(file) for plane, file in films.items()}
    found |= {plane: Film([0], [Landscape.load(file)]) for plane, file in single.items()}
    return {plane: each for plane, each in found.items() if all(np.isfinite(x.values).any() for x in each.landscapes)}


def recorded(run: Path) -> Row | None:
    """The flatness record that `fedflat flatness` wrote for a run, if there is one.

    Raises:
        RunError: the file is damaged.
    """
    path = run / "flatness.json"
    if not path.is_file():
        return None
    try:
        row = json.loads(read_whole(path))
        flatness_cells(row), headline(row), int(row["samples"])
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, ArithmeticError) as error:
        raise RunError(f"{path}: not a record of flatness, or a damaged one; measure the run again") from error
    found: Row = row
    return found


def recorded_trajectory(run: Path) -> Trajectory | None:
    """The trajectory that `fedflat trajectory` wrote for a run, if there is one."""
    path = run / "trajectory.npz"
    return Trajectory.load(path) if path.is_file() else None


def split_counts(recipe: Recipe, run: Path) -> list[list[int]] | str:
    """Sample counts (clients × classes) of a recipe's split, or a sentence that says why they are not available."""
    try:
        federation = gather(recipe, run)
    except FedflatError as error:
        return f"The split cannot be drawn here: {error}."
    if federation.dataset.train.labels.is_floating_point():
        return "The labels are not class indices, so there is no figure of clients and classes."
    counts: list[list[int]] = federation.counts().tolist()
    return counts
