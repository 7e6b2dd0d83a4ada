"""Parts that take the gradient somewhere else than at w."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedflat.parts.part import Part, ServerView, option
from fedflat.parts.uploads import Upload, Uploads
from fedflat.rule import LocalRule, Outcome, Vectors
from fedflat.slope import Slope

GUARD = 1e-7  # added to norms, so that nothing is divided by zero; that of the FedSMOO authors


def per_norm(radius: float, direction: Tensor, guard: float = GUARD) -> Tensor:
    """ρ/‖x‖, finite where x is zero."""
    norm: Tensor = direction.norm(dim=-1, keepdim=True)
    return radius / (norm + guard)


def along(direction: Tensor, radius: float, guard: float = GUARD) -> Tensor:
    """ρ x/‖x‖, and zero where x is zero."""
    return direction * per_norm(radius, direction, guard)


@dataclass(frozen=True)
class Ascent(Part):
    """Sharpness-aware minimisation (FedSAM):  ε = ρ g/‖g‖ with g = ∇f(w), and the step uses ∇f(w + ε).

    Deviations: none. Weight decay and pulls never enter ε, as in the authors' code.
    """

    rows: ClassVar[bool] = True

    rho: float = option(0.1, "radius ρ of the perturbation", low=0)

    def plan(self, rule: LocalRule, sent: Vectors, memory: Vectors) -> LocalRule:
        return rule.with_ascent(self)

    def __call__(self, slope: Slope, carry: Vectors) -> tuple[Tensor, Vectors]:
        g = slope()
        return slope(g, per_norm(self.rho, g)), carry


@dataclass(frozen=True)
class AdaptiveAscent(Part):
    """Adaptive SAM (FedASAM):  ε = ρ T²g/‖T g‖ with T = |w| + η, so that ε does not change under rescaling of layers.

    Deviations: two definitions are in use. FedASAM's authors have η = 0.2 and T = 1 for biases and norms; the FedSoL
    authors have η = 0 and T = |w| for all (`eta=0, biases=True`).
    """

    rho: float = option(0.7, "radius ρ", low=0)
    eta: float = option(0.2, "floor η of the scale", low=0)
    biases: bool = option(False, "scale biases and norms too")

    def plan(self, rule: LocalRule, sent: Vectors, memory: Vectors) -> LocalRule:
        fixed = rule.layout.mask(lambda name: "weight" not in name).to(sent["weights"].device)
        return rule.with_ascent(AdaptiveStep(self, None if self.biases else fixed))


@dataclass(frozen=True)
class AdaptiveStep:
    """The ascent of `AdaptiveAscent`, with the entries whose scale is 1."""

    part: AdaptiveAscent
    fixed: Tensor | None

    def __call__(self, slope: Slope, carry: Vectors) -> tuple[Tensor, Vectors]:
        scale = slope.weights.abs().add_(self.part.eta)
        if self.fixed is not None:
            scale.masked_fill_(self.fixed, 1.0)
        scaled = slope() * scale
        return slope(scaled * scale, per_norm(self.part.rho, scaled)), carry


@dataclass(frozen=True)
class LookbackAscent(Part):
    """Ascend against the last global move (FedLESAM):  ε = ρ (w_old − wᵗ)/‖w_old − wᵗ‖, fixed over the round.

    w_old is the global model that this client saw when it last took part; the first time ε = 0. One gradient a step.
    With `direction = "server"` it is the global model of the last round, the same for everybody, and the server sends
    w_old − wᵗ.

    Deviations: the released code indexes the broadcast direction by tensor, so that each tensor is shifted by one
    number; this is the paper's formula.
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
    """Between the client's own sharpness and the global one (FedGF):

        server:  w̃ = w + ρ_g (w_old − w)/‖w_old − w‖,      c = mean of the last W of 1[ mean ‖Δᵢ‖ > T ]
        client:  the gradient is taken at  c w̃ + (1 − c)(w + ρ g/‖g‖)

    w_old is the global model of the round before; c = 0 in round 0. The more the clients diverge, the more the global
    perturbation counts.

    Deviations: none known; W, T and ρ_g have no published defaults beyond W = 30.
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
            return slope(g, length), carry
        return slope(mix * (carry["ahead"] - slope.weights) + (1 - mix) * length * g), carry

    def merge(self, move: Tensor, server: ServerView, uploads: Uploads) -> tuple[Tensor, Vectors]:
        divergence = sum(upload.norm for upload in uploads) / len(uploads)
        window = torch.cat([server["window"][1:], server["window"].new_tensor([float(divergence > self.threshold)])])
        return move, {"before": server.weights, "window": window}
