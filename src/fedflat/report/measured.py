"""What a report measures of a finished run, with settings small enough to wait for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fedflat.client import Problem
from fedflat.errors import FedflatError
from fedflat.flatness import (
    Duality,
    Flatness,
    Hessian,
    Landscape,
    Portion,
    duality,
    eigen_plane,
    landscape,
    layers_of,
    measure,
    top_eigenvalues,
)
from fedflat.prepare import gather, load_run
from fedflat.recipe import Recipe

SAMPLES, PROBES, POINTS, PAIRS, TWINS = 500, 6, 15, 300, 2000


@dataclass(frozen=True)
class Measured:
    """The minimum of one run; where its data or layers allow no duality, there is none."""

    flatness: Flatness
    duality: Duality | None

    def row(self) -> dict[str, Any]:
        """As the tables of flatness take it."""
        spectrum = self.flatness.spectrum
        return asdict(self.flatness) | {"spectrum": {**asdict(spectrum), "ratio": spectrum.ratio}}


def measured(run: Path) -> Measured:
    """Flatness with its layers, duality of the head, and RUN/landscape-eigen.npz unless it is there."""
    problem, _ = load_run(run)
    objective = Portion(SAMPLES).pooled(problem)
    found = Measured(measure(objective, probes=PROBES, by_layer=True), _duality(problem))
    plane = run / "landscape-eigen.npz"
    if not plane.exists():
        directions = eigen_plane(top_eigenvalues(Hessian(objective), 2))
        landscape(objective, directions, points=POINTS).save(plane)
    return found


def _duality(problem: Problem) -> Duality | None:
    module, federation = problem.network.module, problem.federation
    linear = [name for name in layers_of(module) if isinstance(module.get_submodule(name), nn.Linear)]
    if not linear:
        return None
    inputs, labels = zip(*Portion(TWINS).batches(federation, range(federation.clients)), strict=True)
    train, test = (torch.cat(inputs), torch.cat(labels)), federation.held_out("test", 0, federation.size("test"))
    try:
        return duality(module, problem.loss, train, test, linear[-1], k=50, limit=PAIRS, samples=SAMPLES)
    except FedflatError:
        return None


def landscapes(run: Path) -> Mapping[str, Landscape]:
    """What `fedflat landscape` has written for a run, by the name of the plane; not what is nowhere finite."""
    files = sorted(run.glob("landscape-*.npz"))
    found = {file.stem.removeprefix("landscape-"): Landscape.load(file) for file in files}
    return {plane: each for plane, each in found.items() if np.isfinite(each.values).any()}


def split_counts(recipe: Recipe) -> list[list[int]] | str:
    """Clients × classes of a recipe's split, or the sentence why they cannot be shown."""
    if recipe.split.name == "given":
        return "The federation was made in Python, so its split is not in the run's directory."
    try:
        federation = gather(recipe)
    except FedflatError as error:
        return f"The split cannot be drawn here: {error}."
    if federation.dataset.train.labels.is_floating_point():
        return "The labels are no classes, so there is no picture of clients and classes."
    counts: list[list[int]] = federation.counts().tolist()
    return counts
