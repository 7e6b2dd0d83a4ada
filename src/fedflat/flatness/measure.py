"""All flatness measures of one minimum in one record."""

from __future__ import annotations

from dataclasses import dataclass, field

from fedflat.flatness.federated import FederatedHessian
from fedflat.flatness.hessian import Hessian, Trace, top_eigenvalues, trace
from fedflat.flatness.layers import LayerFlatness, layers
from fedflat.flatness.norms import capacity, weight_norm
from fedflat.flatness.objective import Objective
from fedflat.flatness.sharpness import adaptive_sharpness, ascent_sharpness, average_sharpness
from fedflat.flatness.spectrum import Density, density, hutch_plus_plus


@dataclass(frozen=True)
class Spectrum:
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


@dataclass(frozen=True)
class Flatness:
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


def spectrum(
    operator: Hessian | FederatedHessian,
    k: int = 5,
    probes: int = 12,
    tolerance: float = 1e-3,
    steps: int = 0,
    seed: int = 0,
) -> Spectrum:
    """Computes the k largest eigenvalues and the trace of a Hessian, and optionally its eigenvalue density.

    Args:
        operator: the Hessian, pooled or federated.
        k: number of eigenvalues.
        probes: Hessian products for each of the two trace estimates (at least 3 for Hutch++).
        tolerance: relative accuracy of the eigenvalues.
        steps: Lanczos steps for the density; 0 leaves it out.
        seed: seed of the start vectors and probes.
    """
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
        spectrum=spectrum(Hessian(objective), k, probes, steps=steps, seed=seed),
        ascent_sharpness=ascent_sharpness(objective, rho),
        average_sharpness=average.mean,
        average_sharpness_error=average.error,
        adaptive_sharpness=adaptive_sharpness(objective, adaptive_rho),
        weight_norm=weight_norm(objective.module),
        log10_capacity=capacity(objective.module, objective.batches[0][0][:1]).log10,
        layers=layers(objective, seed=seed, bias=bias) if by_layer else [],
    )
