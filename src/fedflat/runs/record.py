"""The format of a round's record, for all code that reads one from a file."""

from __future__ import annotations

import json
import math
from typing import Any

COUNTED = ("seconds", "bytes_down", "bytes_up", "sharpness_bytes")  # numbers that are summed, so never missing
REFUSAL = {"client": int, "reason": str, "detail": str}


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
