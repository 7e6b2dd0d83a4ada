"""All flatness measures of one minimum in one record."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from fedflat.errors import FedflatError
from fedflat.flatness.door import of_model
from fedflat.flatness.federated import FederatedHessian
from fedflat.flatness.hessian import Hessian, Trace, top_eigenvalues, trace
from fedflat.flatness.layers import LayerFlatness, layers
from fedflat.flatness.norms import capacity, weight_norm
from fedflat.flatness.objective import Objective
from fedflat.flatness.sharpness import adaptive_sharpness, ascent_sharpness, average_sharpness
from fedflat.flatness.spectral import draw_densities, draw_eigenvalues
from fedflat.flatness.spectrum import Density, density, hutch_plus_plus
from fedflat.shown import Shown


@dataclass(frozen=True, repr=False)
class Spectrum(Shown):
    """The spectrum of a Hessian: its k largest eigenvalues with residuals ‖Hv − λv‖, and two estimates of its trace.

    `trace` is Hutchinson's estimate and `trace_plus_plus` that of Hutch++. `products` counts the Hessian products and
    `bytes` the traffic of a federated Hessian.
    """

    eigenvalues: list[float]
    residuals: list[float]
    trace: Trace
    trace_plus_plus: Trace
    products: int
    bytes: int = 0
    density: Density | None = None

    @property
    def ratio(self) -> float:
        """λ₁/λ_k."""
        return self.eigenvalues[0] / self.eigenvalues[-1] if self.eigenvalues[-1] else float("nan")

    def caption(self) -> str:
        return f"Spectrum of the Hessian, from {self.products} Hessian products"

    def rows(self) -> list[dict[str, Any]]:
        found = zip(self.eigenvalues, self.residuals, strict=True)
        top = [quantity(f"λ{n}", value, residual) for n, (value, residual) in enumerate(found, start=1)]
        ratio = [quantity(f"λ1/λ{len(top)}", self.ratio)] if len(top) > 1 else []
        plain, better = self.trace, self.trace_plus_plus
        return [
            *top,
            *ratio,
            quantity("trace (Hutchinson)", plain.mean, plain.error),
            quantity("trace (Hutch++)", better.mean, better.error),
        ]

    def draw(self, axes: Any) -> None:
        if self.density is not None:
            draw_densities(axes, {"": self.density})
        else:
            draw_eigenvalues(axes, self.eigenvalues, self.residuals)


@dataclass(frozen=True, repr=False)
class Flatness(Shown):
    """The flatness measures of one minimum on a set of samples."""

    samples: int
    loss: float
    spectrum: Spectrum
    ascent_sharpness: float
    average_sharpness: float
    average_sharpness_error: float
    adaptive_sharpness: float
    weight_norm: float
    log10_capacity: float
    layers: list[LayerFlatness] = field(default_factory=list)

    def caption(self) -> str:
        return f"Flatness of the mean loss over {self.samples:,} samples"

    def rows(self) -> list[dict[str, Any]]:
        return [
            quantity("loss", self.loss),
            *self.spectrum.rows(),
            quantity("sharpness, one ascent", self.ascent_sharpness),
            quantity("sharpness, average", self.average_sharpness, self.average_sharpness_error),
            quantity("sharpness, adaptive (scale-invariant)", self.adaptive_sharpness),
            quantity("‖w‖", self.weight_norm),
            quantity("capacity, log10 V_L", self.log10_capacity),
            *(row for layer in self.layers for row in _layer_rows(layer)),
        ]

    def draw(self, axes: Any) -> None:
        self.spectrum.draw(axes)


def quantity(name: str, value: float | None, error: float | None = None) -> dict[str, Any]:
    """A row of a table: a number, and its error if it has one."""
    return {"quantity": name, "value": value, "±": error}


def _layer_rows(layer: LayerFlatness) -> list[dict[str, Any]]:
    name = layer.name or "the model"
    return [
        quantity(f"{name}: λ1 of its block", layer.eigenvalues[0]),
        quantity(f"{name}: trace of its block", layer.trace.mean, layer.trace.error),
        quantity(f"{name}: MAN's bound on λ1", layer.activity.bound),
    ]


@of_model
def spectrum(
    objective: Objective | Hessian | FederatedHessian,
    k: int = 5,
    probes: int = 12,
    tolerance: float = 1e-3,
    steps: int = 0,
    seed: int = 0,
) -> Spectrum:
    """Computes the k largest eigenvalues and the trace of a Hessian, and optionally its eigenvalue density.

    Also takes a Hessian as an operator, pooled or federated.

    Args:
        objective: the mean loss.
        k: number of eigenvalues.
        probes: Hessian products for each of the two trace estimates (at least 3 for Hutch++).
        tolerance: relative accuracy of the eigenvalues.
        steps: Lanczos steps for the density; 0 leaves it out.
        seed: seed of the start vectors and probes.
    """
    operator = Hessian(objective) if isinstance(objective, Objective) else objective
    eigen = top_eigenvalues(operator, k, tolerance, seed)
    plain, better = trace(operator, probes, seed), hutch_plus_plus(operator, max(probes, 3), seed)
    spread = density(operator, min(steps, operator.size), probes=1, seed=seed) if steps else None
    crossed = operator.bytes if isinstance(operator, FederatedHessian) else 0
    return Spectrum(eigen.values.tolist(), eigen.residuals.tolist(), plain, better, operator.products, crossed, spread)


def measure(
    objective: Objective,
    k: int = 5,
    probes: int = 12,
    rho: float = 0.05,
    adaptive_rho: float = 0.5,
    by_layer: bool = False,
    steps: int = 0,
    seed: int = 0,
    bias: bool = True,
) -> Flatness:
    """Measures the flatness of the objective at the current weights of its module.

    The eigenvalues take tens of Hessian products.

    Args:
        objective: the mean loss.
        k: number of eigenvalues.
        probes: Hessian products for each of the two trace estimates.
        rho: radius of the ascent and the average sharpness.
        adaptive_rho: radius of the adaptive sharpness.
        by_layer: also measure every layer, which takes about as many products again for each of them.
        steps: Lanczos steps for the eigenvalue density; 0 leaves it out.
        seed: seed of all random draws.
        bias: include the bias in a layer's block.
    """
    average = average_sharpness(objective, rho, seed=seed)
    return Flatness(
        samples=objective.samples,
        loss=objective.value(),
        spectrum=spectrum(objective, k, probes, steps=steps, seed=seed),
        ascent_sharpness=ascent_sharpness(objective, rho),
        average_sharpness=average.mean,
        average_sharpness_error=average.error,
        adaptive_sharpness=adaptive_sharpness(objective, adaptive_rho),
        weight_norm=weight_norm(objective.module),
        log10_capacity=_log10_capacity(objective),
        layers=layers(objective, seed=seed, bias=bias) if by_layer else [],
    )


def _log10_capacity(objective: Objective) -> float:
    """log10 V_L, or NaN for a model without linear or convolutional layers."""
    try:
        return capacity(objective.module, objective.batches[0][0][:1]).log10
    except FedflatError:
        return math.nan
