"""Image files of paths between models and of trajectories."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fedflat.drawing import COLOURS, new_figure, save_figure
from fedflat.flatness import Interpolation, Trajectory, draw_path


def draw_paths(found: Mapping[str, Interpolation], ends: tuple[str, str], path: Path) -> None:
    """Draws several paths between the same two models.

    Args:
        found: the paths by name.
        ends: the names of the models at α = 0 and α = 1.
        path: the image file to write.
    """
    figure = new_figure(7, 4)
    axes = figure.subplots()
    for colour, (name, each) in zip(COLOURS, found.items(), strict=False):
        draw_path(axes, each, name, colour)
    axes.set(xlabel=f"α, from {ends[0]} to {ends[1]}")
    save_figure(figure, path)


def draw_trajectory(found: Trajectory, path: Path, title: str = "") -> None:
    """Draws a trajectory under a title."""
    figure = new_figure(*found.size)
    axes = figure.subplots()
    found.draw(axes)
    axes.set(title=title)
    save_figure(figure, path)
