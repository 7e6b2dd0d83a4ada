"""FedSMOO's perturbation, with a consensus between all clients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedflat.local import LocalRule, Outcome, Slope, Vectors
from fedflat.methods.part import Crowd, Part, ServerView, option
from fedflat.methods.parts.ascent import GUARD, along, per_norm
from fedflat.methods.uploads import Upload, Uploads


@dataclass(frozen=True)
class ConsensusAscent(Part):
    """Perturb with a consensus between all clients (FedSMOO), in every local step:

        ŝ = ρ q/‖q‖,  q = g − μᵢ − s            μᵢ ← μᵢ + ŝ − s            the step uses ∇f(w + ŝ)
        server:  s = ρ M/‖M‖,  M = mean μᵢ

    s is constant over a round, and μᵢ is the client's dual variable. This is the authors' code, which produced the
    published numbers. With `upload = "less"` clients send μᵢ − ŝ with the last ŝ, as in the paper. The solution of the
    paper's Lagrangian has +s in q: `sign = 1`. The authors average over the round's clients; `crowd = "all"` averages
    over all m.
    """

    rows: ClassVar[bool] = True

    rho: float = option(0.1, "radius ρ of the perturbation", low=0)
    sign: int = option(-1, "sign of s in q: -1 as in the authors' code, or +1", choices=(-1, 1))
    crowd: Crowd = option("active", "whose duals s is the mean of", choices=("active", "all"))
    upload: Literal["dual", "less"] = option("dual", "what goes up: μᵢ, or μᵢ − ŝ", choices=("dual", "less"))

    def first_state(self, weights: Tensor) -> Vectors:
        zero = torch.zeros_like(weights)
        return {"perturbation": zero, "mean_dual": zero.clone()} if self.crowd == "all" else {"perturbation": zero}

    def first_memory(self, initial: Tensor) -> Vectors:
        zero = torch.zeros_like(initial)
        return {"dual": zero, "told": zero} if self._needs_told else {"dual": zero}

    @property
    def _needs_told(self) -> bool:
        """Whether a client must remember its last upload, because it sends only the change."""
        return self.crowd == "all" and self.upload == "less"

    def broadcast(self, server: ServerView) -> Vectors:
        return {"perturbation": server["perturbation"]}

    def plan(self, rule: LocalRule, sent: Vectors, memory: Vectors) -> LocalRule:
        last = {"last": torch.zeros_like(memory["dual"])} if self.upload == "less" else {}
        # A copy of μᵢ for this round, which every step updates in place.
        dual = memory["dual"].clone()
        return rule.with_ascent(self if self.rho else rule.ascent, dual=dual, s=sent["perturbation"], **last)

    def __call__(self, slope: Slope, carry: Vectors) -> tuple[Tensor, Vectors]:
        s, dual = carry["s"], carry["dual"]
        q = slope().sub_(dual).add_(s, alpha=self.sign)
        length = per_norm(self.rho, q)
        dual.addcmul_(q, length).sub_(s)
        if "last" in carry:
            torch.mul(q, length, out=carry["last"])
        return slope(q, length, spent=True), carry

    def report(self, upload: Upload, sent: Vectors, memory: Vectors, outcome: Outcome) -> tuple[Upload, Vectors]:
        dual = outcome.carry["dual"]
        told = dual - outcome.carry["last"] if self.upload == "less" else dual
        if self.crowd == "active":
            return upload.update(dual=told), {"dual": dual}
        before = memory["told"] if self._needs_told else memory["dual"]
        return upload.update(dual=told - before), {"dual": dual} | ({"told": told} if self._needs_told else {})

    def merge(self, move: Tensor, server: ServerView, uploads: Uploads) -> tuple[Tensor, Vectors]:
        if self.crowd == "active":
            mean, new = uploads.sum("dual").div_(len(uploads)), {}
        else:
            mean = uploads.sum("dual").div_(server.clients).add_(server["mean_dual"])
            new = {"mean_dual": mean}
        # The FedSMOO authors add a guard to this norm; the FedGMT authors, whose clients send μᵢ − ŝ, do not.
        guard = 1e-16 if self.upload == "less" else GUARD
        return move, {"perturbation": along(mean, self.rho, guard), **new}


@dataclass(frozen=True)
class PrintedConsensus(Part):
    """FedSMOO's perturbation as printed in its slides, with α and projections onto the ball of radius ρ:

        s' = α (g − μᵢ) − s,      ŝ = s' min(1, ρ/‖s'‖),      μᵢ ← μᵢ + (ŝ − s)/(2α),      the step uses ∇f(w + ŝ)
        server:  s = S min(1, ρ/‖S‖),  S = mean (ŝᵢ − α μᵢ) over the round's clients, with each one's last ŝᵢ

    The slides write argmax where only argmin has a solution. The minimiser of ‖sᵢ − s'‖ in the ball is the projection.

    Deviations: the slides have ŝ − s' in the update of μᵢ. With this update μᵢ grows by a factor of up to 1.5 in every
    step, and training diverges; `printed` reproduces it. No numbers are published for either form.
    """

    rows: ClassVar[bool] = True

    rho: float = option(0.1, "radius ρ of the perturbation", low=0)
    alpha: float = option(1.0, "penalty parameter α of the perturbation's consensus", low=0, open_low=True)
    printed: bool = option(False, "update the duals as the slides print it")

    def first_state(self, weights: Tensor) -> Vectors:
        return {"perturbation": torch.zeros_like(weights)}

    def first_memory(self, initial: Tensor) -> Vectors:
        return {"dual": torch.zeros_like(initial)}

    def broadcast(self, server: ServerView) -> Vectors:
        return {"perturbation": server["perturbation"]}

    def plan(self, rule: LocalRule, sent: Vectors, memory: Vectors) -> LocalRule:
        dual = memory["dual"].clone()
        ascent = self if self.rho else rule.ascent
        return rule.with_ascent(ascent, dual=dual, last=torch.zeros_like(dual), s=sent["perturbation"])

    def __call__(self, slope: Slope, carry: Vectors) -> tuple[Tensor, Vectors]:
        wish = self.alpha * (slope() - carry["dual"]) - carry["s"]
        found = _projected(wish, self.rho)
        carry["dual"].add_(found - (wish if self.printed else carry["s"]), alpha=1 / (2 * self.alpha))
        carry["last"].copy_(found)
        return slope(found, spent=True), carry

    def report(self, upload: Upload, sent: Vectors, memory: Vectors, outcome: Outcome) -> tuple[Upload, Vectors]:
        dual = outcome.carry["dual"]
        return upload.update(wish=outcome.carry["last"] - self.alpha * dual), {"dual": dual}

    def merge(self, move: Tensor, server: ServerView, uploads: Uploads) -> tuple[Tensor, Vectors]:
        return move, {"perturbation": _projected(uploads.sum("wish") / len(uploads), self.rho)}


def _projected(vector: Tensor, radius: float) -> Tensor:
    """Return the nearest point in the ball of this radius."""
    return vector * per_norm(radius, vector).clamp(max=1.0)
