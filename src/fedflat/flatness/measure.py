"""All flatness measures of one minimum in one record."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from fedflat.errors import TrainingError
from fedflat.flatness.federated import FederatedHessian
from fedflat.flatness.hessian import Hessian, Matrix, matrix_of, ratio, top_eigenvalues
from fedflat.flatness.layers import LayerFlatness, layers
from fedflat.flatness.norms import capacity, weight_norm
from fedflat.flatness.objective import Objective
from fedflat.flatness.sharpness import adaptive_sharpness, ascent_sharpness, average_sharpness
from fedflat.flatness.spectrum import Density, Outliers, density, outliers
from fedflat.flatness.traces import Trace, trace


@dataclass(frozen=True)
class Spectrum:
    """The spectrum of a Hessian: its k largest eigenvalues with residuals ‖Hv − λv‖, and its trace with an interval.

    `products` counts the Hessian products and `bytes` the traffic of a federated Hessian. With a density come the
    eigenvalues that stand out of its bulk. `matrix` says if it is another matrix than the Hessian.
    """

    eigenvalues: list[float]
    residuals: list[float]
    trace: Trace
    products: int
    bytes: int = 0
    density: Density | None = None
    outliers: Outliers | None = None
    matrix: Matrix = "hessian"

    @property
    def ratio(self) -> float | None:
        """λ₁/λ_k; None unless both are positive."""
        return ratio(self.eigenvalues)[0]

    @property
    def ratio_missing(self) -> str:
        """Why there is no ratio λ₁/λ_k; empty if there is one."""
        return ratio(self.eigenvalues)[1]

    def record(self) -> dict[str, Any]:
        """All numbers as one table, including the ratio, or else the reason why there is none."""
        missing = {"ratio_missing": self.ratio_missing} if self.ratio_missing else {}
        return {**asdict(self), "ratio": self.ratio, **missing}


@dataclass(frozen=True)
class Flatness:
    """The flatness measures of one minimum on a set of samples.

    `average_sharpness_low` and `average_sharpness_high` are the ends of its 95 % interval over directions.
    """

    samples: int
    loss: float
    spectrum: Spectrum
    ascent_sharpness: float
    average_sharpness: float
    average_sharpness_error: float
    average_sharpness_low: float
    average_sharpness_high: float
    adaptive_sharpness: float
    weight_norm: float
    log10_capacity: float
    layers: list[LayerFlatness] = field(default_factory=list)

    @property
    def numbers(self) -> dict[str, float]:
        """The measures that are one number each, by name."""
        named = ("loss", "ascent_sharpness", "average_sharpness", "adaptive_sharpness", "weight_norm", "log10_capacity")
        curved = {"lambda1": self.spectrum.eigenvalues[0], "trace": self.spectrum.trace.mean}
        return curved | {name: getattr(self, name) for name in named}

    def record(self) -> dict[str, Any]:
        """All numbers as one table."""
        return asdict(self) | {"spectrum": self.spectrum.record()}


def spectrum(
    operator: Hessian | FederatedHessian,
    k: int = 5,
    products: int = 32,
    tolerance: float = 1e-3,
    steps: int = 0,
    seed: int = 0,
    relative_error: float | None = None,
) -> Spectrum:
    """Computes the k largest eigenvalues and the trace of a Hessian, and optionally its eigenvalue density.

    Args:
        operator: the Hessian, pooled or federated, or another matrix.
        k: number of eigenvalues.
        products: matrix products for the trace.
        tolerance: relative accuracy of the eigenvalues.
        steps: Lanczos steps for the density and its outliers; 0 leaves them out.
        seed: seed of the start vectors and probes.
        relative_error: take more products for the trace until its interval is that narrow, relative to the trace.
    """
    eigen = top_eigenvalues(operator, k, tolerance, seed)
    spread = density(operator, min(steps, operator.size), probes=1, seed=seed) if steps else None
    return Spectrum(
        eigenvalues=eigen.values.tolist(),
        residuals=eigen.residuals.tolist(),
        trace=trace(operator, products, seed, relative_error),
        products=operator.products,
        bytes=operator.bytes if isinstance(operator, FederatedHessian) else 0,
        density=spread,
        outliers=outliers(spread) if spread else None,
        matrix=operator.matrix,
    )


def measure(
    objective: Objective,
    k: int = 5,
    products: int = 32,
    rho: float = 0.05,
    adaptive_rho: float = 0.5,
    by_layer: bool = False,
    steps: int = 0,
    seed: int = 0,
    bias: bool = True,
    matrix: Matrix = "hessian",
    relative_error: float | None = None,
) -> Flatness:
    """Measures the flatness of the objective at the current weights of its module.

    The eigenvalues take tens of Hessian products.

    Args:
        objective: the mean loss.
        k: number of eigenvalues.
        products: matrix products for the trace.
        rho: radius of the ascent and the average sharpness.
        adaptive_rho: radius of the adaptive sharpness.
        by_layer: also measure every layer, which takes about as many products again for each of them.
        steps: Lanczos steps for the eigenvalue density and its outliers; 0 leaves them out.
        seed: seed of all random draws.
        bias: include the bias in a layer's block.
        matrix: whose spectrum: "hessian", "ggn" (Gauss–Newton) or "fisher". The layers' blocks are of the Hessian.
        relative_error: take more products for the trace until its interval is that narrow, relative to the trace.

    Raises:
        TrainingError: the loss is not finite.
    """
    loss = objective.value()
    if not math.isfinite(loss):
        raise TrainingError(f"the mean loss of these samples is {loss}, so there is no flatness to measure")
    average = average_sharpness(objective, rho, seed=seed)
    return Flatness(
        samples=objective.samples,
        loss=loss,
        spectrum=spectrum(
            matrix_of(objective, matrix), k, products, steps=steps, seed=seed, relative_error=relative_error
        ),
        ascent_sharpness=ascent_sharpness(objective, rho),
        average_sharpness=average.mean,
        average_sharpness_error=average.error,
        average_sharpness_low=average.low,
        average_sharpness_high=average.high,
        adaptive_sharpness=adaptive_sharpness(objective, adaptive_rho),
        weight_norm=weight_norm(objective.module),
        log10_capacity=capacity(objective.module, objective.batches[0][0][:1]).log10,
        layers=layers(objective, seed=seed, bias=bias) if by_layer else [],
    )
