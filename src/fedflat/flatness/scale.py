"""Measures of a model before and after a rescaling of its weights that does not change its function."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedflat.drawing import COLOURS
from fedflat.flatness.door import of_model
from fedflat.flatness.hessian import Hessian, top_eigenvalues
from fedflat.flatness.norms import weight_norm
from fedflat.flatness.objective import Objective
from fedflat.flatness.sharpness import adaptive_sharpness, ascent_sharpness
from fedflat.flatness.symmetry import rescaled
from fedflat.shown import Shown

NAMES = {
    "loss": "loss",
    "adaptive_sharpness": "sharpness, adaptive (scale-invariant)",
    "top_eigenvalue": "λ1",
    "ascent_sharpness": "sharpness, one ascent",
    "weight_norm": "‖w‖",
}


@dataclass(frozen=True)
class Scaled:
    """Measures of one model: three that depend on the scale of its layers, and the loss and one that do not."""

    loss: float
    top_eigenvalue: float
    ascent_sharpness: float
    weight_norm: float
    adaptive_sharpness: float


@dataclass(frozen=True, repr=False)
class ScaleTest(Shown):
    """A model before and after a rescaling that does not change its function.

    Attributes:
        factor: c, by which one layer was multiplied and the next divided.
        before: measures of the model.
        after: measures of the rescaled model.
        outputs: the largest change of an output, relative to the largest output; it is due to rounding.
    """

    factor: float
    before: Scaled
    after: Scaled
    outputs: float

    def caption(self) -> str:
        return f"The same function with one layer times {self.factor:g} and the next divided by it"

    def rows(self) -> list[dict[str, Any]]:
        pairs = {title: (getattr(self.before, name), getattr(self.after, name)) for name, title in NAMES.items()}
        rows: list[dict[str, Any]] = [
            {"": title, "as trained": old, f"rescaled by {self.factor:g}": new, "ratio": new / old if old else None}
            for title, (old, new) in pairs.items()
        ]
        return [*rows, {"": "largest change of an output", f"rescaled by {self.factor:g}": self.outputs}]

    def draw(self, axes: Any) -> None:
        """Draws bars from 1 to the ratios after ÷ before, and their values."""
        shown = {row[""]: row["ratio"] for row in self.rows() if row.get("ratio")}
        axes.barh([*shown], [ratio - 1 for ratio in shown.values()], left=1, color=COLOURS[0])
        for place, ratio in enumerate(shown.values()):
            axes.text(max(1.0, ratio), place, f"  × {ratio:.3g}", va="center")
        axes.margins(x=0.2)
        axes.axvline(1, color="0.5", linewidth=0.8)
        axes.set(xlabel="rescaled ÷ as trained", xscale="log")
        axes.invert_yaxis()


@of_model
def scale_test(
    objective: Objective,
    factor: float = 10.0,
    name: str | None = None,
    rho: float = 0.05,
    adaptive_rho: float = 0.5,
    seed: int = 0,
) -> ScaleTest:
    """Measures a ReLU network before and after multiplying one layer by c and dividing the next by c.

    The function stays the same, so whatever changes is a property of the parametrisation and not of the minimum
    (Dinh et al. 2017). The network must be a chain, see `hidden_layers`.

    Args:
        objective: the mean loss.
        factor: c > 0.
        name: the layer to multiply; the first one that allows it by default.
        rho: radius of the ascent sharpness.
        adaptive_rho: radius of the adaptive sharpness.
        seed: seed of the eigenvalue's start vector.

    Raises:
        RecipeError: the factor is not positive, or the network has no such layer.
    """
    other = Objective(rescaled(objective.module, factor, name), objective.loss, objective.batches)
    old, new = (_outputs(each.module, objective) for each in (objective, other))
    before, after = (
        Scaled(
            loss=each.value(),
            top_eigenvalue=float(top_eigenvalues(Hessian(each), k=1, seed=seed).values[0]),
            ascent_sharpness=ascent_sharpness(each, rho),
            weight_norm=weight_norm(each.module),
            adaptive_sharpness=adaptive_sharpness(each, adaptive_rho),
        )
        for each in (objective, other)
    )
    return ScaleTest(factor, before, after, float((new - old).abs().max() / old.abs().max()))


@torch.no_grad()
def _outputs(module: nn.Module, objective: Objective) -> Tensor:
    return torch.cat([module(inputs) for inputs, _ in objective.batches])
