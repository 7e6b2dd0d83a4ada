"""FedSoL: perturb along the gradient of a proximal loss, and descend along the gradient of the local loss."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedflat.errors import RecipeError
from fedflat.local import LocalRule, Pass, Slope, Vectors
from fedflat.methods.part import Part, Wrapper, option
from fedflat.methods.parts.terms import Distillation
from fedflat.models import Layout

Radius = Literal["fixed", "layer", "dim0"]
Scope = Literal["all", "head", "body"]
Form = Literal["A1", "A2", "A3", "A4", "A5", "A6"]


@dataclass(frozen=True)
class ProximalAscent(Wrapper):
    """Perturb along a proximal gradient (FedSoL). This part wraps another part with the gradient

        g_p = ∇ Σ terms(w) + pull + decay · w

    which does not enter the step. It only determines where the local gradient is taken:

        ε = ρ Λ ⊙ g_p/‖g_p‖,      the step uses ∇f(w + ε)

    Λ is |w − w_g| of each tensor, normalised over the first dimension (`dim0`, the authors' code and the main variant)
    or over the whole tensor (`layer`, Eq. 11 of the paper, a far smaller radius), or 1 (`fixed`). `scope` selects what
    is perturbed: all weights, the head or the body. With the head, a step runs the body once and uses its activations
    in both passes. A fixed radius ρ = 2 over all layers diverged in the first round in the setting of the paper's
    Table 1, both with the authors' code and with this implementation.

    Deviations: at w = w_g the gradient of the KL is rounding noise, which the authors' code with a fixed radius scales
    up to the full radius. Here ε = 0 if ‖g_p‖ < `zero`; `zero = 0` reproduces the authors' code. Their code for sources
    other than KL is not released. Here such a source only gives the direction, so that ρ = 0 is FedAvg.
    """

    part: Part = field(default_factory=Distillation)
    rho: float = option(2.0, "radius ρ of the perturbation", low=0)
    radius: Radius = option("dim0", "the shape Λ of the perturbation", choices=("fixed", "layer", "dim0"))
    scope: Scope = option("all", "what is perturbed", choices=("all", "head", "body"))
    zero: float = option(1e-6, "norm of g_p below which ε = 0", low=0)

    def wrap(self, rule: LocalRule, inner: LocalRule, sent: Vectors, memory: Vectors) -> LocalRule:
        if self.scope != "all":
            rule.require_head(f'scope = "{self.scope}"', body=self.scope == "body")
        if lost := next((name for name in ("ascent", "descent") if getattr(inner, name) is not None), None):
            source, own = type(self.part).__name__, type(self).__name__
            raise RecipeError(f"method: {own} uses only the gradient of {source}, whose {lost} would be lost")
        step = self.step(inner, sent["weights"])
        if self.active:
            return rule.with_ascent(step)
        return rule.watching(WatchedStep(step)) if {"cosine", "lambda"} & {*rule.measures} else rule

    @property
    def active(self) -> bool:
        """Whether the part changes the step."""
        return self.rho > 0

    def step(self, inner: LocalRule, anchor: Tensor) -> ProximalStep:
        return ProximalStep(self, inner, anchor)


@dataclass(frozen=True)
class ProximalStep:
    """The ascent of FedSoL: `inner` is the plan of the wrapped part, `anchor` the global model w_g."""

    part: ProximalAscent
    inner: LocalRule
    anchor: Tensor

    @property
    def features(self) -> bool:
        return self.part.scope == "head" or any(getattr(term, "features", False) for term in self.inner.terms)

    @property
    def activations(self) -> bool:
        return any(getattr(term, "activations", False) for term in self.inner.terms)

    @property
    def attention(self) -> bool:
        return any(getattr(term, "attention", False) for term in self.inner.terms)

    @property
    def head_only(self) -> bool:
        """Whether a kernel may run the body once for both gradients."""
        return self.part.scope == "head" and bool(self.inner.terms)

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
        """Record cos(g_u, g_p) within the scope if it is measured; for g_p = 0 it is undefined."""
        if "cosine" in self.inner.measures and float(g_p.norm()) > max(self.part.zero, 1e-12):
            slope.notes.add("cosine", F.cosine_similarity(g_u, g_p, dim=0))

    def proximal(self, slope: Slope, offset: Tensor | None = None) -> Tensor:
        """Return g_p at w + ε."""
        terms = self.inner.terms
        g = slope(offset, terms=terms, data=False) if terms else torch.zeros_like(self.anchor)
        here = slope.weights if offset is None else slope.weights + offset
        return self._linear(g, here, slice(None))

    def within(self, g: Tensor) -> Tensor:
        """Return the vector with zeros outside of the scope."""
        if self.part.scope == "all":
            return g
        inside = torch.zeros_like(g) if self.part.scope == "head" else g.clone()
        inside[self.inner.head] = g[self.inner.head] if self.part.scope == "head" else 0.0
        return inside

    def ascent(self, slope: Slope, g: Tensor, span: slice) -> Tensor:
        """Return ρ Λ ⊙ g/‖g‖ for one span of the vector."""
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
        """Record the mean entry of Λ per layer; in the first step of a round w = w_g, and Λ is undefined."""
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


@dataclass(frozen=True)
class WatchedStep:
    """A term that computes the step without taking it, to record the angle and Λ if they are measured."""

    step: ProximalStep

    @property
    def features(self) -> bool:
        return self.step.features

    @property
    def activations(self) -> bool:
        return self.step.activations

    @property
    def attention(self) -> bool:
        return self.step.attention

    def __call__(self, here: Pass) -> Tensor:
        return self.step(here.slope, {})[0]


def shape(difference: Tensor, layout: Layout, radius: Radius) -> Tensor:
    """Return Λ: |w − w_g| of each tensor, normalised as a whole (`layer`) or over its first dimension (`dim0`)."""
    result = torch.empty_like(difference)
    for name, view in layout.views(difference.abs()).items():
        unit = F.normalize(view, dim=0) if radius == "dim0" else view / (view.norm() + 1e-12)
        result[layout.slices[name]] = unit.reshape(-1)
    return result


@dataclass(frozen=True)
class AblatedAscent(ProximalAscent):
    """The combinations of local loss f and proximal loss L_p in Table 6 of the FedSoL paper, with ε_p from g_p:

        A1  f(w + ε_p)                      A4  f(w + ε_c) + β L_p(w + ε_c),   ε_c from ∇f + g_p
        A2  f(w) + β L_p(w + ε_p)           A5  f(w) + β L_p(w)
        A3  f(w + ε_p) + β L_p(w + ε_p)     A6  f(w + ε_p) + β L_p(w)

    A0 is FedAvg and A1 is FedSoL.

    Deviations: the paper does not give β; the default is 1.
    """

    form: Form = option("A1", "which combination", choices=("A1", "A2", "A3", "A4", "A5", "A6"))
    beta: float = option(1.0, "weight β of the proximal loss", low=0)

    @property
    def active(self) -> bool:
        return (self.rho > 0 and self.form not in ("A2", "A5")) or (self.beta > 0 and self.form != "A1")

    def step(self, inner: LocalRule, anchor: Tensor) -> ProximalStep:
        return AblatedStep(self, inner, anchor)


@dataclass(frozen=True)
class AblatedStep(ProximalStep):
    """The ascent of an ablation: it chooses where f and L_p are evaluated."""

    head_only = False

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
