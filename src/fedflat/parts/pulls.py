"""Parts that pull the client's steps towards something: a constant vector per round, and a decay."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from fedflat.local import LocalRule, Outcome, Vectors
from fedflat.parts.part import Part, ServerState, Uploads, option


def pulled(rule: LocalRule, pull: Tensor, decay: float = 0.0) -> LocalRule:
    """The rule with one more pull and decay."""
    return replace(rule, pull=pull if rule.pull is None else rule.pull + pull, decay=rule.decay + decay)


@dataclass(frozen=True)
class Proximal(Part):
    """Stay near the global model (FedProx):  ∇ μ/2 ‖w − wᵗ‖² = μ w − μ wᵗ.

    Deviations: none. The two summands stand apart because the authors of other methods clip between them; with
    `clip_mode = "loss_only"` the split does not matter.
    """

    mu: float = option(0.1, "weight μ of the proximal term", low=0)

    def plan(self, rule: LocalRule, sent: Vectors, memory: Vectors) -> LocalRule:
        return pulled(rule, -self.mu * sent["weights"], self.mu)


@dataclass(frozen=True)
class DynamicDual(Part):
    """Dynamic regularisation (FedDyn):

        client:  g = ∇fᵢ(w) + λ (w − wᵗ + hᵢ),      hᵢ ← hᵢ + Δᵢ
        server:  w ← mean_S wᵢ + h̄,                 h̄ ← h̄ + (1/m) Σ_S Δᵢ

    with hᵢ = −(gradient memory)/λ, so that the server's h̄ is the mean of all m clients' hᵢ.

    Deviations: none from the authors' code as the FedSMOO house runs it; the paper writes the same with λ h.
    """

    memory: ClassVar[tuple[str, ...]] = ("drift",)
    state: ClassVar[tuple[str, ...]] = ("mean_drift",)

    penalty: float = option(0.1, "weight λ of the quadratic penalty (α in FedDyn, 1/β in FedSMOO)", low=0)

    def plan(self, rule: LocalRule, sent: Vectors, memory: Vectors) -> LocalRule:
        return pulled(rule, self.penalty * (memory["drift"] - sent["weights"]), self.penalty)

    def settle(self, sent: Vectors, memory: Vectors, outcome: Outcome) -> tuple[Vectors, Vectors]:
        return {"drift": memory["drift"] + outcome.delta}, {}

    def merge(self, server: ServerState, uploads: Uploads) -> ServerState:
        mean_drift = server["mean_drift"] + uploads.sum("delta") / server.clients
        return server.update(move=server.move + mean_drift, mean_drift=mean_drift)
