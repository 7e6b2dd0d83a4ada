"""Models projected into a plane of weight space, with the loss surface of that plane."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedflat.errors import RecipeError
from fedflat.flatness.landscape import Landscape, landscape
from fedflat.flatness.objective import Objective

Floats = NDArray[np.float64]
MARGIN = 0.25  # on each side of the surface, as a fraction of the extent of the points
_FLAT = 1e-6  # models whose second extent is a smaller share of the first lie on one line, up to rounding


@dataclass(frozen=True, eq=False)
class Plane:
    """The plane o + x u + y v, with orthonormal u and v.

    Attributes:
        origin: o.
        axes: u and v as rows, in float64.
        shares: the shares of the models' variance along u and v, if the plane is that of their principal components.
    """

    origin: Tensor
    axes: Tensor
    shares: tuple[float, float] | None = None

    def project(self, models: Tensor) -> Tensor:
        """The coordinates (x, y) of models, one model in each row."""
        return (models.double() - self.origin) @ self.axes.T

    def at(self, coordinates: Tensor) -> Tensor:
        """The weights at coordinates (x, y), one pair in each row."""
        there: Tensor = self.origin + coordinates.double() @ self.axes
        return there

    def distances(self, models: Tensor) -> Tensor:
        """The distance of each model from the plane."""
        lengths: Tensor = torch.linalg.vector_norm(models.double() - self.at(self.project(models)), dim=1)
        return lengths


def principal_plane(models: Tensor) -> Plane:
    """The plane through the last model along the two principal components of all models.

    The components are the top right singular vectors of the centred models, computed from the n × n matrix of inner
    products, so that n models of d weights take n² d operations. Each axis points from the first to the last model.

    Args:
        models: n models as rows, for example the global models of n rounds.

    Raises:
        RecipeError: there are fewer than three models, or they lie on one line.
    """
    if len(models) < 3:
        raise RecipeError(f"plane: {len(models)} models do not span a plane; give at least three")
    centred = models.double() - models.double().mean(dim=0)
    squares, left = torch.linalg.eigh(centred @ centred.T)
    squares, left = squares.flip(0).clamp(min=0), left.flip(1)
    total = float(squares.sum())
    _refuse_line(float(squares[0]) ** 0.5, float(squares[1]) ** 0.5)
    axes = _orthonormal(left[:, :2].T @ centred)
    along = axes @ (models[-1] - models[0]).double()
    axes = axes * torch.where(along < 0, -1.0, 1.0)[:, None]
    return Plane(models[-1].double(), axes, (float(squares[0]) / total, float(squares[1]) / total))


def plane_through(a: Tensor, b: Tensor, c: Tensor) -> Plane:
    """The plane through three models, with the first as its origin and the second on the x axis.

    Raises:
        RecipeError: the models lie on one line.
    """
    first, second = (b - a).double(), (c - a).double()
    length = float(first.norm())
    beside = second - (second @ first) / max(length, 1e-300) ** 2 * first
    _refuse_line(max(length, float(second.norm())), min(length, float(beside.norm())))
    return Plane(a.double(), _orthonormal(torch.stack([first, second])))


def _refuse_line(long: float, wide: float) -> None:
    if not wide > _FLAT * long:
        raise RecipeError("plane: the models lie on one line, so they do not span a plane")


def _orthonormal(rows: Tensor) -> Tensor:
    """Gram–Schmidt of two rows, with their signs."""
    basis, factor = torch.linalg.qr(rows.T)
    signed: Tensor = (basis * factor.diagonal().sign()).T
    return signed.contiguous()


def surface(
    objective: Objective,
    plane: Plane,
    around: Tensor,
    points: int = 25,
) -> Landscape:
    """The mean loss over the part of a plane that holds some points, with a margin.

    Args:
        objective: the mean loss, as a function of the weights of the plane.
        plane: the plane.
        around: the coordinates (x, y) of the points to cover, one pair in each row.
        points: number of grid points along each axis.

    Returns:
        The landscape in the coordinates of the plane; its centre is f at the plane's origin.
    """
    low, high = around.double().amin(dim=0), around.double().amax(dim=0)
    # At least a third of the longer side, so that a nearly straight trajectory still has a surface.
    half = torch.clamp((high - low) / 2, min=float((high - low).max()) / 6) * (1 + 2 * MARGIN)
    middle = (low + high) / 2
    with objective.at(plane.at(middle)):
        grid = landscape(objective, [*(half[:, None] * plane.axes)], 1.0, points)
    with objective.at(plane.origin):
        centre = objective.value()
    return Landscape(middle.numpy()[:, None] + half.numpy()[:, None] * grid.axes, grid.values, centre)
