"""Parts that add a term to the loss."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from fedflat.local import LocalRule, Pass, Vectors
from fedflat.parts.part import Part, option


@dataclass(frozen=True)
class ActivationNorm(Part):
    """Minimise the norm of the activations (MAN):  ζ/2 Σ_l mean(a_l²) over all hidden activations a_l.

    The mean runs over batch and units, the sum over layers; the logits are no activation. a_l is what leaves an
    activation module, before any pooling. The Hessian block of the next layer is E[a aᵀ ⊗ ∇²_z ℓ], so a smaller ‖a‖
    bounds its top eigenvalue.

    Deviations: the authors' code for ConvNet-GN loses the third layer's term by an overwritten variable; ours has all.
    """

    zeta: float = option(0.15, "weight ζ of the activations' squared norm", low=0)

    def plan(self, rule: LocalRule, sent: Vectors, memory: Vectors) -> LocalRule:
        return replace(rule, terms=(*rule.terms, ActivationTerm(self.zeta)))


@dataclass(frozen=True)
class ActivationTerm:
    """ζ/2 Σ_l mean(a_l²) of one pass."""

    zeta: float
    features: bool = False
    activations: bool = True

    def __call__(self, here: Pass) -> Tensor:
        total = here.logits.new_zeros(())
        for name, activation in here.forward.activations.items():
            norm = activation.square().mean()
            here.note(f"activation/{name}", norm)
            total = total + norm
        return 0.5 * self.zeta * total
