"""Replays recorded trajectories of the methods' authors in float64 and measures the deviations.

The comparison covers the global weights after every round and, if recorded, the clients' consistency, the averages of
the clients' models, and the personal models of the clients with their answers and accuracies.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedflat.engine import Inline
from fedflat.errors import DataError, FedflatError, RecipeError, nearest
from fedflat.methods import Uploads
from fedflat.rounds import Problem, conduct, first_state, one_thread, view
from fedflat.runs.adaptation import ALONE, Walk
from fedflat.runs.neighbours import Mixture, Neighbours, features_and_logits
from fedflat.runs.personal import epoch_marks
from fedflat.runs.trajectory import Arrays, Shapes, check_samples, problem_of, read, refuse_others, samples_of, shape_of

EXACT = ("accuracy_", "predictions_")  # arrays that must be equal, regardless of the tolerance


@dataclass(frozen=True)
class Verdict:
    """The deviations of a replay from one file: the largest absolute deviation of each recorded array."""

    path: Path
    method: str
    rounds: int
    deviations: dict[str, float]
    tolerance: float

    @property
    def deviation(self) -> float:
        """The largest deviation over all arrays."""
        return max(self.deviations.values(), default=0.0)

    @property
    def deviating(self) -> list[str]:
        """The arrays that deviate by more than the tolerance, or at all where they must be equal."""
        allowed = {name: 0.0 if name.startswith(EXACT) else self.tolerance for name in self.deviations}
        return [name for name, deviation in self.deviations.items() if not deviation <= allowed[name]]

    @property
    def good(self) -> bool:
        return not self.deviating


def verify(path: Path) -> Verdict:
    """Replay one file: the same start, samples and participants must give the recorded arrays."""
    arrays = read(path)
    try:
        recipe = json.loads(str(arrays["recipe"]))
        method, problem = problem_of(recipe, arrays)
        adapting = _adapting(problem, recipe.get("personal"), arrays)
        found = Deviations(arrays)
        _replay(problem, found)
        if adapting:
            adapting.compare(found)
        return Verdict(path, method, len(arrays["weights"]), found.largest, float(recipe["tolerance"]))
    except FedflatError as error:
        raise type(error)(f"{path}: {error}") from None
    except (KeyError, ValueError, TypeError, RuntimeError, IndexError, AttributeError) as error:
        raise DataError(f"{path}: not a trajectory that can be replayed ({type(error).__name__}: {error})") from None


class Deviations:
    """The largest deviation from each recorded array so far."""

    def __init__(self, arrays: Arrays) -> None:
        self.arrays, self.largest = arrays, dict[str, float]()

    def note(self, name: str, ours: Tensor | float, row: int | None = None) -> None:
        """Compare with one row of an array, or with all of it; does nothing if it was not recorded."""
        if name in self.arrays:
            theirs = self.arrays[name] if row is None else self.arrays[name][row]
            gap = np.abs(np.asarray(ours, np.float64) - np.asarray(theirs, np.float64)).max(initial=0.0)
            self.largest[name] = max(self.largest.get(name, 0.0), float(gap) if np.isfinite(gap) else math.inf)

    def note_share(self, name: str, ours: float, row: int) -> None:
        """Compare with a share of samples, which some authors round to four decimals."""
        self.note(name, min(ours, round(ours, 4), key=lambda share: abs(share - self.arrays[name][row])), row)


def _replay(problem: Problem, found: Deviations) -> None:
    state, everybody = first_state(problem), range(problem.federation.clients)
    average = problem.recipe.server.average
    with closing(Observed(problem)) as engine:
        for round, active in enumerate(found.arrays["participants"]):
            cohort = np.flatnonzero(active).tolist()
            if cohort:
                engine.sent = problem.method.broadcast(view(problem, state))["weights"].clone()
                state, report = conduct(problem, state, engine, cohort)
                if report.skipped or report.refused:
                    raise DataError(f"round {round} cannot be replayed: {report.skipped or report.refused[0].detail}")
                found.note("consistency", report.measures["consistency"], round)
                found.note("active", engine.average(cohort, average), round)
            else:
                state = replace(state, round=state.round + 1)
            found.note("weights", state.weights, round)
            found.note("all", engine.average(everybody, average), round)


class Observed(Inline):
    """An engine that keeps every client's last model; before the client's first round, the initial model."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.sent = problem.network.weights.clone()
        self._samples = [problem.federation.samples(i) for i in range(problem.federation.clients)]
        self._last = self.sent.repeat(len(self._samples), 1)

    def remember(self, uploads: Uploads) -> None:
        for upload in uploads:
            self._last[upload.client] = self.sent + upload.delta
        super().remember(uploads)

    def average(self, clients: Sequence[int], by: str) -> Tensor:
        """Return the average of these clients' last models, uniform or weighted by samples."""
        shares = torch.tensor([self._samples[i] if by == "samples" else 1 for i in clients], dtype=self._last.dtype)
        return shares @ self._last[[*clients]] / shares.sum()


# --------------------------------------------------------------------------------------------------------------------
# Personal models
# --------------------------------------------------------------------------------------------------------------------

REQUIRED = ("how", "epochs", "lr")
SETTINGS = (*REQUIRED, "lr_decay", *(field.name for field in fields(Neighbours)))


def _adapting(problem: Problem, written: Any, arrays: Arrays) -> Adapting | None:
    """The recipe's `personal`, checked together with its arrays."""
    if written is None:
        refuse_others(arrays, {}, "the recipe has no personal")
        return None
    if not isinstance(written, dict):
        raise RecipeError(f"personal = {written!r}: must be a table with {', '.join(REQUIRED)}")
    for name in REQUIRED:
        if name not in written:
            raise RecipeError(f"personal.{name} is missing")
    for name in written:
        if name not in SETTINGS:
            raise RecipeError(f"personal has no setting {name!r}; {nearest(name, SETTINGS)}")
    epochs = written["epochs"]
    if not isinstance(epochs, list) or not all(type(epoch) is int for epoch in epochs):
        raise RecipeError(f"personal.epochs = {epochs!r}: must be a list of whole numbers")
    settings = {name: written[name] for name in written if name not in (*REQUIRED, "lr_decay")}
    try:
        marks, neighbours = epoch_marks(written["how"], epochs), Neighbours(**settings)
        walk = Walk(problem, written["how"], marks, float(written["lr"]), float(written.get("lr_decay", ALONE)))
    except RecipeError as error:
        raise RecipeError(f"personal.{error}") from None
    adapting = Adapting(walk, neighbours)
    adapting.check(arrays)
    return adapting


@dataclass(frozen=True)
class Adapting:
    """Every client's personal model, and its answers on that client's test samples."""

    walk: Walk
    neighbours: Neighbours

    def check(self, arrays: Arrays) -> None:
        """Check that all arrays for the recipe's `personal` are present in their shapes, and no others."""
        federation = self.walk.problem.federation
        for i in range(federation.clients):
            check_samples(arrays, i, "test_")
            if self.walk.how == "knn" and self.neighbours.capacity < federation.samples(i):
                raise RecipeError(
                    f"personal.capacity = {self.neighbours.capacity}: client {i} has {federation.samples(i)} samples, "
                    "and which of them it stored is not recorded"
                )
        shapes = self._shapes(arrays)
        for name, shape in shapes.items():
            if shape_of(arrays, name) != shape:
                raise RecipeError(f"{name} has shape {arrays[name].shape}, but the recipe's personal makes it {shape}")
        refuse_others(arrays, shapes, f"personal.how = {self.walk.how!r}, personal.epochs = {[*self.walk.marks]}")

    def _shapes(self, arrays: Arrays) -> Shapes:
        network, clients, shapes = self.walk.problem.network, self.walk.problem.federation.clients, Shapes()
        classes = features_and_logits(network, samples_of(arrays, 0)[0][:1])[1].shape[1]
        for epochs in self.walk.marks:
            shapes |= {f"personal_e{epochs}": (clients, network.size), f"accuracy_e{epochs}": (clients,)}
            for i in range(clients):
                tests = len(arrays[f"test_labels_{i}"])
                answers = {f"scores_e{epochs}_{i}": (tests, classes), f"predictions_e{epochs}_{i}": (tests,)}
                if self.walk.how == "knn":
                    shapes |= {f"neighbours_e{epochs}_{i}": (tests, classes), **answers}
                else:
                    shapes |= {name: shape for name, shape in answers.items() if name in arrays}
        return shapes

    def compare(self, found: Deviations) -> None:
        """Adapt the last recorded global weights to every client, or the initial ones for `local`, and compare."""
        rounds = 0 if self.walk.how == "local" else len(found.arrays["weights"])
        start = torch.tensor(found.arrays["weights"][-1] if rounds else found.arrays["initial"], dtype=torch.float64)
        with one_thread():
            for client in range(self.walk.problem.federation.clients):
                self.walk.of(client, start, partial(self._answer, found, client))

    def _answer(self, found: Deviations, client: int, epochs: int) -> None:
        network, (inputs, labels) = self.walk.problem.network, samples_of(found.arrays, client, "test_")
        if self.walk.how == "knn":
            near, scores = Mixture(self.walk.problem, client, self.neighbours).answers(inputs)
            found.note(f"neighbours_e{epochs}_{client}", near)
        else:
            network.module.eval()
            _, scores = features_and_logits(network, inputs)
        predictions = scores.argmax(1)
        found.note(f"personal_e{epochs}", network.weights, client)
        found.note(f"scores_e{epochs}_{client}", scores)
        found.note(f"predictions_e{epochs}_{client}", predictions)
        found.note_share(f"accuracy_e{epochs}", int((predictions == labels).sum()) / len(labels), client)
