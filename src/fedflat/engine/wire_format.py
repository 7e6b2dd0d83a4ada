"""Converts vectors and uploads to arrays and plain numbers, to send them to other processes."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from fedflat.local import Vectors
from fedflat.methods import Upload

Arrays = dict[str, np.ndarray[Any, Any]]
NUMBERS = ("client", "samples", "steps", "lr", "loss", "notes")


def arrays(vectors: Vectors) -> Arrays:
    """Convert the vectors to arrays; memory is shared where possible."""
    return {name: vector.detach().cpu().numpy() for name, vector in vectors.items()}


def vectors(arrays: Mapping[str, np.ndarray[Any, Any]]) -> Vectors:
    """Convert the arrays to read-only vectors: memory from an object store must not be written."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


def numbers(upload: Upload) -> dict[str, Any]:
    """Return an upload without its vectors."""
    return {name: getattr(upload, name) for name in NUMBERS}
