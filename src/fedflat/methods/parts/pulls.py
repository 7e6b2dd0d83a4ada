"""Parts that add a pull to the client's steps: a vector that is constant over the round, and a decay."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from fedflat.local import LocalRule, Outcome, Vectors
from fedflat.methods.part import Crowd, Part, ServerView, option
from fedflat.methods.uploads import Upload, Uploads

Quadratic = Literal["decay", "clipped", "none"]
Division = Literal["steps", "momentum", "common"]


@dataclass(frozen=True)
class Proximal(Part):
    """Stay near the global model (FedProx):  ∇ μ/2 ‖w − wᵗ‖² = μ w − μ wᵗ.

    Deviations: none. The two summands are separate because some authors clip only one of them. With
    `clip_mode = "loss_only"` this makes no difference.
    """

    mu: float = option(0.1, "weight μ of the proximal term", low=0)

    def plan(self, rule: LocalRule, sent: Vectors, memory: Vectors) -> LocalRule:
        return rule.with_pull(-self.mu * sent["weights"], self.mu) if self.mu else rule


@dataclass(frozen=True)
class DynamicDual(Part):
    """Dynamic regularisation with a dual variable per client (FedDyn; the λ of FedSMOO; FedADMM):

        client:  g = ∇fᵢ(w) + λ (w − wᵗ + hᵢ),      hᵢ ← hᵢ + Δᵢ
        server:  w ← mean_S wᵢ + h̄,                 h̄ ← h̄ + (1/m) Σ_S Δᵢ

    Here hᵢ is the gradient memory divided by −λ, and h̄ is the mean of hᵢ over all m clients.

    Options: with `dual = "active"`, h̄ is the mean over the round's clients, as in the FedSpeed paper (its code uses all
    clients); the clients then upload hᵢ too. With `balanced`, λ is divided by nᵢ m/N, as in the code of FedDyn, FedDC
    and MAN. `quadratic` says where λ w is added: to the weight decay, outside of the authors' clip (`decay`), or inside
    the clip (`clipped`, FedDC). With `none` both λ w and λ wᵗ are left out, and only λ hᵢ remains (FedGMT). `gain`
    multiplies Δᵢ in the updates of hᵢ and h̄. With `direction_only`, hᵢ is only a direction for FedSoL, and the server's
    average does not change.
    """

    penalty: float = option(0.1, "weight λ of the quadratic penalty (α in FedDyn, 1/β in FedSMOO)", low=0)
    dual: Crowd = option("all", "whose duals the server averages", choices=("all", "active"))
    balanced: bool = option(False, "divide λ by the client's relative size nᵢ m/N")
    quadratic: Quadratic = option("decay", "where λ w stands", choices=("decay", "clipped", "none"))
    gain: float = option(1.0, "factor on Δᵢ in the dual's update", low=0)
    direction_only: bool = option(False, "only point the way for FedSoL")

    def first_state(self, weights: Tensor) -> Vectors:
        return {} if self.direction_only else {"mean_drift": torch.zeros_like(weights)}

    def first_memory(self, initial: Tensor) -> Vectors:
        return {"drift": torch.zeros_like(initial)}

    def plan(self, rule: LocalRule, sent: Vectors, memory: Vectors) -> LocalRule:
        if not self.penalty:
            return rule
        penalty = self.penalty / rule.share if self.balanced else self.penalty
        if self.quadratic == "none":
            return rule.with_pull(penalty * memory["drift"])
        pull = penalty * (memory["drift"] - sent["weights"])
        return rule.with_pull(pull, penalty) if self.quadratic == "decay" else rule.with_pull(pull, spring=penalty)

    def report(self, upload: Upload, sent: Vectors, memory: Vectors, outcome: Outcome) -> tuple[Upload, Vectors]:
        drift = torch.add(memory["drift"], outcome.delta, alpha=self.gain)
        return (upload.update(drift=drift) if self.dual == "active" else upload), {"drift": drift}

    def merge(self, move: Tensor, server: ServerView, uploads: Uploads) -> tuple[Tensor, Vectors]:
        if self.direction_only:
            return move, {}
        if self.dual == "active":
            mean_drift = uploads.average("drift")
        else:
            mean_drift = uploads.sum("delta").mul_(self.gain).div_(server.clients).add_(server["mean_drift"])
        return move + mean_drift, {"mean_drift": mean_drift}


@dataclass(frozen=True)
class ControlVariates(Part):
    """Correct the client drift with control variates (SCAFFOLD, option II):

        client:  g = ∇fᵢ(w) − cᵢ + c,      cᵢ⁺ = cᵢ − c − Δᵢ/(K η),      upload cᵢ⁺ − cᵢ
        server:  c ← c + (1/m) Σ_S (cᵢ⁺ − cᵢ)

    c remains the mean of all cᵢ. K is the client's own number of steps.

    Options: `division` is the divisor of Δᵢ. `steps` is K η. `momentum` uses the effective number of momentum steps, as
    in the FedSoL authors' code. Their server uses the sampling ratio in place of n/m; the two differ only if ratio · m
    is not a whole number. `common` is K̄ η₀ as in FedDC's code, where K̄ is the number of steps of a client of mean size,
    used for all clients, and η₀ is the learning rate of round 0. With `balanced` (FedDC), c is divided and the upload
    multiplied by nᵢ m/N. With `direction_only`, c − cᵢ is only a direction for FedSoL. It does not enter the step, so
    the update has no correction for it: cᵢ⁺ = −Δᵢ/(K η), the client's mean gradient.
    """

    division: Division = option("steps", "what Δᵢ is divided by", choices=("steps", "momentum", "common"))
    balanced: bool = option(False, "weigh the correction by the client's relative size nᵢ m/N")
    direction_only: bool = option(False, "only point the way for FedSoL")

    def first_state(self, weights: Tensor) -> Vectors:
        return {"controls": torch.zeros_like(weights)}

    def first_memory(self, initial: Tensor) -> Vectors:
        return {"control": torch.zeros_like(initial)}

    def broadcast(self, server: ServerView) -> Vectors:
        return {"controls": server["controls"]}

    def plan(self, rule: LocalRule, sent: Vectors, memory: Vectors) -> LocalRule:
        return rule.with_pull(sent["controls"] / self._share(rule) - memory["control"])

    def report(self, upload: Upload, sent: Vectors, memory: Vectors, outcome: Outcome) -> tuple[Upload, Vectors]:
        share = self._share(outcome.rule)
        applied = memory["control"] if self.direction_only else sent["controls"] / share
        change = -applied - outcome.delta / self._divisor(outcome.rule)
        return upload.update(control_change=share * change), {"control": memory["control"] + change}

    def merge(self, move: Tensor, server: ServerView, uploads: Uploads) -> tuple[Tensor, Vectors]:
        return move, {"controls": server["controls"] + uploads.sum("control_change") / server.clients}

    def _share(self, rule: LocalRule) -> float:
        return rule.share if self.balanced else 1.0

    def _divisor(self, rule: LocalRule) -> float:
        effective = rule.effective_steps  # refuses an optimiser for which Δ/(K η) is not a mean gradient
        if self.division == "common":
            return rule.typical_steps * rule.first_lr
        return (effective if self.division == "momentum" else rule.steps) * rule.mean_lr


@dataclass(frozen=True)
class MomentumControls(ControlVariates):
    """SCAFFOLD's correction with a moving average of the clients' controls as c (FedMoSWA's momentum):

        client:  g = ∇fᵢ(w) − cᵢ + c,      cᵢ⁺ = cᵢ − c − Δᵢ/(K η),      upload cᵢ⁺ − c
        server:  c ← c + γ mean_S (cᵢ⁺ − c)

    With γ = 1 and all clients in every round this is SCAFFOLD.

    Deviations: only the abstract of the paper was available; the equations are those of the released code. The code
    sets c to mean_S cᵢ⁺ in the first round. Its FedMoSWA lacks the falling rate and the longer server step of FedSWA,
    which are in the paper. K η is the sum of the η_k of the falling rate.
    """

    gamma: float = option(0.4, "share γ of the new controls in c", low=0, high=1)

    def report(self, upload: Upload, sent: Vectors, memory: Vectors, outcome: Outcome) -> tuple[Upload, Vectors]:
        upload, kept = super().report(upload, sent, memory, outcome)
        return upload.update(control_change=kept["control"] - sent["controls"]), kept

    def merge(self, move: Tensor, server: ServerView, uploads: Uploads) -> tuple[Tensor, Vectors]:
        change = uploads.sum("control_change") / len(uploads)
        return move, {"controls": torch.add(server["controls"], change, alpha=self.gamma)}


def mean_gradient(uploads: Uploads) -> Tensor:
    """Return −Σ pᵢ Δᵢ/(Kᵢ ηᵢ), the mean direction that the clients subtracted in a step."""
    weights = [-weight / pace for weight, pace in zip(uploads.weights, uploads.paces, strict=True)]
    return uploads.sum("delta", weights)


@dataclass(frozen=True)
class ClientMomentum(Part):
    """Mix the last global move into every local step (FedCM, and MoFedSAM with an ascent):

        client:  g = α ∇fᵢ(w) + (1 − α) Δᵗ
        server:  Δᵗ⁺¹ = −mean_S Δᵢ/(K η)

    Δ⁰ = 0, so the gradients of the first round are scaled by α.

    Deviations: each Δᵢ is divided by the client's own K, whereas the authors use one K for all clients. They use no
    local momentum. With local momentum, Δᵗ grows from round to round unless K counts the effective steps
    (`momentum_aware`).
    """

    sees = "each"

    mix: float = option(0.1, "share α of the client's own gradient", low=0, high=1, open_low=True)
    momentum_aware: bool = option(False, "divide by the effective number of momentum steps")

    def first_state(self, weights: Tensor) -> Vectors:
        return {"direction": torch.zeros_like(weights)}

    def broadcast(self, server: ServerView) -> Vectors:
        return {"direction": server["direction"]}

    def plan(self, rule: LocalRule, sent: Vectors, memory: Vectors) -> LocalRule:
        if self.mix == 1:
            return rule
        return replace(rule, scale=rule.scale * self.mix).with_pull((1 - self.mix) * sent["direction"])

    def report(self, upload: Upload, sent: Vectors, memory: Vectors, outcome: Outcome) -> tuple[Upload, Vectors]:
        rule = outcome.rule
        effective = rule.effective_steps  # refuses an optimiser for which Δ/(K η) is not a mean gradient
        return (replace(upload, lr=rule.mean_lr * effective / rule.steps) if self.momentum_aware else upload), {}

    def merge(self, move: Tensor, server: ServerView, uploads: Uploads) -> tuple[Tensor, Vectors]:
        return move, {"direction": mean_gradient(uploads)}
