"""Activity–weight duality: the gap between test and train loss as moves of one layer's weights.

A layer z = W a cannot tell a change of its input from a change of its weights. Let a be what a train sample sends into
it and a' what its test twin sends; the smallest ΔW with (W + ΔW) a = W a' is the pair's dual weight,

    ΔW = W Δa aᵀ / |a|²,      Δa = a' − a.

With it the train sample has the twin's loss (if nothing passes by the layer), so Δl = l(x') − l(x) is a finite
difference of the loss over weights, of slope g = Δl ΔW/|ΔW|², and Δl = g · ΔW. In the eigenbasis of the train loss's
Hessian in W, with means μ, deviations σ and correlations c over the pairs,

    mean Δl = Σₙ ℓₙ,      ℓₙ = mean gₙ ΔWₙ = cₙ σ_g,n σ_w,n + μ_g,n μ_w,n :

σ_g is the sharpness of the minimum, σ_w the size of its weights (Feng, Zhang, Tu, Nature Machine Intelligence 5, 2023).
The paper finds that the means are negligible and that cₙ hardly depends on n, so that the gap is about c Σ σ_w,n σ_g,n.

Whether the mean Δl is near the gap depends on the pairs (`pairing`), so every result has both pairings.

A convolution, or a linear layer at many positions, sees many rows at once: A with a row for each patch or token. Then
ΔWᵀ = A⁺ (A' − A) Wᵀ is the dual weight in the sense of least squares, and what it misses is reported as the residual.
Nearly dependent patches make it long, mostly outside the top directions: look at a convolution's remainder first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedflat.errors import DataError, RecipeError
from fedflat.flatness.activities import SeenLayer, parameter_of
from fedflat.flatness.hessian import Hessian, top_eigenvalues
from fedflat.flatness.objective import Objective, flat
from fedflat.flatness.pairing import DIRECTIONS, Direction, Pairs, drawn, pairs
from fedflat.rule import Batch, Loss

DENSE = 3000  # weights, up to which the layer's Hessian is a matrix and the basis is complete
DEAD = 1e-12  # |a|² of a sample that no weight of the layer sees
STILL = 1e-6  # of the largest σ: a direction below it does not vary, and its correlation is rounding


@dataclass(frozen=True)
class DualWeights:
    """ΔW_k = left_kᵀ right_k for pairs k: left (k × r × out), right (k × r × in) with orthonormal rows.

    A linear layer at one position has r = 1. `residuals` are |A ΔWᵀ − (A' − A) Wᵀ| / |(A' − A) Wᵀ|.
    """

    left: Tensor
    right: Tensor
    residuals: Tensor

    @property
    def squares(self) -> Tensor:
        """|ΔW_k|²."""
        return self.left.square().sum(dim=(1, 2))

    def along(self, directions: Tensor) -> Tensor:
        """ΔW_k · V_n as k × n, for directions n × out × in; only for r > 1 are the ΔW_k of this chunk made."""
        if self.left.shape[1] == 1:
            left, right = self.left[:, 0], self.right[:, 0]
            return torch.stack([(right @ direction.T * left).sum(dim=1) for direction in directions], dim=1)
        return (self.left.mT @ self.right).flatten(1) @ directions.flatten(1).T


def dual_weights(before: Tensor, after: Tensor, weight: Tensor) -> DualWeights:
    """The smallest ΔW with A (W + ΔW)ᵀ = A' Wᵀ in the sense of least squares, by the thin A = Q S V: ΔWᵀ = Vᵀ S⁺ Qᵀ U.

    `before` and `after` are A and A' (pairs × positions × in), `weight` is W (out × in), and U = (A' − A) Wᵀ.

    >>> a, b, w = torch.tensor([[[2.0, 0.0]]]), torch.tensor([[[2.0, 4.0]]]), torch.tensor([[5.0, 3.0]])
    >>> dual = dual_weights(a, b, w)
    >>> dual.left.mT @ dual.right   # 3 · 4 = 6 · 2: the first weight makes up for what the second input gained
    tensor([[[6., 0.]]])
    """
    wanted = (after - before) @ weight.T
    q, s, right = torch.linalg.svd(before, full_matrices=False)
    floor = s[:, :1] * max(before.shape[1:]) * torch.finfo(s.dtype).eps
    inverse = torch.where(s > floor, 1 / s, 0)
    left = inverse[..., None] * (q.mT @ wanted)
    missed = wanted - q @ (s[..., None] * left)
    return DualWeights(left, right, missed.norm(dim=(1, 2)) / wanted.norm(dim=(1, 2)))


@dataclass(frozen=True)
class Spread:
    """How far the correlations cₙ of the directions are apart: mean, deviation, and three quantiles."""

    mean: float
    std: float
    low: float  # 10 %
    median: float
    high: float  # 90 %


@dataclass(frozen=True)
class Pairing:
    """The pairs of one direction: their mean Δl, and what each eigenvector n of the layer's Hessian makes of it.

    `paired_gap` is the mean Δl, in which samples count as often as they are somebody's twin; the contributions ℓₙ and
    the `remainder` add up to it. Pairs without activities or without a change are left out of everything and counted
    in `skipped`.
    """

    pairs: int
    skipped: int
    paired_gap: float
    residual: float
    mean_w: list[float]
    mean_g: list[float]
    sigma_w: list[float]
    sigma_g: list[float]
    correlation: list[float]
    contribution: list[float]

    @property
    def remainder(self) -> float:
        """What the directions leave of the paired gap."""
        return self.paired_gap - sum(self.contribution)

    @property
    def fluctuation(self) -> float:
        """Σ cₙ σ_w,n σ_g,n, which the paper finds to be about the whole gap."""
        products = zip(self.correlation, self.sigma_w, self.sigma_g, strict=True)
        return sum(c * w * g for c, w, g in products)

    @property
    def drift(self) -> float:
        """Σ μ_w,n μ_g,n, which the paper finds to be negligible."""
        return sum(w * g for w, g in zip(self.mean_w, self.mean_g, strict=True))

    @property
    def envelope(self) -> float:
        """Σ σ_w,n σ_g,n, which bounds the fluctuation, since |c| ≤ 1."""
        return sum(w * g for w, g in zip(self.sigma_w, self.sigma_g, strict=True))

    @property
    def size(self) -> float:
        """√Σ σ_w,n²: how far the dual weights scatter."""
        return math.hypot(*self.sigma_w)

    @property
    def sharpness(self) -> float:
        """√Σ σ_g,n²: how far the slopes scatter."""
        return math.hypot(*self.sigma_g)

    @property
    def moving(self) -> list[int]:
        """The directions in which both ΔW and g vary: the others have no correlation."""
        w, g = (STILL * max(sigma, default=0.0) for sigma in (self.sigma_w, self.sigma_g))
        return [n for n, (x, y) in enumerate(zip(self.sigma_w, self.sigma_g, strict=True)) if x > w and y > g]

    @property
    def correlations(self) -> Spread:
        """The spread of cₙ over the directions that move; all zero where none does."""
        c = torch.tensor([self.correlation[n] for n in self.moving] or [0.0], dtype=torch.float64)
        low, median, high = c.quantile(torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)).tolist()
        return Spread(float(c.mean()), float(c.std(correction=0)), low, median, high)

    @property
    def participation(self) -> float:
        """(Σ|ℓₙ|)² / Σ ℓₙ²: about how many directions carry the gap."""
        squares = sum(part**2 for part in self.contribution)
        return sum(map(abs, self.contribution)) ** 2 / squares if squares else 0.0


@dataclass(frozen=True)
class Duality:
    """The gap of one layer beside both pairings, in one basis (falling eigenvalues of the layer's Hessian).

    `train_loss` and `test_loss` are means over all samples that were looked at; `missing` counts the classes that only
    one side has.
    """

    layer: str
    train_samples: int
    test_samples: int
    train_loss: float
    test_loss: float
    missing: int
    weight_norm: float
    eigenvalues: list[float]
    pairings: dict[Direction, Pairing]

    @property
    def gap(self) -> float:
        """The generalisation gap: the mean test loss less the mean train loss."""
        return self.test_loss - self.train_loss


def duality(
    module: nn.Module,
    loss: Loss,
    train: Batch,
    test: Batch,
    layer: str,
    k: int = 100,
    limit: int = 2000,
    samples: int = 4000,
    batch: int = 256,
    seed: int = 0,
) -> Duality:
    """The gap as dual weights of a layer, its bias standing still, by both pairings.

    Args:
        module: the network, in evaluation mode from here on.
        loss: a mean over a batch; a sample's loss is that of a batch of one, which asks nothing more of the loss.
        train: inputs and classes of the train samples; `gap` is over all of them, and of all test samples.
        test: inputs and classes of the test samples.
        layer: the layer's name, one of `layers_of(module)`.
        k: directions of a layer with more than 3000 weights; a smaller one has all its directions.
        limit: pairs of a pairing at most, drawn by the seed; 0 takes all.
        samples: train samples that the basis, the eigenvectors of their Hessian, is taken from; 0 takes all.
        batch: samples of a pass: more are faster, fewer take less memory.
        seed: seed of what is drawn.
    """
    for name, number, least in (("k", k, 1), ("limit", limit, 0), ("samples", samples, 0), ("batch", batch, 1)):
        if number < least:
            raise RecipeError(f"{name} = {number}: it must be at least 1{'' if least else ', or 0 for all'}")
    here = SeenLayer(module, loss, layer)
    matched = {direction: pairs(train, test, direction, limit, seed) for direction in DIRECTIONS}
    size = min(batch, here.room(train))
    some = drawn(torch.arange(len(train[1])), samples, seed)
    objective = Objective(module, loss, _batches((train[0][some], train[1][some]), batch), [parameter_of(layer)])
    eigenvalues, directions = _basis(objective, k, here.rows(train, batch), seed)
    on_train, on_test = (Objective(module, loss, _batches(side, batch)).value() for side in (train, test))
    return Duality(
        layer=layer,
        train_samples=len(train[1]),
        test_samples=len(test[1]),
        train_loss=on_train,
        test_loss=on_test,
        missing=matched["train_to_test"].missing,
        weight_norm=float(here.weight.norm()),
        eigenvalues=eigenvalues.tolist(),
        pairings={name: _pairing(here, directions, train, test, each, size) for name, each in matched.items()},
    )


def _pairing(here: SeenLayer, directions: Tensor, train: Batch, test: Batch, matched: Pairs, size: int) -> Pairing:
    """ΔWₙ, |ΔW|² and Δl of the pairs that have a dual weight, and their moments."""
    chunks = []
    for i, j in zip(matched.train.split(size), matched.test.split(size), strict=True):
        before, easy = here.see((train[0][i], train[1][i]))
        after, hard = here.see((test[0][j], test[1][j]))
        dual = dual_weights(before, after, here.weight)
        alive = (before.square().sum(dim=(1, 2)) >= DEAD) & (dual.squares > 0)
        components = dual.along(directions.view(-1, *here.weight.shape))
        chunks.append([x[alive].double() for x in (components, dual.squares, dual.residuals, hard - easy)])
    w, squares, residuals, changes = (torch.cat(parts) for parts in zip(*chunks, strict=True))
    if not len(w):
        raise DataError(f"layer {here.name!r}: no pair has activities that differ, so there is nothing to analyse")
    return Pairing(
        pairs=len(w),
        skipped=len(matched.test) - len(w),
        paired_gap=float(changes.mean()),
        residual=float(residuals.mean()),
        **_moments(w, w * (changes / squares)[:, None]),
    )


def _moments(w: Tensor, g: Tensor) -> dict[str, list[float]]:
    """Over the pairs, for each direction; a correlation is zero where one of the two does not vary."""
    means, sigmas = [x.mean(dim=0) for x in (w, g)], [x.std(dim=0, correction=0) for x in (w, g)]
    correlation = ((w - means[0]) * (g - means[1])).mean(dim=0) / (sigmas[0] * sigmas[1])
    return {
        "mean_w": means[0].tolist(),
        "mean_g": means[1].tolist(),
        "sigma_w": sigmas[0].tolist(),
        "sigma_g": sigmas[1].tolist(),
        "correlation": correlation.nan_to_num(0, 0, 0).tolist(),
        "contribution": (g * w).mean(dim=0).tolist(),
    }


def _batches(samples: Batch, size: int) -> list[Batch]:
    return list(zip(samples[0].split(size), samples[1].split(size), strict=True))


def _basis(objective: Objective, k: int, rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Eigenvalues in falling order and eigenvectors as rows."""
    if objective.size > DENSE:
        eigen = top_eigenvalues(Hessian(objective), k, seed=seed)
        return eigen.values, eigen.vectors
    values, vectors = torch.linalg.eigh(_matrix(objective, rows))
    return values.flip(0), vectors.T.flip(0)


def _matrix(objective: Objective, rows: int) -> Tensor:
    """∇²f, so many rows at once; each batch's first backward pass serves all of its rows."""
    total = torch.zeros(objective.size, objective.size, dtype=objective.dtype)
    unit = torch.eye(objective.size, dtype=objective.dtype)
    for batch in objective.batches:
        mean = objective.loss(objective.module(batch[0]), batch[1])
        slope = flat(torch.autograd.grad(mean, objective.parameters, create_graph=True))
        for some, directions in zip(total.split(rows), unit.split(rows), strict=True):
            some.add_(_products(slope, objective.parameters, directions), alpha=objective.share(batch))
    return total


def _products(slope: Tensor, parameters: Sequence[Tensor], directions: Tensor) -> Tensor:
    """H v for each direction v, as rows; one by one where a user's own function cannot be batched."""
    if len(directions) > 1:
        with suppress(RuntimeError):
            found = torch.autograd.grad(slope, parameters, directions, retain_graph=True, is_grads_batched=True)
            return torch.cat([part.flatten(1) for part in found], dim=1)
    return torch.stack([flat(torch.autograd.grad(slope, parameters, v, retain_graph=True)) for v in directions])
