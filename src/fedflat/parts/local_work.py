"""Parts that change how a client walks: the learning rate within a round, what is frozen, look-ahead by a meta step."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from fedflat.parts.part import Part, option
from fedflat.rule import LocalRule, Vectors
from fedflat.slope import Slope
from fedflat.step import corrected

Pairs = Literal["cycle", "once"]


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
    """Learn a model that one step adapts (Per-FedAvg, first order), on pairs of batches a and b:

        v ← m v + g(w; a),      w' = w − η v
        v ← m v + g(w'; b),     w  ← w − β v

    The inner rate η is the recipe's and decays with it, the outer rate β is constant. With `shared_momentum` both steps
    use one buffer v, as in the FedSoL authors' code; without it the inner step is plain,  w' = w − η g(w; a),  and v
    belongs to the outer one. g is the whole gradient of a local step: ∇f with the clip and the pulls of other parts,
    and the weight decay, which is taken at w both times.

    With L batches and E epochs a round has  E ⌈L/E⌉  pairs (`cycle`, the authors' number: about two passes over the
    samples, whatever E is), or as many as show every batch once in each epoch, ⌈E L/2⌉ (`once`). Where the recipe sets
    `local.steps`, E = 1 and L is that number. A round's batches are one stream: a pair may span two passes.

    Deviations: a rate that falls within the round (FedSWA) is the outer one.
    """

    outer_lr: float = option(0.01, "outer learning rate β", low=0, open_low=True)
    shared_momentum: bool = option(True, "one momentum buffer for the inner and the outer step")
    pairs: Pairs = option("cycle", "how many pairs of batches a round has", choices=("cycle", "once"))

    def plan(self, rule: LocalRule, sent: Vectors, memory: Vectors) -> LocalRule:
        return self.paired(rule, self.pairs_after(rule.epochs, rule.steps // rule.epochs, rule.epochs))

    def pairs_after(self, epochs: int, length: int, round_epochs: int) -> int:
        """The pairs in some epochs of L batches each, where a round has E epochs.

        >>> MetaStep().pairs_after(3, 4, 3), MetaStep(pairs="once").pairs_after(3, 3, 3)
        (6, 5)
        """
        return epochs * math.ceil(length / round_epochs) if self.pairs == "cycle" else math.ceil(epochs * length / 2)

    def paired(self, rule: LocalRule, pairs: int) -> LocalRule:
        """The rule whose steps are so many meta steps, with the inner rate η that was the rule's."""
        look = LookAhead(rule.lr, self.shared_momentum)
        buffered = 2 if self.shared_momentum else 1
        return replace(rule, lr=self.outer_lr, steps=pairs, ascent=look, pairs=True, buffered=buffered)


@dataclass(frozen=True)
class LookAhead:
    """The inner step of a pair: it leads to w', where the outer step takes its gradient."""

    lr: float
    shared: bool

    def __call__(self, slope: Slope, carry: Vectors) -> tuple[Tensor, Vectors]:
        g, decay = corrected(slope.weights, slope(), slope.rule)
        if decay:
            g.add_(slope.weights, alpha=decay)
        if self.shared and slope.velocity is not None:
            g = slope.velocity.mul_(slope.rule.momentum).add_(g)
        return slope.on_other_batch(g * -self.lr), carry
