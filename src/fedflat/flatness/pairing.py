"""Pairs of train and test samples: nearest neighbours of the same class in input space.

Activity–weight duality compares the losses of the two samples of a pair. The paper pairs every train sample with its
nearest test sample; the authors' demo pairs every test sample with its nearest train sample. The two pairings weigh
the samples differently, and their mean differences may even have opposite signs, so we always compute both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from fedflat.errors import DataError, RecipeError, nearest
from fedflat.local import Batch

Direction = Literal["train_to_test", "test_to_train"]

DIRECTIONS: tuple[Direction, ...] = get_args(Direction)  # the paper's pairing comes first
CHUNK = 256  # number of samples whose distances are computed at once


@dataclass(frozen=True)
class Pairs:
    """The indices of paired train and test samples, and the number of classes that only one of the sets has."""

    train: Tensor
    test: Tensor
    missing: int


def pairs(train: Batch, test: Batch, direction: Direction = "train_to_test", limit: int = 0, seed: int = 0) -> Pairs:
    """Pairs each train sample with the nearest test sample of its class (as in the paper), or the other way round.

    Args:
        train: inputs and classes of the train samples.
        test: inputs and classes of the test samples.
        direction: `train_to_test` (the paper's pairing) or `test_to_train` (that of the authors' demo).
        limit: maximum number of pairs, drawn with the seed; 0 uses all samples.
        seed: seed of that draw.

    Raises:
        RecipeError: `direction` or `limit` is invalid.
        DataError: the labels are not one class per sample, or the two sets have no class in common.

    >>> train = torch.tensor([[0.0], [1.0], [5.0]]), torch.tensor([0, 0, 1])
    >>> test = torch.tensor([[4.0], [0.4]]), torch.tensor([0, 0])
    >>> pairs(train, test)
    Pairs(train=tensor([0, 1]), test=tensor([1, 1]), missing=1)
    >>> pairs(train, test, "test_to_train")
    Pairs(train=tensor([1, 0]), test=tensor([0, 1]), missing=1)
    """
    if direction not in DIRECTIONS:
        raise RecipeError(f"direction = {direction!r} is unknown; {nearest(direction, DIRECTIONS)}")
    if limit < 0:
        raise RecipeError(f"limit = {limit}: it must be at least 1, or 0 for all")
    for side, (_, labels) in {"train": train, "test": test}.items():
        if labels.ndim != 1:
            text = not labels.is_floating_point()
            hint = '; of a text, predict one token per window: data.predict = "next"' if text else ""
            shape = tuple(labels.shape)
            raise DataError(f"{side} labels: pairs need one class for each sample, not the shape {shape}{hint}")
    (inputs, labels), others = (train, test) if direction == "train_to_test" else (test, train)
    common = torch.isin(labels, others[1])
    if not common.any():
        values = "; their labels are values, and pairs need classes" if labels.is_floating_point() else ""
        raise DataError(f"train and test samples have no class in common, so there are no pairs{values}")
    chosen = drawn(common.nonzero().flatten(), limit, seed)
    twins = _twins((inputs[chosen], labels[chosen]), others)
    missing = len(set(labels.tolist()) ^ set(others[1].tolist()))
    return Pairs(chosen, twins, missing) if direction == "train_to_test" else Pairs(twins, chosen, missing)


def drawn(indices: Tensor, limit: int, seed: int) -> Tensor:
    """At most `limit` of the indices, in their original order; 0 means all."""
    if not limit or len(indices) <= limit:
        return indices
    chance = torch.Generator().manual_seed(seed)
    return indices[torch.randperm(len(indices), generator=chance)[:limit].sort().values]


def _twins(samples: Batch, others: Batch) -> Tensor:
    """The nearest other sample of the same class, argmin |b|² − 2 a·b; in float64 because this is a difference."""
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
