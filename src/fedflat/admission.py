"""Who may enter a round's average: every upload is looked at before it is merged.

One bad client must not spoil a round, so what is refused is named and counted, and changes neither the global state nor
the client's memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from statistics import median

import torch

from fedflat.client import Problem, Refusal
from fedflat.errors import FedflatError, TrainingError
from fedflat.parts import Upload
from fedflat.recipe import Admission

ADVICE = {
    "not finite": "lower local.lr or set local.clip",
    "norm": "lower local.lr, set local.clip, or raise admission.max_norm or admission.max_ratio",
    "hung": "raise admission.deadline if its turn may take that long",
    "raised": 'with admission.failures = "stop" and engine.name = "inline" its traceback is shown',
}


class Gate:
    """The checks of a problem's uploads, and the list of those that were turned away in a round."""

    def __init__(self, problem: Problem, limits: Admission, round: int) -> None:
        self._limits, self._round = limits, round
        self._dtype, self._sizes = problem.network.weights.dtype, problem.uploads
        self.refused: list[Refusal] = []

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
        if isinstance(refusal.error, FedflatError):  # a mistake in the recipe, not a client's mishap
            raise refusal.error
        if self._limits.failures == "stop":
            sentence = TrainingError(self.sentence(refusal))
            raise refusal.error or sentence

    def sentence(self, refusal: Refusal) -> str:
        advice = f"; {ADVICE[refusal.reason]}" if refusal.reason in ADVICE else ""
        return f"client {refusal.client} in round {self._round}: {refusal.reason}: {refusal.detail}{advice}"

    def _fault(self, upload: Upload) -> Refusal | None:
        """What is wrong with an upload, if anything is."""
        found = {"delta": upload.delta, **upload.vectors}
        reason, detail = (
            _misnamed(found, self._sizes)
            or _misshapen(found, self._sizes, self._dtype)
            or self._misweighed(upload)
            or self._unbounded(upload)
            or ("", "")
        )
        return Refusal(upload.client, reason, detail) if reason else None

    def _misweighed(self, upload: Upload) -> tuple[str, str] | None:
        for name in ("samples", "steps"):
            value, most = getattr(upload, name), self._limits.max_samples if name == "samples" else math.inf
            if not (isinstance(value, int | float) and 0 < value <= most):
                return "weight", f"{name} = {value!r} is not above 0" + (
                    f" and at most {most}" if most < math.inf else ""
                )
        return None

    def _unbounded(self, upload: Upload) -> tuple[str, str] | None:
        if not math.isfinite(upload.loss):
            return "not finite", f"its model is no longer finite (mean loss {upload.loss:.3g})"
        for name, vector in upload.vectors.items():
            if not bool(torch.isfinite(vector).all()):
                return "not finite", f"{name} has entries that are not finite"
        if math.isfinite(upload.norm) and upload.norm <= self._limits.max_norm:
            return None
        if not bool(torch.isfinite(upload.delta).all()):
            return "not finite", "its model is no longer finite"
        return "norm", f"‖Δ‖ = {upload.norm:.3g} is above {self._limits.max_norm:g}"


def _misnamed(found: Mapping[str, object], expected: Mapping[str, int]) -> tuple[str, str] | None:
    missing, extra = expected.keys() - found.keys(), found.keys() - expected.keys()
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
