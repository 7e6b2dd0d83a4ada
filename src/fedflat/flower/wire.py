"""Briefs, uploads and questions as Flower messages: named arrays, and a record of plain numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedflat.client import Problem
from fedflat.engine.wire import NUMBERS, arrays, vectors
from fedflat.parts import Upload
from fedflat.rule import Vectors

VECTORS, FACTS, NOTES = "vectors", "facts", "notes"
SLACK = 4096  # bytes that an array's own header may take
NUMPY = "numpy.ndarray"


class UnfitError(Exception):
    """A reply that is not what was asked for: the reason in a word, and in a few more."""


def content(named: Vectors, facts: dict[str, Any], notes: dict[str, float] | None = None) -> RecordDict:
    """What a message carries."""
    records = {VECTORS: ArrayRecord({name: Array(array) for name, array in arrays(named).items()})}
    return RecordDict({**records, FACTS: ConfigRecord(facts), NOTES: ConfigRecord(dict(notes or {}))})


def read_facts(record: RecordDict) -> dict[str, Any]:
    return dict(record[FACTS]) if isinstance(record.get(FACTS), ConfigRecord) else {}


def read_vectors(record: RecordDict, most: int) -> Vectors:
    """The vectors of a message of at most so many bytes; nothing is unpacked before its size is known."""
    found = record.get(VECTORS)
    if not isinstance(found, ArrayRecord):
        raise UnfitError("names", "it has no vectors")
    size = sum(len(array.data) for array in found.values())
    if size > most + SLACK * max(len(found), 1):
        raise UnfitError("oversized", f"{size:,} bytes, where {most:,} were announced")
    plain: dict[str, np.ndarray[Any, Any]] = {}
    for name, array in found.items():
        if array.stype != NUMPY:
            raise UnfitError("dtype", f"{name} is packed as {array.stype!r}")
        try:
            # Flower reads arrays with allow_pickle=False, so no object can come along.
            plain[name] = np.array(array.numpy())
        except Exception as error:  # bytes of anybody's making: NumPy raises what it meets
            raise UnfitError("shape", f"{name} cannot be unpacked ({error})") from None
    try:
        return vectors(plain)
    except (TypeError, ValueError) as error:
        raise UnfitError("dtype", f"an array is of a kind that no vector has ({error})") from None


def upload_facts(upload: Upload) -> dict[str, Any]:
    return {name: getattr(upload, name) for name in NUMBERS if name != "notes"}


def read_upload(record: RecordDict, problem: Problem, client: int) -> Upload:
    """The upload that a reply carries; whether its vectors are sound is for the server's gate to say."""
    facts = read_facts(record)
    missing = [name for name in NUMBERS if name != "notes" and name not in facts]
    if missing:
        raise UnfitError("names", f"{', '.join(missing)} is missing")
    announced = sum(problem.uploads.values()) * problem.network.weights.element_size()
    named = read_vectors(record, announced)
    if "delta" not in named:
        raise UnfitError("names", "delta is missing")
    notes = record.get(NOTES)
    found = {str(k): v for k, v in notes.items() if isinstance(v, float)} if isinstance(notes, ConfigRecord) else {}
    numbers = {name: facts[name] for name in NUMBERS if name != "notes"} | {"client": client}
    return Upload(delta=named.pop("delta"), vectors=named, notes=found, **numbers)
