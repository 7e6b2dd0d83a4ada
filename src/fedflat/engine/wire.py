"""Vectors and uploads as arrays and plain numbers, the form in which they leave a process."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from fedflat.parts import Upload
from fedflat.rule import Vectors

Arrays = dict[str, np.ndarray[Any, Any]]
NUMBERS = ("client", "samples", "steps", "lr", "loss", "notes")


def arrays(vectors: Vectors) -> Arrays:
    """The vectors as arrays; they share memory where they can."""
    return {name: vector.detach().cpu().numpy() for name, vector in vectors.items()}


def vectors(arrays: Mapping[str, np.ndarray[Any, Any]]) -> Vectors:
    """The arrays as vectors that nobody may write to: an object store hands out memory that is only for reading."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


def numbers(upload: Upload) -> dict[str, Any]:
    """All of an upload but its vectors."""
    return {name: getattr(upload, name) for name in NUMBERS}
