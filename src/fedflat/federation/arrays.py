"""A user's own arrays in one .npz file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedflat.errors import DataError
from fedflat.federation import formats
from fedflat.federation.dataset import Dataset, Samples


def read_arrays(path: Path | None) -> Dataset:
    """A user's own .npz: x_train, y_train, x_test, y_test, and optionally groups_train, groups_test, mean and std.

    Inputs are uint8 images (N, C, H, W) or (N, H, W), or floating numbers (N, …). Labels are classes that count from 0,
    or floating numbers (N,) or (N, K): several labels of a sample if all of (N, K) are 0 or 1, else values to predict.
    Without `mean` and `std`, images are mapped to [−1, 1] (.5, .5) and floating numbers stay as they are (0, 1).
    """
    if path is None:
        raise DataError("the data set arrays needs the path of an .npz file as its directory")
    content = formats.read_npz(
        path, ["x_train", "y_train", "x_test", "y_test"], ["groups_train", "groups_test", "mean", "std"]
    )
    train, test = (_own_samples(path, content, part) for part in ("train", "test"))
    if train.inputs.shape[1:] != test.inputs.shape[1:] or train.inputs.dtype != test.inputs.dtype:
        raise DataError(f"{path} has inputs of different shape or type in x_train and x_test")
    channels = train.inputs.shape[1] if train.inputs.ndim == 4 else 1
    usual = (0.5, 0.5) if train.inputs.dtype == torch.uint8 else (0.0, 1.0)
    mean, std = (
        _statistic(path, content, name, channels, value) for name, value in zip(("mean", "std"), usual, strict=True)
    )
    if min(std) <= 0:
        raise DataError(f"{path} has a std that is not positive")
    classes, task = _classes(path, train.labels, test.labels)
    return Dataset("arrays", train, test, classes, mean, std, task=task)


def _classes(path: Path, train: Tensor, test: Tensor) -> tuple[int, str]:
    """Return the number of classes or targets, and the task that the labels are for."""
    if train.dtype != test.dtype or train.shape[1:] != test.shape[1:]:
        raise DataError(f"{path} has labels of different shape or type in y_train and y_test")
    if train.is_floating_point():
        marks = train.ndim == 2 and all(bool(((part == 0) | (part == 1)).all()) for part in (train, test))
        return train[0].numel(), "multi-label" if marks else "regression"
    classes = 1 + max(int(train.max()), int(test.max()))
    if classes > len(train) + len(test):
        raise DataError(
            f"{path} has the label {classes - 1}, which makes more classes than samples; count them from 0, or store "
            "values to predict as floating numbers"
        )
    return classes, "classification"


def _own_samples(path: Path, content: dict[str, NDArray[Any]], part: str) -> Samples:
    inputs = _own_inputs(path, f"x_{part}", content[f"x_{part}"])
    labels = _own_labels(path, f"y_{part}", content[f"y_{part}"], len(inputs))
    groups = content.get(f"groups_{part}")
    owners = None if groups is None else _own_integers(path, f"groups_{part}", groups, len(inputs))
    return Samples(
        torch.from_numpy(inputs), torch.from_numpy(labels), None if owners is None else torch.from_numpy(owners)
    )


def _own_inputs(path: Path, name: str, inputs: NDArray[Any]) -> NDArray[Any]:
    if inputs.ndim < 2 or not inputs.size:
        raise DataError(f"{path} has {name} of shape {inputs.shape}; one row per sample is expected, and at least one")
    if inputs.dtype == np.uint8 and inputs.ndim in (3, 4):
        images = inputs[:, None] if inputs.ndim == 3 else inputs
        if images.shape[1] > 4 and images.shape[3] <= 4:
            raise DataError(f"{path} has {name} of shape {images.shape}; store images as (N, C, H, W)")
        return np.ascontiguousarray(images)
    if not np.issubdtype(inputs.dtype, np.floating):
        raise DataError(
            f"{path} has {name} as {inputs.dtype}, {inputs.ndim} axes; store uint8 images or floating numbers"
        )
    if not np.isfinite(inputs).all():
        raise DataError(f"{path} has a number in {name} that is not finite")
    return np.ascontiguousarray(inputs, np.float32)


def _own_labels(path: Path, name: str, values: NDArray[Any], samples: int) -> NDArray[Any]:
    if np.issubdtype(values.dtype, np.floating):
        if values.ndim not in (1, 2) or len(values) != samples or not values.size:
            raise DataError(
                f"{path} has {name} of shape {values.shape}; "
                f"a number or a row for each of {samples} samples is expected"
            )
        if not np.isfinite(values).all():
            raise DataError(f"{path} has a number in {name} that is not finite")
        return np.ascontiguousarray(values, np.float32)
    labels = _own_integers(path, name, values, samples)
    if labels.min() < 0:
        raise DataError(f"{path} has the label {labels.min()} in {name}; labels count from 0")
    return labels


def _own_integers(path: Path, name: str, values: NDArray[Any], samples: int) -> NDArray[np.int64]:
    if not np.issubdtype(values.dtype, np.integer) or values.size != samples:
        raise DataError(
            f"{path} has {name} as {values.size} × {values.dtype}; an integer for each of {samples} samples is expected"
        )
    return values.reshape(samples).astype(np.int64)


def _statistic(
    path: Path, content: dict[str, NDArray[Any]], name: str, channels: int, usual: float
) -> tuple[float, ...]:
    values = content.get(name, np.array(usual)).ravel()
    if values.size not in (1, channels) or not np.isfinite(values).all():
        raise DataError(f"{path} has {name} of {values.size} numbers; one for each of {channels} channels is expected")
    return tuple(float(value) for value in np.broadcast_to(values, channels))
