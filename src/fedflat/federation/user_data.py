"""A user's own data as a `Dataset`: arrays, tensors, torch datasets, tables, CSV files, image folders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader

from fedflat.errors import DataError, shortened
from fedflat.federation.columns import Columns, columns_of, is_table, numbers_or_texts, read_csv
from fedflat.federation.dataset import Dataset, Samples
from fedflat.federation.datasets import known_datasets
from fedflat.federation.folders import image_folder
from fedflat.federation.places import expanded
from fedflat.progress import track
from fedflat.randomness import generator

Array = NDArray[Any] | Tensor
Test = Any  # data of the same form, or a share
DO = (
    "give the name of a data set, (inputs, labels), a torch Dataset, a DataFrame, a CSV file or a folder of images; "
    "or a fedflat.Dataset"
)


class Raw(NamedTuple):
    """Inputs and labels as arrays, optionally with an owner for each sample and names of the classes."""

    inputs: NDArray[Any]
    labels: NDArray[Any]
    owners: NDArray[Any] | None = None
    standardised: bool = False  # whether inputs are columns, each on a scale of its own


def is_array(value: Any) -> bool:
    """Return whether this is a NumPy array or a tensor."""
    return isinstance(value, np.ndarray | Tensor)


def is_own(data: Any) -> bool:
    """Return whether these are a user's own data, and not the name of a data set."""
    if isinstance(data, str):
        return data not in known_datasets() and (expanded(data).is_dir() or data.lower().endswith(".csv"))
    return True


def own_dataset(
    data: Any,
    test: Test = 0.2,
    *,
    label: str | None = None,
    owner: str | Sequence[Any] | None = None,
    columns: Sequence[str] | None = None,
    vocabulary: int = 0,
    size: tuple[int, int] | None = None,
    seed: int = 0,
) -> Dataset:
    """Read a user's own data.

    Args:
        data: what `federate` takes, except for names and `Dataset`.
        test: data of the same form, or the share of the samples that is drawn for testing.
        label: the column of the labels, for a table.
        owner: the column of the owners, for a table, or an array with an owner for each sample.
        columns: the input columns of a table; by default all others.
        vocabulary: the number of tokens, if the inputs are token ids.
        size: height and width to which the images of a folder are resized.
        seed: seed of the samples that are held out.

    Raises:
        DataError: the form of the data is unknown, or the data are invalid.
    """
    whole = data.dataset if isinstance(data, DataLoader) else data
    if isinstance(whole, str | Path) and expanded(whole).is_dir():
        found = image_folder(expanded(whole), size)
        pair = _pair(found.train, found.test)
        return _assembled(expanded(whole).resolve().name, *pair, test, owner, vocabulary, seed)
    train = _raw(whole, label, owner if isinstance(owner, str) else None, columns, "data")
    if isinstance(test, float) or (isinstance(test, int) and not isinstance(test, bool)):
        held: Raw | None = None
    else:
        held = _raw(test, label, owner if isinstance(owner, str) else None, columns, "test")
    return _assembled(_name(whole), train, held, test, owner, vocabulary, seed)


def _pair(train: Any, test: Any) -> tuple[Raw, Raw | None]:
    return Raw(*train), None if test is None else Raw(*test)


def _name(data: Any) -> str:
    if isinstance(data, str | Path):
        return Path(data).stem
    return "own data" if isinstance(data, tuple | list) else "table" if is_table(data) else type(data).__name__


def _assembled(name: str, train: Raw, test: Raw | None, share: Test, owner: Any, vocabulary: int, seed: int) -> Dataset:
    if owner is not None and not isinstance(owner, str):
        train = train._replace(owners=_array(owner, "client"))
    if train.owners is not None and len(train.owners) != len(train.labels):
        raise DataError(f"client: {len(train.owners)} owners for {len(train.labels)} samples; give one for each")
    for part, raw in (("data", train), ("test", test)):
        if raw is not None and len(raw.inputs) != len(raw.labels):
            raise DataError(f"{part}: {len(raw.inputs)} inputs with {len(raw.labels)} labels; give one for each")
    if test is None:
        train, test = _held_out(train, share, seed)
    if train.inputs.shape[1:] != test.inputs.shape[1:]:
        raise DataError(
            f"test: inputs of shape {test.inputs.shape[1:]}, and the training inputs {train.inputs.shape[1:]}"
        )
    inputs = [_inputs(raw.inputs, part, vocabulary) for part, raw in (("data", train), ("test", test))]
    labels, classes, task = _labels(train.labels, test.labels)
    owners = _numbered(train.owners, test.owners)
    parts = [Samples(x, y, who) for x, y, who in zip(inputs, labels, owners, strict=True)]
    mean, std = _statistics(inputs[0], train.standardised)
    return Dataset(name, parts[0], parts[1], classes, mean, std, vocabulary, task)


def _held_out(raw: Raw, share: Any, seed: int) -> tuple[Raw, Raw]:
    """Split the samples into those for training and those drawn for testing."""
    count = round(float(share) * len(raw.labels))
    if not 0 < float(share) < 1 or not 0 < count < len(raw.labels):
        raise DataError(
            f"test = {share}: is not a share of {len(raw.labels)} samples; give one between 0 and 1, or test data"
        )
    order = torch.randperm(len(raw.labels), generator=generator(seed, "held out")).numpy()
    parts = (np.sort(order[count:]), np.sort(order[:count]))
    train, test = (
        raw._replace(
            inputs=raw.inputs[rows], labels=raw.labels[rows], owners=None if raw.owners is None else raw.owners[rows]
        )
        for rows in parts
    )
    return train, test


def _raw(data: Any, label: str | None, owner: Any, columns: Sequence[str] | None, part: str) -> Raw:
    """Convert any supported data to arrays."""
    if isinstance(data, str | Path):
        return _from_table(read_csv(expanded(data)), label, owner, columns, str(data))
    if is_table(data):
        return _from_table(columns_of(data), label, owner, columns, part)
    if isinstance(data, tuple | list) and len(data) == 2 and all(hasattr(each, "__len__") for each in data):
        return Raw(_array(data[0], f"{part}: the inputs"), _array(data[1], f"{part}: the labels"))
    if hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, Mapping | tuple | list):
        return _from_samples(data, part)
    raise DataError(f"{part}: is a {type(data).__name__} ({shortened(repr(data), 40)}); {DO}")


def _array(values: Any, what: str) -> NDArray[Any]:
    try:
        array = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    except (TypeError, ValueError) as error:
        raise DataError(f"{what} are not an array with a sample in each row ({error})") from None
    if array.dtype.kind == "O" and all(isinstance(each, str) for each in array.flat):
        array = array.astype(str)
    if array.dtype.kind not in "biufU" or not array.ndim:
        raise DataError(f"{what} are {array.dtype} of shape {array.shape}; give numbers with a sample in each row")
    return array


def _from_samples(data: Any, part: str) -> Raw:
    """The samples of a torch Dataset, one after the other."""
    if not len(data):
        raise DataError(f"{part}: the {type(data).__name__} is empty")
    inputs, labels = list[NDArray[Any]](), list[NDArray[Any]]()
    for number in track(range(len(data)), "reading"):
        sample = data[number]
        if not isinstance(sample, tuple | list) or len(sample) != 2:
            raise DataError(
                f"{part}: sample {number} of the {type(data).__name__} is a {type(sample).__name__}; "
                "it must give (input, label)"
            )
        for entry, into in zip(sample, (inputs, labels), strict=True):
            into.append(_image(entry) if hasattr(entry, "convert") else _entry(entry, number, part))
    shapes = {each.shape for each in inputs}
    if len(shapes) > 1:
        some = " and ".join(map(str, sorted(shapes)[:2]))
        raise DataError(f"{part}: the inputs have different shapes, such as {some}; make them equal")
    return Raw(np.stack(inputs), np.stack(labels))


def _entry(entry: Any, number: int, part: str) -> NDArray[Any]:
    array = entry.detach().cpu().numpy() if isinstance(entry, Tensor) else np.asarray(entry)
    if array.dtype.kind not in "biufU":
        raise DataError(f"{part}: sample {number} has a {type(entry).__name__}; give numbers, arrays or tensors")
    return array


def _image(picture: Any) -> NDArray[np.uint8]:
    """A picture of Pillow as bytes (C, H, W)."""
    grey = picture.mode in ("L", "1")
    pixels = np.asarray(picture.convert("L" if grey else "RGB"), np.uint8)
    return pixels[None] if grey else pixels.transpose(2, 0, 1)


def _from_table(
    table: Columns, label: str | None, owner: str | None, columns: Sequence[str] | None, source: str
) -> Raw:
    named: dict[str, Any] = {"label": label, "client": owner}
    columns = [columns] if isinstance(columns, str) else columns
    for option, column in named.items():
        if column is not None and not isinstance(column, str):
            raise DataError(f"{source}: {option}= is a {type(column).__name__}; give the name of one column")
        if column is not None and column not in table:
            raise DataError(f"{source}: has no column {column!r} ({option}=); it has {', '.join(table)}")
    if label is None:
        raise DataError(f"{source}: which column holds the labels? Say label=; there are {', '.join(table)}")
    taken = {column for column in named.values() if column is not None}
    inputs = [name for name in table if name not in taken] if columns is None else list(columns)
    if label in inputs:
        raise DataError(f"{source}: column {label!r} holds the labels; leave it out of columns=")
    if owner is not None and table[owner].dtype.kind == "f" and np.isnan(table[owner]).any():
        row = int(np.isnan(table[owner]).argmax())
        raise DataError(f"{source}: row {row + 1} of column {owner!r} (client=) is missing; every row needs an owner")
    for name in inputs:
        if name not in table:
            raise DataError(f"{source}: has no column {name!r} (columns=); it has {', '.join(table)}")
        if table[name].dtype.kind not in "biuf":
            raise DataError(
                f"{source}: {_not_a_number(name, table[name])}, which is not a number; encode the column as "
                "numbers, or leave it out by columns="
            )
    if not inputs:
        raise DataError(f"{source}: has no input columns beside {', '.join(map(repr, taken))}")
    numbers = np.stack([table[name].astype(np.float32) for name in inputs], axis=1)
    bad = ~np.isfinite(numbers)
    if bad.any():
        row, column = np.argwhere(bad)[0]
        raise DataError(
            f"{source}: row {row + 1} of column {inputs[column]!r} is missing or not finite; fill it or leave it out"
        )
    return Raw(numbers, table[label], None if owner is None else table[owner], True)


def _not_a_number(name: str, texts: NDArray[Any]) -> str:
    """Where a column of texts has the first one that is not a number."""
    wrong = (row for row, text in enumerate(texts) if numbers_or_texts([str(text)]).dtype.kind == "U")
    row = next(wrong, 0)
    where = f"row {row + 1} of " if row else ""
    return f"{where}column {name!r} holds {shortened(repr(str(texts[row])), 40)}"


def _inputs(inputs: NDArray[Any], part: str, vocabulary: int) -> Tensor:
    kind, shape = inputs.dtype, inputs.shape
    if vocabulary:
        if kind.kind not in "iu":
            raise DataError(f"{part}: vocabulary = {vocabulary}, but the inputs are {kind}; token ids are integers")
        return torch.from_numpy(inputs.astype(np.int64))
    if kind == np.uint8 and inputs.ndim in (3, 4):
        images = inputs[:, None] if inputs.ndim == 3 else inputs
        if images.shape[1] > 4 and images.shape[3] <= 4:
            images = images.transpose(0, 3, 1, 2)  # channels last, as in image files
        return torch.from_numpy(np.ascontiguousarray(images))
    if kind.kind != "f" or inputs.ndim < 2:
        wanted = "floating numbers, a row for each sample (x.astype('float32')), uint8 images (N, C, H, W)"
        raise DataError(f"{part}: the inputs are {kind} of shape {shape}; give {wanted}, or token ids with vocabulary=")
    if not np.isfinite(inputs).all():
        raise DataError(f"{part}: the inputs have values that are not finite")
    return torch.from_numpy(np.ascontiguousarray(inputs, np.float32))


def _labels(train: NDArray[Any], test: NDArray[Any]) -> tuple[tuple[Tensor, Tensor], int, str]:
    """Labels as tensors, the number of classes or targets, and the task that they are for."""
    both = np.concatenate([train, test])
    if both.dtype.kind == "f":
        if not np.isfinite(both).all():
            raise DataError("data: the labels have values that are missing or not finite")
        many = both.ndim == 2 and bool(np.isin(both, (0, 1)).all())
        targets = [torch.from_numpy(np.ascontiguousarray(part, np.float32)) for part in (train, test)]
        return (targets[0], targets[1]), 1 if both.ndim == 1 else both.shape[1], "multi-label" if many else "regression"
    if both.dtype.kind in "Ub":
        names, numbers = np.unique(both, return_inverse=True)
        numbers = numbers.reshape(both.shape)
        count = len(names)
    else:
        numbers, count = both, 1 + int(both.max())
        if numbers.min() < 0 and numbers.ndim == 1:
            raise DataError(f"data: the labels go from {both.min()} to {both.max()}; classes count from 0")
        if numbers.ndim == 1 and count > len(both):
            raise DataError(
                f"data: the label {both.max()} makes more classes than samples; count classes from 0, "
                "or make the labels floating numbers to predict them"
            )
    classes = [torch.from_numpy(part.astype(np.int64)) for part in (numbers[: len(train)], numbers[len(train) :])]
    return (classes[0], classes[1]), count, "classification" if both.ndim == 1 else "next-token"


def _numbered(train: NDArray[Any] | None, test: NDArray[Any] | None) -> tuple[Tensor | None, Tensor | None]:
    """Owners as numbers in the order of their names."""
    if train is None:
        return None, None
    _, numbers = np.unique(train if test is None else np.concatenate([train, test]), return_inverse=True)
    found = torch.from_numpy(numbers.astype(np.int64))
    return found[: len(train)], None if test is None else found[len(train) :]


def _statistics(inputs: Tensor, standardised: bool) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Columns of a table are standardised, images mapped to [−1, 1], other numbers stay as they are."""
    if standardised:
        std = inputs.std(dim=0, correction=0)
        return tuple(inputs.mean(dim=0).tolist()), tuple(torch.where(std > 0, std, 1.0).tolist())
    if inputs.dtype == torch.uint8:
        return (0.5,) * inputs.shape[1], (0.5,) * inputs.shape[1]
    return (), ()
