"""SAM with a random direction."""

from dataclasses import dataclass

import torch

from fedflat import Part, option


@dataclass(frozen=True)
class RandomSAM(Part):
    """The step uses ∇f(w + ρ u/‖u‖), with u drawn anew from N(0, I) in every step."""

    rho: float = option(0.1, "radius ρ of the perturbation", low=0)

    def plan(self, rule, sent, memory):
        chance = rule.generator("RandomSAM")

        def ascent(slope, carry):
            u = torch.randn(slope.weights.shape, generator=chance).to(slope.weights)
            return slope(u, self.rho / u.norm()), carry

        return rule.with_ascent(ascent)
