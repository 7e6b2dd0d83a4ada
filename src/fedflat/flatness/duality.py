"""Activity–weight duality: the gap between test and train loss as moves of one layer's weights.

A layer z = W a cannot tell a change of its input from a change of its weights. Let a be what a train sample sends into
it and a' what its test twin sends; the smallest ΔW with (W + ΔW) a = W a' is the pair's dual weight,

    ΔW = W Δa aᵀ / |a|²,      Δa = a' − a.

With it the train sample has the twin's loss (if nothing passes by the layer), so Δl = l(x') − l(x) is a finite
difference of the loss over weights, of slope g = Δl ΔW/|ΔW|², and Δl = g · ΔW. In the eigenbasis of the train loss's
Hessian in W, with means μ, deviations σ and correlations c over the pairs,

    mean Δl = Σₙ ℓₙ,      ℓₙ = mean gₙ ΔWₙ = cₙ σ_g,n σ_w,n + μ_g,n μ_w,n :

σ_g is the sharpness of the minimum, σ_w the size of its weights (Feng, Zhang, Tu, Nature Machine Intelligence 5, 2023).

A convolution, or a linear layer at many positions, sees many rows at once: A with a row for each patch or token. Then
ΔWᵀ = A⁺ (A' − A) Wᵀ is the dual weight in the sense of least squares, and what it misses is reported as the residual.
Nearly dependent patches make it long, mostly outside the top directions: look at a convolution's remainder first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedflat.errors import DataError, RecipeError, TrainingError, nearest
from fedflat.flatness.hessian import Hessian, top_eigenvalues
from fedflat.flatness.objective import Objective, flat
from fedflat.local import Batch, Loss

Direction = Literal["test_to_train", "train_to_test"]

DENSE = 3000  # weights, up to which the layer's Hessian is a matrix and the basis is complete
DEAD = 1e-12  # |a|² of a sample that no weight of the layer sees
CHUNK = 256  # samples whose distances are taken at once
BUDGET = 2**24  # numbers in one chunk's patches and dual weights


@dataclass(frozen=True)
class Pairs:
    """Which train and test samples are twins, by index, and how many classes only one side has."""

    train: Tensor
    test: Tensor
    missing: int


def pairs(train: Batch, test: Batch, direction: Direction = "test_to_train", limit: int = 2000, seed: int = 0) -> Pairs:
    """For each test sample the nearest train sample of its class in input space, or the other way round.

    Of more than `limit` samples, so many are drawn by the seed.

    >>> train = torch.tensor([[0.0], [1.0], [5.0]]), torch.tensor([0, 0, 1])
    >>> test = torch.tensor([[4.0], [0.4]]), torch.tensor([0, 0])
    >>> pairs(train, test)
    Pairs(train=tensor([1, 0]), test=tensor([0, 1]), missing=1)
    """
    if direction not in get_args(Direction):
        raise RecipeError(f"direction = {direction!r} is unknown; {nearest(direction, get_args(Direction))}")
    _at_least_one(limit=limit)
    for side, (_, labels) in {"train": train, "test": test}.items():
        if labels.ndim != 1:
            raise DataError(f"{side} labels: pairs need one class for each sample, not the shape {tuple(labels.shape)}")
    (inputs, labels), others = (test, train) if direction == "test_to_train" else (train, test)
    common = torch.isin(labels, others[1])
    if not common.any():
        raise DataError("train and test samples have no class in common, so there are no pairs")
    chosen = _drawn(common.nonzero().flatten(), limit, seed)
    twins = _twins((inputs[chosen], labels[chosen]), others)
    missing = len(set(labels.tolist()) ^ set(others[1].tolist()))
    return Pairs(twins, chosen, missing) if direction == "test_to_train" else Pairs(chosen, twins, missing)


def _at_least_one(**numbers: int) -> None:
    for name, number in numbers.items():
        if number < 1:
            raise RecipeError(f"{name} = {number}: it must be at least 1")


def _drawn(indices: Tensor, limit: int, seed: int) -> Tensor:
    """At most so many of the indices, in their order."""
    if len(indices) <= limit:
        return indices
    chance = torch.Generator().manual_seed(seed)
    return indices[torch.randperm(len(indices), generator=chance)[:limit].sort().values]


def _twins(samples: Batch, others: Batch) -> Tensor:
    """The nearest of the others of the same class: argmin |b|² − 2 a·b, in float64 because it is a difference."""
    inputs, labels = samples
    twins = torch.empty_like(labels, dtype=torch.long)
    for label in labels.unique():
        mine, theirs = (labels == label).nonzero().flatten(), (others[1] == label).nonzero().flatten()
        candidates = others[0][theirs].flatten(1).double()
        squares = candidates.square().sum(dim=1)
        for part in mine.split(CHUNK):
            products = inputs[part].flatten(1).double() @ candidates.T
            twins[part] = theirs[(squares - 2 * products).argmin(dim=1)]
    return twins


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
class Duality:
    """The gap of one layer, in total and direction by direction (falling eigenvalues of the layer's Hessian).

    `gap` is the mean test loss less the mean train loss; `paired_gap` is the mean Δl of the pairs, in which samples
    count as often as they are somebody's twin; the contributions ℓₙ and the `remainder` add up to it.
    Pairs without activities or without a change are left out of everything and counted in `skipped`.
    """

    layer: str
    pairs: int
    skipped: int
    missing: int
    gap: float
    paired_gap: float
    residual: float
    weight_norm: float
    eigenvalues: list[float]
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
    def spread(self) -> float:
        """Σ σ_w σ_g, which bounds what the fluctuations can contribute, since |c| ≤ 1."""
        return sum(w * g for w, g in zip(self.sigma_w, self.sigma_g, strict=True))

    @property
    def participation(self) -> float:
        """(Σ|ℓₙ|)² / Σ ℓₙ²: about how many directions carry the gap."""
        squares = sum(part**2 for part in self.contribution)
        return sum(map(abs, self.contribution)) ** 2 / squares if squares else 0.0


def duality(
    module: nn.Module,
    loss: Loss,
    train: Batch,
    test: Batch,
    layer: str,
    k: int = 100,
    direction: Direction = "test_to_train",
    limit: int = 2000,
    samples: int = 4000,
    batch: int = 256,
    seed: int = 0,
) -> Duality:
    """The gap as dual weights of a layer, its bias standing still; `layers_of` tells the layers.

    The basis is that of the Hessian of `samples` train samples: all directions of a layer with up to 3000 weights, and
    k directions of a larger one. A pass is over `batch` samples: more are faster, fewer take less memory. The loss is a
    mean over a batch; a sample's loss is that of a batch of one, which asks nothing more of the loss.
    """
    _at_least_one(k=k, samples=samples, batch=batch)
    here = _Layer(module, loss, layer)
    matched = pairs(train, test, direction, limit, seed)
    size = min(batch, here.room(train))
    some = _drawn(torch.arange(len(train[1])), samples, seed)
    objective = Objective(module, loss, _batches((train[0][some], train[1][some]), batch), [_parameter(layer)])
    eigenvalues, directions = _basis(objective, k, seed)
    w, squares, residuals, changes = _moves(here, directions, train, test, matched, size)
    on_train, on_test = (Objective(module, loss, _batches(side, batch)).value() for side in (train, test))
    return Duality(
        layer=layer,
        pairs=len(w),
        skipped=len(matched.test) - len(w),
        missing=matched.missing,
        gap=on_test - on_train,
        paired_gap=float(changes.mean()),
        residual=float(residuals.mean()),
        weight_norm=float(here.weight.norm()),
        eigenvalues=eigenvalues.tolist(),
        **_moments(w, w * (changes / squares)[:, None]),
    )


def _moves(
    here: _Layer, directions: Tensor, train: Batch, test: Batch, matched: Pairs, size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """ΔWₙ (pairs × directions), |ΔW|², residuals and Δl of the pairs that have a dual weight."""
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
    return w, squares, residuals, changes


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


def layers_of(module: nn.Module) -> list[str]:
    """The names of the layers that can be analysed: linear layers and ungrouped 2-d convolutions with trained weights.

    >>> layers_of(nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3, groups=4), nn.Flatten(), nn.Linear(4, 2)))
    ['0', '3']
    """
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    return [
        name
        for name, part in module.named_modules()
        if (isinstance(part, nn.Linear) or (isinstance(part, nn.Conv2d) and part.groups == 1))
        and _parameter(name) in trained
    ]


def _parameter(layer: str) -> str:
    return f"{layer}.weight" if layer else "weight"


class _Layer:
    """One layer of a network: what enters it, and what the network then loses."""

    def __init__(self, module: nn.Module, loss: Loss, name: str) -> None:
        part = dict(module.named_modules()).get(name)
        if isinstance(part, nn.Conv2d) and part.groups > 1:
            raise RecipeError(f"layer {name!r} is a grouped convolution, which has no dual here; take another layer")
        known = layers_of(module)
        if name not in known or not isinstance(part, nn.Linear | nn.Conv2d):
            raise RecipeError(f"layer {name!r} cannot be analysed; these can: {', '.join(known) or 'none'}")
        self.module, self.loss, self.name, self.part = module.eval(), loss, name, part
        self.weight = part.weight.detach().flatten(1)

    @torch.no_grad()
    def see(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The rows A of each sample (samples × positions × in), and its loss."""
        seen: list[Tensor] = []
        # A clone, since a later layer may work in place on what this one was given.
        with self.part.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0].clone())):
            outputs = self.module(batch[0])
        if len(seen) != 1:
            raise RecipeError(f"layer {self.name!r} runs {len(seen)} times in a pass; take one that runs once")
        rows = _patches(self.part, seen[0]) if isinstance(self.part, nn.Conv2d) else seen[0]
        losses = [self.loss(z, y) for z, y in zip(outputs.split(1), batch[1].split(1), strict=True)]
        activities, each = rows.reshape(len(losses), -1, rows.shape[-1]), torch.stack(losses)
        if not (activities.isfinite().all() and each.isfinite().all()):
            raise TrainingError(f"layer {self.name!r}: activities or losses are not finite; the model has diverged")
        return activities, each

    def room(self, samples: Batch) -> int:
        """How many pairs' rows and dual weights fit into the budget; a pass of one sample tells."""
        _, positions, inputs = self.see((samples[0][:1], samples[1][:1]))[0].shape
        return max(1, BUDGET // (inputs * (positions + len(self.weight))))


def _patches(conv: nn.Conv2d, images: Tensor) -> Tensor:
    """im2col: samples × positions × in, the rows that the kernels are multiplied with."""
    mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
    # The layer's own account of its margins covers numbers, "same" and "valid" alike.
    padded = F.pad(images, conv._reversed_padding_repeated_twice, mode=mode)
    return F.unfold(padded, conv.kernel_size, conv.dilation, stride=conv.stride).mT


def _batches(samples: Batch, size: int) -> list[Batch]:
    return list(zip(samples[0].split(size), samples[1].split(size), strict=True))


def _basis(objective: Objective, k: int, seed: int) -> tuple[Tensor, Tensor]:
    """Eigenvalues in falling order and eigenvectors as rows."""
    if objective.size > DENSE:
        eigen = top_eigenvalues(Hessian(objective), k, seed=seed)
        return eigen.values, eigen.vectors
    values, vectors = torch.linalg.eigh(_matrix(objective))
    return values.flip(0), vectors.T.flip(0)


def _matrix(objective: Objective) -> Tensor:
    """∇²f, row by row; each batch's first backward pass serves all of its rows."""
    total = torch.zeros(objective.size, objective.size, dtype=objective.dtype)
    for batch in objective.batches:
        mean = objective.loss(objective.module(batch[0]), batch[1])
        slopes = flat(torch.autograd.grad(mean, objective.parameters, create_graph=True))
        for row, slope in zip(total, slopes, strict=True):
            second = torch.autograd.grad(slope, objective.parameters, retain_graph=True)
            row.add_(flat(second), alpha=objective.share(batch))
    return total
