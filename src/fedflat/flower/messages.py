"""Broadcasts, uploads and questions as Flower messages: named arrays, and a record of plain numbers.

Neither side trusts the other, so every field is checked for its type, size and range before it is used.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedflat.engine import NUMBERS, arrays, vectors
from fedflat.errors import printable, shown
from fedflat.federation import check_array
from fedflat.flower.shelf import Mark
from fedflat.local import Vectors
from fedflat.methods import Upload
from fedflat.recipe import Local
from fedflat.rounds import Problem

VECTORS, FACTS, NOTES = "vectors", "facts", "notes"
SLACK = 4096  # maximum bytes of an array's header
NUMPY = "numpy.ndarray"
ROUNDS = 10_000_000  # far beyond any run
SAMPLES = 10**12
NAMED = 64  # maximum notes of an upload, and characters of a name


class UnfitError(Exception):
    """A message that is not what was asked for: a one-word reason and a short explanation."""


def content(named: Vectors, facts: dict[str, Any], notes: dict[str, float] | None = None) -> RecordDict:
    """Build the content of a message from vectors, facts and notes."""
    records = {VECTORS: ArrayRecord({name: Array(array) for name, array in arrays(named).items()})}
    return RecordDict({**records, FACTS: ConfigRecord(facts), NOTES: ConfigRecord(dict(notes or {}))})


def read_facts(record: RecordDict) -> dict[str, Any]:
    return dict(record[FACTS]) if isinstance(record.get(FACTS), ConfigRecord) else {}


def refusal(sentence: str, reason: str) -> RecordDict:
    """Build the content of a client's refusal."""
    return content({}, {"refused": sentence, "reason": reason})


def read_refusal(facts: Mapping[str, Any]) -> tuple[str, str] | None:
    """Read why a client refuses: a reason for admission, and its sentence. None if it does not refuse."""
    if not (refused := facts.get("refused")):
        return None
    return "not finite" if facts.get("reason") == "not finite" else "policy", printable(refused)


def whole(facts: Mapping[str, Any], name: str, low: int, high: int) -> int:
    """Read an integer of a message.

    Raises:
        UnfitError: if it is not an integer from `low` to `high`.
    """
    value = facts.get(name)
    if type(value) is not int or not low <= value <= high:
        raise UnfitError("weight", f"{name} = {shown(value, 40)} is not a whole number from {low} to {high}")
    return value


def word(facts: Mapping[str, Any], name: str, pattern: str) -> str:
    """Read a short text of a message.

    Raises:
        UnfitError: if it is not a text, is too long or does not match the pattern.
    """
    value = facts.get(name)
    if not isinstance(value, str) or len(value) > 256 or not re.fullmatch(pattern, value):
        raise UnfitError("names", f"{name} = {shown(value, 40)} does not have the expected form")
    return value


def read_vectors(record: RecordDict, most: int) -> Vectors:
    """Read the vectors of a message; sizes are checked before unpacking.

    Args:
        record: the content of the message.
        most: the largest total size of the vectors, in bytes.

    Raises:
        UnfitError: if the vectors are missing, too many, too large or cannot be unpacked.
    """
    found = record.get(VECTORS)
    if not isinstance(found, ArrayRecord):
        raise UnfitError("names", "it has no vectors")
    if len(found) > NAMED:
        raise UnfitError("names", f"it has {len(found)} vectors")
    size = sum(len(array.data) for array in found.values())
    if size > most + SLACK * max(len(found), 1):
        raise UnfitError("oversized", f"{size:,} bytes, but the vectors need only {most:,}")
    unpacked: dict[str, np.ndarray[Any, Any]] = {}
    for name, array in found.items():
        if array.stype != NUMPY:
            raise UnfitError("dtype", f"{printable(name, NAMED)} is packed as {shown(array.stype, NAMED)}")
        try:
            check_array(BytesIO(array.data), len(array.data), "it", printable(name, NAMED))
            # Flower reads arrays with allow_pickle=False, so a message cannot contain objects.
            unpacked[name] = np.array(array.numpy())
        except Exception as error:  # untrusted bytes: NumPy may raise anything
            raise UnfitError("shape", f"{printable(name, NAMED)} cannot be unpacked ({printable(error)})") from None
    try:
        return vectors(unpacked)
    except (TypeError, ValueError) as error:
        raise UnfitError("dtype", f"the dtype of an array is not supported ({printable(error)})") from None


def read_exactly(record: RecordDict, sizes: Mapping[str, int], dtype: torch.dtype) -> Vectors:
    """Read exactly these vectors from a message; all must be finite, and no others may be present.

    Raises:
        UnfitError: if the vectors differ in name, size or dtype, or are not finite.
    """
    found = read_vectors(record, sum(sizes.values()) * dtype.itemsize)
    if found.keys() != sizes.keys():
        named = ", ".join(sorted(printable(name, NAMED) for name in found)) or "none"
        raise UnfitError("names", f"it has the vectors {named}, not {', '.join(sorted(sizes))}")
    for name, vector in found.items():
        if vector.shape != (sizes[name],) or vector.dtype != dtype:
            raise UnfitError("shape", f"{name} is {vector.dtype} {tuple(vector.shape)}, not {dtype} {(sizes[name],)}")
        if not bool(torch.isfinite(vector).all()):
            raise UnfitError("not finite", f"{name} has entries that are not finite")
    return found


# --------------------------------------------------------------------------------------------------------------------
# From the server
# --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ask:
    """The fields that the server sends with a broadcast or question, in their allowed ranges."""

    run: str
    round: int
    everyone: int
    mark: Mark | None = None

    @classmethod
    def read(cls, facts: Mapping[str, Any]) -> Ask:
        run, round = word(facts, "run", "[0-9a-f]{16}"), whole(facts, "round", 0, ROUNDS)
        mark = None
        if facts.get("kept_digest"):
            mark = Mark(whole(facts, "kept_round", 0, round), word(facts, "kept_digest", "[0-9a-f]{64}"))
        return cls(run, round, whole(facts, "everyone", 1, SAMPLES), mark)


def read_lr(facts: Mapping[str, Any], local: Local, round: int) -> float:
    """Read η of a round and check it against the recipe.

    Raises:
        UnfitError: if it is not the recipe's η of this round.
    """
    lr, expected = facts.get("lr"), local.lr * local.lr_decay**round
    if not isinstance(lr, float) or not math.isclose(lr, expected, rel_tol=1e-6):
        raise UnfitError("weight", f"lr = {shown(lr, 40)}, but the recipe gives {expected:g} in round {round}")
    return lr


def sent_sizes(problem: Problem) -> dict[str, int]:
    """Return the vectors that are sent to clients in a round, with their sizes."""
    sizes = problem.method.sent_sizes(problem.network.layout)
    statistics = problem.network.buffers.numel() if problem.recipe.model.buffers == "average" else 0
    return {**sizes, **({"buffers": statistics} if statistics else {})}


# --------------------------------------------------------------------------------------------------------------------
# From a client
# --------------------------------------------------------------------------------------------------------------------


def refuse_not_finite(numbers: Mapping[str, float], named: Vectors) -> None:
    """Refuse to send values that are not finite: training diverged, or the weights overflow on these samples.

    Raises:
        UnfitError: if a number or an entry of a vector is not finite.
    """
    spoilt = [name for name, value in numbers.items() if not math.isfinite(value)]
    spoilt += [name for name, vector in named.items() if not bool(torch.isfinite(vector).all())]
    if spoilt:
        raise UnfitError("not finite", f"{spoilt[0]} is not finite with the weights that were sent")


def upload_facts(upload: Upload) -> dict[str, Any]:
    return {name: getattr(upload, name) for name in NUMBERS if name != "notes"}


def read_upload(record: RecordDict, problem: Problem, client: int, samples: int) -> Upload:
    """Read the upload in a reply; the server's gate checks its vectors.

    Args:
        record: the content of the reply.
        problem: what the recipe describes.
        client: the client that replied.
        samples: the number of samples that it reported in its hello.

    Raises:
        UnfitError: if a field is missing or not of its type.
    """
    facts = read_facts(record)
    numbers: dict[str, Any] = {name: facts.get(name) for name in NUMBERS if name != "notes"} | {"client": client}
    if missing := [name for name, value in numbers.items() if value is None]:
        raise UnfitError("names", f"{', '.join(missing)} is missing")
    if unfit := [name for name, value in numbers.items() if type(value) not in (int, float)]:
        raise UnfitError("weight", f"{unfit[0]} = {shown(numbers[unfit[0]], 40)} is not a number")
    if facts["samples"] != samples:
        raise UnfitError("weight", f"samples = {shown(facts['samples'], 40)}, but its hello said {samples}")
    named = read_vectors(record, sum(problem.uploads.values()) * problem.network.weights.element_size())
    if "delta" not in named:
        raise UnfitError("names", "delta is missing")
    return Upload(delta=named.pop("delta"), vectors=named, notes=_notes(record), **numbers)


def _notes(record: RecordDict) -> dict[str, float]:
    found = record.get(NOTES)
    notes = dict(found) if isinstance(found, ConfigRecord) else {}
    if len(notes) > NAMED:
        raise UnfitError("names", f"it has {len(notes)} notes")
    for name, value in notes.items():
        if printable(name, NAMED) != name or type(value) is not float:
            raise UnfitError("names", f"note {shown(name, NAMED)} is not a number with a short name")
    return {str(name): float(value) for name, value in notes.items()}  # type: ignore[arg-type]
