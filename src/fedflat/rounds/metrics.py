"""Metrics: the quality of a model on held-out samples, and the distances between clients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedflat.local import Batch
from fedflat.methods import Upload
from fedflat.models import Network, faster_operations
from fedflat.tasks import Accuracy, Metric, Task, counted
from fedflat.tokens import counted_rows


@dataclass(frozen=True)
class Score:
    """The loss and the task's metrics as sums over samples, so that the scores of chunks can be added.

    `counted` is the number of samples, or of whatever else the loss averages over (tokens).
    """

    loss_sum: float
    counted: int
    found: tuple[Metric, ...]

    def __add__(self, other: Score) -> Score:
        found = tuple(a + b for a, b in zip(self.found, other.found, strict=True))
        return Score(self.loss_sum + other.loss_sum, self.counted + other.counted, found)

    @property
    def loss(self) -> float:
        return self.loss_sum / self.counted

    @property
    def values(self) -> dict[str, float]:
        """The value of each metric; NaN if it is not defined, such as a ratio with nothing below the line."""
        return {metric.name: _value(metric) for metric in self.found}

    @property
    def per_class(self) -> list[float]:
        """The accuracy of each class; empty if it is not a metric of the task."""
        return next((metric.per_class for metric in self.found if isinstance(metric, Accuracy)), [])


def _value(metric: Metric) -> float:
    with suppress(ArithmeticError):
        return float(metric.value)
    return math.nan


@torch.no_grad()
def score(module: nn.Module, inputs: Tensor, labels: Tensor, task: Task) -> Score:
    """Score one chunk of samples with a module in evaluation mode."""
    module.eval()
    with faster_operations():
        outputs = module(inputs)
    number = int(counted(task.loss, labels))
    return Score(
        float(task.loss(outputs, labels)) * number, number, tuple(metric.of(outputs, labels) for metric in task.metrics)
    )


@torch.no_grad()
def proximal_loss(network: Network, start: Tensor, end: Tensor, batches: Iterable[Batch], tau: float = 3.0) -> float:
    """Return the mean over samples, or tokens that count, of KL( softmax(z_g/τ) ‖ softmax(z/τ) ) (FedSoL, Fig. 9a).

    Args:
        network: runs both models in evaluation mode; it ends with the weights `end`, and its buffers serve both.
        start: the global weights w_g that the client began with.
        end: the weights after its local training.
        batches: the client's samples.
        tau: temperature τ; 3 is that of FedSoL's proximal loss.
    """
    network.module.eval()
    batches, answers = list(batches), []
    for weights in (start, end):
        network.load(weights)
        logits = torch.cat([counted_rows(network.module(inputs), labels)[0] for inputs, labels in batches])
        answers.append(F.log_softmax(logits / tau, dim=1))
    known, now = answers
    return float(F.kl_div(now, known, reduction="batchmean", log_target=True))


def consistency(uploads: Sequence[Upload], moved: Tensor) -> float:
    """Return (1/n) Σ ‖wᵢ − w‖² to the new global model w = sent + moved; wᵢ = sent + Δᵢ, so `sent` cancels."""
    gap = torch.empty_like(moved)
    gaps = (torch.sub(upload.delta, moved, out=gap) for upload in uploads)
    return sum(float(gap.dot(gap)) for gap in gaps) / len(uploads)


def divergence(uploads: Sequence[Upload], moved: Tensor) -> float:
    """Return (1/n) Σ ‖wᵢ − w‖ to the global model that the clients began with."""
    return sum(upload.norm for upload in uploads) / len(uploads)


def discord(uploads: Sequence[Upload], moved: Tensor) -> float:
    """Return the mean of ‖wᵢ − wⱼ‖ over pairs of clients; 0 for a single client."""
    pairs = [float((a.delta - b.delta).norm()) for a, b in combinations(uploads, 2)]
    return sum(pairs) / max(len(pairs), 1)


# Measures of a round's uploads that a recipe can request, given how far the global model moved.
MEASURES = {"consistency": consistency, "divergence": divergence, "discord": discord}


def bytes_of(*vectors: Tensor | None) -> int:
    """Return the size of these vectors in bytes when sent."""
    return sum(v.numel() * v.element_size() for v in vectors if v is not None)


def flat_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a round's record with the clients' notes at the top level, as in fedflat 0.1.

    >>> flat_record({"round": 3, "notes": {"cosine": 0.5, "round": 7}})
    {'cosine': 0.5, 'round': 3}
    """
    return {**record.get("notes", {}), **{name: value for name, value in record.items() if name != "notes"}}
