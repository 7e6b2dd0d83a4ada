"""A dataclass as a JSON file and back. Reading checks every value against the type of its field and runs no code."""

from __future__ import annotations

import json
import math
from dataclasses import MISSING, fields, is_dataclass
from os import PathLike
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
import torch

from fedflat.errors import FedflatError, RunError
from fedflat.files import read_bytes, write_whole

KIND = "fedflat"  # the key under which a file says what it holds
NOT_FINITE = ("nan", "inf", "-inf")  # JSON has no such numbers, so they are written as strings
MOST = 2**28  # maximum number of bytes of a file


class _UnfitError(Exception):
    """A value that does not fit the type of its field."""


def write_record(record: Any, path: str | PathLike[str]) -> None:
    """Writes a dataclass as JSON, under the name of its class. Raises `RunError` if that fails."""
    text = json.dumps({KIND: type(record).__name__, **packed(record)}, indent=1, ensure_ascii=False, allow_nan=False)
    try:
        write_whole(Path(path), text.encode() + b"\n", public=True)
    except OSError as error:
        raise RunError(f"{path}: cannot be written ({error.strerror})") from None


def read_record(path: str | PathLike[str], kinds: dict[str, type]) -> Any:
    """Reads a file written by `write_record`.

    Args:
        path: the file.
        kinds: the classes that it may hold, by name.

    Raises:
        RunError: the file cannot be read, is damaged, or holds something else.
    """
    try:
        if Path(path).stat().st_size > MOST:
            raise RunError(f"{path}: is larger than {MOST:,} bytes, so it is not a saved result")
        found = json.loads(read_bytes(path))
        kind = kinds[found.pop(KIND)]
    except OSError as error:
        raise RunError(f"{path}: cannot be read ({error.strerror})") from None
    except FedflatError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        expected = ", ".join(sorted(kinds))
        raise RunError(f"{path}: is not a result that fedflat saved (expected one of: {expected})") from None
    try:
        return unpacked(kind, found)
    except _UnfitError as error:
        raise RunError(f"{path}: is damaged: {error}") from None


def packed(value: Any) -> Any:
    """The value in JSON's types. Arrays and tensors become lists; NaN and infinities become strings."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: packed(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, dict):
        return {str(name): packed(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [packed(entry) for entry in value]
    if hasattr(value, "tolist"):
        return packed(value.tolist())
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def unpacked(kind: Any, value: Any, where: str = "") -> Any:
    """Converts a value of JSON to the type `kind`; `where` names the value in an error."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, UnionType):
        return _one_of(inner, value, where)
    if origin is Literal:
        return _expect(value in inner, value, where)
    if kind in (int, str, bool, NoneType):
        return _expect(type(value) is kind, value, where)
    if kind is float:
        return float(_expect(type(value) in (int, float) or value in NOT_FINITE, value, where))
    if is_dataclass(kind):
        return _record(kind, value, where)
    if origin in (list, tuple):
        _expect(isinstance(value, list), value, where)
        return origin(unpacked(inner[0], entry, f"{where}[{k}]") for k, entry in enumerate(value))
    if origin is dict:
        _expect(isinstance(value, dict), value, where)
        names = {name: unpacked(inner[0], name, where) for name in value}
        return {names[name]: unpacked(inner[1], entry, f"{where}.{name}") for name, entry in value.items()}
    return _array(origin or kind, value, where)


def _expect(fits: bool, value: Any, where: str) -> Any:
    if not fits:
        raise _UnfitError(f"{where or 'it'} has an unexpected value of type {type(value).__name__}")
    return value


def _one_of(kinds: tuple[Any, ...], value: Any, where: str) -> Any:
    for kind in kinds:
        try:
            return unpacked(kind, value, where)
        except _UnfitError:
            continue
    return _expect(False, value, where)


def _record(kind: Any, value: Any, where: str) -> Any:
    hints = get_type_hints(kind)
    known = {field.name: field for field in fields(kind) if field.init}
    _expect(isinstance(value, dict), value, where)
    needed = {n for n, field in known.items() if field.default is MISSING and field.default_factory is MISSING}
    if wrong := (value.keys() - known.keys()) | (needed - value.keys()):
        raise _UnfitError(f"{where or kind.__name__} has no or an unknown field {sorted(wrong)[0]!r}")
    return kind(**{name: unpacked(hints[name], entry, f"{where}.{name}"[not where :]) for name, entry in value.items()})


def _array(kind: Any, value: Any, where: str) -> Any:
    """An array of NumPy or a tensor, in float64 as all results have them."""
    _expect(isinstance(value, list), value, where)
    try:
        array = np.array(value, dtype=np.float64)
    except (ValueError, TypeError):
        return _expect(False, value, where)
    return torch.from_numpy(array) if issubclass(kind, torch.Tensor) else array
