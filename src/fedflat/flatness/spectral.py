"""Figures of the spectrum of the Hessian: its largest eigenvalues, and the density of all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fedflat.drawing import COLOURS, STYLES, new_figure, save_figure
from fedflat.flatness.spectrum import Density

FLOOR = 1e-10  # fraction of the highest density; lower values are tails of broadened peaks and not eigenvalues


def draw_density(densities: Mapping[str, Density], path: Path, matrix: str = "Hessian") -> None:
    """Draws φ(t) of each run into a file."""
    figure = new_figure(7, 4)
    draw_densities(figure.subplots(), densities, matrix)
    save_figure(figure, path)


def draw_eigenvalues(axes: Any, values: Sequence[float], residuals: Sequence[float], matrix: str = "Hessian") -> None:
    """Draws the largest eigenvalues as bars, with their residuals as error bars."""
    places = range(1, len(values) + 1)
    axes.bar(places, values, yerr=residuals, capsize=3, color=COLOURS[0], width=0.6)
    axes.set(xlabel="$n$", ylabel=rf"eigenvalue $\lambda_n$ of the {matrix}", xticks=list(places))
    axes.axhline(0, color="0.5", linewidth=0.8)
    axes.grid(alpha=0.3, axis="y")


def draw_densities(axes: Any, densities: Mapping[str, Density], matrix: str = "Hessian") -> None:
    """Draws φ(t) of each run on a logarithmic scale, with each peak broadened by a hundredth of the range."""
    nodes = torch.cat([node for density in densities.values() for node in density.nodes])
    low, high = float(nodes.min()), float(nodes.max())
    width = max((high - low) / 100, 1e-9)
    grid = torch.linspace(low - 4 * width, high + 4 * width, 1000)
    top = 0.0
    for place, (name, density) in enumerate(densities.items()):
        values = density.on(grid, width)
        top = max(top, float(values.max()))
        colour, style = COLOURS[place % len(COLOURS)], STYLES[place % len(STYLES)]
        axes.plot(grid.numpy(), values.numpy(), color=colour, linestyle=style, linewidth=1.4, label=name)
    axes.set(xlabel=f"eigenvalue $t$ of the {matrix}", ylabel=r"density $\varphi(t)$", yscale="log")
    axes.set_ylim(max(top * FLOOR, 1e-300), top * 3)
    axes.grid(alpha=0.3)
    if any(densities):
        axes.legend(frameon=False)
