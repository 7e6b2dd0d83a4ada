"""Parts that change local training: its start, the learning rate within a round, frozen weights, and meta steps."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from fedflat.local import LocalRule, Outcome, Slope, Vectors, corrected
from fedflat.methods.part import Part, option
from fedflat.methods.uploads import Upload

Pairs = Literal["cycle", "once"]


@dataclass(frozen=True)
class RelaxedStart(Part):
    """Start each client beyond the global model, away from its last local one (FedInit):

        client:  starts at  wᵗ + β (wᵗ − wᵢ),      wᵢ = its model at the end of its last round, w⁰ before the first
        server:  w ← w + mean_S Δᵢ,                Δᵢ measured from the client's own start

    For the other parts of a method, the client's start replaces the weights that it received, as in the authors'
    FL-Simulator: it is the anchor of FedProx and FedDyn and the reference of a distillation.

    Deviations: only the abstract of the paper was available; the equations are those of the authors' simulator
    (`use_RI`). There FedDyn and FedSpeed average the clients' models instead of wᵗ + Δᵢ, so the results of combining
    them with this part differ. Consistency and `evaluation.model = "active"` also use wᵗ + Δᵢ as the client's model.
    """

    beta: float = option(0.1, "how far β beyond the global model", low=0)

    def first_memory(self, initial: Tensor) -> Vectors:
        return {"last": initial.clone()}

    def begin(self, sent: Vectors, memory: Vectors) -> Tensor | None:
        return torch.lerp(sent["weights"], memory["last"], -self.beta) if self.beta else None

    def report(self, upload: Upload, sent: Vectors, memory: Vectors, outcome: Outcome) -> tuple[Upload, Vectors]:
        return upload, {"last": sent["weights"] + outcome.delta}


@dataclass(frozen=True)
class FallingRate(Part):
    """Decrease the learning rate within every round (FedSWA):  η_k = η (1 − (1 − ρ) k/K),  k = 0 … K−1.

    Deviations: the released code starts at 2η and ends at 0. This part implements the paper's schedule.
    """

    floor: float = option(0.1, "share ρ of η that is left at the end of the round", low=0, high=1)

    def plan(self, rule: LocalRule, sent: Vectors, memory: Vectors) -> LocalRule:
        return replace(rule, lr_floor=self.floor)


@dataclass(frozen=True)
class FrozenHead(Part):
    """Train only the body; the head keeps its random initial weights until personalisation (FedBABU).

    Neither gradients nor weight decay change the head.

    Deviations: the frozen head is still sent with the weights.
    """

    def plan(self, rule: LocalRule, sent: Vectors, memory: Vectors) -> LocalRule:
        rule.require_head("FrozenHead", body=True)
        frozen = torch.zeros_like(sent["weights"], dtype=torch.bool) if rule.frozen is None else rule.frozen.clone()
        frozen[rule.head] = True
        return replace(rule, frozen=frozen)


@dataclass(frozen=True)
class MetaStep(Part):
    """Train a model that adapts to a client in one step (Per-FedAvg, first order), on pairs of batches a and b:

        v ← m v + g(w; a),      w' = w − η v
        v ← m v + g(w'; b),     w  ← w − β v

    The inner rate η is the recipe's and decays with it; the outer rate β is constant. With `shared_momentum` both steps
    use one buffer v, as in the FedSoL authors' code. Without it the inner step is  w' = w − η g(w; a),  and only the
    outer step uses v. g is the full gradient of a local step: ∇f with the clip and the pulls of other parts, and the
    weight decay, which is taken at w in both steps.

    With L batches and E epochs a round has  E ⌈L/E⌉  pairs (`cycle`, as the authors do: about two passes over the
    samples for any E), or ⌈E L/2⌉ pairs, which use every batch once per epoch (`once`). If the recipe sets
    `local.steps`, E = 1 and L is that number. The batches of a round form one stream, so a pair may span two passes.

    Deviations: a schedule of the learning rate within the round (FedSWA) applies to the outer rate.
    """

    outer_lr: float = option(0.01, "outer learning rate β", low=0, open_low=True)
    shared_momentum: bool = option(True, "one momentum buffer for the inner and the outer step")
    pairs: Pairs = option("cycle", "how many pairs of batches a round has", choices=("cycle", "once"))

    def plan(self, rule: LocalRule, sent: Vectors, memory: Vectors) -> LocalRule:
        return self.paired(rule, self.pairs_after(rule.epochs, rule.steps // rule.epochs, rule.epochs))

    def pairs_after(self, epochs: int, length: int, round_epochs: int) -> int:
        """Return the number of pairs in some epochs of L batches each, if a round has E epochs.

        >>> MetaStep().pairs_after(3, 4, 3), MetaStep(pairs="once").pairs_after(3, 3, 3)
        (6, 5)
        """
        return epochs * math.ceil(length / round_epochs) if self.pairs == "cycle" else math.ceil(epochs * length / 2)

    def paired(self, rule: LocalRule, pairs: int) -> LocalRule:
        """Return the rule with this number of meta steps; the inner rate η is the learning rate of the given rule."""
        look = LookAhead(rule.lr, self.shared_momentum)
        buffered = 2 if self.shared_momentum else 1
        return replace(rule, lr=self.outer_lr, steps=pairs, ascent=look, pairs=True, buffered=buffered)


@dataclass(frozen=True)
class LookAhead:
    """The inner step of a pair: it computes w', where the outer step takes its gradient."""

    lr: float
    shared: bool

    def __call__(self, slope: Slope, carry: Vectors) -> tuple[Tensor, Vectors]:
        g, decay = corrected(slope.weights, slope(), slope.rule)
        if decay:
            g.add_(slope.weights, alpha=decay)
        if self.shared and slope.velocity is not None:
            g = slope.velocity.mul_(slope.rule.momentum).add_(g)
        return slope.on_other_batch(g * -self.lr), carry
