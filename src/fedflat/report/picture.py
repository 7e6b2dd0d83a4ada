"""Figures of splits, curves over the rounds, and bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedflat.drawing import new_figure, save_figure


def draw_split(counts: Sequence[Sequence[int]], path: Path, title: str = "") -> None:
    """Draws sample counts of clients × classes: circles, stacked bars for many clients, a heat map for many classes."""
    table = np.asarray(counts)
    clients, classes = table.shape
    figure = new_figure(min(max(6.0, 0.22 * clients + 2), 16), min(max(3.5, 0.28 * classes + 1.2), 9))
    axes = figure.subplots()
    if classes > 20:
        figure.colorbar(axes.imshow(table.T, aspect="auto", origin="lower", cmap="viridis"), label="samples")
        axes.set(ylabel="class")
    elif clients <= 60:
        _circles(axes, table)
    else:
        _bars(axes, table)
    for axis in (axes.xaxis, axes.yaxis):
        axis.get_major_locator().set_params(integer=True)
    axes.set(xlabel="client", title=title)
    save_figure(figure, path)


def _circles(axes: Any, table: Any) -> None:
    x, y = np.nonzero(table)
    axes.scatter(x, y, s=table[x, y] / table.max() * 160, c=[f"C{c % 10}" for c in y])
    axes.set(ylabel="class", xlim=(-1, len(table)), ylim=(-1, table.shape[1]))


def _bars(axes: Any, table: Any) -> None:
    below = np.zeros(len(table))
    for c, column in enumerate(table.T):
        axes.bar(range(len(table)), column, bottom=below, width=1.0, color=f"C{c % 10}", label=str(c))
        below += column
    axes.set(ylabel="samples", xlim=(-0.5, len(table) - 0.5))
    axes.legend(title="class", bbox_to_anchor=(1, 1), loc="upper left", frameon=False, fontsize="small")


Curve = Sequence[tuple[int, float]]


def draw_curves(curves: Mapping[str, Sequence[Curve]], path: Path, ylabel: str, title: str = "") -> None:
    """Draws the mean of the curves of each name over the rounds, with their range as a shaded area."""
    figure = new_figure(7, 4)
    axes = figure.subplots()
    for name, runs in curves.items():
        rounds = [round for round, _ in runs[0]]
        values = np.array([[value for _, value in run] for run in runs])
        (line,) = axes.plot(rounds, values.mean(axis=0), label=name)
        axes.fill_between(
            rounds, values.min(axis=0), values.max(axis=0), color=line.get_color(), alpha=0.15, linewidth=0
        )
    axes.set(xlabel="round", ylabel=ylabel, title=title)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    save_figure(figure, path)


def draw_bars(panels: Mapping[str, Sequence[float]], labels: Sequence[str], path: Path) -> None:
    """Draws panels side by side, one for each quantity, with a bar for each label."""
    figure = new_figure(3.2 * len(panels), 3)
    for axes, (name, values) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        axes.bar(labels, values, color="C0")
        axes.set_title(name)
        axes.grid(alpha=0.3, axis="y")
    save_figure(figure, path)
