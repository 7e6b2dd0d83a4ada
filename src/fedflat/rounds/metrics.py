"""Metrics: the quality of a model on held-out samples, and the distances between clients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedflat.local import Batch, Loss
from fedflat.methods import Upload
from fedflat.models import Network


@dataclass(frozen=True)
class Score:
    """Sums over samples, so that the scores of chunks add up. For labels that are not classes only the loss counts."""

    loss_sum: float
    correct: tuple[int, ...]
    total: tuple[int, ...]
    samples: int

    def __add__(self, other: Score) -> Score:
        return Score(
            self.loss_sum + other.loss_sum,
            tuple(a + b for a, b in zip(self.correct, other.correct, strict=True)),
            tuple(a + b for a, b in zip(self.total, other.total, strict=True)),
            self.samples + other.samples,
        )

    @property
    def loss(self) -> float:
        return self.loss_sum / self.samples

    @property
    def accuracy(self) -> float:
        """The share of samples whose label has the largest logit; NaN if labels are not classes."""
        return sum(self.correct) / self.samples if self.correct else math.nan

    @property
    def per_class(self) -> list[float]:
        return [c / t if t else math.nan for c, t in zip(self.correct, self.total, strict=True)]


@torch.no_grad()
def score(module: nn.Module, inputs: Tensor, labels: Tensor, loss: Loss, classes: int) -> Score:
    """Score one chunk of samples with a module in evaluation mode."""
    module.eval()
    logits = module(inputs)
    total = float(loss(logits, labels)) * len(labels)
    if labels.is_floating_point():
        return Score(total, (), (), len(labels))
    hits = labels[logits.argmax(dim=1) == labels]
    correct, present = (torch.bincount(x, minlength=classes).tolist() for x in (hits, labels))
    return Score(total, tuple(correct), tuple(present), len(labels))


@torch.no_grad()
def proximal_loss(network: Network, start: Tensor, end: Tensor, batches: Iterable[Batch], tau: float = 3.0) -> float:
    """Return the mean over samples of KL( softmax(z_g/τ) ‖ softmax(z/τ) ) (FedSoL, Fig. 9a).

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
        logits = torch.cat([network.module(inputs) for inputs, _ in batches])
        answers.append(F.log_softmax(logits / tau, dim=1))
    known, now = answers
    return float(F.kl_div(now, known, reduction="batchmean", log_target=True))


def consistency(uploads: Sequence[Upload], moved: Tensor) -> float:
    """(1/n) Σ ‖wᵢ − w‖² to the new global model; wᵢ = sent + Δᵢ and w = sent + moved, so `sent` cancels."""
    gap = torch.empty_like(moved)
    gaps = (torch.sub(upload.delta, moved, out=gap) for upload in uploads)
    return sum(float(gap.dot(gap)) for gap in gaps) / len(uploads)


def divergence(uploads: Sequence[Upload], moved: Tensor) -> float:
    """(1/n) Σ ‖wᵢ − w‖ to the global model that the clients began with."""
    return sum(upload.norm for upload in uploads) / len(uploads)


def discord(uploads: Sequence[Upload], moved: Tensor) -> float:
    """The mean of ‖wᵢ − wⱼ‖ over pairs of clients; 0 for a single client."""
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
