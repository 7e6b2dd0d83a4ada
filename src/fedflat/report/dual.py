"""The picture of activity–weight duality: where the gap sits, and the size and the sharpness behind it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedflat.errors import RunError
from fedflat.flatness.duality import Duality
from fedflat.report.picture import new_figure, save_figure

# Okabe and Ito's colours, which stay apart for all kinds of sight; yellow is left out, as it is faint on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
TITLES = (r"contribution $\ell_n$", r"size $\sigma_{w,n}$", r"sharpness $\sigma_{g,n}$")
STYLES = ("-", "--", "-.", ":")


def draw_duality(results: Mapping[str, Duality], path: Path) -> None:
    """Contribution ℓₙ, size σ_w and sharpness σ_g against the direction n, for each run.

    The lines are means over neighbouring n, in bins of equal width on the logarithmic axis; dots are single directions.
    """
    if not results:
        raise RunError(f"{path}: there is no result to draw")
    figure = new_figure(12, 3.9)
    panels = figure.subplots(1, 3)
    for place, (name, result) in enumerate(results.items()):
        colour, style = COLOURS[place % len(COLOURS)], STYLES[place % len(STYLES)]
        label = f"{name}: gap {result.gap:.3g}, of the pairs {result.paired_gap:.3g}"
        for axes, values in zip(panels, (result.contribution, result.sigma_w, result.sigma_g), strict=True):
            axes.plot(np.arange(1, len(values) + 1), values, ".", color=colour, markersize=2, alpha=0.25, zorder=1)
            axes.plot(*binned(values), color=colour, linestyle=style, linewidth=1.6, label=label)
    for axes, title in zip(panels, TITLES, strict=True):
        axes.set(title=title, xscale="log", xlabel="direction $n$, by falling curvature")
        axes.grid(alpha=0.3)
    _scale(panels[0], [part for result in results.values() for part in result.contribution])
    for axes in panels[1:]:
        _focus(axes)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    save_figure(figure, path)


def binned(values: list[float]) -> tuple[Any, Any]:
    """Mean direction and mean value in bins that grow with n, ten to a decade.

    >>> [x.tolist() for x in binned([4.0, 3.0, 2.0])]
    [[1.0, 2.0, 3.0], [4.0, 3.0, 2.0]]
    """
    n = np.arange(1, len(values) + 1)
    place = np.floor(10 * np.log10(n)).astype(int)
    _, bins = np.unique(place, return_inverse=True)
    count = np.bincount(bins)
    return np.bincount(bins, n) / count, np.bincount(bins, values) / count


def _scale(axes: Any, values: list[float]) -> None:
    """Logarithmic on both sides of zero, linear below about a thousandth of the largest."""
    largest = max(map(abs, values))
    if largest > 0:
        linear = 10 ** math.floor(math.log10(largest) - 3)
        axes.set_yscale("symlog", linthresh=linear)
        axes.set_ylim(min(2 * min(values), -linear / 2), max(2 * max(values), linear / 2))
    axes.axhline(0, color="0.5", linewidth=0.8)


def _focus(axes: Any) -> None:
    """A logarithmic axis over what the lines cover: single directions without any movement would stretch it."""
    lines = np.concatenate([line.get_ydata() for line in axes.get_lines() if line.get_linestyle() != "None"])
    if (lines > 0).any():
        axes.set_yscale("log")
        axes.set_ylim(lines[lines > 0].min() / 4, lines.max() * 4)
