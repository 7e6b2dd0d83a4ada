"""The trajectory of a run in a plane of weight space: its rounds, the models of its clients, the loss below them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedflat.errors import RunError
from fedflat.federation import load_npz
from fedflat.flatness.landscape import Landscape
from fedflat.flatness.objective import Objective
from fedflat.flatness.projection import Plane, surface

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


@dataclass(frozen=True, eq=False)
class Trajectory:
    """Models of a run in a plane, as coordinates (x, y), and the loss over that plane.

    The plane holds only part of the distances: `off` and `clients_off` tell how far the models are from it, and f at a
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

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the trajectory as an .npz file. Raises `RunError` if that fails."""
        arrays: dict[str, Any] = {**vars(self), **vars(self.surface)}
        del arrays["surface"]
        try:
            with open(path, "wb") as file:
                np.savez_compressed(file, **arrays)
        except OSError as error:
            raise RunError(f"{path}: the trajectory cannot be written ({error.strerror})") from error

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Trajectory:
        """Reads a file written by `save`. Raises `RunError` if it is missing or damaged."""
        names = [name for name in cls.__dataclass_fields__ if name != "surface"]
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


def trajectory(
    objective: Objective,
    plane: Plane,
    rounds: Sequence[int],
    models: Tensor,
    local: LocalRound | None = None,
    points: int = 25,
    progress: Callable[[], object] | None = None,
) -> Trajectory:
    """Projects the models of a run into a plane and evaluates the mean loss over it.

    Args:
        objective: the mean loss.
        plane: the plane, such as `principal_plane(models)`.
        rounds: the round of each model.
        models: the global models, one in each row.
        local: a round whose client models are shown too.
        points: number of grid points along each axis of the surface.
        progress: called after each point of the surface.
    """
    losses = []
    for model in models:
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
        surface=surface(objective, plane, seen, points, progress),
    )
