"""FedSoL: perturb along the gradient of a proximal loss, descend by that of the local loss alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedflat.parts.part import Part, Wrapper, option
from fedflat.parts.terms import Distillation
from fedflat.rule import LocalRule, Vectors
from fedflat.slope import Slope
from fedflat.vector import Layout

Radius = Literal["fixed", "layer", "dim0"]
Scope = Literal["all", "head", "body"]
Form = Literal["A1", "A2", "A3", "A4", "A5", "A6"]


@dataclass(frozen=True)
class ProximalAscent(Wrapper):
    """Stability against proximal perturbations (FedSoL). It wraps another part, whose gradient

        g_p = ∇ Σ terms(w) + pull + decay · w

    does not enter the step but only says where the local gradient is taken:

        ε = ρ Λ ⊙ g_p/‖g_p‖,      the step uses ∇f(w + ε)

    Λ is |w − w_g| of each tensor, normalised over the first dimension (`dim0`, the authors' code and the main variant),
    or over the whole tensor (`layer`, the paper's Eq. 11; a far smaller radius), or 1 (`fixed`). `scope` perturbs all,
    the head or the body. With the head the body is run once a step, and its activations serve both passes. A fixed
    radius ρ = 2 over all layers made the first round diverge in the setting of the paper's Table 1, with the authors'
    code as with ours.

    Deviations: at w = w_g the gradient of a KL is rounding noise, which with a fixed radius the authors' code scales up
    to the full radius; here ε = 0 where ‖g_p‖ < `zero`, and `zero = 0` repeats the authors. Their code for sources
    other than KL is not released. Ours take the direction of the wrapped part and nothing else, so that ρ = 0 is
    FedAvg.
    """

    part: Part = field(default_factory=Distillation)
    rho: float = option(2.0, "radius ρ of the perturbation", low=0)
    radius: Radius = option("dim0", "the shape Λ of the perturbation", choices=("fixed", "layer", "dim0"))
    scope: Scope = option("all", "what is perturbed", choices=("all", "head", "body"))
    zero: float = option(1e-6, "norm of g_p below which ε = 0", low=0)

    def wrap(self, rule: LocalRule, inner: LocalRule, sent: Vectors, memory: Vectors) -> LocalRule:
        return rule.with_ascent(self.step(inner, sent["weights"]))

    def step(self, inner: LocalRule, anchor: Tensor) -> ProximalStep:
        return ProximalStep(self, inner, anchor)


@dataclass(frozen=True)
class ProximalStep:
    """One step of FedSoL: `inner` is what the wrapped part planned, `anchor` the global model w_g."""

    part: ProximalAscent
    inner: LocalRule
    anchor: Tensor

    @property
    def features(self) -> bool:
        return self.part.scope == "head" or any(getattr(term, "features", False) for term in self.inner.terms)

    @property
    def activations(self) -> bool:
        return any(getattr(term, "activations", False) for term in self.inner.terms)

    def __call__(self, slope: Slope, carry: Vectors) -> tuple[Tensor, Vectors]:
        if self.part.scope == "head":
            head = self.inner.head
            g = slope.in_head(self.inner.terms) if self.inner.terms else torch.zeros_like(slope.weights[head])
            g_p = self._linear(g, slope.weights, head)
            g_u = slope.at_head(self.ascent(slope, g_p, head))
            self.note_cosine(slope, g_u[head], g_p)
            return g_u, carry
        g_p = self.within(self.proximal(slope))
        g_u = slope(self.ascent(slope, g_p, slice(0, len(g_p))))
        self.note_cosine(slope, self.within(g_u), g_p)
        return g_u, carry

    def note_cosine(self, slope: Slope, g_u: Tensor, g_p: Tensor) -> None:
        """Note cos(g_u, g_p) within the scope if that is measured; where g_p = 0 there is no angle."""
        if "cosine" in self.inner.measures and float(g_p.norm()) > max(self.part.zero, 1e-12):
            slope.notes.add("cosine", F.cosine_similarity(g_u, g_p, dim=0))

    def proximal(self, slope: Slope, offset: Tensor | None = None) -> Tensor:
        """g_p at w + ε."""
        terms = self.inner.terms
        g = slope(offset, terms=terms, data=False) if terms else torch.zeros_like(self.anchor)
        here = slope.weights if offset is None else slope.weights + offset
        return self._linear(g, here, slice(None))

    def within(self, g: Tensor) -> Tensor:
        """The vector, zero outside of the scope."""
        if self.part.scope == "all":
            return g
        inside = torch.zeros_like(g) if self.part.scope == "head" else g.clone()
        inside[self.inner.head] = g[self.inner.head] if self.part.scope == "head" else 0.0
        return inside

    def ascent(self, slope: Slope, g: Tensor, span: slice) -> Tensor:
        """ρ Λ ⊙ g/‖g‖ for one span of the vector."""
        norm: Tensor = g.norm()
        g = g * torch.where(norm < self.part.zero, 0.0, self.part.rho / (norm + 1e-12))
        if self.part.radius == "fixed":
            return g
        moved = slope.weights - self.anchor
        radii = shape(moved, self.inner.layout, self.part.radius)
        if "lambda" in self.inner.measures and bool(moved.any()):
            self._note_radii(slope, radii)
        return g * radii[span]

    def _note_radii(self, slope: Slope, radii: Tensor) -> None:
        """Note the mean entry of Λ by layer; at a round's first step w = w_g, and there is no Λ."""
        layers: dict[str, list[Tensor]] = {}
        for name, place in self.inner.layout.slices.items():
            layers.setdefault(name.rpartition(".")[0] or name, []).append(radii[place])
        for layer, parts in layers.items():
            slope.notes.add(f"lambda/{layer}", torch.cat(parts).mean())

    def _linear(self, g: Tensor, weights: Tensor, span: slice) -> Tensor:
        if self.inner.pull is not None:
            g = g + self.inner.pull[span]
        decay = self.inner.decay + self.inner.spring
        return g.add(weights[span], alpha=decay) if decay else g


def shape(difference: Tensor, layout: Layout, radius: Radius) -> Tensor:
    """Λ: |w − w_g| of each tensor, normalised as a whole (`layer`) or over its first dimension (`dim0`)."""
    result = torch.empty_like(difference)
    for name, view in layout.views(difference.abs()).items():
        unit = F.normalize(view, dim=0) if radius == "dim0" else view / (view.norm() + 1e-12)
        result[layout.slices[name]] = unit.reshape(-1)
    return result


@dataclass(frozen=True)
class AblatedAscent(ProximalAscent):
    """The paper's other ways to combine local loss f and proximal loss L_p (its Table 6), with ε_p from g_p:

        A1  f(w + ε_p)                      A4  f(w + ε_c) + β L_p(w + ε_c),   ε_c from ∇f + g_p
        A2  f(w) + β L_p(w + ε_p)           A5  f(w) + β L_p(w)
        A3  f(w + ε_p) + β L_p(w + ε_p)     A6  f(w + ε_p) + β L_p(w)

    A0 is FedAvg and A1 FedSoL.

    Deviations: β is not given in the paper; 1 here.
    """

    form: Form = option("A1", "which combination", choices=("A1", "A2", "A3", "A4", "A5", "A6"))
    beta: float = option(1.0, "weight β of the proximal loss", low=0)

    def step(self, inner: LocalRule, anchor: Tensor) -> ProximalStep:
        return AblatedStep(self, inner, anchor)


@dataclass(frozen=True)
class AblatedStep(ProximalStep):
    """One step of an ablation: where f and where L_p are taken."""

    def __call__(self, slope: Slope, carry: Vectors) -> tuple[Tensor, Vectors]:
        assert isinstance(self.part, AblatedAscent)
        form, beta = self.part.form, self.part.beta
        g_p, ascent = self.proximal(slope), None
        if form != "A5":
            direction = self.within(g_p + slope() if form == "A4" else g_p)
            ascent = self.ascent(slope, direction, slice(0, len(direction)))
        g = slope(None if form in ("A2", "A5") else ascent)
        if form != "A1":
            g = g.add(self.proximal(slope, ascent) if form in ("A2", "A3", "A4") else g_p, alpha=beta)
        self.note_cosine(slope, self.within(g), self.within(g_p))
        return g, carry
