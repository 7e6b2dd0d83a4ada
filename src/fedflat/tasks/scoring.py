"""Metrics as sums: each chunk of samples gives its sums, the sums of chunks add up, and their total gives the value.

A metric need not be a mean over samples. What matters is that the total of the chunks determines it: R² adds up means
and squared deviations, and the mean average precision keeps every score. Chunks are always added in the same order, so
the value has the same bits for any number of workers.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from fedflat.tokens import counted_rows

Floats = NDArray[np.float64]


class Metric(ABC):
    """The sums of one metric over some samples. A subclass is a dataclass of numbers that can be pickled.

    `name` is the metric's name in the records, and `higher` says whether larger values are better.
    """

    name: ClassVar[str]
    higher: ClassVar[bool] = True
    __dataclass_fields__: ClassVar[dict[str, Any]]

    @classmethod
    @abstractmethod
    def of(cls, outputs: Tensor, labels: Tensor) -> Self:
        """Return the sums over one chunk of samples.

        Args:
            outputs: the outputs of the model, one row for each sample.
            labels: the labels of these samples.
        """

    def __add__(self, other: Any) -> Self:
        """Return the sums over both chunks, by default field by field."""
        return type(self)(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))

    @property
    @abstractmethod
    def value(self) -> float:
        """The value over all samples that were added up; NaN if it is not defined for them."""


@dataclass(frozen=True)
class Accuracy(Metric):
    """The share of samples, or for token labels of the tokens that count, whose label has the largest logit.

    The value is NaN for labels that are not classes.
    """

    name = "accuracy"

    correct: tuple[int, ...]
    total: tuple[int, ...]

    @classmethod
    def of(cls, outputs: Tensor, labels: Tensor) -> Self:
        if labels.is_floating_point():
            return cls((), ())
        outputs, labels = counted_rows(outputs, labels)
        hits = labels[outputs.argmax(dim=1) == labels]
        correct, present = (torch.bincount(x, minlength=outputs.shape[1]).tolist() for x in (hits, labels))
        return cls(tuple(correct), tuple(present))

    def __add__(self, other: Accuracy) -> Self:
        correct, total = (
            tuple(a + b for a, b in zip(mine, theirs, strict=True))
            for mine, theirs in ((self.correct, other.correct), (self.total, other.total))
        )
        return type(self)(correct, total)

    @property
    def value(self) -> float:
        return sum(self.correct) / sum(self.total) if sum(self.total) else math.nan

    @property
    def per_class(self) -> list[float]:
        """The accuracy of each class; NaN for a class without samples."""
        return [c / t if t else math.nan for c, t in zip(self.correct, self.total, strict=True)]


@dataclass(frozen=True)
class Perplexity(Metric):
    """exp of the mean cross-entropy over the tokens that count."""

    name = "perplexity"
    higher = False

    nats: float
    tokens: int

    @classmethod
    def of(cls, outputs: Tensor, labels: Tensor) -> Self:
        rows, classes = counted_rows(outputs, labels)
        return cls(float(F.cross_entropy(rows.double(), classes, reduction="sum")), len(classes))

    @property
    def value(self) -> float:
        mean = self.nats / self.tokens if self.tokens else math.nan
        return math.exp(mean) if mean < 700 else math.inf  # exp overflows for larger values


@dataclass(frozen=True)
class RSquared(Metric):
    """R² = 1 − Σ (y − ŷ)² / Σ (y − ȳ)², the mean over the targets of a sample.

    Each chunk gives n, its mean and M = Σ (y − mean)². Two chunks add up to

        mean = (n₁ mean₁ + n₂ mean₂)/n,      M = M₁ + M₂ + (mean₁ − mean₂)² n₁ n₂/n,

    which avoids cancellation for targets far from 0. A constant target counts 1 if it is predicted exactly, else 0.
    """

    name = "r2"

    samples: int
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    error: tuple[float, ...]

    @classmethod
    def of(cls, outputs: Tensor, labels: Tensor) -> Self:
        y = labels.double().reshape(len(labels), -1)
        error = (y - outputs.double().reshape(y.shape)).square().sum(dim=0)
        mean = y.mean(dim=0)
        deviation = (y - mean).square().sum(dim=0)
        return cls(len(y), tuple(mean.tolist()), tuple(deviation.tolist()), tuple(error.tolist()))

    def __add__(self, other: RSquared) -> Self:
        n = self.samples + other.samples
        mine, theirs = np.array(self.mean), np.array(other.mean)
        mean = (self.samples * mine + other.samples * theirs) / n
        apart = (mine - theirs) ** 2 * (self.samples * other.samples / n)
        deviation = np.array(self.deviation) + np.array(other.deviation) + apart
        error = np.array(self.error) + np.array(other.error)
        return type(self)(n, *(tuple(x.tolist()) for x in (mean, deviation, error)))

    @property
    def value(self) -> float:
        if self.samples < 2:
            return math.nan
        each = [1 - e / d if d else float(e == 0) for e, d in zip(self.error, self.deviation, strict=True)]
        return sum(each) / len(each)


@dataclass(frozen=True)
class SquaredError(Metric):
    """The mean of (y − ŷ)² over samples and targets."""

    name = "mse"
    higher = False

    total: float
    count: int

    @classmethod
    def of(cls, outputs: Tensor, labels: Tensor) -> Self:
        y = labels.double()
        return cls(float((y - outputs.double().reshape(y.shape)).square().sum()), y.numel())

    @property
    def value(self) -> float:
        return self.total / self.count


@dataclass(frozen=True)
class MeanAveragePrecision(Metric):
    """The mean over labels of the average precision AP = Σ_n (R_n − R_{n−1}) P_n, over the thresholds of the scores.

    P_n and R_n are precision and recall of the samples whose score is at least the n-th largest distinct one. A label
    that no sample has is left out of the mean. Average precision is not a mean over samples, so all scores are kept.
    """

    name = "map"

    scores: tuple[NDArray[np.floating[Any]], ...]
    targets: tuple[NDArray[np.bool_], ...]

    @classmethod
    def of(cls, outputs: Tensor, labels: Tensor) -> Self:
        return cls((outputs.float().cpu().numpy(),), ((labels > 0.5).reshape(outputs.shape).cpu().numpy(),))

    @property
    def value(self) -> float:
        scores, targets = np.concatenate(self.scores), np.concatenate(self.targets)
        held = [average_precision(s, t) for s, t in zip(scores.T, targets.T, strict=True) if t.any()]
        return sum(held) / len(held) if held else math.nan


def average_precision(scores: NDArray[np.floating[Any]], targets: NDArray[np.bool_]) -> float:
    """Return the average precision of one label.

    >>> average_precision(np.array([0.9, 0.8, 0.1]), np.array([True, False, True]))
    0.8333333333333333
    """
    order = np.argsort(-scores, kind="stable")
    scores, hits = scores[order], np.cumsum(targets[order])
    last = np.flatnonzero(np.append(scores[1:] != scores[:-1], True))  # samples with equal scores share a threshold
    precision, recall = hits[last] / (last + 1), hits[last] / hits[-1]
    return float(np.sum(np.diff(recall, prepend=0.0) * precision))
