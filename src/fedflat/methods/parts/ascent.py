"""Parts that take the gradient at a perturbed point instead of w."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedflat.local import LocalRule, Outcome, Slope, Vectors
from fedflat.methods.part import Part, ServerView, option
from fedflat.methods.uploads import Upload, Uploads

GUARD = 1e-7  # added to norms to avoid division by zero; the value of the FedSMOO authors


def per_norm(radius: float, direction: Tensor, guard: float = GUARD) -> Tensor:
    """Return ρ/‖x‖, finite for x = 0."""
    norm: Tensor = direction.norm(dim=-1, keepdim=True)
    return radius / (norm + guard)


def along(direction: Tensor, radius: float, guard: float = GUARD) -> Tensor:
    """Return ρ x/‖x‖, and zero for x = 0."""
    return direction * per_norm(radius, direction, guard)


@dataclass(frozen=True)
class Ascent(Part):
    """Sharpness-aware minimisation (FedSAM):  ε = ρ g/‖g‖ with g = ∇f(w), and the step uses ∇f(w + ε).

    Deviations: none. Weight decay and pulls do not enter ε, as in the authors' code.
    """

    rows: ClassVar[bool] = True

    rho: float = option(0.1, "radius ρ of the perturbation", low=0)

    def plan(self, rule: LocalRule, sent: Vectors, memory: Vectors) -> LocalRule:
        return rule.with_ascent(self) if self.rho else rule

    def __call__(self, slope: Slope, carry: Vectors) -> tuple[Tensor, Vectors]:
        g = slope()
        return slope(g, per_norm(self.rho, g), spent=True), carry


@dataclass(frozen=True)
class SparingAscent(Part):
    """SAM with fewer gradients (LookSAM): ε = ρ g/‖g‖ in every k-th step only, with g on a share of the batch.

        steps 0, k, 2k, …    g = ∇f(w) on the first ⌈fraction · B⌉ samples,   s = ∇f(w + ε),
                             h = s − (s·ĝ) ĝ,   and the step uses s
        other steps          g = ∇f(w),   and the step uses  g + α ‖g‖ ĥ

    Here x̂ = x/‖x‖. The direction h, in which SAM differs from plain SGD, changes slowly and is reused until the
    next ascent. A step needs (k + fraction)/k gradients on average. With k = 1 and fraction = 1 it is FedSAM.

    Deviations: the paper's ascent uses the whole batch (`fraction = 1`). With a smaller fraction, batch-norm takes its
    statistics from that share. The default of α is ours; `benchmarks/sparing_sam.py` shows what a larger one costs.
    """

    rho: float = option(0.1, "radius ρ of the perturbation", low=0)
    every: int = option(5, "steps k from one ascent to the next", low=1)
    fraction: float = option(1.0, "share of the batch on which the ascent is computed", low=0, high=1, open_low=True)
    mix: float = option(0.2, "weight α of the direction h in the steps between", low=0)

    def plan(self, rule: LocalRule, sent: Vectors, memory: Vectors) -> LocalRule:
        if not self.rho:
            return rule
        if self.every == 1 and self.fraction == 1:
            return Ascent(self.rho).plan(rule, sent, memory)
        return rule.with_ascent(self, step=torch.zeros(1))

    def __call__(self, slope: Slope, carry: Vectors) -> tuple[Tensor, Vectors]:
        k, carry = int(carry["step"]), {**carry, "step": carry["step"] + 1}
        if k % self.every:
            g = slope()
            return torch.addcmul(g, carry["sharp"], g.norm(), value=self.mix), carry
        with slope.first(self.fraction):
            g = slope()
        sharp = slope(g, per_norm(self.rho, g))
        if self.every > 1:
            g = along(g, 1.0)
            carry["sharp"] = along(sharp - sharp.dot(g) * g, 1.0)
        return sharp, carry


@dataclass(frozen=True)
class AdaptiveAscent(Part):
    """Adaptive SAM (FedASAM):  ε = ρ T²g/‖T g‖ with T = |w| + η, which makes ε invariant to rescaling of layers.

    Deviations: two definitions are in use. FedASAM's authors use η = 0.2, and T = 1 for parameters without "weight" in
    their name: biases, but not the gains of a norm (`norm.weight`), which are scaled like other weights. We scale the
    factors of adapters too, whatever their names. The FedSoL authors use η = 0 and T = |w| for all parameters
    (`eta=0, biases=True`).
    """

    rho: float = option(0.7, "radius ρ", low=0)
    eta: float = option(0.2, "floor η of the scale", low=0)
    biases: bool = option(False, "scale biases too")

    def plan(self, rule: LocalRule, sent: Vectors, memory: Vectors) -> LocalRule:
        if not self.rho:
            return rule
        fixed = rule.layout.mask(lambda name: "weight" not in name and ".lora_" not in f".{name}")
        fixed = fixed.to(sent["weights"].device)
        return rule.with_ascent(AdaptiveStep(self, None if self.biases else fixed))


@dataclass(frozen=True)
class AdaptiveStep:
    """The ascent of `AdaptiveAscent`; `fixed` marks the entries with scale 1."""

    part: AdaptiveAscent
    fixed: Tensor | None

    def __call__(self, slope: Slope, carry: Vectors) -> tuple[Tensor, Vectors]:
        scale = slope.weights.abs().add_(self.part.eta)
        if self.fixed is not None:
            scale.masked_fill_(self.fixed, 1.0)
        scaled = slope() * scale
        length = per_norm(self.part.rho, scaled)
        return slope(scaled.mul_(scale), length, spent=True), carry


@dataclass(frozen=True)
class LookbackAscent(Part):
    """Perturb against the last global move (FedLESAM):  ε = ρ (w_old − wᵗ)/‖w_old − wᵗ‖, constant over the round.

    w_old is the global model that the client received when it last took part; in its first round ε = 0. A step needs
    only one gradient. With `direction = "server"`, w_old is the global model of the last round, which is the same for
    all clients, and the server sends w_old − wᵗ.

    Deviations: the released code indexes the broadcast direction by tensor, which shifts each tensor by a single
    number. This part implements the paper's formula.
    """

    rows: ClassVar[bool] = True

    rho: float = option(0.1, "radius ρ of the perturbation", low=0)
    direction: Literal["client", "server"] = option(
        "client", "since which model: the client's last one or the server's", choices=("client", "server")
    )

    def first_memory(self, initial: Tensor) -> Vectors:
        return {"seen": torch.full_like(initial, torch.nan)} if self.direction == "client" else {}

    def first_state(self, weights: Tensor) -> Vectors:
        return {"before": weights.clone()} if self.direction == "server" else {}

    def broadcast(self, server: ServerView) -> Vectors:
        return {"back": server["before"] - server.weights} if self.direction == "server" else {}

    def plan(self, rule: LocalRule, sent: Vectors, memory: Vectors) -> LocalRule:
        if not self.rho:
            return rule
        back = sent["back"] if self.direction == "server" else (memory["seen"] - sent["weights"]).nan_to_num(0.0)
        return rule.with_ascent(self, lookback=along(back, self.rho))

    def __call__(self, slope: Slope, carry: Vectors) -> tuple[Tensor, Vectors]:
        return slope(carry["lookback"]), carry

    def report(self, upload: Upload, sent: Vectors, memory: Vectors, outcome: Outcome) -> tuple[Upload, Vectors]:
        return upload, {"seen": sent["weights"]} if self.direction == "client" else {}

    def merge(self, move: Tensor, server: ServerView, uploads: Uploads) -> tuple[Tensor, Vectors]:
        return move, {"before": server.weights} if self.direction == "server" else {}


@dataclass(frozen=True)
class InterpolatedAscent(Part):
    """Interpolate between the client's perturbation and a global one (FedGF):

        server:  w̃ = w + ρ_g (w_old − w)/‖w_old − w‖,      c = mean of the last W of 1[ mean ‖Δᵢ‖ > T ]
        client:  the gradient is taken at  c w̃ + (1 − c)(w + ρ g/‖g‖)

    w_old is the global model of the previous round, and c = 0 in round 0. The weight of the global perturbation
    grows with the divergence of the clients.

    Deviations: none known. Of the defaults of W, T and ρ_g, only W = 30 is published.
    """

    sees = "each"

    rho: float = option(0.05, "radius ρ of the client's perturbation", low=0)
    rho_server: float = option(0.05, "radius ρ_g of the global perturbation", low=0)
    threshold: float = option(1.0, "divergence T above which a round counts", low=0)
    window: int = option(30, "rounds W that c looks back on", low=1)

    def first_state(self, weights: Tensor) -> Vectors:
        return {"before": weights.clone(), "window": weights.new_full((self.window,), torch.nan)}

    def broadcast(self, server: ServerView) -> Vectors:
        seen = server["window"][~server["window"].isnan()]
        share = seen.mean() if len(seen) else seen.new_zeros(())
        ahead = server.weights + along(server["before"] - server.weights, self.rho_server)
        return {"ahead": ahead, "mix": share.view(1)}

    def plan(self, rule: LocalRule, sent: Vectors, memory: Vectors) -> LocalRule:
        return rule.with_ascent(self, ahead=sent["ahead"], mix=sent["mix"])

    def __call__(self, slope: Slope, carry: Vectors) -> tuple[Tensor, Vectors]:
        mix, g = carry["mix"], slope()
        length = per_norm(self.rho, g)
        if not bool(mix):
            return slope(g, length, spent=True), carry
        return slope(mix * (carry["ahead"] - slope.weights) + (1 - mix) * length * g, spent=True), carry

    def merge(self, move: Tensor, server: ServerView, uploads: Uploads) -> tuple[Tensor, Vectors]:
        divergence = sum(upload.norm for upload in uploads) / len(uploads)
        window = torch.cat([server["window"][1:], server["window"].new_tensor([float(divergence > self.threshold)])])
        return move, {"before": server.weights, "window": window}
