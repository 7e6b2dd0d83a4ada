"""Makes a data set from arrays of inputs, labels and owners, for tables that do not describe their columns."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedflat.errors import DataError
from fedflat.federation.dataset import Dataset, Samples
from fedflat.randomness import generator


class Raw(NamedTuple):
    """Inputs and labels of a part, and optionally an owner for each sample."""

    inputs: NDArray[Any]
    labels: NDArray[Any]
    owners: NDArray[Any] | None


def assembled(name: str, train: Raw, test: Raw, vocabulary: int) -> Dataset:
    """Make a data set of two parts: whole numbers and words are classes, floating numbers are targets.

    Raises:
        DataError: the parts do not fit together, or their labels cannot be used.
    """
    if train.inputs.shape[1:] != test.inputs.shape[1:]:
        raise DataError(f"{name}: inputs of shape {train.inputs.shape[1:]} and, for testing, {test.inputs.shape[1:]}")
    labels, count, task = labels_of(name, np.concatenate([train.labels, test.labels]))
    owners = None
    if train.owners is not None and test.owners is not None:
        names = np.concatenate([train.owners, test.owners])
        owners = torch.from_numpy(np.unique(names, return_inverse=True)[1].astype(np.int64))
    cut = len(train.labels)
    parts = [
        Samples(
            torch.from_numpy(np.ascontiguousarray(raw.inputs)), labels[rows], None if owners is None else owners[rows]
        )
        for raw, rows in ((train, slice(cut)), (test, slice(cut, None)))
    ]
    images = train.inputs.dtype == np.uint8
    scale = (0.5,) * train.inputs.shape[1] if images else ()  # images are mapped to [−1, 1]
    return Dataset(name, parts[0], parts[1], count, scale, scale, vocabulary, task)


def labels_of(name: str, labels: NDArray[Any]) -> tuple[Tensor, int, str]:
    """The labels as a tensor, the number of classes or targets, and the task that they are for."""
    if labels.dtype.kind == "f":
        if not np.isfinite(labels).all():
            raise DataError(f"{name}: a label is not a finite number")
        many = labels.ndim == 2 and bool(np.isin(labels, (0, 1)).all())
        targets = torch.from_numpy(labels.astype(np.float32))
        return targets, 1 if labels.ndim == 1 else labels.shape[1], "multi-label" if many else "regression"
    if labels.dtype.kind in "Ub":
        names, numbers = np.unique(labels, return_inverse=True)
        return torch.from_numpy(numbers.reshape(labels.shape).astype(np.int64)), len(names), "classification"
    if labels.dtype.kind not in "iu":
        raise DataError(f"{name}: labels are {labels.dtype}; give whole numbers, words or floating numbers")
    if labels.ndim == 1 and not 0 <= labels.min() <= labels.max() < len(labels):
        raise DataError(f"{name}: labels go from {labels.min()} to {labels.max()}; classes count from 0")
    task = "classification" if labels.ndim == 1 else "next-token"
    return torch.from_numpy(labels.astype(np.int64)), 1 + int(labels.max()), task


def held_out_rows(count: int, share: float, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the rows that are left for training, and those drawn for testing.

    Raises:
        DataError: the share is not between 0 and 1, or leaves a part without rows.
    """
    tested = round(float(share) * count)
    if not 0 < float(share) < 1 or not 0 < tested < count:
        raise DataError(f"test = {share}: is not a share of {count} samples; give one between 0 and 1, or test data")
    order = torch.randperm(count, generator=generator(seed, "held out")).numpy()
    return np.sort(order[tested:]), np.sort(order[:tested])
