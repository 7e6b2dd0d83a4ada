"""Figures of loss landscapes: several runs side by side on a common scale."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedflat.drawing import draw_band, new_figure, save_figure
from fedflat.errors import RecipeError

if TYPE_CHECKING:  # landscape.py draws with this module
    from fedflat.flatness.landscape import Landscape

Floats = NDArray[np.float64]

_MAP = "viridis"
STEEP = 40
_DECADES = 1.5  # losses that span more decades are drawn on a logarithmic scale


def draw_landscapes(landscapes: Mapping[str, Landscape], path: Path) -> None:
    """Draws the landscapes of several runs: curves in one plot, or contours above surfaces for planes.

    All runs share one scale, so a minimum that looks flatter is flatter. Values that are not finite are left out.

    Args:
        landscapes: the landscape of each run, by its name, all on the same grid.
        path: the image file to write.

    Raises:
        RecipeError: there are no landscapes, their grids differ, or one has no finite value.
        RunError: the file cannot be written.
    """
    check_comparable(landscapes)
    if len(next(iter(landscapes.values())).axes) == 1:
        _draw_curves(landscapes, path)
    else:
        _draw_planes(landscapes, path)


def draw_landscape(axes: Any, each: Landscape) -> None:
    """Draws one landscape on given axes: a curve, filled contours, or a surface on axes with three dimensions."""
    found = {"": each}
    check_comparable(found)
    scale = Scale.of(found)
    if len(each.axes) == 1:
        draw_lines(axes, found, scale)
    elif axes.name == "3d":
        draw_surface(axes, each, scale)
    else:
        heights, labels = scale.ticks()
        axes.figure.colorbar(draw_map(axes, each, scale), ax=axes, label="loss").set_ticks(heights, labels=labels)
    axes.set_title(caption("", each).strip())


def check_comparable(landscapes: Mapping[str, Landscape]) -> None:
    """Refuses landscapes that cannot be drawn on one scale."""
    if not landscapes:
        raise RecipeError("landscapes: there are none to draw")
    (first, pattern), *others = landscapes.items()
    for name, other in others:
        if not np.array_equal(other.axes, pattern.axes):
            raise RecipeError(f"landscapes: {name} and {first} have different grids; measure both on the same grid")
    for name, each in landscapes.items():
        if not np.isfinite(each.values).any():
            raise RecipeError(f"landscapes: {name} has no finite value; measure it with a smaller span")


@dataclass(frozen=True)
class Scale:
    """Maps losses to heights (the loss or its logarithm) over the common range of all runs."""

    low: float
    high: float
    logarithmic: bool

    @classmethod
    def of(cls, landscapes: Mapping[str, Landscape], logarithmic: bool | None = None) -> Scale:
        """The range of all landscapes, by default logarithmic if it spans more than a few decades."""
        values = np.concatenate([each.values.ravel() for each in landscapes.values()])
        finite = values[np.isfinite(values)]
        low, high = float(finite.min()), float(finite.max())
        if high - low <= 1e-9 * abs(high):
            low, high = low - 0.5, high + 0.5  # a constant loss still needs a scale
        if logarithmic is None:
            logarithmic = low > 0 and math.log10(high) - math.log10(low) > _DECADES
        return cls(low, high, logarithmic)

    def heights(self, values: Any) -> Floats:
        finite = np.where(np.isfinite(values), values, np.nan)
        return np.log10(finite) if self.logarithmic else finite

    @property
    def ends(self) -> tuple[float, float]:
        low, high = self.heights([self.low, self.high])
        return float(low), float(high)

    def levels(self, count: int) -> Floats:
        return np.linspace(*self.ends, count)

    def ticks(self) -> tuple[Floats, list[str]]:
        """The heights and labels of a few round losses within the range."""
        losses = _round_logarithmic(self.low, self.high) if self.logarithmic else _round_linear(self.low, self.high)
        losses = losses[(losses >= self.low) & (losses <= self.high)]
        return self.heights(losses), [f"{loss:g}" for loss in losses]


def _round_linear(low: float, high: float) -> Floats:
    from matplotlib.ticker import MaxNLocator

    return np.asarray(MaxNLocator(5).tick_values(low, high))


def _round_logarithmic(low: float, high: float) -> Floats:
    decades = np.log10(high) - np.log10(low)
    digits = (1, 2, 5) if decades < 2 else (1, 3) if decades < 4 else (1,)
    powers = np.arange(np.floor(np.log10(low)), np.log10(high) + 1, np.ceil(decades / 6))
    return np.array([digit * 10.0**power for power in powers for digit in digits])


def steep(found: Sequence[Landscape]) -> bool:
    """Whether surfaces need a logarithmic scale, because a common linear one would hide the shape of most of them.

    This is the case if the largest loss is far above the middle of some surface. A deep minimum alone does not count:
    on a logarithmic scale it would look like a narrow one.
    """
    finite = [each.values[np.isfinite(each.values)] for each in found]
    high, middles = max(float(values.max()) for values in finite), [float(np.median(values)) for values in finite]
    return min(float(values.min()) for values in finite) > 0 and high > STEEP * min(middles)


def caption(name: str, each: Landscape) -> str:
    """The name of a run, its loss and its largest rise."""
    return f"{name}\nloss {each.centre:.3g}, rises by {each.rise:.3g}"


def _draw_curves(landscapes: Mapping[str, Landscape], path: Path) -> None:
    figure = new_figure(7, 4.2)
    axes = figure.subplots()
    draw_lines(axes, landscapes, Scale.of(landscapes))
    axes.legend(frameon=False, fontsize="small", bbox_to_anchor=(1, 1), loc="upper left")
    save_figure(figure, path)


def draw_lines(axes: Any, landscapes: Mapping[str, Landscape], scale: Scale) -> None:
    """Draws landscapes along one direction as lines over each other."""
    for k, (name, each) in enumerate(landscapes.items()):
        draw_band(axes, k, caption(name, each), each.axes[0], scale.heights(each.values))
    axes.axvline(0, color="0.6", linewidth=0.8, linestyle=":")
    axes.set(xlabel="step α along the direction", ylabel="loss")
    axes.set_yticks(*scale.ticks())


def _draw_planes(landscapes: Mapping[str, Landscape], path: Path) -> None:
    runs = len(landscapes)
    figure = new_figure(3.3 * runs + 1.2, 6.4)
    scale = Scale.of(landscapes)
    maps = [figure.add_subplot(2, runs, 1 + k) for k in range(runs)]
    surfaces = [figure.add_subplot(2, runs, 1 + runs + k, projection="3d") for k in range(runs)]
    for above, below, (name, each) in zip(maps, surfaces, landscapes.items(), strict=True):
        above.set_title(caption(name, each), fontsize="medium")
        filled = draw_map(above, each, scale)
        draw_surface(below, each, scale)
    heights, labels = scale.ticks()
    bar = figure.colorbar(filled, ax=[*maps, *surfaces], label="loss", aspect=40, shrink=0.8)
    bar.set_ticks(heights, labels=labels)
    bar.add_lines(heights, ["white"] * len(heights), [0.8] * len(heights))
    save_figure(figure, path)


def draw_map(axes: Any, each: Landscape, scale: Scale, centre: bool = True) -> Any:
    """Draws filled contours, with lines at the ticks of the colour bar, and a cross at the centre."""
    heights = scale.heights(each.values).T  # matplotlib expects the vertical axis first
    filled = axes.contourf(*each.axes, heights, scale.levels(25), cmap=_MAP)
    crossed = [height for height in scale.ticks()[0] if np.nanmin(heights) < height < np.nanmax(heights)]
    if crossed:
        axes.contour(*each.axes, heights, crossed, colors="white", linewidths=0.8, linestyles="-")
    axes.set(facecolor="0.85")
    if centre:
        axes.plot(0, 0, marker="+", color="white", markersize=9, markeredgewidth=1.5)
        steps = np.linspace(each.axes[0, 0], each.axes[0, -1], 5)
        axes.set(aspect="equal", xlabel="α", ylabel="β", xticks=steps, yticks=steps)
    return filled


def draw_surface(axes: Any, each: Landscape, scale: Scale) -> None:
    """Draws the surface with the camera that all surfaces share."""
    low, high = scale.ends
    surface = (*np.meshgrid(*each.axes), scale.heights(each.values).T)
    axes.plot_surface(*surface, cmap=_MAP, vmin=low, vmax=high, rcount=60, ccount=60, linewidth=0)
    steps = np.linspace(each.axes[0, 0], each.axes[0, -1], 3)
    axes.set(zlim=(low, high), xticks=steps, yticks=steps)
    axes.set_xlabel("α", labelpad=-4)
    axes.set_ylabel("β", labelpad=-4)
    for axis in "xy":
        axes.tick_params(axis=axis, pad=-1)
    axes.set_zticks(*scale.ticks())
    axes.view_init(elev=28, azim=-55)
    axes.set_box_aspect((1, 1, 0.8), zoom=1.1)
