"""Figure of the eigenvalue density of the Hessian."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from fedflat.flatness import Density
from fedflat.report.dual import COLOURS, STYLES
from fedflat.report.picture import new_figure, save_figure

FLOOR = 1e-10  # fraction of the highest density; lower values are tails of broadened peaks and not eigenvalues


def draw_density(densities: Mapping[str, Density], path: Path) -> None:
    """Draws φ(t) of each run on a logarithmic scale, with each peak broadened by a hundredth of the range."""
    nodes = torch.cat([node for density in densities.values() for node in density.nodes])
    low, high = float(nodes.min()), float(nodes.max())
    width = max((high - low) / 100, 1e-9)
    grid = torch.linspace(low - 4 * width, high + 4 * width, 1000)
    figure = new_figure(7, 4)
    axes = figure.subplots()
    top = 0.0
    for place, (name, density) in enumerate(densities.items()):
        values = density.on(grid, width)
        top = max(top, float(values.max()))
        colour, style = COLOURS[place % len(COLOURS)], STYLES[place % len(STYLES)]
        axes.plot(grid.numpy(), values.numpy(), color=colour, linestyle=style, linewidth=1.4, label=name)
    axes.set(xlabel="eigenvalue $t$ of the Hessian", ylabel=r"density $\varphi(t)$", yscale="log")
    axes.set_ylim(max(top * FLOOR, 1e-300), top * 3)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    save_figure(figure, path)
