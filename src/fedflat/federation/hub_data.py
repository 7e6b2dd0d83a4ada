"""Data sets of Hugging Face's `datasets`, in memory or in a local folder.

Nothing is downloaded, so a table must not refer to its data by URL.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedflat.errors import DataError
from fedflat.federation.corpora import AS_USUAL, Cut, of_rows
from fedflat.federation.dataset import Dataset
from fedflat.federation.hub_arrays import Raw, assembled, held_out_rows, labels_of
from fedflat.federation.hub_folders import holds_tables, opened, reading_hub
from fedflat.federation.pictures import picture
from fedflat.federation.places import expanded, own_path
from fedflat.federation.text import Ids, Row, padded
from fedflat.tokens import IGNORED, PADDING

TEST_SPLITS = ("test", "validation", "valid", "val", "dev")
LABELS, TEXTS = ("label", "labels", "target", "y"), ("text", "sentence", "content")


class Columns(NamedTuple):
    """The columns of a table by their meaning."""

    inputs: list[str]
    label: str | None
    client: str | None


class HubData(NamedTuple):
    """A data set, and the table of its training samples if it has a row for each."""

    dataset: Dataset
    rows: Any


def is_hub_data(data: Any) -> bool:
    """Return whether this is an object of the package `datasets`, or a folder that holds such data."""
    if isinstance(data, str | Path):
        return holds_tables(expanded(data))
    return type(data).__module__.partition(".")[0] == "datasets"


def hub_dataset(
    data: Any,
    test: Any = 0.2,
    *,
    label: str | None = None,
    client: str | None = None,
    columns: Sequence[str] | None = None,
    vocabulary: int = 0,
    image_size: tuple[int, int] | None = None,
    cut: Cut = AS_USUAL,
    seed: int = 0,
) -> HubData:
    """Read a `datasets.Dataset`, a `DatasetDict` with a training part, or a folder of them.

    Inputs are images, token ids (`input_ids`, padded at their end, with an `attention_mask` if there is one), texts, or
    numbers. Labels are classes, words, floating targets, 0 and 1 for each of several labels, or, for token ids, the
    class of every token, of which −100 do not count. A text without labels is for predicting its tokens.

    Args:
        data: the data set or the path of a folder.
        test: another data set, or the share of the rows that is held out if the data have no test part.
        label: the column of the labels; by default `label`, `labels`, `target`, `y`, or the only column of classes.
        client: the column that says who owns a row; by default `client`, if there is one.
        columns: the input columns; by default an image, `input_ids`, a text, or all numbers.
        vocabulary: the number of tokens, if the inputs are token ids; by default one more than the largest.
        image_size: height and width to which images are resized; without it all must have the same.
        cut: how texts become samples.
        seed: seed of the rows that are held out.

    Raises:
        DataError: the data are not such a data set, or a column is missing or cannot be used.
    """
    name = expanded(data).resolve().name if isinstance(data, str | Path) else "datasets"
    with reading_hub(name):
        train, held = _parts(data, test, seed)
        found = _chosen(train, label, client, columns)
        for column in (*found.inputs, found.label, found.client):
            if column is not None and column not in held.column_names:
                raise DataError(f"{name}: the test part has no column {column!r}; there are {_named(held)}")
        if _is_text(train, found):
            dataset = _texts(name, train, held, found, cut)
        else:
            parts = [_raw(part, found, image_size) for part in (train, held)]
            dataset = assembled(name, *_aligned(parts), vocabulary=vocabulary or _vocabulary(parts))
    return HubData(dataset, train if len(dataset.train) == len(train) else None)


def _parts(data: Any, test: Any, seed: int) -> tuple[Any, Any]:
    """The tables for training and testing."""
    whole = opened(expanded(data)) if isinstance(data, str | Path) else data
    parts = dict(whole) if isinstance(whole, Mapping) else {"train": whole}
    if "train" not in parts:
        raise DataError(f"datasets: there is no part 'train'; there are {', '.join(parts)}")
    for part in parts.values():
        if not hasattr(part, "column_names") or not hasattr(part, "select"):
            raise DataError(f"datasets: is a {type(part).__name__}, which is a stream; load it without streaming")
    train = parts["train"]
    if not isinstance(test, int | float):
        return train, _parts({"train": test} if hasattr(test, "select") else test, 0.2, seed)[0]
    held = next((parts[name] for name in TEST_SPLITS if name in parts), None)
    if held is not None:
        return train, held
    rest, drawn = held_out_rows(len(train), test, seed)
    return train.select(rest), train.select(drawn)


# Columns -------------------------------------------------------------------------------------------------------------


def _named(table: Any) -> str:
    return ", ".join(table.column_names)


def _kind(table: Any, column: str) -> str:
    """What a column holds: "image", "class", "text", "number", "numbers", "ids" or something else."""
    feature = table.features[column]
    kind = type(feature).__name__
    if kind in ("Image", "ClassLabel"):
        return {"Image": "image", "ClassLabel": "class"}[kind]
    if kind in ("Array2D", "Array3D", "Array4D"):
        return "numbers"
    dtype = str(getattr(feature, "dtype", ""))
    if kind == "Value":
        return "text" if "string" in dtype else "number" if re.match("u?int|float|double|bool", dtype) else dtype
    inner: Any = getattr(feature, "feature", None)
    while type(inner).__name__ in ("List", "Sequence", "LargeList"):
        inner, kind = inner.feature, "nested"
    numbers = re.match("(u?int)|float|double|bool", str(getattr(inner, "dtype", "")))
    return "other" if numbers is None else "ids" if numbers[1] and kind != "nested" else "numbers"


def _chosen(table: Any, label: str | None, client: str | None, columns: Sequence[str] | None) -> Columns:
    there = table.column_names
    for given in (label, client, *(columns or ())):
        if given is not None and given not in there:
            raise DataError(f"datasets: there is no column {given!r}; there are {_named(table)}")
    client = client or ("client" if "client" in there else None)
    free = [name for name in there if name not in (client, *(columns or ()))]
    classes = [name for name in free if _kind(table, name) == "class"]
    usual = [name for name in LABELS if name in free]
    label = label or (usual or (classes if len(classes) == 1 else []) or [None])[0]
    return Columns(list(columns) if columns else _inputs(table, [n for n in free if n != label]), label, client)


def _inputs(table: Any, free: list[str]) -> list[str]:
    """The columns that are inputs by default."""
    kinds = {name: _kind(table, name) for name in free}
    if "input_ids" in free:
        return ["input_ids"]
    images, texts, numbers = ([name for name in free if kinds[name] == kind] for kind in ("image", "text", "number"))
    arrays = [name for name in free if kinds[name] in ("numbers", "ids")]
    usual = [name for name in TEXTS if name in texts][:1]
    for several in (images, usual, arrays, [] if numbers else texts):
        if len(several) > 1:
            raise DataError(
                f"datasets: the columns {', '.join(several)} may all be inputs; say columns=['{several[0]}']"
            )
        if several:
            return several
    if not numbers:
        raise DataError(f"datasets: none of the columns {_named(table)} is an image, a text or a number")
    return numbers


def _is_text(table: Any, columns: Columns) -> bool:
    return len(columns.inputs) == 1 and _kind(table, columns.inputs[0]) == "text"


# Values --------------------------------------------------------------------------------------------------------------


def _values(table: Any, column: str) -> Any:
    """A column as an array of NumPy, or as a list of arrays if they differ in length."""
    cells = table.with_format("arrow", columns=[column])[:][column]
    if cells.null_count:
        missing = cells.is_null().to_pylist().index(True)
        raise DataError(f"datasets: row {missing} has nothing in the column {column!r}")
    values = table.with_format("numpy", columns=[column])[:][column]
    array: Any = values if isinstance(values, np.ndarray) else np.asarray(values, dtype=object)
    if array.dtype.kind != "O":
        return array
    listed = array.tolist()
    return np.array(listed) if all(isinstance(value, str) for value in listed) else listed


def _texts(name: str, train: Any, test: Any, columns: Columns, cut: Cut) -> Dataset:
    """Texts with a class each, or with floating targets, or without labels."""
    targets = None if columns.label is None else _targets([train, test], columns.label)
    if targets is None:
        return _classes_of_texts(name, train, test, columns, cut)
    plain = _classes_of_texts(name, train, test, columns._replace(label=None), cut, label="")
    labels, count, task = labels_of(name, targets)
    parts = [
        replace(part, labels=own)
        for part, own in zip((plain.train, plain.test), labels.split([len(train), len(test)]), strict=True)
    ]
    return replace(plain, train=parts[0], test=parts[1], classes=count, task=task, labels=())


def _targets(tables: Sequence[Any], column: str) -> NDArray[Any] | None:
    """The labels of all rows if they are floating numbers, or several for each row; None if they are classes."""
    found = [_values(table, column) for table in tables]
    if any(isinstance(each, list) or each.shape[1:] != found[0].shape[1:] for each in found):
        raise DataError(f"datasets: the labels in {column!r} have different lengths")
    labels: NDArray[Any] = np.concatenate(found)
    several = labels.ndim == 2 and labels.dtype.kind in "biu"
    return labels.astype(np.float64) if several else labels if labels.dtype.kind == "f" else None


def _classes_of_texts(
    name: str, train: Any, test: Any, columns: Columns, cut: Cut, label: str | None = None
) -> Dataset:
    """Texts with the classes of a column; without one, all have the same label, or none."""

    def words(table: Any, column: str | None) -> list[str | None]:
        return [None] * len(table) if column is None else [str(value) for value in _values(table, column).tolist()]

    def rows(table: Any) -> list[Row]:
        texts = [str(text) for text in _values(table, columns.inputs[0]).tolist()]
        for number, text in enumerate(texts):
            if not text.strip():
                raise DataError(f"{name}: row {number} has no text under {columns.inputs[0]!r}")
        labels = words(table, columns.label) if columns.label else [label] * len(table)
        beside = labels, words(table, columns.client)
        return [Row(*row) for row in zip(texts, *beside, strict=True)]

    return of_rows(name, rows(train), rows(test), cut, name)


def _raw(table: Any, columns: Columns, size: tuple[int, int] | None) -> Raw:
    if columns.label is None:
        raise DataError(f"datasets: which column holds the labels? say label='…'; there are {_named(table)}")
    first = columns.inputs[0]
    owners = None if columns.client is None else np.asarray(_values(table, columns.client)).astype(str)
    labels = _values(table, columns.label)
    tokens = len(columns.inputs) == 1 and _kind(table, first) == "ids"
    if tokens:
        each = [columns.label] if _kind(table, columns.label) == "ids" else []
        rows, *theirs = _token_rows(table, first, *each)
        inputs: Any = _padded(rows, max(map(len, rows)), PADDING)
        labels = _padded(theirs[0], inputs.shape[1], IGNORED) if theirs else labels
    elif len(columns.inputs) == 1:
        inputs = _images(table, first, size) if _kind(table, first) == "image" else _numbers(table, first)
    else:
        inputs = np.stack([_numbers(table, name) for name in columns.inputs], axis=1)
    if isinstance(labels, list):
        raise DataError(f"datasets: the labels in {columns.label!r} have different lengths")
    if labels.ndim == 2 and not tokens:
        labels = labels.astype(np.float64)  # several labels of a sample
    return Raw(inputs, labels, owners)


def _numbers(table: Any, column: str) -> NDArray[Any]:
    values = _values(table, column)
    if isinstance(values, list) or values.dtype.kind not in "biuf":
        raise DataError(f"datasets: the column {column!r} does not hold numbers, as many in each row")
    array: NDArray[Any] = values if values.dtype == np.uint8 and values.ndim > 2 else values.astype(np.float32)
    return array


def _token_rows(table: Any, *columns: str) -> list[list[Ids]]:
    """Token ids and their labels, without the positions that `attention_mask` leaves out."""
    masked = "attention_mask" in table.column_names
    names = (*columns, "attention_mask") if masked else columns
    found = [[np.asarray(row, np.int64) for row in _values(table, name)] for name in names]
    for number, row in enumerate(zip(*found, strict=True)):
        for name, entries in zip(names, row, strict=True):
            if len(entries) != len(row[0]):
                hint = "; several labels of a text must be floating numbers" if name in columns[1:] else ""
                raise DataError(
                    f"datasets: row {number} has {len(row[0])} entries in {columns[0]!r} and {len(entries)} in "
                    f"{name!r}{hint}"
                )
    if not masked:
        return found
    *found, masks = found
    return [[row[mask != 0] for row, mask in zip(rows, masks, strict=True)] for rows in found]


def _padded(rows: Any, width: int, fill: int) -> Ids:
    return padded([np.asarray(row, np.int64) for row in rows], width, fill)


def _aligned(parts: list[Raw]) -> tuple[Raw, Raw]:
    """The parts with rows of tokens of the same length."""
    if any(part.inputs.dtype != np.int64 or part.inputs.ndim != 2 for part in parts):
        return parts[0], parts[1]
    width = max(part.inputs.shape[1] for part in parts)
    wide = [part._replace(
        inputs=_padded(part.inputs, width, PADDING),
        labels=_padded(part.labels, width, IGNORED) if _per_token(part) else part.labels,
    ) for part in parts]  # fmt: skip
    return wide[0], wide[1]


def _per_token(part: Raw) -> bool:
    """Whether the labels are classes of every token; several labels of a text are floating numbers."""
    return part.labels.ndim == 2 and part.labels.dtype.kind in "iu"


def _vocabulary(parts: list[Raw]) -> int:
    tokens = all(part.inputs.dtype == np.int64 and part.inputs.ndim == 2 for part in parts)
    return 1 + max(int(part.inputs.max()) for part in parts) if tokens else 0


def _images(table: Any, column: str, size: tuple[int, int] | None) -> NDArray[np.uint8]:
    """Images from their bytes or from local files; a URL is never followed."""
    import datasets

    stored = table.cast_column(column, datasets.Image(decode=False)).with_format(None)
    pictures: list[NDArray[np.uint8]] = []
    for number, cell in enumerate(stored[column]):
        source = cell and (cell.get("bytes") or cell.get("path"))
        if not source or (isinstance(source, str) and "://" in source):
            raise DataError(f"datasets: row {number} has no image of its own in {column!r}")
        with picture(source) as image:
            grey = image.mode in ("1", "L")
            plain = image.convert("L" if grey else "RGB")
            pixels = np.asarray(plain.resize((size[1], size[0])) if size else plain, np.uint8)
        pictures.append(pixels[None] if grey else pixels.transpose(2, 0, 1))
        if pictures[-1].shape != pictures[0].shape:
            raise DataError(
                f"datasets: row {number} has an image of shape {pictures[-1].shape}, and row 0 one of "
                f"{pictures[0].shape}; say image_size=(height, width)"
            )
    return np.stack(pictures)


def hub_folder(directory: Path | None, cut: Cut = AS_USUAL) -> Dataset:
    """A user's own folder of Hugging Face's `datasets`, with the columns that `hub_dataset` takes by default."""
    return hub_dataset(own_path(directory, "datasets", "a folder"), cut=cut).dataset
