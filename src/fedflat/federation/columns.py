"""Tables as columns of arrays: those of pandas, and CSV files."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedflat.errors import DataError
from fedflat.federation.formats import reading
from fedflat.federation.sizes import check_size, read_at_most
from fedflat.files import opened

Columns = dict[str, NDArray[Any]]
LARGEST = 2**31  # bytes of a CSV file
EMPTY = ("", "na", "nan", "null", "none")


def is_table(data: Any) -> bool:
    """Return whether this is a table with named columns, as those of pandas are."""
    return hasattr(data, "columns") and hasattr(data, "__getitem__") and hasattr(data, "to_dict")


def columns_of(table: Any) -> Columns:
    """The columns of a DataFrame: numbers, or texts for everything else."""
    return {str(name): _typed(table[name].to_numpy()) for name in table.columns}


def _typed(values: NDArray[Any]) -> NDArray[Any]:
    if values.dtype.kind in "biuf":
        return values
    return numbers_or_texts(["" if value is None or value != value else str(value) for value in values.tolist()])


def read_csv(path: Path) -> Columns:
    """The columns of a CSV file whose first line names them. A missing number is NaN.

    Raises:
        DataError: the file is missing or not such a table; the message names the line.
    """
    with reading(path):
        check_size(path, path.stat().st_size, LARGEST)
        with opened(path) as stream:
            text = read_at_most(path, stream, LARGEST).decode("utf-8-sig")
        rows = csv.reader(io.StringIO(text), strict=True)
        try:
            names = [name.strip() for name in next(rows, [])]
            lines = [row for row in rows if row]
        except csv.Error as error:
            raise DataError(f"{path}: line {rows.line_num} is not CSV ({error})") from None
    if len(set(names)) < len(names) or not all(names):
        raise DataError(f"{path}: the first line must name the columns, each once; it is {', '.join(map(repr, names))}")
    if not lines:
        raise DataError(f"{path}: holds no rows below the line of names")
    for number, row in enumerate(lines):
        if len(row) != len(names):
            raise DataError(f"{path}: row {number + 1} has {len(row)} fields, and {len(names)} columns are named")
    # NumPy stores every text of a column with the length of the longest.
    check_size(path, 4 * len(lines) * sum(max(len(row[k]) for row in lines) for k in range(len(names))))
    return {name: numbers_or_texts([row[k].strip() for row in lines]) for k, name in enumerate(names)}


def numbers_or_texts(values: list[str]) -> NDArray[Any]:
    """Converts texts to integers if all are, or else to floats (missing ones to NaN); otherwise leaves them as texts.

    >>> numbers_or_texts(["1", "2"]).dtype.kind, numbers_or_texts(["1", ""]).dtype.kind, numbers_or_texts(["a", "1"])
    ('i', 'f', array(['a', '1'], dtype='<U1'))
    """
    for kind in (np.int64, np.float64):
        there = values if kind is np.int64 else ["nan" if value.lower() in EMPTY else value for value in values]
        try:
            return np.array([kind(value) for value in there])
        except (ValueError, OverflowError):
            continue
    return np.array(values)
