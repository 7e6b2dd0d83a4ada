"""The running medians of the norms of clients' vectors, with which admission compares each upload."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median

import torch

from fedflat.local import Vectors
from fedflat.methods import Upload
from fedflat.rounds.setup import Problem

NORMS = "gate.norms"  # begins their names in the server's state; methods have other names
WINDOW = 5  # rounds of the running median
FALL = 0.95  # a round's median counts as at least this share of the running median


def compared(problem: Problem) -> list[str]:
    """Return the vectors of an upload whose norms are compared with other clients': in a simulation only Δ."""
    beside = problem.uploads.keys() - problem.method.figures.keys() - {"delta"} if problem.deployed else set()
    return ["delta", *sorted(beside)]


def norm_of(upload: Upload, name: str) -> float:
    return upload.norm if name == "delta" else upload.norms[name]


def middle_norms(problem: Problem, uploads: Sequence[Upload]) -> dict[str, float]:
    """Return the median norm of each vector that is compared."""
    return {name: median(norm_of(upload, name) for upload in uploads) for name in compared(problem)}


def first_medians(problem: Problem) -> Vectors:
    """Return the windows of medians in the server's state before round 0, one for each vector; 0 = none."""
    return {_key(name): torch.zeros(WINDOW, dtype=torch.float64) for name in compared(problem)}


def running_medians(problem: Problem, state: Vectors) -> dict[str, float]:
    """Return the running median of ‖Δ‖ and of the norms of the other vectors: the median of the last rounds' medians.

    Empty if there is none yet, or if the server may not compare clients: when privacy rests on a sum, one client's
    upload must not decide whether others count.
    """
    if problem.method.always_moves:
        return {}
    windows = {name: [norm for norm in state[_key(name)].tolist() if norm > 0] for name in compared(problem)}
    return {name: median(norms) for name, norms in windows.items() if norms}


def next_medians(problem: Problem, state: Vectors, uploads: Sequence[Upload], scales: Mapping[str, float]) -> Vectors:
    """Return the windows of medians after one more round; `scales` are the running medians before it.

    The running median falls slowly: as training converges, most honest updates become short before all of them do.
    """
    found: Vectors = {}
    for name, middle in (middle_norms(problem, uploads) if uploads else {}).items():
        if math.isfinite(middle):  # a norm may overflow even if no entry does
            window = state[_key(name)]
            new = max(middle, FALL * scales.get(name, 0.0))
            found[_key(name)] = torch.cat([window[1:], window.new_tensor([new])])
    return found


def _key(name: str) -> str:
    return NORMS if name == "delta" else f"{NORMS}.{name}"
