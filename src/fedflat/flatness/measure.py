"""All flatness measures of one minimum in one record."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from fedflat.errors import FedflatError, TrainingError
from fedflat.flatness.door import of_model
from fedflat.flatness.federated import FederatedHessian
from fedflat.flatness.hessian import Hessian, Matrix, matrix_of, ratio, top_eigenvalues
from fedflat.flatness.layers import LayerFlatness, layers
from fedflat.flatness.norms import capacity, weight_norm
from fedflat.flatness.objective import Objective
from fedflat.flatness.sharpness import adaptive_sharpness, ascent_sharpness, average_sharpness
from fedflat.flatness.spectral import draw_densities, draw_eigenvalues
from fedflat.flatness.spectrum import Density, Outliers, density, outliers
from fedflat.flatness.traces import Trace, trace
from fedflat.shown import Shown

NAMES: dict[Matrix, str] = {"hessian": "Hessian", "ggn": "Gauss–Newton matrix", "fisher": "Fisher matrix"}


@dataclass(frozen=True, repr=False)
class Spectrum(Shown):
    """The spectrum of a Hessian: its k largest eigenvalues with residuals ‖Hv − λv‖, and its trace with an interval.

    `products` counts the Hessian products and `bytes` the traffic of a federated Hessian. If there is a density,
    `outliers` holds the eigenvalues above its bulk. `matrix` names the matrix, by default the Hessian.
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

    def caption(self) -> str:
        return f"Spectrum of the {NAMES[self.matrix]}, from {self.products} products"

    def rows(self) -> list[dict[str, Any]]:
        found = zip(self.eigenvalues, self.residuals, strict=True)
        top = [quantity(f"λ{n}", value, residual) for n, (value, residual) in enumerate(found, start=1)]
        between = [quantity(f"λ1/λ{len(top)}", self.ratio)] if len(top) > 1 else []
        apart = [quantity("outliers above the bulk", self.outliers.count)] if self.outliers else []
        total = self.trace
        return [*top, *between, *apart, quantity("trace", total.mean, total.error, total.low, total.high)]

    def draw(self, axes: Any) -> None:
        if self.density is not None:
            draw_densities(axes, {"": self.density}, NAMES[self.matrix])
        else:
            draw_eigenvalues(axes, self.eigenvalues, self.residuals, NAMES[self.matrix])


@dataclass(frozen=True, repr=False)
class Flatness(Shown):
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

    def caption(self) -> str:
        """Return what was measured, in one line."""
        return f"Flatness of the mean loss over {self.samples:,} samples"

    @property
    def numbers(self) -> dict[str, float]:
        """The measures that are one number each, by name."""
        named = ("loss", "ascent_sharpness", "average_sharpness", "adaptive_sharpness", "weight_norm", "log10_capacity")
        curved = {"lambda1": self.spectrum.eigenvalues[0], "trace": self.spectrum.trace.mean}
        return curved | {name: getattr(self, name) for name in named}

    def record(self) -> dict[str, Any]:
        """All numbers as one table."""
        return asdict(self) | {"spectrum": self.spectrum.record()}

    def rows(self) -> list[dict[str, Any]]:
        """Return one row for each measure, with its interval where it has one."""
        return [
            quantity("loss", self.loss),
            *self.spectrum.rows(),
            quantity("sharpness, one ascent", self.ascent_sharpness),
            quantity(
                "sharpness, average",
                self.average_sharpness,
                self.average_sharpness_error,
                self.average_sharpness_low,
                self.average_sharpness_high,
            ),
            quantity("sharpness, adaptive (scale-invariant)", self.adaptive_sharpness),
            quantity("‖w‖", self.weight_norm),
            quantity("capacity, log10 V_L", self.log10_capacity),
            *(row for layer in self.layers for row in _layer_rows(layer)),
        ]

    def draw(self, axes: Any) -> None:
        """Draw the spectrum on matplotlib's axes."""
        self.spectrum.draw(axes)


def quantity(
    name: str,
    value: float | None,
    error: float | None = None,
    low: float | None = None,
    high: float | None = None,
) -> dict[str, Any]:
    """A row of a table: a number with its error and the ends of its 95 % interval, if it has them."""
    return {"quantity": name, "value": value, "±": error, "low": low, "high": high}


def _layer_rows(layer: LayerFlatness) -> list[dict[str, Any]]:
    name = layer.name or "the model"
    return [
        quantity(f"{name}: λ1 of its block", layer.eigenvalues[0]),
        quantity(f"{name}: trace of its block", layer.trace.mean, layer.trace.error, layer.trace.low, layer.trace.high),
        quantity(f"{name}: MAN's bound on λ1", layer.activity.bound),
    ]


@of_model
def spectrum(
    objective: Objective | Hessian | FederatedHessian,
    k: int = 5,
    products: int = 32,
    tolerance: float = 1e-3,
    steps: int = 0,
    seed: int = 0,
    relative_error: float | None = None,
    matrix: Matrix = "hessian",
) -> Spectrum:
    """Computes the k largest eigenvalues and the trace of a Hessian, and optionally its eigenvalue density.

    Also takes a matrix as an operator: the Hessian, pooled or federated, or another one.

    Args:
        objective: the mean loss.
        k: number of eigenvalues.
        products: matrix products for the trace.
        tolerance: relative accuracy of the eigenvalues.
        steps: Lanczos steps for the density and its outliers; 0 leaves them out.
        seed: seed of the start vectors and probes.
        relative_error: take more products for the trace until its interval is that narrow, relative to the trace.
        matrix: of a mean loss, "hessian", "ggn" (Gauss–Newton) or "fisher".
    """
    operator = matrix_of(objective, matrix) if isinstance(objective, Objective) else objective
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
        log10_capacity=_log10_capacity(objective),
        layers=layers(objective, seed=seed, bias=bias) if by_layer else [],
    )


def _log10_capacity(objective: Objective) -> float:
    """log10 V_L, or NaN for a model without linear or convolutional layers."""
    try:
        return capacity(objective.module, objective.batches[0][0][:1]).log10
    except FedflatError:
        return math.nan
