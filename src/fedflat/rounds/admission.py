"""Admission: checks every upload before it is merged.

One bad client must not spoil a round. Refused uploads are named and counted, and change neither the global state nor
the client's memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from statistics import median

import torch

from fedflat.errors import DataError, FedflatError, TrainingError, printable, shown
from fedflat.federation import Federation
from fedflat.methods import Upload
from fedflat.recipe import Admission
from fedflat.rounds.client import local_rule
from fedflat.rounds.faults import MOST, misfit, misnoted, negative, number, whole
from fedflat.rounds.medians import middle_norms, norm_of
from fedflat.rounds.setup import FAILURES, Broadcast, Problem, Refusal

ADVICE = {
    "not finite": "lower local.lr or set local.clip",
    "norm": "lower local.lr, set local.clip, or raise the limit: admission.max_norm, admission.max_ratio, "
    "admission.outlier, or in a deployment deployment.outlier or the samples that count (samples.toml)",
    "hung": "raise admission.deadline if its local round may take that long",
    "raised": 'with admission.failures = "stop" and engine.name = "inline" its traceback is shown',
}
SYMBOLS = {"delta": "Δ"}
CLOSE = 1e-3  # relative error allowed for a number that the server knows: float32, and other libraries
NEAR = 1.01  # factor by which claimed samples may exceed those that count
FAR = 1e3  # allowed factor between a client's numbers and the recipe's if the server has no better estimate


class Gate:
    """Checks the uploads of a problem and lists those refused in a round.

    Args:
        problem: what the recipe describes.
        limits: the recipe's section `admission`.
        broadcast: what the clients of the round received.
        failed: clients that have already failed in this round.
        scales: the running median of ‖Δ‖ over previous rounds, and in a deployment of every other vector's norm; empty
            if unknown or not used.
        hold: whether all uploads may be held back to compare them with each other.
    """

    def __init__(
        self,
        problem: Problem,
        limits: Admission,
        broadcast: Broadcast,
        failed: Iterable[Refusal] = (),
        scales: Mapping[str, float] | None = None,
        hold: bool = False,
    ) -> None:
        self._problem, self._limits, self._broadcast = problem, limits, broadcast
        self._scales, self._hold = dict(scales or {}), hold
        self._outlier = problem.recipe.deployment.outlier if problem.deployed else limits.outlier
        self.refused = list(failed)
        self.away = {refusal.client for refusal in self.refused}

    @property
    def failed(self) -> list[Refusal]:
        """The clients that sent no upload at all."""
        return [refusal for refusal in self.refused if refusal.reason in FAILURES]

    def admitted(self, arriving: Iterable[Upload | Refusal]) -> Iterator[Upload]:
        """Yield the valid uploads; if norms are compared within the cohort, after all have arrived."""
        sound = self._sound(arriving)
        if self._limits.max_ratio or self._hold:
            yield from self._near(list(sound))
        else:
            yield from (upload for upload in sound if self._usual(upload, self._scales))

    def _sound(self, arriving: Iterable[Upload | Refusal]) -> Iterator[Upload]:
        for each in arriving:
            refusal = each if isinstance(each, Refusal) else self._fault(each)
            if refusal is None:
                assert isinstance(each, Upload)
                yield each
            else:
                self._refuse(refusal)

    def _near(self, uploads: list[Upload]) -> Iterator[Upload]:
        """The uploads whose ‖Δ‖ is at most `max_ratio` times the cohort's median and not an outlier.

        Outliers are measured against the larger of this cohort's median and the running median, because all norms may
        grow at once. This cohort's median counts from three uploads on: with fewer, a single dishonest client could
        move it.
        """
        # A client whose second reply was refused in the meantime is not away: its first reply counts, at its place in
        # the order of the sums.
        self.away.difference_update(upload.client for upload in uploads)
        middle, ratio = median(upload.norm for upload in uploads) if uploads else 0.0, self._limits.max_ratio
        scales = self._scales
        if len(uploads) > 2:
            here = middle_norms(self._problem, uploads)
            scales = {name: max(scales.get(name, 0.0), norm) for name, norm in here.items()}
        for upload in uploads:
            if ratio and upload.norm > ratio * middle:
                self._refuse_long(upload, "delta", upload.norm, f"{ratio:g} × the cohort's median {middle:.3g}")
            elif self._usual(upload, scales):
                yield upload

    def _usual(self, upload: Upload, scales: Mapping[str, float]) -> bool:
        """Whether ‖Δᵢ‖ ≤ outlier · scale · max(1, Kᵢ/K̄), where K̄ is the mean number of steps per client.

        If a client claims more samples than count, its steps are scaled down in proportion. In a deployment the other
        vectors of an upload are compared too, each with its own scale and with outlier² as factor, because some are
        squares (FedAdamW's second moments).
        """
        steps = upload.steps * min(1.0, self.most / upload.samples)
        for name, scale in scales.items():
            norm, factor = norm_of(upload, name), self._outlier if name == "delta" else self._outlier**2
            limit = factor * scale if factor and scale else math.inf
            if not (norm <= limit or norm <= limit * steps / self._mean_steps):
                self._refuse_long(upload, name, norm, f"{factor:g} × the cohorts' running median {scale:.3g}")
                return False
        return True

    @cached_property
    def most(self) -> float:
        """The largest number of samples that counts for a client; no limit in a simulation, whose counts are true."""
        if not self._problem.deployed:
            return math.inf
        federation = self._problem.federation
        sizes = {client: known_samples(federation, client) for client in range(federation.clients)}
        counted = counted_samples({client: n for client, n in sizes.items() if n}, self._limits)
        return max(counted.values(), default=math.inf)

    @cached_property
    def _mean_steps(self) -> int:
        return local_rule(self._problem, self._broadcast, -1, 1).typical_steps

    def _refuse_long(self, upload: Upload, name: str, norm: float, limit: str) -> None:
        self._refuse(Refusal(upload.client, "norm", f"‖{SYMBOLS.get(name, name)}‖ = {norm:.3g} is more than {limit}"))

    def _refuse(self, refusal: Refusal) -> None:
        refusal = replace(refusal, reason=printable(refusal.reason, 40), detail=printable(refusal.detail))
        self.refused.append(refusal)
        self.away.add(refusal.client)
        if isinstance(refusal.error, FedflatError):  # a mistake in the recipe, not a client's failure
            raise refusal.error
        if self._limits.failures == "stop":
            if refusal.error is None:
                raise TrainingError(self.sentence(refusal))
            refusal.error.add_note(self.sentence(refusal))
            raise refusal.error

    def sentence(self, refusal: Refusal) -> str:
        advice = f"; {ADVICE[refusal.reason]}" if refusal.reason in ADVICE else ""
        return f"client {refusal.client} in round {self._broadcast.round}: {refusal.reason}: {refusal.detail}{advice}"

    def _fault(self, upload: Upload) -> Refusal | None:
        """What is wrong with an upload, if anything."""
        fault = (
            misfit(upload, self._problem)
            or self._misweighed(upload)
            or self._misclaimed(upload)
            or misnoted(upload.notes, self._problem)
            or negative(upload, self._problem)
            or self._unbounded(upload)
        )
        return Refusal(upload.client, *fault) if fault else None

    def _misweighed(self, upload: Upload) -> tuple[str, str] | None:
        if wrong := check_samples(upload.samples, self._limits):
            return "weight", wrong
        if not (whole(upload.steps) and 1 <= upload.steps <= MOST):
            return "weight", f"steps = {shown(upload.steps)} is not a whole number from 1 to {MOST:g}"
        if not (number(upload.lr) and 0 < upload.lr <= MOST):
            return "weight", f"lr = {shown(upload.lr)} is not above 0 and at most {MOST:g}"
        for name in self._problem.method.figures:
            if not bool(((upload[name] > 0) & (upload[name] <= MOST)).all()):
                return "weight", f"{name} = {shown(upload[name].tolist())} is not above 0 and at most {MOST:g}"
        return None

    def _misclaimed(self, upload: Upload) -> tuple[str, str] | None:
        """Which claim of a client contradicts what the server knows, if any.

        The server knows the samples from the client's hello, and computes the other numbers from them and the recipe.
        Nothing is checked in a simulation, where the numbers come from this program itself.
        """
        problem = self._problem
        if not problem.deployed:
            return None
        samples = known_samples(problem.federation, upload.client)
        if samples is not None and upload.samples != samples:
            return "claim", f"samples = {upload.samples} where it had {samples} when it said hello"
        share = min(upload.samples, self.most) / problem.federation.mean_samples
        rule = local_rule(problem, self._broadcast, upload.client, upload.samples, share)
        known = problem.method.claims(rule)
        spans: dict[str, tuple[list[float], list[tuple[float, float]]]] = {
            "steps": ([upload.steps], _span([known.steps], [rule.steps])),
            "lr": ([upload.lr], _span([known.lr], [rule.lr])),
        }
        for name, size in problem.method.figures.items():
            spans[name] = (upload[name].tolist(), _span(known.figures.get(name, [None] * size), [1.0] * size))
        for name, (values, ranges) in spans.items():
            for value, (low, high) in zip(values, ranges, strict=True):
                if not low <= value <= high:
                    due = f"{(low + high) / 2:.6g}" if high - low < 0.1 * high else f"between {low:.3g} and {high:.3g}"
                    return "claim", f"{name} = {value:.6g} where by the recipe and its samples it is {due}"
        return None

    def _unbounded(self, upload: Upload) -> tuple[str, str] | None:
        if not (number(upload.loss) and math.isfinite(upload.loss)):
            return "not finite", f"its model is no longer finite (mean loss {shown(upload.loss)})"
        if self._problem.deployed and abs(upload.loss) > MOST:
            return "claim", f"loss = {upload.loss:.3g} is beyond {MOST:g}"
        for name, norm in {"delta": upload.norm, **upload.norms}.items():
            # A norm may overflow even if no entry does.
            if not math.isfinite(norm) and not bool(torch.isfinite(upload[name]).all()):
                return "not finite", f"{SYMBOLS.get(name, name)} has entries that are not finite"
            if norm > self._limits.max_norm:
                return "norm", f"‖{SYMBOLS.get(name, name)}‖ = {norm:.3g} is above {self._limits.max_norm:g}"
        return None


def check_samples(samples: object, limits: Admission) -> str:
    """Return what is wrong with a client's claimed number of samples, in its hello or upload; empty if valid.

    >>> check_samples(2**62, Admission())
    'samples = 4611686018427387904 is not a whole number from 1 to 1000000000 (admission.max_samples)'
    """
    if isinstance(samples, int) and whole(samples) and 1 <= samples <= limits.max_samples:
        return ""
    return f"samples = {shown(samples)} is not a whole number from 1 to {limits.max_samples} (admission.max_samples)"


def counted_samples(sizes: Mapping[int, int], limits: Admission) -> dict[int, int]:
    """Return how many samples count for each client: at most `admission.max_share` times the median of all.

    One sample or 1 % more count too, so that clients of equal parts of a data set are weighted as in a simulation.

    >>> counted_samples({0: 100, 1: 10**9, 2: 120}, Admission(max_share=10.0))
    {0: 100, 1: 1200, 2: 120}
    """
    if not limits.max_share or not sizes:
        return dict(sizes)
    limit = limits.max_share * median(sizes.values())
    most = max(math.ceil(limit), *(n for n in sizes.values() if n <= max(limit + 1, NEAR * limit)), 1)
    return {client: min(n, most) for client, n in sizes.items()}


def known_samples(federation: Federation, client: int) -> int | None:
    """Return a client's number of samples; None if this side does not know it."""
    try:
        return federation.samples(client)
    except DataError:
        return None


def _span(known: Sequence[float | None], like: Sequence[float]) -> list[tuple[float, float]]:
    """The allowed range of numbers: close to a known value, else within a factor of similar ones."""
    return [
        (about / FAR, about * FAR) if value is None else (value * (1 - CLOSE), value * (1 + CLOSE))
        for value, about in zip(known, like, strict=True)
    ]
