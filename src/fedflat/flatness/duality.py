"""Activity–weight duality: the gap between test and train loss, written as changes of one layer's weights.

For a layer z = W a, a change of the input has the same effect as some change of the weights. Let a be the layer's input
for a train sample and a' its input for the paired test sample. The pair's dual weight is the smallest ΔW with
(W + ΔW) a = W a',

    ΔW = W Δa aᵀ / |a|²,      Δa = a' − a.

With the weights W + ΔW the train sample has the loss of the test sample (if no connection bypasses the layer). So
Δl = l(x') − l(x) is a finite difference of the loss over the weights, with slope g = Δl ΔW/|ΔW|², and Δl = g · ΔW.
In the eigenbasis of the Hessian of the train loss in W, with means μ, standard deviations σ and correlations c over
the pairs,

    mean Δl = Σₙ ℓₙ,      ℓₙ = mean gₙ ΔWₙ = cₙ σ_g,n σ_w,n + μ_g,n μ_w,n .

Here σ_g is the sharpness of the minimum and σ_w the size of its weights (Feng, Zhang, Tu, Nature Machine Intelligence
5, 2023). The paper finds that the means are negligible and that cₙ hardly depends on n, so the gap is about
c Σ σ_w,n σ_g,n.

How close the mean Δl is to the gap depends on the pairs (see `pairing`), so every result contains both pairings.

A convolution, or a linear layer applied at many positions, sees a matrix A with one row for each patch or token. Then
the dual weight is the least-squares solution ΔWᵀ = A⁺ (A' − A) Wᵀ, and the part it cannot reach is reported as the
residual. Rows of padding are zero in both. Nearly dependent patches make ΔW long, mostly outside the top directions, so
check the remainder of a convolution first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedflat.errors import DataError, RecipeError
from fedflat.flatness.activities import SeenLayer, parameter_of
from fedflat.flatness.dense import dense_hessian
from fedflat.flatness.dual import draw_gap
from fedflat.flatness.dual_weights import dual_weights
from fedflat.flatness.hessian import Hessian, top_eigenvalues
from fedflat.flatness.objective import Objective
from fedflat.flatness.pairing import DIRECTIONS, Direction, Pairs, drawn, pairs
from fedflat.local import Batch, Loss
from fedflat.progress import track
from fedflat.shown import Shown
from fedflat.tokens import widened

DENSE = 3000  # up to this many weights, the layer's Hessian is a dense matrix and the basis is complete
DEAD = 1e-12  # below this |a|², a sample counts as having no activity in the layer
STILL = 1e-6  # a direction whose σ is below this fraction of the largest has a correlation of pure rounding error


@dataclass(frozen=True)
class Spread:
    """The spread of the correlations cₙ over the directions: mean, standard deviation and three quantiles."""

    mean: float
    std: float
    low: float  # 10 %
    median: float
    high: float  # 90 %


@dataclass(frozen=True)
class Pairing:
    """The mean Δl of one pairing, and the contribution of each eigenvector n of the layer's Hessian.

    `paired_gap` is the mean Δl over the pairs; a sample counts once for each pair it is in. The contributions ℓₙ and
    the `remainder` add up to it. Pairs without activity or without a change of activity are left out and counted in
    `skipped`. The lists have one entry for each direction n.
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
        """The part of the paired gap outside the directions."""
        return self.paired_gap - sum(self.contribution)

    @property
    def fluctuation(self) -> float:
        """Σ cₙ σ_w,n σ_g,n. The paper finds that this is about the whole gap."""
        products = zip(self.correlation, self.sigma_w, self.sigma_g, strict=True)
        return sum(c * w * g for c, w, g in products)

    @property
    def drift(self) -> float:
        """Σ μ_w,n μ_g,n. The paper finds that this is negligible."""
        return sum(w * g for w, g in zip(self.mean_w, self.mean_g, strict=True))

    @property
    def envelope(self) -> float:
        """Σ σ_w,n σ_g,n, an upper bound on the fluctuation because |c| ≤ 1."""
        return sum(w * g for w, g in zip(self.sigma_w, self.sigma_g, strict=True))

    @property
    def size(self) -> float:
        """√Σ σ_w,n², the spread of the dual weights."""
        return math.hypot(*self.sigma_w)

    @property
    def sharpness(self) -> float:
        """√Σ σ_g,n², the spread of the slopes."""
        return math.hypot(*self.sigma_g)

    @property
    def moving(self) -> list[int]:
        """The directions in which both ΔW and g vary; the correlation is defined only for these."""
        w, g = (STILL * max(sigma) for sigma in (self.sigma_w, self.sigma_g))
        return [n for n, (x, y) in enumerate(zip(self.sigma_w, self.sigma_g, strict=True)) if x > w and y > g]

    @property
    def correlations(self) -> Spread:
        """The spread of cₙ over the `moving` directions; all zero if there are none."""
        c = torch.tensor([self.correlation[n] for n in self.moving] or [0.0], dtype=torch.float64)
        low, median, high = c.quantile(torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)).tolist()
        return Spread(float(c.mean()), float(c.std(correction=0)), low, median, high)

    @property
    def participation(self) -> float:
        """(Σ|ℓₙ|)² / Σ ℓₙ², the effective number of directions that carry the gap."""
        squares = sum(part**2 for part in self.contribution)
        return sum(map(abs, self.contribution)) ** 2 / squares if squares else 0.0


@dataclass(frozen=True, repr=False)
class Duality(Shown):
    """The generalisation gap and both pairings of one layer, in the eigenbasis of the layer's Hessian.

    `eigenvalues` are in descending order. `train_loss` and `test_loss` are means over all samples given to `duality`.
    `missing` counts the classes that occur in only one of the two sets.
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
        """The generalisation gap: mean test loss minus mean train loss."""
        return self.test_loss - self.train_loss

    def caption(self) -> str:
        samples = f"{self.train_samples:,} training and {self.test_samples:,} test samples"
        return f"Activity–weight duality of layer {self.layer!r}, {samples}: gap {self.gap:.4g}"

    def rows(self) -> list[dict[str, Any]]:
        return [
            {
                "pairing": direction.replace("_", " "),
                "gap": self.gap,
                "gap of the pairs": found.paired_gap,
                "Σ c σ_w σ_g": found.fluctuation,
                "Σ μ_w μ_g": found.drift,
                "c": found.correlations.mean,
                "size": found.size,
                "sharpness": found.sharpness,
                "pairs": found.pairs,
            }
            for direction, found in self.pairings.items()
        ]

    def draw(self, axes: Any) -> None:
        draw_gap(axes, self)


def decompose(
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
    """Decomposes the generalisation gap into dual weights of one layer, for both pairings. The bias is held fixed.

    Args:
        module: the network. It is put into evaluation mode.
        loss: a mean over a batch. The loss of a sample is computed as a batch of one.
        train: inputs and classes of the train samples. `Duality.gap` uses all train and all test samples.
        test: inputs and classes of the test samples.
        layer: the layer's name, one of `layers_of(module)`.
        k: number of directions for a layer with more than 3000 weights. A smaller layer uses all its directions.
        limit: maximum number of pairs in each pairing, drawn with the seed; 0 uses all.
        samples: number of train samples for the Hessian whose eigenvectors form the basis; 0 uses all.
        batch: samples per forward pass. Larger batches are faster, smaller ones need less memory.
        seed: seed of all random draws.

    Raises:
        RecipeError: an argument is out of range, or the layer cannot be analysed.
        DataError: no pairs can be formed, or none has activities that differ.
    """
    for name, number, least in (("k", k, 1), ("limit", limit, 0), ("samples", samples, 0), ("batch", batch, 1)):
        if number < least:
            raise RecipeError(f"{name} = {number}: it must be at least 1{'' if least else ', or 0 for all'}")
    here = SeenLayer(module, loss, layer)
    width = max(inputs.shape[-1] for inputs, _ in (train, test))  # of texts, either half may be cut at its longest one
    train, test = widened(*train, width), widened(*test, width)
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
    """Computes ΔWₙ, |ΔW|² and Δl of the pairs that have a dual weight, and their moments."""
    chunks = []
    places = list(zip(matched.train.split(size), matched.test.split(size), strict=True))
    for i, j in track(places, "pairs"):
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
    """Moments over the pairs for each direction. The correlation is zero if ΔW or g does not vary."""
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
    """Eigenvalues in descending order, and the eigenvectors as rows."""
    if objective.size > DENSE:
        eigen = top_eigenvalues(Hessian(objective), k, seed=seed)
        return eigen.values, eigen.vectors
    hessian = dense_hessian(objective, rows)
    # In double precision: in float32, LAPACK may not converge for a layer with many dead units.
    values, vectors = (part.to(hessian.dtype) for part in torch.linalg.eigh(hessian.double()))
    return values.flip(0), vectors.T.flip(0)
