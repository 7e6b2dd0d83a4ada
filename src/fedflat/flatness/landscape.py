"""The loss around a minimum, along one direction or over a plane."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from fedflat.errors import RecipeError, RunError, nearest
from fedflat.federation import load_npz, save_npz
from fedflat.flatness.door import of_model
from fedflat.flatness.hessian import Eigen, Hessian, top_eigenvalues
from fedflat.flatness.objective import Objective
from fedflat.flatness.terrain import draw_landscape
from fedflat.progress import track
from fedflat.shown import Shown, framed

Floats = NDArray[np.float64]
_FEWEST = 3  # a curvature needs at least three points


Plane = Literal["eigen", "random"]


@dataclass(frozen=True, eq=False, repr=False)
class Landscape(Shown):
    """The loss on a grid around the weights w.

    Attributes:
        axes: the steps αᵢ (and βⱼ), one row for each direction.
        values: `values[i]` = f(w + αᵢ d₁), or `values[i, j]` = f(w + αᵢ d₁ + βⱼ d₂); inf or nan if the loss overflowed.
        centre: f(w).
    """

    axes: Floats
    values: Floats
    centre: float

    pictured: ClassVar[bool] = True

    @property
    def rise(self) -> float:
        """max f(w + …) − f(w) over the grid, the sharpness within its span; inf if the loss overflowed.

        >>> Landscape(np.array([[-1.0, 0.0, 1.0]]), np.array([2.5, 0.5, 1.5]), 0.5).rise
        2.0
        """
        return float(np.nan_to_num(self.values, nan=math.inf, posinf=math.inf).max()) - self.centre

    def caption(self) -> str:
        kind, steps = "plane" if len(self.axes) == 2 else "curve", " × ".join(map(str, self.values.shape))
        return f"Loss on a {kind} of {steps} points from {self.axes[0, 0]:g} to {self.axes[0, -1]:g}"

    def rows(self) -> list[dict[str, Any]]:
        return [{"loss at the centre": self.centre, "largest rise": self.rise}]

    def table(self) -> Any:
        """One row for each point: its steps along the directions, and the loss there."""
        names = ("α", "β")[: len(self.axes)]
        steps = product(*self.axes.tolist())
        values = self.values.ravel().tolist()
        return framed({**dict(zip(names, at, strict=True)), "loss": f} for at, f in zip(steps, values, strict=True))

    def draw(self, axes: Any) -> None:
        draw_landscape(axes, self)

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the landscape as an .npz file. Raises `RunError` if that fails."""
        try:
            save_npz(path, axes=self.axes, values=self.values, centre=self.centre)
        except OSError as error:
            raise RunError(f"{path}: the landscape cannot be written ({error.strerror})") from error

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Landscape:
        """Reads a file written by `save`. Raises `RunError` if it is missing or damaged."""
        try:
            axes, values, centre = load_npz(Path(path), ["axes", "values", "centre"]).values()
        except OSError as error:
            raise RunError(f"{path}: the landscape cannot be read ({error.strerror})") from error
        except Exception as error:  # a damaged zip or header makes zipfile, zlib and NumPy raise almost anything
            raise RunError(f"{path}: not a landscape file, or a damaged one; measure the landscape again") from error
        return cls.checked(path, axes, values, centre)

    @classmethod
    def checked(cls, path: str | PathLike[str], axes: NDArray[Any], values: NDArray[Any], centre: Any) -> Landscape:
        """A landscape from the arrays of a file. Raises `RunError` if they do not fit each other."""
        if not (_is_grid(axes) and _is_real(values, axes.shape[1:] * len(axes)) and _is_real(np.asarray(centre), ())):
            raise RunError(f"{path}: its values do not fit its axes; measure the landscape again")
        return cls(axes, values, float(centre))


def _is_grid(axes: NDArray[Any]) -> bool:
    rising = _is_real(axes, axes.shape) and axes.ndim == 2 and bool(np.all(np.diff(axes) > 0))
    return rising and len(axes) in (1, 2) and axes.shape[1] >= _FEWEST


def _is_real(array: NDArray[Any], shape: tuple[int, ...]) -> bool:
    return array.dtype == np.float64 and array.shape == shape


@of_model
def landscape(
    objective: Objective,
    directions: Sequence[Tensor] | Tensor | str = "eigen",
    span: float = 1.0,
    points: int = 25,
    dimensions: int = 2,
    seed: int = 0,
) -> Landscape:
    """Evaluates the mean loss on a line or a plane through the current weights, with forward passes only.

    Args:
        objective: the mean loss.
        directions: `eigen` for the top eigenvectors of the Hessian, `random` for filter-normalised directions, or one
            direction (a curve) or two (a surface), each a flat vector of the objective's size.
        span: the steps run from −span to span.
        points: number of steps along each direction. An odd number includes w itself.
        dimensions: 1 for a curve, 2 for a surface, if directions are not given as vectors.
        seed: seed of the directions.

    Raises:
        RecipeError: an argument is out of range.

    >>> x = torch.tensor([[1.0], [3.0]])
    >>> f = Objective(torch.nn.Linear(1, 1, bias=False), lambda z, y: 0.5 * (z - y).square().mean(), [(x, x)])
    >>> with f.at(torch.tensor([1.0])):   # f(w) = 5/2 (w − 1)²
    ...     landscape(f, [torch.tensor([2.0])], points=5).values.tolist()
    [10.0, 2.5, 0.0, 2.5, 10.0]
    """
    if isinstance(directions, str):
        directions = plane_of(objective, directions, dimensions, seed)
    _check(objective, directions, span, points)
    home = objective.weights
    plane = [direction.to(home) for direction in directions]
    axis = span * (np.arange(1 - points, points, 2) / (points - 1))  # exactly 0 in the middle and ±span at the ends
    values = []
    with objective.at(home):
        for start, direction, step in track(_steps(home, plane, axis.tolist()), "landscape", points ** len(plane)):
            objective.move(start, direction, step)
            values.append(objective.value())
    grid = np.array(values).reshape((points,) * len(plane))
    return Landscape(np.tile(axis, (len(plane), 1)), grid, objective.value())


def _steps(home: Tensor, plane: Sequence[Tensor], axis: Sequence[float]) -> Iterator[tuple[Tensor, Tensor, float]]:
    """The points of the grid, each as a start, a direction and a step. All points of a row share their start."""
    *first, last = plane
    rows = (torch.add(home, direction, alpha=step) for direction in first for step in axis) if first else (home,)
    return ((row, last, step) for row in rows for step in axis)


def _check(objective: Objective, directions: Sequence[Tensor] | Tensor, span: float, points: int) -> None:
    if len(directions) not in (1, 2):
        raise RecipeError(f"landscape: {len(directions)} directions given; give one for a curve or two for a surface")
    for direction in directions:
        if direction.shape != (objective.size,):
            shape = tuple(direction.shape)
            raise RecipeError(
                f"landscape: a direction has shape {shape}; for this model it must be ({objective.size},)"
            )
    if not 0 < span < math.inf:
        raise RecipeError(f"landscape: span is {span}; it must be a positive number")
    if points < _FEWEST:
        raise RecipeError(f"landscape: points is {points}; it must be at least {_FEWEST}")


def plane_of(objective: Objective, plane: str, dimensions: int = 2, seed: int = 0) -> Tensor:
    """One or two directions of a named plane: the top eigenvectors (`eigen`) or filter-normalised ones (`random`).

    Args:
        objective: the mean loss at the centre of the plane.
        plane: `eigen` or `random`.
        dimensions: number of directions, 1 or 2.
        seed: seed of the directions.

    Raises:
        RecipeError: the plane is unknown, or `dimensions` is not 1 or 2.
    """
    if dimensions not in (1, 2):
        raise RecipeError(f"landscape: dimensions is {dimensions}; it must be 1 for a curve or 2 for a surface")
    if plane == "eigen":
        found = top_eigenvalues(Hessian(objective), 2, seed=seed)
        return eigen_plane(found) if dimensions == 2 else functional.normalize(found.vectors[:1], dim=1)
    if plane == "random":
        return filter_normalised(objective, dimensions, seed, orthogonal=True)
    raise RecipeError(f"landscape: there is no plane {plane!r}; {nearest(plane, get_args(Plane))}")


def eigen_plane(eigen: Eigen) -> Tensor:
    """The unit eigenvectors of λ₁ and λ₂ as rows. They span the plane in which f curves most.

    Raises:
        RecipeError: `eigen` holds only one eigenvector.
    """
    if len(eigen.vectors) < 2:
        raise RecipeError("eigen plane: one eigenvector does not span a plane; compute at least two")
    return functional.normalize(eigen.vectors[:2], dim=1)


def filter_normalised(objective: Objective, count: int = 2, seed: int = 0, orthogonal: bool = False) -> Tensor:
    """Random filter-normalised directions (Li et al., 2018).

    For each output f of a layer, d_f ← d_f ‖w_f‖/(‖d_f‖ + 1e-10) with Gaussian d_f. Biases and normalisation
    parameters stay 0. A step of 1 then has the size of the weights at any scale, so landscapes of different models can
    be compared.

    Args:
        objective: its module holds the weights w.
        count: number of directions.
        seed: seed of the Gaussian draws.
        orthogonal: make each direction orthogonal to the earlier ones, filter by filter, which keeps the filter norms.
            A filter of n weights has at most n orthogonal directions; further ones are 0 there.

    Returns:
        The directions as rows.
    """
    chance = torch.Generator().manual_seed(seed)
    drawn = torch.randn(count, objective.size, generator=chance, dtype=torch.float64)
    for name, weights in objective.layout.views(objective.weights).items():
        part = drawn[:, objective.layout.slices[name]]
        if weights.ndim < 2:
            part.zero_()
            continue
        filters = part.view(count, len(weights), -1)
        if orthogonal:
            filters.copy_(_orthogonalised(filters))
        norms = weights.flatten(1).norm(dim=1, keepdim=True).to(filters)
        filters.mul_(norms / (filters.norm(dim=2, keepdim=True) + 1e-10))
    return drawn.to(objective.dtype)


def _orthogonalised(filters: Tensor) -> Tensor:
    """Gram–Schmidt over the first axis, separately for each filter, with unit vectors as result."""
    basis, factor = torch.linalg.qr(filters.permute(1, 2, 0))
    basis = basis * factor.diagonal(dim1=1, dim2=2).sign().unsqueeze(1)  # QR does not fix the signs
    return functional.pad(basis, (0, len(filters) - basis.shape[2])).permute(2, 0, 1)
