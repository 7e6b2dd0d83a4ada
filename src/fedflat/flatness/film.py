"""The landscape of a run over its rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from fedflat.drawing import COLOURS
from fedflat.errors import RunError
from fedflat.federation import load_npz, save_npz
from fedflat.flatness.landscape import Landscape, landscape
from fedflat.flatness.objective import Objective
from fedflat.shown import Shown


@dataclass(frozen=True, eq=False, repr=False)
class Film(Shown):
    """The landscapes of several rounds of a run, all on one grid and along the same directions.

    Attributes:
        rounds: the rounds, in rising order.
        landscapes: the landscape around the global model of each round.
    """

    rounds: Sequence[int]
    landscapes: Sequence[Landscape]

    def caption(self) -> str:
        return f"{self.landscapes[-1].caption()}, around the models of {len(self.rounds)} rounds"

    def rows(self) -> list[dict[str, Any]]:
        found = zip(self.rounds, self.landscapes, strict=True)
        return [{"round": round, "loss": each.centre, "largest rise": each.rise} for round, each in found]

    def draw(self, axes: Any) -> None:
        """The loss and its largest rise over the rounds; `landscapes[k].plot()` draws one of them."""
        for colour, name in zip(COLOURS, ("loss", "largest rise"), strict=False):
            axes.plot(self.rounds, [row[name] for row in self.rows()], "-o", markersize=3, color=colour, label=name)
        axes.set(xlabel="round", yscale="log")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the landscapes as one .npz file. Raises `RunError` if that fails."""
        values, centres = np.stack([each.values for each in self.landscapes]), [each.centre for each in self.landscapes]
        axes, rounds = self.landscapes[0].axes, np.array(self.rounds, np.int64)
        try:
            save_npz(path, rounds=rounds, axes=axes, values=values, centres=np.array(centres))
        except OSError as error:
            raise RunError(f"{path}: the landscapes cannot be written ({error.strerror})") from error

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Film:
        """Reads a file written by `save`. Raises `RunError` if it is missing or damaged."""
        try:
            rounds, axes, values, centres = load_npz(Path(path), ["rounds", "axes", "values", "centres"]).values()
        except OSError as error:
            raise RunError(f"{path}: the landscapes cannot be read ({error.strerror})") from error
        except Exception as error:  # a damaged zip or header makes zipfile, zlib and NumPy raise almost anything
            raise RunError(f"{path}: not a file of landscapes, or a damaged one; measure them again") from error
        rising = rounds.dtype == np.int64 and rounds.ndim == 1 and bool(np.all(np.diff(rounds) > 0))
        if not (rising and len(rounds) and rounds.shape == centres.shape == values.shape[:1]):
            raise RunError(f"{path}: its values do not fit its rounds; measure the landscapes again")
        grids = zip(values, centres, strict=True)
        return cls(rounds.tolist(), [Landscape.checked(path, axes, value, centre) for value, centre in grids])


def film(
    objective: Objective,
    directions: Tensor,
    rounds: Sequence[int],
    models: Sequence[Tensor],
    span: float = 1.0,
    points: int = 15,
) -> Film:
    """Evaluates the landscape around each of several models of a run, along the same directions.

    Args:
        objective: the mean loss.
        directions: one or two directions, such as the top eigenvectors at the last model.
        rounds: the round of each model, in rising order.
        models: the weights of each round.
        span: the steps run from −span to span.
        points: number of steps along each direction.
    """
    found = []
    for model in models:
        with objective.at(model):
            found.append(landscape(objective, directions, span, points))
    return Film(rounds, found)
