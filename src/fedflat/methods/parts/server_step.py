"""Parts that change the server's average, its step, or the model that is evaluated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedflat.local import LocalRule, Outcome, Vectors
from fedflat.methods.part import Part, ServerView, option
from fedflat.methods.parts.ascent import along
from fedflat.methods.uploads import Upload, Uploads, Weighting

MANY = 100_000  # steps beyond which a sum over them is computed in closed form


@dataclass(frozen=True)
class AdaptiveServer(Part):
    """An adaptive optimiser on the server, with the average Δ̄ as its gradient (FedAdam, FedYogi, FedAdagrad):

        m ← β₁ m + (1 − β₁) Δ̄
        v ← β₂ v + (1 − β₂) Δ̄²  (adam)      v − (1 − β₂) Δ̄² sign(v − Δ̄²)  (yogi)      v + Δ̄²  (adagrad)
        w ← w + η_g m/(√v + τ)

    There is no bias correction, as in the paper.

    Deviations: v starts at `v0`. The paper requires at least τ²; the FedSMOO authors' code starts at 0.
    """

    stage = "server"

    rule: Literal["adam", "yogi", "adagrad"] = option("adam", "which v", choices=("adam", "yogi", "adagrad"))
    server_lr: float = option(0.1, "server learning rate η_g", low=0, open_low=True)
    beta1: float = option(0.9, "decay β₁ of the mean", low=0, high=1)
    beta2: float = option(0.99, "decay β₂ of the square", low=0, high=1)
    tau: float = option(0.01, "adaptivity τ", low=0, open_low=True)
    v0: float = option(1e-4, "initial v, τ² in the paper", low=0)

    def first_state(self, weights: Tensor) -> Vectors:
        return {"first_moment": torch.zeros_like(weights), "second_moment": torch.full_like(weights, self.v0)}

    def merge(self, move: Tensor, server: ServerView, uploads: Uploads) -> tuple[Tensor, Vectors]:
        v = server["second_moment"]
        m = self.beta1 * server["first_moment"] + (1 - self.beta1) * move
        square = move.square()
        if self.rule == "adam":
            v = self.beta2 * v + (1 - self.beta2) * square
        elif self.rule == "yogi":
            v = v - (1 - self.beta2) * square * torch.sign(v - square)
        else:
            v = v + square
        return self.server_lr * m / (v.sqrt() + self.tau), {"first_moment": m, "second_moment": v}


@dataclass(frozen=True)
class ServerMomentum(Part):
    """Heavy-ball momentum on the server (FedAvgM):  m ← β m + Δ̄,  w ← w + m.

    With `lookahead` the clients start from w + β m, and Δ is measured from there (the Nesterov form of FedACG and
    FedNSAM). The server sends this point in place of w, so the broadcast does not grow.

    Deviations: FedNSAM's released server adds β times the new average where the formula in its code has the old
    momentum; this part implements the formula. Only the abstract of the paper was available. According to the abstract,
    the global momentum is also the direction of the clients' perturbation; the released code and this implementation
    use the client's own gradient.
    """

    stage = "server"

    beta: float = option(0.9, "momentum β", low=0, high=1)
    lookahead: bool = option(False, "let the clients start from w + β m")

    def first_state(self, weights: Tensor) -> Vectors:
        return {"momentum": torch.zeros_like(weights)}

    def broadcast(self, server: ServerView) -> Vectors:
        return {"weights": server.start + self.beta * server["momentum"]} if self.lookahead else {}

    def merge(self, move: Tensor, server: ServerView, uploads: Uploads) -> tuple[Tensor, Vectors]:
        momentum = self.beta * server["momentum"] + move
        return momentum, {"momentum": momentum}


@dataclass(frozen=True)
class ServerStep(Part):
    """Scale the average move (FedSWA's server):  w ← w + α (mean wᵢ − w).

    Deviations: none. The released code uses α = 1.
    """

    stage = "server"

    alpha: float = option(1.5, "how far, in units of the average move", low=0, open_low=True)

    def merge(self, move: Tensor, server: ServerView, uploads: Uploads) -> tuple[Tensor, Vectors]:
        return self.alpha * move, {}


@dataclass(frozen=True)
class Extrapolation(Part):
    """Lengthen the server's step by as much as the clients disagree (FedExP):

        w ← w + η_g Δ̄,      η_g = max( 1, Σ pᵢ ‖Δᵢ‖² / (2 (‖Δ̄‖² + ε)) )

    pᵢ are the weights of the average, 1/n in the paper. The norms are those of the uploads. The factor multiplies the
    method's move, with the changes that other parts have made to Δ̄. The paper evaluates the mean of the last two
    iterates, because they oscillate (`average`); training continues from w.

    Deviations: the released code multiplies ε by the number of clients and by the square of the learning rate's decay
    in every round. This part implements the paper's formula.
    """

    stage = "server"
    sees = "each"

    eps: float = option(1e-3, "ε beside ‖Δ̄‖²", low=0, open_low=True)
    average: bool = option(True, "evaluate the mean of the last two iterates")

    def first_state(self, weights: Tensor) -> Vectors:
        return {"before": weights.clone()} if self.average else {}

    def merge(self, move: Tensor, server: ServerView, uploads: Uploads) -> tuple[Tensor, Vectors]:
        spread = sum(weight * upload.norm**2 for weight, upload in zip(uploads.weights, uploads, strict=True))
        factor = max(1.0, spread / (2 * (float(uploads.average("delta").square().sum()) + self.eps)))
        return factor * move, {"before": server.weights} if self.average else {}

    def evaluated(self, server: ServerView) -> Tensor | None:
        if not self.average:
            return None
        return (server.weights + server["before"]) / 2 if server.round > 1 else server.weights


@dataclass(frozen=True)
class ServerAscent(Part):
    """Sharpness-aware steps on the server without additional communication (FedGloSS):

        sent:    w̃ = w + ρ Δ̃/‖Δ̃‖      with Δ̃ = −mean_S Δᵢ of the last round, its pseudo-gradient
        server:  w ← w + move, from the unperturbed w

    The radius grows linearly from `start` to ρ over `ramp` rounds.

    Deviations: the ramp of the released code ends after one round. This part implements the paper's ramp.
    """

    rho_server: float = option(0.15, "radius ρ of the server's perturbation", low=0)
    start: float = option(0.001, "radius in round 0 if it is ramped up", low=0)
    ramp: int = option(0, "rounds until the radius is ρ; 0 = at once", low=0)

    def first_state(self, weights: Tensor) -> Vectors:
        return {"pseudo_gradient": torch.zeros_like(weights)}

    def broadcast(self, server: ServerView) -> Vectors:
        radius = self.rho_server
        if self.ramp:
            radius = self.start + (self.rho_server - self.start) * min(server.round / self.ramp, 1.0)
        return {"weights": server.start + along(server["pseudo_gradient"], radius)}

    def merge(self, move: Tensor, server: ServerView, uploads: Uploads) -> tuple[Tensor, Vectors]:
        return move, {"pseudo_gradient": -uploads.average("delta")}


@dataclass(frozen=True)
class NormalisedAveraging(Part):
    """Average normalised updates, so that clients with more steps do not get more weight (FedNova):

        w ← w + τ Σ pᵢ Δᵢ/aᵢ,      τ = Σ pᵢ aᵢ

    aᵢ is the client's number of steps. With momentum β it is (K − β (1 − β^K)/(1 − β))/(1 − β). With a proximal term μ
    it is given by a ← (1 − η μ) a + 1 over the K steps, and τ = Σ pᵢ Kᵢ. In a deployment, a client's steps count in
    τ with the share of its samples that counts. Otherwise a client that claims a billion samples would scale the move
    of all clients.

    Deviations: the FedSoL repository adds a correction to FedNova whose global half is never updated. This part leaves
    it out.
    """

    sees = "each"

    def report(self, upload: Upload, sent: Vectors, memory: Vectors, outcome: Outcome) -> tuple[Upload, Vectors]:
        rule = outcome.rule
        proximal = _proximal_steps(rule)
        a, tau = (proximal, rule.steps) if _proximal(rule) else (rule.effective_steps, rule.effective_steps)
        return upload.update(normaliser=outcome.delta.new_tensor([a, tau])), {}

    def merge(self, move: Tensor, server: ServerView, uploads: Uploads) -> tuple[Tensor, Vectors]:
        pairs = [(w, upload["normaliser"].tolist()) for w, upload in zip(uploads.weights, uploads, strict=True)]
        tau = sum(w * counted * steps for (w, (_, steps)), counted in zip(pairs, uploads.counted, strict=True))
        return uploads.sum("delta", [tau * w / a for w, (a, _) in pairs]), {}


def _proximal(rule: LocalRule) -> float:
    """Return the sum of μ over all proximal terms."""
    return rule.decay + rule.spring


def _proximal_steps(rule: LocalRule) -> float:
    a, kept = 0.0, 1 - rule.lr * _proximal(rule)
    if rule.steps > MANY:
        return (1 - kept**rule.steps) / (1 - kept) if -1 < kept < 1 else float(rule.steps)
    for _ in range(rule.steps):
        a = kept * a + 1
    return a


@dataclass(frozen=True)
class WeightAveraging(Part):
    """Stochastic weight averaging on the server (SWA), for evaluation only; training continues from w.

        from round `start` on, every `every` rounds:  w_swa ← w_swa + (w − w_swa)/(k + 1),  k = 0, 1, …

    The first update replaces the previous value, as in the FedASAM authors' code.

    Deviations: the learning rate is not cycled. The authors' code cycles it by the absolute round.
    """

    stage = "evaluation"

    start: int = option(10, "round from which the average runs", low=0)
    every: int = option(1, "rounds between two models of the average", low=1)

    def first_state(self, weights: Tensor) -> Vectors:
        return {"swa": weights.clone()}

    def merge(self, move: Tensor, server: ServerView, uploads: Uploads) -> tuple[Tensor, Vectors]:
        since, new = server.round + 1 - self.start, server.arrival(move)
        if since <= 0:
            return move, {"swa": new}
        if since % self.every:
            return move, {}
        return move, {"swa": server["swa"] + (new - server["swa"]) / (since // self.every)}

    def evaluated(self, server: ServerView) -> Tensor | None:
        return server["swa"] if server.round else None


@dataclass(frozen=True)
class ActiveModel(Part):
    """Evaluate the average of the round's clients, mean_S wᵢ, before any further step of the server.

    It is selected by `evaluation.model = "active"`. Training continues from the server's weights.
    """

    stage = "evaluation"
    stands_for: ClassVar[str] = 'evaluation.model = "active"'

    def first_state(self, weights: Tensor) -> Vectors:
        return {"active": weights.clone()}

    def merge(self, move: Tensor, server: ServerView, uploads: Uploads) -> tuple[Tensor, Vectors]:
        return move, {"active": server.start + uploads.average("delta")}

    def evaluated(self, server: ServerView) -> Tensor | None:
        return server["active"]


@dataclass(frozen=True)
class AllModels(Part):
    """Evaluate the mean of the last models of all m clients, with the initial weights for those that never took part.

    It is selected by `evaluation.model = "all"`, and is the model that MAN's authors evaluate. Training continues from
    the server's weights. Each client keeps its last model and uploads the change. The mean has the same weights as the
    recipe's average.
    """

    stage = "evaluation"
    stands_for: ClassVar[str] = 'evaluation.model = "all"'

    by: Weighting = option("uniform", "weights of the mean", choices=("uniform", "samples"))

    def first_state(self, weights: Tensor) -> Vectors:
        return {"all": weights.clone()}

    def first_memory(self, initial: Tensor) -> Vectors:
        return {"last": initial.clone()}

    def report(self, upload: Upload, sent: Vectors, memory: Vectors, outcome: Outcome) -> tuple[Upload, Vectors]:
        last = sent["weights"] + outcome.delta
        share = outcome.rule.share if self.by == "samples" else 1.0
        return upload.update(change=share * (last - memory["last"])), {"last": last}

    def merge(self, move: Tensor, server: ServerView, uploads: Uploads) -> tuple[Tensor, Vectors]:
        return move, {"all": server["all"] + uploads.sum("change") / server.clients}

    def evaluated(self, server: ServerView) -> Tensor | None:
        return server["all"]
