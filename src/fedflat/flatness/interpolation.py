"""The loss on the straight line between two models, and the barrier on it."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedflat.errors import RecipeError
from fedflat.flatness.door import objective_of
from fedflat.flatness.matching import match as matching
from fedflat.flatness.routes import draw_path
from fedflat.flatness.samples import Collate
from fedflat.flatness.symmetry import permuted
from fedflat.local import Loss
from fedflat.progress import track
from fedflat.shown import Shown

Floats = NDArray[np.float64]
_FEWEST = 3  # a barrier needs a point between the ends


@dataclass(frozen=True, eq=False, repr=False)
class Interpolation(Shown):
    """The loss along w_α = (1 − α) w₀ + α w₁.

    Attributes:
        alphas: the positions α, from 0 to 1.
        losses: f(w_α); inf or nan if the loss overflowed.
        distance: ‖w₁ − w₀‖.
        samples: number of samples of f.
        matched: whether the units of the second model were reordered to match the first.
    """

    alphas: Floats
    losses: Floats
    distance: float
    samples: int
    matched: bool

    pictured: ClassVar[bool] = True

    def caption(self) -> str:
        matched = ", its units matched" if self.matched else ""
        return (
            f"Loss over {self.samples:,} samples on the line to a model at distance {self.distance:.4g}{matched}: "
            f"barrier {self.barrier:.4g} at α = {self.peak:.3g}"
        )

    def rows(self) -> list[dict[str, Any]]:
        points = zip(self.alphas.tolist(), self.losses.tolist(), self.excess.tolist(), strict=True)
        return [{"α": alpha, "loss": loss, "above the chord": above} for alpha, loss, above in points]

    def draw(self, axes: Any) -> None:
        draw_path(axes, self)

    @property
    def excess(self) -> Floats:
        """f(w_α) − (1 − α) f(w₀) − α f(w₁): the height above the chord."""
        return np.asarray(self.losses - (1 - self.alphas) * self.losses[0] - self.alphas * self.losses[-1])

    @property
    def barrier(self) -> float:
        """max_α [f(w_α) − (1 − α) f(w₀) − α f(w₁)] over the points, which include the ends; so it is at least 0.

        >>> Interpolation(np.array([0, 0.5, 1]), np.array([1.0, 4.0, 2.0]), 1.0, 10, False).barrier
        2.5
        """
        return float(np.nan_to_num(self.excess, nan=np.inf, posinf=np.inf).max())

    @property
    def peak(self) -> float:
        """The α of the barrier."""
        return float(self.alphas[np.nan_to_num(self.excess, nan=np.inf, posinf=np.inf).argmax()])


def interpolate(
    a: nn.Module,
    b: nn.Module,
    data: Any,
    loss: Loss | None = None,
    points: int = 25,
    match: bool = False,
    *,
    samples: int = 1000,
    batch: int = 100,
    seed: int = 0,
    collate: Collate | None = None,
) -> Interpolation:
    """Evaluates the mean loss on the line between two models. Both stay unchanged.

    Args:
        a: the first model, at α = 0.
        b: the second model, at α = 1, of the same architecture.
        data: a pair of tensors or arrays, a Dataset, a DataLoader, a list of batches, or a `Federation`.
        loss: maps outputs and labels to a number; by default cross-entropy, or the squared error for real labels.
        points: number of evenly spaced α, the ends included.
        match: first reorder the hidden units of b to match a (Ainsworth et al. 2022). This does not change its
            function, but two models that were trained from different seeds order their units differently.
        samples: maximum number of samples, drawn with the seed; 0 takes all.
        batch: samples in a batch, where the data do not come in batches.
        seed: seed of that draw.
        collate: turns one batch of the data into (inputs, labels).

    Raises:
        RecipeError: the models differ in their shapes or frozen weights, keep running statistics, or cannot be matched.
        DataError: the data cannot be read, or model and loss do not fit them.

    >>> x, (a, b) = torch.tensor([[1.0]]), (nn.Linear(1, 1, bias=False) for _ in range(2))
    >>> _ = nn.init.constant_(a.weight, 1.0), nn.init.constant_(b.weight, -1.0)
    >>> path = interpolate(a, b, [(x, x)], lambda z, y: (z.square() - 1).square().mean(), points=5)   # (w² − 1)²
    >>> path.losses.tolist(), path.barrier
    ([0.0, 0.5625, 1.0, 0.5625, 0.0], 1.0)
    """
    if points < _FEWEST:
        raise RecipeError(f"interpolation: points is {points}; it must be at least {_FEWEST}")
    _check(a, b)
    if match:
        b = permuted(b, matching(a, b).orders)
    own = copy.deepcopy(a)
    with objective_of(own, data, loss, samples=samples, batch=batch, seed=seed, collate=collate) as objective:
        start, end = objective.weights, objective.weights_of(b)
        alphas, losses = np.linspace(0.0, 1.0, points), []
        for alpha in track(alphas.tolist(), "interpolation"):
            with objective.at((1 - alpha) * start + alpha * end):
                losses.append(objective.value())
        return Interpolation(alphas, np.array(losses), float((end - start).norm()), objective.samples, match)


def _check(a: nn.Module, b: nn.Module) -> None:
    for place, model in (("first", a), ("second", b)):
        if not isinstance(model, nn.Module):
            raise RecipeError(f"interpolation: the {place} model is a {type(model).__name__}; give two modules")
    ours, theirs = ({name: tuple(p.shape) for name, p in each.named_parameters()} for each in (a, b))
    for name in ours | theirs:
        if ours.get(name) != theirs.get(name):
            here, there = (shapes.get(name, "nothing") for shapes in (ours, theirs))
            raise RecipeError(
                f"interpolation: {name} is {here} in the first model and {there} in the second; "
                "only models of one architecture have a line between them"
            )
        if not (first := a.get_parameter(name)).requires_grad and not torch.equal(first, b.get_parameter(name)):
            raise RecipeError(f"interpolation: {name} is frozen and differs between the two models")
    statistics = [name for name, buffer in a.named_buffers() if buffer.is_floating_point()]
    if statistics:
        raise RecipeError(
            f"interpolation: the model keeps running statistics ({statistics[0]}), which do not follow the weights "
            "along a line; use a model without them"
        )
