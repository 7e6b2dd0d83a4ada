"""Figures of activity–weight duality: the gap, the size and the sharpness by direction."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fedflat.drawing import COLOURS, new_figure, save_figure
from fedflat.errors import RunError
from fedflat.flatness.pairing import Direction

if TYPE_CHECKING:  # duality.py draws with this module
    from fedflat.flatness.duality import Duality, Pairing

Style = Literal["-", "--"]
PAIRINGS: dict[Direction, tuple[Style, str]] = {
    "train_to_test": ("-", "training sample → nearest test sample (paper)"),
    "test_to_train": ("--", "test sample → nearest training sample (demo)"),
}
LONGEST = 26  # maximum number of characters of a run's name on the axis


def draw_duality(results: Mapping[str, Duality], path: Path) -> None:
    """Plots contribution ℓₙ, size σ_w, sharpness σ_g and correlation c against the direction n.

    Lines are means over neighbouring n, in bins of equal width on the logarithmic axis. Dots are single directions.
    Two more panels show the spread of c, and the sums Σ c σ_w σ_g and Σ μ_w μ_g next to the gap.

    Args:
        results: the result of each run, by its name. Both pairings are drawn.
        path: the image file to write.

    Raises:
        RunError: `results` is empty, or the file cannot be written.
    """
    if not results:
        raise RunError(f"{path}: there is no result to draw")
    figure = new_figure(13, 7 + 0.25 * len(results))
    (ell, size, sharpness), (c, spread, gap) = panels = figure.subplots(2, 3)
    for axes, title in zip(panels.flat, TITLES, strict=True):
        axes.set(title=title)
        axes.grid(alpha=0.3)
    for place, each in enumerate(results.values()):
        for direction, found in each.pairings.items():
            look = {"color": COLOURS[place % len(COLOURS)], "linestyle": PAIRINGS[direction][0]}
            for axes, values in ((ell, found.contribution), (size, found.sigma_w), (sharpness, found.sigma_g)):
                _draw_along(axes, np.asarray(values), look)
            _draw_along(c, correlations(found), look)
    for axes in (ell, size, sharpness, c):
        axes.set(xscale="log", xlabel="direction $n$, by descending curvature")
    _scale(ell, [part for each in results.values() for found in each.pairings.values() for part in found.contribution])
    for axes in (size, sharpness):
        _focus(axes)
    _draw_spread(spread, results)
    _draw_sums(gap, results)
    _draw_legend(figure, results)
    save_figure(figure, path)


def draw_gap(axes: Any, each: Duality) -> None:
    """Draws the gap of the pairs that the first n directions carry, Σ_{m ≤ n} ℓ_m, for both pairings."""
    for k, (direction, found) in enumerate(each.pairings.items()):
        style, label = PAIRINGS[direction]
        carried = np.cumsum(found.contribution)
        axes.plot(np.arange(1, len(carried) + 1), carried, color=COLOURS[k], linestyle=style, label=label)
    axes.axhline(each.gap, color="black", linewidth=1, label="gap: test − training loss")
    axes.set(
        xscale="log", xlabel="direction $n$, by descending curvature", ylabel="gap of the pairs up to direction $n$"
    )
    axes.grid(alpha=0.3)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, frameon=False, fontsize="small")


TITLES = (
    r"contribution $\ell_n$",
    r"size $\sigma_{w,n}$",
    r"sharpness $\sigma_{g,n}$",
    r"correlation $c_n$",
    r"spread of $c_n$: mean ± deviation, 10–90 %",
    r"gap (line), $\Sigma c\,\sigma_w\sigma_g$ (full), $\Sigma\mu_w\mu_g$ (hatched)",
)


def _draw_along(axes: Any, values: Any, look: Mapping[str, Any]) -> None:
    """Draws values against the direction: single values as dots, their means over bins as a line."""
    marker = "." if look["linestyle"] == "-" else "+"
    axes.plot(np.arange(1, len(values) + 1), values, marker, color=look["color"], markersize=2, alpha=0.2, zorder=1)
    axes.plot(*binned(values), linewidth=1.6, **look)


def correlations(found: Pairing) -> Any:
    """cₙ, with NaN for the directions that do not vary."""
    values = np.full(len(found.correlation), np.nan)
    values[found.moving] = np.asarray(found.correlation)[found.moving]
    return values


def _rows(results: Mapping[str, Duality]) -> list[tuple[float, str, Direction, Duality]]:
    """(height, colour, pairing, result) for the two rows of each run, from top to bottom."""
    return [
        (-place - (0.2 if second else -0.2), COLOURS[place % len(COLOURS)], direction, each)
        for place, each in enumerate(results.values())
        for second, direction in enumerate(each.pairings)
    ]


def _draw_spread(axes: Any, results: Mapping[str, Duality]) -> None:
    for height, colour, direction, each in _rows(results):
        c, style = each.pairings[direction].correlations, PAIRINGS[direction][0]
        axes.plot([c.low, c.high], [height] * 2, color=colour, linestyle=style, linewidth=1.2)
        axes.errorbar(c.mean, height, xerr=c.std, fmt="o", color=colour, markersize=5, elinewidth=3, alpha=0.8)
    axes.axvline(0, color="0.5", linewidth=0.8)
    names = [name if len(name) <= LONGEST else f"…{name[1 - LONGEST :]}" for name in results]
    axes.set_yticks([-float(place) for place in range(len(names))], names, fontsize="small")
    axes.set(xlabel="$c_n$ over the directions $n$", ylim=(0.6 - len(names), 0.6))


def _draw_sums(axes: Any, results: Mapping[str, Duality]) -> None:
    for height, colour, direction, each in _rows(results):
        found, style = each.pairings[direction], PAIRINGS[direction][0]
        bar = {"height": 0.3, "edgecolor": colour, "linestyle": style}
        axes.barh(height, found.fluctuation, color=f"{colour}99", **bar)
        axes.barh(height, found.drift, left=found.fluctuation, color="none", hatch="////", **bar)
        axes.plot([each.gap] * 2, [height - 0.2, height + 0.2], color="black", linewidth=2)
    axes.axvline(0, color="0.5", linewidth=0.8)
    axes.set(xlabel="difference of the losses", ylim=(0.6 - len(results), 0.6))
    axes.set_yticks([])


def _draw_legend(figure: Any, results: Mapping[str, Duality]) -> None:
    """The legend: a colour for each run, labelled with its three gaps, and a line style for each pairing."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color="0.3", linestyle=style, label=label) for style, label in PAIRINGS.values()]
    for place, (name, each) in enumerate(results.items()):
        pairs = ", ".join(f"{found.paired_gap:.3g}" for found in each.pairings.values())
        label = f"{name}: gap {each.gap:.3g}, of the pairs {pairs}"
        handles.append(Line2D([], [], color=COLOURS[place % len(COLOURS)], linewidth=3, label=label))
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False)


def binned(values: Any) -> tuple[Any, Any]:
    """Mean direction and mean value in logarithmic bins of n, ten per decade. NaN values are ignored.

    >>> [x.tolist() for x in binned([4.0, 3.0, 2.0])]
    [[1.0, 2.0, 3.0], [4.0, 3.0, 2.0]]
    """
    values = np.asarray(values)
    n = (np.flatnonzero(~np.isnan(values)) + 1).astype(int)
    place = np.floor(10 * np.log10(n)).astype(int)
    _, bins = np.unique(place, return_inverse=True)
    count = np.bincount(bins)
    return np.bincount(bins, n) / count, np.bincount(bins, values[n - 1]) / count


def _scale(axes: Any, values: list[float]) -> None:
    """Sets a symmetric logarithmic axis that is linear below about a thousandth of the largest value."""
    largest = max(map(abs, values))
    if largest > 0:
        linear = 10 ** math.floor(math.log10(largest) - 3)
        axes.set_yscale("symlog", linthresh=linear)
        axes.set_ylim(min(2 * min(values), -linear / 2), max(2 * max(values), linear / 2))
    axes.axhline(0, color="0.5", linewidth=0.8)


def _focus(axes: Any) -> None:
    """Sets a logarithmic axis over the range of the lines. Dots of directions that do not vary would stretch it."""
    lines = np.concatenate([line.get_ydata() for line in axes.get_lines() if line.get_linestyle() != "None"])
    if (lines > 0).any():
        axes.set_yscale("log")
        axes.set_ylim(lines[lines > 0].min() / 4, lines.max() * 4)
