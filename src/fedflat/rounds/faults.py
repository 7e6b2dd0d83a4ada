"""What is wrong with the vectors and notes of an upload: names, shapes, dtypes, signs and ranges."""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from typing import Any

import torch

from fedflat.errors import shown
from fedflat.local import Vectors
from fedflat.methods import Upload
from fedflat.rounds.setup import Problem

MOST = 1e9  # limit on a client's steps, learning rate, figures and notes: above any valid value, far below overflow
NOTES = 1000  # limit per upload of a client


def whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def number(value: Any) -> bool:
    return isinstance(value, float) or (whole(value) and abs(value) < 2**1000)


def misnoted(notes: Mapping[str, float], problem: Problem) -> tuple[str, str] | None:
    """Return what is wrong with a client's notes: too many, an undeclared name, or an extreme value.

    Nothing is checked in a simulation: a user-defined part may add notes that the small example did not show.

    Returns:
        The reason in a word and the details; None if nothing is wrong.
    """
    if not problem.deployed or not notes:
        return None
    if len(notes) > NOTES:
        return "notes", f"{len(notes):,} of them, where {NOTES:,} are allowed"
    layers = _layers(problem)
    for name, value in notes.items():
        if not _declared(name, problem.notes, layers):
            return "notes", f"{shown(name)} is not a name under which this method notes anything"
        if not (number(value) and abs(value) <= MOST):
            return "notes", f"{name} = {shown(value)} is not a number within ±{MOST:g}"
    return None


def _declared(name: object, names: Set[str], layers: Set[str]) -> bool:
    """Whether the method declares this name, where * stands for a layer; "relu#2" is the second use of relu."""
    if not isinstance(name, str):
        return False
    root, _, layer = name.rpartition("/")
    return name in names or (f"{root}/*" in names and re.sub(r"#[1-9][0-9]?$", "", layer) in layers)


def _layers(problem: Problem) -> set[str]:
    """The names of the network's modules, and of parameters outside any module."""
    modules = {name for name, _ in problem.network.module.named_modules()}
    return modules | {name for name in problem.network.layout.shapes if "." not in name}


def misfit(upload: Upload, problem: Problem) -> tuple[str, str] | None:
    """Return what is wrong with the names, shapes or dtypes of a client's upload.

    Returns:
        The reason in a word and the details; None if nothing is wrong.
    """
    sizes, dtype = problem.uploads, problem.network.weights.dtype
    vectors = {"delta": upload.delta, **upload.vectors}
    return _misnamed({*upload.vectors}, {*sizes} - {"delta"}) or _misshapen(vectors, sizes, dtype)


def misfit_memory(kept: Vectors, problem: Problem) -> tuple[str, str] | None:
    """Return what is wrong with the shapes or dtypes of the memory that a client wants to keep.

    Returns:
        The reason in a word and the details; None if nothing is wrong.
    """
    known = {name: kept[name] for name in problem.memory.keys() & kept.keys()}
    return _misshapen(known, problem.memory, problem.network.weights.dtype)


def _misnamed(found: Set[str], expected: Set[str]) -> tuple[str, str] | None:
    missing, extra = expected - found, found - expected
    if missing:
        return "names", f"{', '.join(sorted(missing))} is missing"
    return ("names", f"{', '.join(sorted(map(shown, extra)))} was not asked for") if extra else None


def _misshapen(
    found: Mapping[str, torch.Tensor], expected: Mapping[str, int], dtype: torch.dtype
) -> tuple[str, str] | None:
    for name, vector in found.items():
        if not isinstance(vector, torch.Tensor) or vector.shape != (expected[name],):
            shape = tuple(vector.shape) if isinstance(vector, torch.Tensor) else type(vector).__name__
            return "shape", f"{name} is {shape}, not {(expected[name],)}"
        if vector.dtype != dtype:
            return "dtype", f"{name} is {vector.dtype}, not {dtype}"
    return None


def negative(upload: Upload, problem: Problem) -> tuple[str, str] | None:
    """Return which variances or second moments are negative: their average may be too, and its root NaN.

    Nothing is checked in a simulation, which computes them itself.

    Returns:
        The reason in a word and the details; None if nothing is wrong.
    """
    if not problem.deployed:
        return None
    vectors = {name: upload[name] for name in sorted(problem.method.squares)}
    if "buffers" in upload.vectors:
        views = problem.network.buffer_layout.views(upload["buffers"])
        vectors |= {name: view for name, view in views.items() if name.endswith("running_var")}
    wrong = next((name for name, vector in vectors.items() if bool((vector < 0).any())), None)
    return ("weight", f"{wrong} has negative entries, but is a mean of squares") if wrong else None
