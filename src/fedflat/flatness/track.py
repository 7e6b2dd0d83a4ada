"""The trajectory of a run in a plane of weight space: its rounds, the models of its clients, the loss below them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedflat.errors import RecipeError, RunError, TrainingError
from fedflat.federation import load_npz, save_npz
from fedflat.flatness.door import of_model
from fedflat.flatness.landscape import Landscape
from fedflat.flatness.objective import Objective
from fedflat.flatness.projection import Plane, principal_plane, surface
from fedflat.flatness.routes import draw_trajectory
from fedflat.progress import track
from fedflat.shown import Shown

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class LocalRound:
    """One round seen from weight space: where the clients started, where each ended, and the server's new model.

    Attributes:
        round: the number of the round.
        start: the weights that the clients received.
        models: the weights of each client after local training.
        average: the global weights after the round.
    """

    round: int
    start: Tensor
    models: Mapping[int, Tensor]
    average: Tensor


@dataclass(frozen=True, eq=False, repr=False)
class Trajectory(Shown):
    """Models of a run in a plane, as coordinates (x, y), and the loss over that plane.

    The plane holds only part of the distances: `off` and `clients_off` say how far the models are from it, and f at a
    model (`losses`) differs from the surface at its projection accordingly.

    Attributes:
        rounds: the rounds of the global models.
        path: their coordinates.
        losses: f at the models themselves.
        off: their distances from the plane.
        shares: the shares of variance along both axes; NaN if the plane is not that of principal components.
        local_round: the round whose local models are shown; 0 if none are.
        clients: the clients of that round.
        clients_path: the coordinates of their models.
        clients_off: their distances from the plane.
        ends: the coordinates of the model that they started from, and of their average.
        surface: f over the plane.
    """

    rounds: Integers
    path: Floats
    losses: Floats
    off: Floats
    shares: Floats
    local_round: int
    clients: Integers
    clients_path: Floats
    clients_off: Floats
    ends: Floats
    surface: Landscape

    pictured: ClassVar[bool] = True
    size: ClassVar[tuple[float, float]] = (7.4, 5.4)

    def caption(self) -> str:
        clients = f" and {len(self.clients)} clients of round {self.local_round}" if self.local_round else ""
        shares = ", with {:.0%} and {:.0%} of the variance".format(*self.shares) if np.isfinite(self.shares[0]) else ""
        return f"{len(self.rounds)} models of a run{clients} in a plane of weight space{shares}"

    def rows(self) -> list[dict[str, Any]]:
        """A row for each global model, each client's model and their average. The loss is that of the model itself."""
        clients = [f"client {client}, round {self.local_round}" for client in self.clients]
        rows = [
            *_rows([f"round {round}" for round in self.rounds], self.path, self.off, self.losses),
            *_rows(clients, self.clients_path, self.clients_off, np.full(len(clients), np.nan)),
        ]
        if self.local_round:
            rows += _rows([f"average, round {self.local_round}"], self.ends[1:], np.full(1, np.nan), np.full(1, np.nan))
        return rows

    def draw(self, axes: Any) -> None:
        draw_trajectory(axes, self)

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the trajectory as an .npz file. Raises `RunError` if that fails."""
        arrays: dict[str, Any] = {**vars(self), **vars(self.surface)}
        del arrays["surface"]
        try:
            save_npz(path, **arrays)
        except OSError as error:
            raise RunError(f"{path}: the trajectory cannot be written ({error.strerror})") from error

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Trajectory:
        """Reads a file written by `save`. Raises `RunError` if it is missing or damaged."""
        names = [field.name for field in fields(cls) if field.name != "surface"]
        try:
            found = load_npz(Path(path), [*names, "axes", "values", "centre"])
        except OSError as error:
            raise RunError(f"{path}: the trajectory cannot be read ({error.strerror})") from error
        except Exception as error:  # a damaged zip or header makes zipfile, zlib and NumPy raise almost anything
            raise RunError(f"{path}: not a trajectory file, or a damaged one; project the run again") from error
        grid = Landscape.checked(path, *(found.pop(name) for name in ("axes", "values", "centre")))
        if not _fits(found):
            raise RunError(f"{path}: its arrays do not fit each other; project the run again")
        arrays: dict[str, Any] = {**found, "local_round": int(found["local_round"])}
        return cls(**arrays, surface=grid)


def _rows(names: Sequence[str], places: Floats, off: Floats, losses: Floats) -> list[dict[str, Any]]:
    columns = zip(names, places.tolist(), off.tolist(), losses.tolist(), strict=True)
    return [{"model": n, "x": x, "y": y, "distance from the plane": d, "loss": f} for n, (x, y), d, f in columns]


def _fits(found: Mapping[str, NDArray[Any]]) -> bool:
    count, clients = (found[name].shape[:1] for name in ("rounds", "clients"))
    shapes = {
        "rounds": count, "path": (*count, 2), "losses": count, "off": count, "shares": (2,), "local_round": (),
        "clients": clients, "clients_path": (*clients, 2), "clients_off": clients, "ends": (2, 2),
    }  # fmt: skip
    whole = ("rounds", "clients", "local_round")
    right = (found[name].shape == s and found[name].dtype == (np.int64 if name in whole else np.float64)
             for name, s in shapes.items())  # fmt: skip
    return count != () and clients != () and all(right)


@of_model
def trajectory(
    objective: Objective,
    models: Tensor | Sequence[nn.Module],
    rounds: Sequence[int] | None = None,
    plane: Plane | None = None,
    local: LocalRound | None = None,
    points: int = 25,
) -> Trajectory:
    """Projects the models of a run into a plane and evaluates the mean loss over it.

    Args:
        objective: the mean loss.
        models: the models in the order of training, as modules or as weights with one model in each row.
        rounds: the round of each model; by default 0, 1, 2, …
        plane: the plane; by default `principal_plane(models)`, for which there must be three models.
        local: a round whose client models are shown too.
        points: number of grid points along each axis of the surface.

    Raises:
        RecipeError: the models do not span a plane, or their number is not that of the rounds.
        TrainingError: weights are not finite.
    """
    if not isinstance(models, Tensor):
        models = torch.stack([objective.weights_of(each) for each in models]) if len(models) else objective.weights[:0]
    rounds = range(len(models)) if rounds is None else rounds
    if len(rounds) != len(models):
        raise RecipeError(
            f"trajectory: there are {len(models)} models and {len(rounds)} rounds; give one round for each"
        )
    for round, model in zip(rounds, models, strict=True):
        if not bool(model.isfinite().all()):
            raise TrainingError(f"trajectory: the weights of round {round} are not finite; the run has diverged")
    plane = plane or principal_plane(models)
    losses = []
    for model in track(models, "models", len(models)):
        with objective.at(model):
            losses.append(objective.value())
    clients = sorted(local.models) if local else []
    theirs = torch.stack([local.models[client] for client in clients]) if local and clients else models[:0]
    ends = plane.project(torch.stack([local.start, local.average])) if local else torch.full((2, 2), torch.nan)
    path, scattered = plane.project(models), plane.project(theirs)
    seen = torch.cat([path, scattered, *([ends] if local else [])])
    return Trajectory(
        rounds=np.array(rounds, np.int64),
        path=path.numpy(),
        losses=np.array(losses),
        off=plane.distances(models).numpy(),
        shares=np.array(plane.shares or (np.nan, np.nan)),
        local_round=local.round if local else 0,
        clients=np.array(clients, np.int64),
        clients_path=scattered.numpy(),
        clients_off=plane.distances(theirs).numpy(),
        ends=ends.double().numpy(),
        surface=surface(objective, plane, seen, points),
    )
