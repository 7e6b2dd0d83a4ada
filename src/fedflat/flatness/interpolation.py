"""The loss on the straight line between two models, and the barrier on it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedflat.errors import RecipeError
from fedflat.flatness.matching import match as matching
from fedflat.flatness.objective import Objective
from fedflat.flatness.symmetry import permuted
from fedflat.local import Batch, Loss

Floats = NDArray[np.float64]
_FEWEST = 3  # a barrier needs a point between the ends


@dataclass(frozen=True, eq=False)
class Interpolation:
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
    data: Sequence[Batch],
    loss: Loss = cross_entropy,
    points: int = 25,
    match: bool = False,
    progress: Callable[[], object] | None = None,
) -> Interpolation:
    """Evaluates the mean loss on the line between two models. Both stay unchanged.

    Args:
        a: the first model, at α = 0.
        b: the second model, at α = 1, of the same architecture.
        data: the samples, as batches of inputs and labels.
        loss: the mean loss of a batch, given outputs and labels.
        points: number of evenly spaced α, the ends included.
        match: first reorder the hidden units of b to match a (Ainsworth et al. 2022). This does not change its
            function, but two models that were trained from different seeds order their units differently.
        progress: called after each point.

    Raises:
        RecipeError: the models differ in their shapes or frozen weights, keep running statistics, or cannot be matched.

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
    objective = Objective(copy.deepcopy(a), loss, data)
    start, end = objective.weights, _trained(b, objective)
    alphas, losses = np.linspace(0.0, 1.0, points), []
    for alpha in alphas.tolist():
        with objective.at((1 - alpha) * start + alpha * end):
            losses.append(objective.value())
        if progress:
            progress()
    return Interpolation(alphas, np.array(losses), float((end - start).norm()), objective.samples, match)


def _trained(module: nn.Module, objective: Objective) -> Tensor:
    """The weights of a module in the objective's order."""
    return objective.layout.flatten(dict(module.named_parameters())).to(objective.weights)


def _check(a: nn.Module, b: nn.Module) -> None:
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
