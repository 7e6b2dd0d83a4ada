"""Figures of paths between models and of trajectories in a plane of weight space."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedflat.flatness import Interpolation, Trajectory
from fedflat.report.picture import new_figure, save_figure
from fedflat.report.terrain import LINES, Scale, draw_map


def draw_paths(found: Mapping[str, Interpolation], ends: tuple[str, str], path: Path) -> None:
    """Draws the loss along each path, with the chord that its barrier is measured from.

    Args:
        found: the paths by name.
        ends: the names of the models at α = 0 and α = 1.
        path: the image file to write.
    """
    figure = new_figure(7, 4)
    axes = figure.subplots()
    for colour, (name, each) in zip(LINES, found.items(), strict=False):
        shown = np.where(np.isfinite(each.losses), each.losses, np.nan)
        axes.plot(each.alphas, shown, color=colour, label=f"{name}: barrier {each.barrier:.3g}")
        axes.plot([0, 1], each.losses[[0, -1]], color=colour, linestyle=":", linewidth=1)
    axes.set(xlabel=f"α, from {ends[0]} to {ends[1]}", ylabel="loss")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    save_figure(figure, path)


def draw_trajectory(found: Trajectory, path: Path, title: str = "") -> None:
    """Draws the rounds of a run and the local models of one round over the loss surface of their plane.

    Args:
        found: the trajectory.
        path: the image file to write.
        title: the title of the figure.
    """
    figure = new_figure(7.4, 5.4)
    axes = figure.subplots()
    scale = Scale.of({"": found.surface})
    filled = draw_map(axes, found.surface, scale, centre=False)
    _draw_rounds(axes, found)
    if found.local_round:
        _draw_clients(axes, found)
    heights, labels = scale.ticks()
    figure.colorbar(filled, label="loss").set_ticks(heights, labels=labels)
    shares = [f", {share:.0%} of the variance" if share == share else "" for share in found.shares]
    axes.set(xlabel=f"x{shares[0]}", ylabel=f"y{shares[1]}", title=title)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize="small")
    save_figure(figure, path)


def _draw_rounds(axes: Any, found: Trajectory) -> None:
    x, y = found.path.T
    # White with a dark edge is visible on both ends of the map.
    axes.plot(x, y, "-o", color="white", markeredgecolor="black", markersize=5, linewidth=1.5, label="global model")
    for place in (0, -1):
        text = dict(color="white", xytext=(6, 6), textcoords="offset points", fontsize="small")
        axes.annotate(f"round {found.rounds[place]}", found.path[place], **text)


def _draw_clients(axes: Any, found: Trajectory) -> None:
    start, average = found.ends
    for point in found.clients_path:
        axes.plot(*np.stack([start, point]).T, color=LINES[1], linewidth=0.8, alpha=0.8)
    told = f"clients, round {found.local_round}"
    axes.plot(*found.clients_path.T, "^", color=LINES[1], markeredgecolor="black", markersize=6, label=told)
    axes.plot(*average, "*", color=LINES[3], markeredgecolor="black", markersize=13, label="their average")
