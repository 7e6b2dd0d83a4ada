"""Turns an error of a user's model or loss into one sentence with the shapes that it was given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from fedflat.errors import DataError, FedflatError


@contextmanager
def explained(what: str, *tensors: Any) -> Iterator[None]:
    """Raise whatever a block raises as a `DataError`: what failed, the shapes of the tensors, and why.

    >>> import torch
    >>> with explained("the model cannot process", torch.zeros(4, 3)):
    ...     torch.nn.Linear(2, 1)(torch.zeros(4, 3))
    Traceback (most recent call last):
    fedflat.errors.DataError: the model cannot process shape (4, 3) (float32): RuntimeError: mat1 and mat2 ...
    """
    try:
        yield
    except FedflatError:
        raise
    except Exception as error:  # the user's code may raise anything
        reason = str(error).strip().splitlines() or [""]
        shapes = " and ".join(map(_described, tensors))
        raise DataError(f"{what} {shapes}: {type(error).__name__}: {reason[0]}") from error


def _described(tensor: Any) -> str:
    if isinstance(tensor, Mapping):
        return "; ".join(f"{name}: {_described(each)}" for name, each in tensor.items())
    return f"shape {tuple(tensor.shape)} ({str(tensor.dtype).removeprefix('torch.')})"
