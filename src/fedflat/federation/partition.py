"""Partitions: a split by name with checked options, its class counts, matching test sets, and its file."""

from collections.abc import Callable
from inspect import Parameter, signature
from math import inf
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedflat.errors import DataError, RecipeError, SplitError, nearest
from fedflat.federation.sizes import TooLargeError, load_npz, save_npz
from fedflat.federation.splits import SPLITS, Indices, Rng, Shards, require

Rule: TypeAlias = tuple[Callable[[Any], bool], str]


def partition(
    kind: str, labels: Indices, clients: int, rng: Rng, *, groups: NDArray[Any] | None = None, **options: Any
) -> Shards:
    """Makes the split named `kind`, and checks its options and that every client holds a sample.

    Args:
        kind: the name of the split, one of `SPLITS`.
        labels: the training labels.
        clients: number of clients m; 0 with the split `natural` means one for each group.
        rng: the generator for all draws.
        groups: the group id of each sample, for the split `natural`.
        options: the options of the split.

    Raises:
        RecipeError: the split or an option is unknown, missing or invalid.
        SplitError: the split cannot be made from these samples.

    >>> partition("iid", np.array([0, 0, 1, 1]), 2, np.random.default_rng(0), stratified=True)
    [array([0, 2]), array([1, 3])]
    """
    if kind not in SPLITS:
        raise RecipeError(f"split {kind!r} is unknown; {nearest(kind, SPLITS)}")
    if clients < 1 and not (kind == "natural" and clients == 0):
        raise RecipeError(f"{kind}: clients must be at least 1, got {clients}")
    check_options(kind, SPLITS[kind], options)
    require(kind, len(labels), clients)
    if kind == "natural":
        options["groups"] = groups
    division = SPLITS[kind](labels, clients, rng, **options)
    require_samples(kind, division)
    return division


def require_samples(kind: str, division: Shards) -> None:
    """Raises `SplitError` if a client holds no sample."""
    empty = sum(len(shard) == 0 for shard in division)
    if empty:
        raise SplitError(
            f"{kind}: {empty} of {len(division)} clients would get no sample; lower clients or change the split"
        )


def counts(labels: Indices, shards: Shards, classes: int) -> Indices:
    """The number of samples of each class that each client holds, as clients × classes."""
    table = np.zeros((len(shards), classes), dtype=np.int64)
    owner = np.repeat(np.arange(len(shards)), [len(shard) for shard in shards])
    np.add.at(table, (owner, labels[np.concatenate(shards)]), 1)
    return table


def matched_test(train_counts_row: Indices, test_labels: Indices, rng: Rng, size: int = 1000) -> Indices:
    """Sorted test indices with a client's label distribution q: min(#test_c, ⌊size·q_c⌋) samples of each class c.

    Args:
        train_counts_row: the number of training samples of each class that the client holds.
        test_labels: the test labels.
        rng: the generator that draws the samples.
        size: the size of the test set before rounding.

    >>> labels = np.array([0, 0, 0, 1, 1, 1])
    >>> labels[matched_test(np.array([20, 10]), labels, np.random.default_rng(0), size=3)]
    array([0, 0, 1])
    """
    share = size * train_counts_row // max(train_counts_row.sum(), 1)
    chosen = [rng.permutation(np.flatnonzero(test_labels == c))[: share[c]] for c in np.flatnonzero(share)]
    return np.sort(np.concatenate([np.empty(0, dtype=np.int64), *chosen]))


def save(path: str | PathLike[str], shards: Shards) -> None:
    """Writes a partition as .npz: all indices in one array, and the offsets of the clients."""
    offsets = np.cumsum([0, *map(len, shards)], dtype=np.int64)
    try:
        save_npz(path, indices=np.concatenate(shards), offsets=offsets)
    except OSError as error:
        raise DataError(f"{path}: the partition cannot be written ({error.strerror})") from error


def load(path: str | PathLike[str]) -> Shards:
    """Reads a partition written by `save`. Integers of any width are accepted."""
    try:
        content = load_npz(Path(path), ["indices", "offsets"])
        indices, offsets = content["indices"], content["offsets"]
    except OSError as error:
        raise DataError(f"{path}: the partition cannot be read ({error.strerror})") from error
    except TooLargeError:
        raise
    except Exception as error:  # a damaged zip or header makes zipfile, zlib and NumPy raise almost anything
        raise DataError(f"{path}: not a partition file, or a damaged one; make the partition again") from error
    if not (_is_vector(indices) and _is_vector(offsets) and _divides(offsets, len(indices))):
        raise DataError(f"{path}: its offsets do not divide its indices; make the partition again")
    return np.split(indices.astype(np.int64), offsets[1:-1].astype(np.int64))


def _is_vector(array: NDArray[Any]) -> bool:
    return array.dtype.kind in "iu" and array.ndim == 1 and bool(np.all(array >= 0))


def _divides(offsets: Indices, length: int) -> bool:
    return len(offsets) > 1 and offsets[0] == 0 and offsets[-1] == length and bool(np.all(offsets[1:] >= offsets[:-1]))


def _number(value: Any, low: float, high: float = inf) -> bool:
    return not isinstance(value, bool) and isinstance(value, Real) and low <= float(value) <= high


_FLAG: Rule = (lambda value: isinstance(value, bool), "true or false")
_WHOLE: Rule = (lambda value: isinstance(value, Integral) and _number(value, 1), "a whole number, 1 or more")
_SIZES: Rule = (
    lambda value: isinstance(value, list | tuple | np.ndarray) and all(_number(size, 1e-300, 1e300) for size in value),
    "a list of positive numbers",
)
# Within these bounds of alpha, no logarithm overflows.
OPTIONS: dict[str, Rule] = {
    "alpha": (lambda value: _number(value, 1e-6, 1e6), "a number from 1e-6 to 1e6"),
    "refill": _FLAG,
    "stratified": _FLAG,
    "min_size": _WHOLE,
    "classes": _WHOLE,
    "shards": _WHOLE,
    "sizes": _SIZES,
    "exponent": (lambda value: _number(value, 0, 10), "a number from 0 to 10"),
}


def check_options(kind: str, split: Callable[..., Shards], options: dict[str, Any]) -> None:
    """Raises `RecipeError` for options that the split does not have, and for missing or invalid values."""
    known = {name: option for name, option in signature(split).parameters.items() if name in OPTIONS}
    for name, value in options.items():
        if name not in known:
            raise RecipeError(f"{kind}: unknown option {name!r}; {nearest(name, known) if known else 'it takes none'}")
        allowed, description = OPTIONS[name]
        if not allowed(value):
            raise RecipeError(f"{kind}: {name} must be {description}; got {value!r}")
    for name, option in known.items():
        if option.default is Parameter.empty and name not in options:
            raise RecipeError(f"{kind}: option {name!r} is missing")
