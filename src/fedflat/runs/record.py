"""The format of a round's record and of a run's summary, for all code that reads one from a file."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from fedflat.errors import RunError
from fedflat.files import read_whole

COUNTED = ("seconds", "bytes_down", "bytes_up", "sharpness_bytes")  # numbers that are summed, so never missing
REFUSAL = {"client": int, "reason": str, "detail": str}
TEXTS = ("method", "model_sha256", "base_sha256")  # the texts of a summary; its other fields are measures


def read_record(line: bytes) -> dict[str, Any] | None:
    """Read a record of metrics.jsonl; None if it is not one.

    >>> read_record(b'{"round": 1, "bytes_down": 8, "bytes_up": 8, "seconds": 0.1, "loss": null}')["round"]
    1
    >>> read_record(b'{"round": 1, "bytes_down": 8, "bytes_up": 8, "seconds": "long"}') is None
    True
    """
    try:
        record = json.loads(line)
        whole = isinstance(record, dict) and all(_fits(name, value) for name, value in record.items())
    except (ValueError, RecursionError):
        return None
    return record if whole and type(record.get("round")) is int and record["round"] > 0 else None


def _fits(name: str, value: Any) -> bool:
    """Whether a field has a value of its kind; a field that is not named here is a measure."""
    if name == "cohort":
        return isinstance(value, list) and all(type(client) is int for client in value)
    if name == "class_accuracy":
        return isinstance(value, list) and all(map(_measure, value))
    if name == "notes":
        return isinstance(value, dict) and all(map(_measure, value.values()))
    if name == "refused":
        return isinstance(value, list) and all(map(_refusal, value))
    if name == "skipped" or name.endswith("_missing"):
        return isinstance(value, str)
    if name in COUNTED:
        return value is not None and _measure(value) and math.isfinite(value)
    return _measure(value)


def _measure(value: Any) -> bool:
    return value is None or type(value) is float or (type(value) is int and abs(value) < 2**63)


def _refusal(value: Any) -> bool:
    return isinstance(value, dict) and all(type(value.get(name)) is kind for name, kind in REFUSAL.items())


def read_summary(directory: Path) -> dict[str, Any]:
    """Read summary.json of a finished run, which may be somebody else's.

    Raises:
        RunError: the file cannot be read, or a field is not of its kind.
    """
    path = directory / "summary.json"
    try:
        found = json.loads(read_whole(path))
    except (ValueError, RecursionError):
        found = None
    if not is_summary(found) or "model_sha256" not in found:
        raise RunError(f"{path}: is damaged; let `fedflat resume {directory}` write it again")
    summary: dict[str, Any] = found
    return summary


def is_summary(found: Any) -> bool:
    """Whether the fields of a summary are of their kinds.

    >>> is_summary({"rounds": 3, "accuracy_last": 0.5}), is_summary({"rounds": 3, "accuracy_last": "high"})
    (True, False)
    """
    if not isinstance(found, dict) or type(found.get("rounds")) is not int:
        return False
    return all(_fits_summary(name, value) for name, value in found.items())


def _fits_summary(name: str, value: Any) -> bool:
    if name in TEXTS:
        return isinstance(value, str)
    if name in ("versions", "refused"):
        kind = str if name == "versions" else int
        return isinstance(value, dict) and all(type(each) is kind for each in value.values())
    return type(value) is bool or (name == "seed" and type(value) is int) or _measure(value)
