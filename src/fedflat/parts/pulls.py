"""Parts that pull the client's steps towards something: a vector that is constant over the round, and a decay."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from fedflat.local import LocalRule, Outcome, Vectors
from fedflat.parts.part import Crowd, Part, ServerState, Uploads, option


def pulled(rule: LocalRule, pull: Tensor, decay: float = 0.0) -> LocalRule:
    """The rule with one more pull and decay."""
    return replace(rule, pull=pull if rule.pull is None else rule.pull + pull, decay=rule.decay + decay)


@dataclass(frozen=True)
class Proximal(Part):
    """Stay near the global model (FedProx):  ∇ μ/2 ‖w − wᵗ‖² = μ w − μ wᵗ.

    Deviations: none. The two summands stand apart because some authors clip between them; with
    `clip_mode = "loss_only"` the split does not matter.
    """

    mu: float = option(0.1, "weight μ of the proximal term", low=0)

    def plan(self, rule: LocalRule, sent: Vectors, memory: Vectors) -> LocalRule:
        return pulled(rule, -self.mu * sent["weights"], self.mu)


@dataclass(frozen=True)
class DynamicDual(Part):
    """Dynamic regularisation by a dual variable of each client (FedDyn; the λ of FedSMOO; FedADMM):

        client:  g = ∇fᵢ(w) + λ (w − wᵗ + hᵢ),      hᵢ ← hᵢ + Δᵢ
        server:  w ← mean_S wᵢ + h̄,                 h̄ ← h̄ + (1/m) Σ_S Δᵢ

    where hᵢ is the gradient memory divided by −λ, so that h̄ is the mean over all m clients' hᵢ.

    Deviations: with `dual = "active"` h̄ is the mean over the round's clients, as the FedSpeed paper has it (its code
    uses all); they then upload hᵢ too. With `balanced` λ is divided by nᵢ m/N, as in FedDyn's and FedDC's own code.
    """

    memory = ("drift",)
    state = ("mean_drift",)

    penalty: float = option(0.1, "weight λ of the quadratic penalty (α in FedDyn, 1/β in FedSMOO)", low=0)
    dual: Crowd = option("all", "whose duals the server averages", choices=("all", "active"))
    balanced: bool = option(False, "divide λ by the client's relative size nᵢ m/N")

    @property
    def uploads(self) -> tuple[str, ...]:
        return ("drift",) if self.dual == "active" else ()

    def plan(self, rule: LocalRule, sent: Vectors, memory: Vectors) -> LocalRule:
        penalty = self.penalty / rule.share if self.balanced else self.penalty
        return pulled(rule, penalty * (memory["drift"] - sent["weights"]), penalty)

    def settle(self, sent: Vectors, memory: Vectors, outcome: Outcome) -> tuple[Vectors, Vectors]:
        drift = memory["drift"] + outcome.delta
        return {"drift": drift}, dict.fromkeys(self.uploads, drift)

    def merge(self, server: ServerState, uploads: Uploads) -> ServerState:
        if self.dual == "active":
            mean_drift = uploads.average("drift")
        else:
            mean_drift = server["mean_drift"] + uploads.sum("delta") / server.clients
        return server.update(move=server.move + mean_drift, mean_drift=mean_drift)


@dataclass(frozen=True)
class ControlVariates(Part):
    """Correct the drift by control variates (SCAFFOLD, option II):

        client:  g = ∇fᵢ(w) − cᵢ + c,      cᵢ⁺ = cᵢ − c − Δᵢ/(K η),      upload cᵢ⁺ − cᵢ
        server:  c ← c + (1/m) Σ_S (cᵢ⁺ − cᵢ)

    so that c stays the mean of all cᵢ. K is the client's own number of steps.

    Deviations: with `momentum_aware` K is the effective number of momentum steps, as in the FedSoL authors' code, whose
    server uses the sampling ratio in place of n/m; the two differ only where ratio · m is no whole number. With
    `balanced` (FedDC) c is divided, and the upload multiplied, by nᵢ m/N.
    """

    memory = ("control",)
    state = ("controls",)

    momentum_aware: bool = option(False, "divide by the effective number of momentum steps")
    balanced: bool = option(False, "weigh the correction by the client's relative size nᵢ m/N")

    uploads = ("control_change",)

    def send(self, server: ServerState) -> Vectors:
        return {"controls": server["controls"]}

    def plan(self, rule: LocalRule, sent: Vectors, memory: Vectors) -> LocalRule:
        return pulled(rule, sent["controls"] / self._share(rule) - memory["control"])

    def settle(self, sent: Vectors, memory: Vectors, outcome: Outcome) -> tuple[Vectors, Vectors]:
        rule, share = outcome.rule, self._share(outcome.rule)
        steps = rule.effective_steps if self.momentum_aware else rule.steps
        change = -sent["controls"] / share - outcome.delta / (steps * rule.mean_lr)
        return {"control": memory["control"] + change}, {"control_change": share * change}

    def merge(self, server: ServerState, uploads: Uploads) -> ServerState:
        return server.update(controls=server["controls"] + uploads.sum("control_change") / server.clients)

    def _share(self, rule: LocalRule) -> float:
        return rule.share if self.balanced else 1.0


@dataclass(frozen=True)
class ClientMomentum(Part):
    """Mix the last global move into every local step (FedCM, and with an ascent MoFedSAM):

        client:  g = α ∇fᵢ(w) + (1 − α) Δᵗ
        server:  Δᵗ⁺¹ = −mean_S Δᵢ/(K η)

    Δ⁰ = 0, so the first round's steps have the length α.

    Deviations: each Δᵢ is divided by that client's own K; the authors use one K for all.
    """

    state = ("direction",)

    mix: float = option(0.1, "share α of the client's own gradient", low=0, high=1, open_low=True)

    def send(self, server: ServerState) -> Vectors:
        return {"direction": server["direction"]}

    def plan(self, rule: LocalRule, sent: Vectors, memory: Vectors) -> LocalRule:
        return pulled(replace(rule, scale=rule.scale * self.mix), (1 - self.mix) * sent["direction"])

    def merge(self, server: ServerState, uploads: Uploads) -> ServerState:
        weights = [-w / (u.steps * u.lr) for w, u in zip(uploads.weights, uploads, strict=True)]
        return server.update(direction=uploads.sum("delta", weights))
