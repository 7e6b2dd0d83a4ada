"""Parts that change how a client walks: the learning rate within a round, what is frozen, look-ahead by a meta step."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedflat.local import LocalRule, Slope, Vectors
from fedflat.parts.part import Part, option


@dataclass(frozen=True)
class FallingRate(Part):
    """Let the learning rate fall within every round (FedSWA):  η_k = η (1 − (1 − ρ) k/K),  k = 0 … K−1.

    Deviations: the released code begins at 2η and ends at 0; this is the paper's schedule.
    """

    floor: float = option(0.1, "share ρ of η that is left at the end of the round", low=0, high=1)

    def plan(self, rule: LocalRule, sent: Vectors, memory: Vectors) -> LocalRule:
        return replace(rule, lr_floor=self.floor)


@dataclass(frozen=True)
class FrozenHead(Part):
    """Train the body only; the head keeps its random initial weights (FedBABU). It is trained in personalisation.

    Neither gradient nor weight decay reaches the head.

    Deviations: the frozen head is sent with the weights all the same.
    """

    def plan(self, rule: LocalRule, sent: Vectors, memory: Vectors) -> LocalRule:
        frozen = torch.zeros_like(sent["weights"], dtype=torch.bool) if rule.frozen is None else rule.frozen.clone()
        frozen[rule.head] = True
        return replace(rule, frozen=frozen)


@dataclass(frozen=True)
class MetaStep(Part):
    """Learn a model that one step adapts (Per-FedAvg, first order), on pairs of batches:

        w' = w − α ∇f(w; batch 1),      the step uses ∇f(w'; batch 2)

    Deviations: the inner step is plain; the FedSoL authors' code lets it pollute the momentum of the outer one. A pair
    takes two batches, so an epoch has half as many steps.
    """

    alpha: float = option(0.01, "inner learning rate α", low=0)

    def plan(self, rule: LocalRule, sent: Vectors, memory: Vectors) -> LocalRule:
        return replace(rule, ascent=self, pairs=True, steps=math.ceil(rule.steps / 2))

    def __call__(self, slope: Slope, carry: Vectors) -> tuple[Tensor, Vectors]:
        return slope.on_other_batch(slope() * -self.alpha), carry
