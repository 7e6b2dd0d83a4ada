"""Who may enter a round's average: every upload is looked at before it is merged.

One bad client must not spoil a round, so what is refused is named and counted, and changes neither the global state nor
the client's memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Set
from statistics import median

import torch

from fedflat.client import FAILURES, Problem, Refusal
from fedflat.errors import FedflatError, TrainingError
from fedflat.parts import Upload
from fedflat.recipe import Admission

ADVICE = {
    "not finite": "lower local.lr or set local.clip",
    "norm": "lower local.lr, set local.clip, or raise admission.max_norm or admission.max_ratio",
    "hung": "raise admission.deadline if its turn may take that long",
    "raised": 'with admission.failures = "stop" and engine.name = "inline" its traceback is shown',
}
SYMBOLS = {"delta": "Δ"}
MOST = 1e9  # steps that a client may claim, or its learning rate: beyond reason, and far from overflow


class Gate:
    """The checks of a problem's uploads, and the list of those that were turned away in a round."""

    def __init__(self, problem: Problem, limits: Admission, round: int, failed: Iterable[Refusal] = ()) -> None:
        self._problem, self._limits, self._round = problem, limits, round
        self.refused = list(failed)
        self.away = {refusal.client for refusal in self.refused}

    @property
    def failed(self) -> list[Refusal]:
        """Those that gave no upload at all."""
        return [refusal for refusal in self.refused if refusal.reason in FAILURES]

    def admitted(self, arriving: Iterable[Upload | Refusal]) -> Iterator[Upload]:
        """The sound ones among the uploads; where norms are compared with the cohort's, once all are there."""
        sound = self._sound(arriving)
        yield from self._near(list(sound)) if self._limits.max_ratio else sound

    def _sound(self, arriving: Iterable[Upload | Refusal]) -> Iterator[Upload]:
        for each in arriving:
            refusal = each if isinstance(each, Refusal) else self._fault(each)
            if refusal is None:
                assert isinstance(each, Upload)
                yield each
            else:
                self._refuse(refusal)

    def _near(self, uploads: list[Upload]) -> Iterator[Upload]:
        """Those whose ‖Δ‖ is at most `max_ratio` times the median of the cohort's."""
        middle = median(upload.norm for upload in uploads) if uploads else 0.0
        for upload in uploads:
            if upload.norm <= self._limits.max_ratio * middle:
                yield upload
            else:
                detail = f"‖Δ‖ = {upload.norm:.3g} is more than {self._limits.max_ratio:g} × the cohort's median"
                self._refuse(Refusal(upload.client, "norm", f"{detail} {middle:.3g}"))

    def _refuse(self, refusal: Refusal) -> None:
        self.refused.append(refusal)
        self.away.add(refusal.client)
        if isinstance(refusal.error, FedflatError):  # a mistake in the recipe, not a client's mishap
            raise refusal.error
        if self._limits.failures == "stop":
            if refusal.error is None:
                raise TrainingError(self.sentence(refusal))
            refusal.error.add_note(self.sentence(refusal))
            raise refusal.error

    def sentence(self, refusal: Refusal) -> str:
        advice = f"; {ADVICE[refusal.reason]}" if refusal.reason in ADVICE else ""
        return f"client {refusal.client} in round {self._round}: {refusal.reason}: {refusal.detail}{advice}"

    def _fault(self, upload: Upload) -> Refusal | None:
        """What is wrong with an upload, if anything is."""
        fault = misfit(upload, self._problem) or self._misweighed(upload) or self._unbounded(upload)
        return Refusal(upload.client, *fault) if fault else None

    def _misweighed(self, upload: Upload) -> tuple[str, str] | None:
        for name, most in ("samples", self._limits.max_samples), ("steps", MOST), ("lr", MOST):
            value = getattr(upload, name)
            if not (isinstance(value, int | float) and 0 < value <= most):
                return "weight", f"{name} = {value!r} is not above 0 and at most {most:g}"
        for name in self._problem.method.figures:
            if not bool((upload[name] > 0).all()):
                return "weight", f"{name} = {upload[name].tolist()} is not above 0"
        return None

    def _unbounded(self, upload: Upload) -> tuple[str, str] | None:
        if not (isinstance(upload.loss, int | float) and math.isfinite(upload.loss)):
            return "not finite", f"its model is no longer finite (mean loss {upload.loss!r})"
        norms = {name: float(torch.linalg.vector_norm(vector)) for name, vector in upload.vectors.items()}
        for name, norm in {"delta": upload.norm, **norms}.items():
            # A norm may overflow where no entry has.
            if not math.isfinite(norm) and not bool(torch.isfinite(upload[name]).all()):
                return "not finite", f"{SYMBOLS.get(name, name)} has entries that are not finite"
            if norm > self._limits.max_norm:
                return "norm", f"‖{SYMBOLS.get(name, name)}‖ = {norm:.3g} is above {self._limits.max_norm:g}"
        return None


def misfit(upload: Upload, problem: Problem) -> tuple[str, str] | None:
    """What is wrong with the names, shapes or dtypes of what a client sends up or wants to keep."""
    sizes, dtype = problem.uploads, problem.network.weights.dtype
    kept = {name: upload.memory[name] for name in problem.memory.keys() & upload.memory.keys()}
    return (
        _misnamed({*upload.vectors}, {*sizes} - {"delta"})
        or _misshapen({"delta": upload.delta, **upload.vectors}, sizes, dtype)
        or _misshapen(kept, problem.memory, dtype)
    )


def _misnamed(found: Set[str], expected: Set[str]) -> tuple[str, str] | None:
    missing, extra = expected - found, found - expected
    if missing:
        return "names", f"{', '.join(sorted(missing))} is missing"
    return ("names", f"{', '.join(sorted(map(str, extra)))} was not asked for") if extra else None


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
