"""Parts that take the gradient somewhere else than at w."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from fedflat.local import LocalRule, Slope, Vectors
from fedflat.parts.part import Part, Place, option


def along(direction: Tensor, radius: float, guard: float = 1e-7) -> Tensor:
    """ρ x/‖x‖, and zero where x is zero; the guard is that of the FedSMOO authors."""
    norm: Tensor = direction.norm(dim=-1, keepdim=True)
    return direction * (radius / (norm + guard))


@dataclass(frozen=True)
class Ascent(Part):
    """Sharpness-aware minimisation (FedSAM):  ε = ρ g/‖g‖ with g = ∇f(w), and the step uses ∇f(w + ε).

    Deviations: none. Weight decay and pulls never enter ε, as in the authors' code.
    """

    place: ClassVar[Place] = "ascent"

    rho: float = option(0.1, "radius ρ of the perturbation", low=0)

    def plan(self, rule: LocalRule, sent: Vectors, memory: Vectors) -> LocalRule:
        return replace(rule, ascent=self)

    def __call__(self, slope: Slope, carry: Vectors) -> tuple[Tensor, Vectors]:
        return slope(along(slope(), self.rho)), carry
