"""Parts that take the gradient somewhere else than at w."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedflat.local import LocalRule, Outcome, Slope, Vectors
from fedflat.parts.part import Crowd, Part, ServerState, Uploads, option


def per_norm(radius: float, direction: Tensor) -> Tensor:
    """ρ/‖x‖, finite where x is zero; the guard is that of the FedSMOO authors."""
    norm: Tensor = direction.norm(dim=-1, keepdim=True)
    return radius / (norm + 1e-7)


def along(direction: Tensor, radius: float) -> Tensor:
    """ρ x/‖x‖, and zero where x is zero."""
    return direction * per_norm(radius, direction)


@dataclass(frozen=True)
class Ascent(Part):
    """Sharpness-aware minimisation (FedSAM):  ε = ρ g/‖g‖ with g = ∇f(w), and the step uses ∇f(w + ε).

    Deviations: none. Weight decay and pulls never enter ε, as in the authors' code.
    """

    place = "ascent"
    rows = True
    gradients = 2

    rho: float = option(0.1, "radius ρ of the perturbation", low=0)

    def plan(self, rule: LocalRule, sent: Vectors, memory: Vectors) -> LocalRule:
        return replace(rule, ascent=self)

    def __call__(self, slope: Slope, carry: Vectors) -> tuple[Tensor, Vectors]:
        g = slope()
        return slope(g, per_norm(self.rho, g)), carry


@dataclass(frozen=True)
class AdaptiveAscent(Part):
    """Adaptive SAM (FedASAM):  ε = ρ T²g/‖T g‖ with T = |w| + η, so that ε does not change under rescaling of layers.

    Deviations: two definitions are in use. FedASAM's authors have η = 0.2 and T = 1 for what is no weight (biases,
    norms); the FedSoL authors have η = 0 and T = |w| for all (`eta=0, biases=True`).
    """

    place = "ascent"
    gradients = 2

    rho: float = option(0.7, "radius ρ", low=0)
    eta: float = option(0.2, "floor η of the scale", low=0)
    biases: bool = option(False, "scale biases and norms too")

    def plan(self, rule: LocalRule, sent: Vectors, memory: Vectors) -> LocalRule:
        fixed = rule.layout.mask(lambda name: "weight" not in name).to(sent["weights"].device)
        return replace(rule, ascent=AdaptiveStep(self, None if self.biases else fixed))


@dataclass(frozen=True)
class AdaptiveStep:
    """The ascent of `AdaptiveAscent`, with the entries whose scale is 1."""

    part: AdaptiveAscent
    fixed: Tensor | None
    features: ClassVar[bool] = False
    activations: ClassVar[bool] = False

    def __call__(self, slope: Slope, carry: Vectors) -> tuple[Tensor, Vectors]:
        scale = slope.weights.abs().add_(self.part.eta)
        if self.fixed is not None:
            scale.masked_fill_(self.fixed, 1.0)
        scaled = slope().mul_(scale)
        length = per_norm(self.part.rho, scaled)
        return slope(scaled.mul_(scale), length), carry


@dataclass(frozen=True)
class ConsensusAscent(Part):
    """A perturbation that all clients agree on (FedSMOO), in every local step:

        ŝ = ρ q/‖q‖,  q = g − μᵢ − s            μᵢ ← μᵢ + ŝ − s            the step uses ∇f(w + ŝ)
        server:  s = ρ M/‖M‖,  M = mean μᵢ

    s is fixed over a round; μᵢ is the client's dual variable.

    Deviations: the sign of s and the uploaded μᵢ (the paper: μᵢ − ŝ) are those of the authors' code, which made the
    published numbers. Solving the written Lagrangian gives +s: `sign = 1`. Their mean runs over the round's clients;
    `crowd = "all"` takes all m.
    """

    place = "ascent"
    rows = True
    memory = ("dual",)
    state = ("perturbation", "mean_dual")
    gradients = 2

    rho: float = option(0.1, "radius ρ of the perturbation", low=0)
    sign: int = option(-1, "sign of s in q: -1 as in the authors' code, or +1", choices=(-1, 1))
    crowd: Crowd = option("active", "whose duals s is the mean of", choices=("active", "all"))

    uploads = ("dual",)

    def send(self, server: ServerState) -> Vectors:
        return {"perturbation": server["perturbation"]}

    def plan(self, rule: LocalRule, sent: Vectors, memory: Vectors) -> LocalRule:
        # The round's own copy, which every step changes in place.
        dual = memory["dual"].clone()
        return replace(rule, ascent=self, carry={**rule.carry, "dual": dual, "s": sent["perturbation"]})

    def __call__(self, slope: Slope, carry: Vectors) -> tuple[Tensor, Vectors]:
        s, dual = carry["s"], carry["dual"]
        q = slope().sub_(dual).add_(s, alpha=self.sign)
        length = per_norm(self.rho, q)
        dual.addcmul_(q, length).sub_(s)
        return slope(q, length), carry

    def settle(self, sent: Vectors, memory: Vectors, outcome: Outcome) -> tuple[Vectors, Vectors]:
        dual = outcome.carry["dual"]
        return {"dual": dual}, {"dual": dual if self.crowd == "active" else dual - memory["dual"]}

    def merge(self, server: ServerState, uploads: Uploads) -> ServerState:
        if self.crowd == "active":
            mean = uploads.sum("dual") / len(uploads)
        else:
            mean = server["mean_dual"] + uploads.sum("dual") / server.clients
        return server.update(perturbation=along(mean, self.rho), mean_dual=mean)


@dataclass(frozen=True)
class LookbackAscent(Part):
    """Ascend against the last global move (FedLESAM):  ε = ρ (w_old − wᵗ)/‖w_old − wᵗ‖, fixed over the round.

    w_old is the global model that this client saw when it last took part; the first time ε = 0. One gradient a step.

    Deviations: the released code broadcasts one direction and then indexes it by tensor, so that each tensor is
    shifted by one number; this is the paper's formula.
    """

    place = "ascent"
    rows = True
    memory = ("seen",)

    rho: float = option(0.1, "radius ρ of the perturbation", low=0)

    def first_memory(self, initial: Tensor) -> Vectors:
        return {"seen": torch.full_like(initial, torch.nan)}

    def plan(self, rule: LocalRule, sent: Vectors, memory: Vectors) -> LocalRule:
        moved = (memory["seen"] - sent["weights"]).nan_to_num_(0.0)
        return replace(rule, ascent=self, carry={**rule.carry, "lookback": along(moved, self.rho)})

    def __call__(self, slope: Slope, carry: Vectors) -> tuple[Tensor, Vectors]:
        return slope(carry["lookback"]), carry

    def settle(self, sent: Vectors, memory: Vectors, outcome: Outcome) -> tuple[Vectors, Vectors]:
        return {"seen": sent["weights"]}, {}


@dataclass(frozen=True)
class InterpolatedAscent(Part):
    """Between the client's own sharpness and the global one (FedGF):

        server:  w̃ = w + ρ_g (w_old − w)/‖w_old − w‖,      c = mean of the last W of 1[ mean ‖Δᵢ‖ > T ]
        client:  the gradient is taken at  c w̃ + (1 − c)(w + ρ g/‖g‖)

    w_old is the global model of the round before; c = 0 in round 0. The more the clients diverge, the more the global
    perturbation counts.

    Deviations: none known; W, T and ρ_g have no published defaults beyond W = 30.
    """

    place = "ascent"
    state = ("before", "window")
    gradients = 2

    rho: float = option(0.05, "radius ρ of the client's perturbation", low=0)
    rho_server: float = option(0.05, "radius ρ_g of the global perturbation", low=0)
    threshold: float = option(1.0, "divergence T above which a round counts", low=0)
    window: int = option(30, "rounds W that c looks back on", low=1)

    def first_state(self, weights: Tensor) -> Vectors:
        return {"before": weights.clone(), "window": weights.new_full((self.window,), torch.nan)}

    def send(self, server: ServerState) -> Vectors:
        seen = server["window"][~server["window"].isnan()]
        share = seen.mean() if len(seen) else seen.new_zeros(())
        ahead = server.weights + along(server["before"] - server.weights, self.rho_server)
        return {"ahead": ahead, "mix": share.view(1)}

    def plan(self, rule: LocalRule, sent: Vectors, memory: Vectors) -> LocalRule:
        return replace(rule, ascent=self, carry={**rule.carry, "ahead": sent["ahead"], "mix": sent["mix"]})

    def __call__(self, slope: Slope, carry: Vectors) -> tuple[Tensor, Vectors]:
        mix, g = carry["mix"], slope()
        length = per_norm(self.rho, g)
        if not bool(mix):
            return slope(g, length), carry
        return slope(mix * (carry["ahead"] - slope.weights) + (1 - mix) * length * g), carry

    def merge(self, server: ServerState, uploads: Uploads) -> ServerState:
        divergence = sum(upload.norm for upload in uploads) / len(uploads)
        window = torch.cat([server["window"][1:], server["window"].new_tensor([float(divergence > self.threshold)])])
        return server.update(before=server.weights, window=window)
