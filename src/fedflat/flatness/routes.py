"""Figures of paths between models and of trajectories in a plane of weight space, on given axes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fedflat.drawing import COLOURS
from fedflat.flatness.terrain import Scale, draw_map

if TYPE_CHECKING:  # these modules draw with this one
    from fedflat.flatness.interpolation import Interpolation
    from fedflat.flatness.track import Trajectory


def draw_path(axes: Any, found: Interpolation, name: str = "", colour: str = COLOURS[0]) -> None:
    """Draws the loss along a path, with the chord that its barrier is measured from."""
    shown = np.where(np.isfinite(found.losses), found.losses, np.nan)
    label = f"{name}: barrier {found.barrier:.3g}" if name else f"barrier {found.barrier:.3g}"
    axes.plot(found.alphas, shown, color=colour, label=label)
    axes.plot([0, 1], found.losses[[0, -1]], color=colour, linestyle=":", linewidth=1)
    axes.set(xlabel="α, from the first to the second model", ylabel="loss")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)


def draw_trajectory(axes: Any, found: Trajectory) -> None:
    """Draws the rounds of a run and the local models of one round over the loss surface of their plane."""
    scale = Scale.of({"": found.surface})
    filled = draw_map(axes, found.surface, scale, centre=False)
    _draw_rounds(axes, found)
    if found.local_round:
        _draw_clients(axes, found)
    heights, labels = scale.ticks()
    axes.figure.colorbar(filled, ax=axes, label="loss").set_ticks(heights, labels=labels)
    shares = [f", {share:.0%} of the variance" if share == share else "" for share in found.shares]
    axes.set(xlabel=f"x{shares[0]}", ylabel=f"y{shares[1]}")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3, frameon=False, fontsize="small")


def _draw_rounds(axes: Any, found: Trajectory) -> None:
    x, y = found.path.T
    # White with a dark edge is visible on both ends of the map.
    axes.plot(x, y, "-o", color="white", markeredgecolor="black", markersize=5, linewidth=1.5, label="global model")
    for place in (0, -1):
        shade = dict(boxstyle="round,pad=0.15", facecolor="black", alpha=0.5, linewidth=0)
        text = dict(color="white", xytext=(6, 6), textcoords="offset points", fontsize="small", bbox=shade)
        axes.annotate(f"round {found.rounds[place]}", found.path[place], **text)


def _draw_clients(axes: Any, found: Trajectory) -> None:
    start, average = found.ends
    for point in found.clients_path:
        axes.plot(*np.stack([start, point]).T, color=COLOURS[1], linewidth=0.8, alpha=0.8)
    told = f"clients, round {found.local_round}"
    axes.plot(*found.clients_path.T, "^", color=COLOURS[1], markeredgecolor="black", markersize=6, label=told)
    axes.plot(*average, "*", color=COLOURS[3], markeredgecolor="black", markersize=13, label="their average")
