"""FedWMSAM: momentum and control variates with an adaptive weight, and a perturbation along the momentum."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedflat.local import LocalRule, Outcome, Slope, Vectors
from fedflat.methods.part import Part, ServerView, option
from fedflat.methods.parts.ascent import per_norm
from fedflat.methods.parts.pulls import mean_gradient
from fedflat.methods.uploads import Upload, Uploads

DISAGREEMENT = 0.1, 0.9  # bounds of the disagreement that α follows


@dataclass(frozen=True)
class WeightedMomentum(Part):
    """A momentum for each client, a perturbation along it, and an adaptive weight α of the gradient (FedWMSAM):

        client:  Δᵢ' = Δ + α/(1 − α) (c − cᵢ)                      the server's momentum, corrected for the client
                 the gradient is taken at  w + ρ δ/‖δ‖,             δ = wᵗ + b Δᵢ' − w  in step b = 0, 1, …
                 g = α ∇fᵢ(w + ρ δ/‖δ‖) + (1 − α) Δᵢ'
                 cᵢ⁺ = cᵢ − c − Δwᵢ/(K η),                          upload cᵢ⁺ − cᵢ
        server:  Δ ← −mean_S Δwᵢ/(K η),      c ← c + (1/m) Σ_S (cᵢ⁺ − cᵢ)
                 α ← (1 − λ) α + λ clamp( 1 + mean_S cos(Δwᵢ, Δ), 0.1, 0.9 )      with the Δ of this round

    Δwᵢ is the client's update, so the cosine is −1 if all clients follow the momentum, and α decreases; if they
    disagree, α grows. A step needs only one gradient. With ρ = 0, λ = 0 and α = 1 this is SCAFFOLD.

    Deviations: only the abstract of the paper was available. The client's formulas are those of the authors' summary,
    with c − cᵢ from the released code where the summary has c_k. The server's formulas are those of the code. The code
    perturbs in the opposite direction (`sign = -1`). It also uses a single entry of the flat vector δ for each tensor,
    which is not reproduced.
    """

    sees = "each"
    rows: ClassVar[bool] = True

    rho: float = option(0.01, "radius ρ of the perturbation", low=0)
    mix: float = option(0.1, "initial share α of the client's own gradient", low=0, high=1, open_low=True)
    rate: float = option(0.01, "how fast α follows the clients, λ", low=0, high=1)
    sign: int = option(1, "direction of the perturbation: 1 as in the summary, -1 as in the code", choices=(1, -1))

    def first_state(self, weights: Tensor) -> Vectors:
        zeros = torch.zeros_like(weights)
        return {"direction": zeros, "controls": zeros.clone(), "mix": weights.new_tensor([self.mix])}

    def first_memory(self, initial: Tensor) -> Vectors:
        return {"control": torch.zeros_like(initial)}

    def broadcast(self, server: ServerView) -> Vectors:
        return dict(server.vectors)

    def plan(self, rule: LocalRule, sent: Vectors, memory: Vectors) -> LocalRule:
        mix = float(sent["mix"])
        # (1 − α) Δᵢ', which is also defined for α = 1.
        pull = (1 - mix) * sent["direction"] + mix * (sent["controls"] - memory["control"])
        rule = replace(rule, scale=rule.scale * mix).with_pull(pull)
        if not self.rho or mix == 1:
            return rule
        carry = {"origin": sent["weights"], "ahead": pull / (1 - mix), "step": torch.zeros_like(sent["mix"])}
        return rule.with_ascent(self, **carry)

    def __call__(self, slope: Slope, carry: Vectors) -> tuple[Tensor, Vectors]:
        way = carry["origin"] + carry["step"] * carry["ahead"] - slope.weights
        return slope(way, per_norm(self.sign * self.rho, way)), {**carry, "step": carry["step"] + 1}

    def report(self, upload: Upload, sent: Vectors, memory: Vectors, outcome: Outcome) -> tuple[Upload, Vectors]:
        _ = outcome.rule.effective_steps  # refuses an optimiser for which Δ/(K η) is not a mean gradient
        change = -sent["controls"] - outcome.delta / (outcome.rule.steps * outcome.rule.mean_lr)
        return upload.update(control_change=change), {"control": memory["control"] + change}

    def merge(self, move: Tensor, server: ServerView, uploads: Uploads) -> tuple[Tensor, Vectors]:
        return move, {
            "direction": mean_gradient(uploads),
            "controls": server["controls"] + uploads.sum("control_change") / server.clients,
            "mix": (1 - self.rate) * server["mix"] + self.rate * _disagreement(uploads, server["direction"]),
        }


def _disagreement(uploads: Uploads, direction: Tensor) -> float:
    """Return 1 + mean cos(Δwᵢ, Δ), clamped to its bounds; without a momentum, the lower bound."""
    low, high = DISAGREEMENT
    if not bool(direction.any()):
        return low
    cosines = [float(F.cosine_similarity(upload.delta, direction, dim=0)) for upload in uploads]
    return min(max(1 + sum(cosines) / len(cosines), low), high)
