"""Figures of splits, curves over the rounds, and bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedflat.drawing import COLOURS, draw_band, new_figure, save_figure


def draw_split(counts: Sequence[Sequence[int]], path: Path, title: str = "") -> None:
    """Draws sample counts of clients × classes into a file."""
    clients, classes = np.shape(counts)
    figure = new_figure(min(max(6.0, 0.22 * clients + 2), 16), min(max(3.5, 0.28 * classes + 1.2), 9))
    axes = figure.subplots()
    draw_counts(figure, axes, counts)
    axes.set(title=title)
    save_figure(figure, path)


def draw_counts(figure: Any, axes: Any, counts: Sequence[Sequence[int]]) -> None:
    """Draws sample counts of clients × classes: circles, stacked bars for many clients, a heat map for many classes."""
    table = np.asarray(counts)
    clients, classes = table.shape
    if classes > 20:
        shown = axes.imshow(table.T, aspect="auto", origin="lower", cmap="viridis", interpolation="nearest")
        figure.colorbar(shown, label="samples")
        axes.set(ylabel="class")
    elif clients <= 60:
        _circles(axes, table)
    else:
        _bars(axes, table)
    for axis in (axes.xaxis, axes.yaxis):
        axis.get_major_locator().set_params(integer=True)
    axes.set(xlabel="client")


def _circles(axes: Any, table: Any) -> None:
    """Circles whose areas are the counts; the largest just fits between two clients."""
    x, y = np.nonzero(table)
    width, height = 72 * np.asarray(axes.figure.get_size_inches())
    side = min(0.8 * width / (len(table) + 1), 0.7 * height / (table.shape[1] + 1), 13)  # points
    axes.scatter(x, y, s=table[x, y] / table.max() * side**2, c=COLOURS[0], linewidths=0)
    axes.set(ylabel="class", xlim=(-0.8, len(table) - 0.2), ylim=(-0.8, table.shape[1] - 0.2))


def _bars(axes: Any, table: Any) -> None:
    from matplotlib import colormaps

    below = np.zeros(len(table))
    shades = colormaps["viridis"](np.linspace(0, 0.95, table.shape[1]))
    for c, column in enumerate(table.T):
        axes.bar(range(len(table)), column, bottom=below, width=1.0, color=shades[c], label=str(c))
        below += column
    axes.set(ylabel="samples", xlim=(-0.5, len(table) - 0.5))
    axes.legend(title="class", bbox_to_anchor=(1, 1), loc="upper left", frameon=False, fontsize="small")


Curve = Sequence[tuple[int, float]]


def draw_curves(curves: Mapping[str, Sequence[Curve]], path: Path, ylabel: str, title: str = "") -> None:
    """Draws the mean of the curves of each name over the rounds, with their range as a shaded area."""
    figure = new_figure(7, 4)
    axes = figure.subplots()
    for place, (name, runs) in enumerate(curves.items()):
        values = np.array([[value for _, value in run] for run in runs])
        rounds, ends = [round for round, _ in runs[0]], (values.min(axis=0), values.max(axis=0))
        draw_band(axes, place, name, rounds, values.mean(axis=0), ends)
    axes.set(xlabel="round", ylabel=ylabel, title=title)
    axes.legend(frameon=False)
    save_figure(figure, path)


def draw_bars(panels: Mapping[str, Sequence[float]], labels: Sequence[str], path: Path) -> None:
    """Draws panels side by side, one for each quantity, with a bar for each label."""
    figure = new_figure(3.2 * len(panels), 3)
    for axes, (name, values) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        axes.bar(labels, values, color=COLOURS[0])
        axes.set_title(name)
        axes.grid(alpha=0.3, axis="y")
    save_figure(figure, path)
