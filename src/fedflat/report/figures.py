"""The figures of the report as Plotly JSON: data and layout. The page adds the colours of its theme.

The `meta` of a trace is the index of its line, so the page can hide and show it.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fedflat.flatness import (
    Direction,
    Duality,
    Film,
    Landscape,
    LayerFlatness,
    Trajectory,
    binned,
    correlations,
    steep,
)
from fedflat.report.flatness_table import PAIRINGS
from fedflat.report.lines import Band, Line, thinned

Figure = dict[str, Any]

# The colour-blind safe palette of Okabe and Ito, without its yellow, which is faint on white, and with a grey that is
# visible in both themes instead of black. Neighbouring lines also differ in their dashes.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#808080")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
SCALE = "Cividis"
# The same scale without its dark end, which is invisible on a dark page.
LIFTED = [[0, "#3f5f94"], [0.5, "#a39b76"], [1, "#fde737"]]
DECADES = 1.5  # losses that span more decades are drawn on a logarithmic scale
MOST_CLIENTS = 300
MOST_CELLS = 60_000  # over all heat maps of classes
WIDEST = 51  # maximum number of points of a landscape along a direction


def style(place: int) -> dict[str, Any]:
    return {"color": COLOURS[place % len(COLOURS)], "dash": DASHES[place % len(DASHES)], "width": 2}


def bands(named: Sequence[tuple[int, str, Band]], axis: str, most: int, **options: Any) -> Figure:
    """A line over the rounds for each band, with the range over its seeds as a shaded area."""
    traces = []
    for place, name, band in named:
        kept = thinned(len(band.rounds), most)
        rounds = [band.rounds[k] for k in kept]
        if band.low != band.high:
            traces.append(_range(place, rounds, [band.low[k] for k in kept], [band.high[k] for k in kept]))
        traces.append(_line(place, name, rounds, [band.mean[k] for k in kept]))
    return _figure(traces, "round", axis, **options)


def _line(place: int, name: str, x: ArrayLike, y: ArrayLike) -> Figure:
    mode = "lines" if np.size(x) > 1 else "markers"
    marker = {"color": style(place)["color"]}
    described = {"type": "scatter", "mode": mode, "name": plain(name), "meta": place, "line": style(place)}
    return {**described, "marker": marker, "x": short(x), "y": short(y)}


def _range(place: int, x: list[int], low: list[float], high: list[float]) -> Figure:
    colour = style(place)["color"]
    around = {"x": [*x, *reversed(x)], "y": short([*high, *reversed(low)])}
    look = {"fill": "toself", "fillcolor": f"{colour}2e", "line": {"width": 0, "color": colour}, "mode": "lines"}
    return {"type": "scatter", "meta": place, **around, **look, "hoverinfo": "skip", "showlegend": False}


def traffic(lines: Sequence[Line], most: int, metric: str = "accuracy") -> Figure | None:
    """A metric against the traffic so far."""
    traces = []
    for place, line in enumerate(lines):
        if band := line.band(metric):
            sent, kept = line.megabytes(), thinned(len(band.rounds), most)
            x, y = [sent[band.rounds[k]] for k in kept], [band.mean[k] for k in kept]
            traces.append(_line(place, line.name, x, y))
    return _figure(traces, "MB sent, both ways", metric) if traces else None


def split(counts: Sequence[Sequence[int]]) -> Figure:
    """A heat map of clients × classes by number of samples, with empty cells for zero."""
    shown = np.asarray(counts)[:MOST_CLIENTS].T
    cells = [[int(count) or None for count in row] for row in shown]
    gap = 1 if shown.shape[1] <= 60 and shown.shape[0] <= 30 else 0
    told = "client %{x}, class %{y}: %{z} samples<extra></extra>"
    look = {"colorscale": LIFTED, "colorbar": _bar("samples"), "xgap": gap, "ygap": gap, "zmin": 0}
    return _heat(cells, [*range(shown.shape[1])], "client", told, **look)


def classes(line: Line, most: int) -> Figure | None:
    """A heat map of the accuracy of every class over the rounds, averaged over the seeds."""
    curves = [curve for run in line.runs if (curve := run.curve("class_accuracy"))]
    rounds = sorted(set.intersection(*map(set, curves))) if curves else []
    if not rounds or not curves[0][rounds[0]]:  # runs of 0.2 have empty lists for tasks without classes
        return None
    rounds = [rounds[k] for k in thinned(len(rounds), max(2, most // len(curves[0][rounds[0]])))]
    cube = np.array([[curve[round] for round in rounds] for curve in curves], dtype=float)  # nan: class without samples
    told = "round %{x}, class %{y}: %{z}<extra></extra>"
    cells = [short(row, 3) for row in cube.mean(axis=0).T]
    return _heat(cells, rounds, "round", told, colorbar=_bar("accuracy"), zmin=0, zmax=1)


def _heat(cells: list[list[Any]], x: list[int], axis: str, told: str, **options: Any) -> Figure:
    trace = {"type": "heatmap", "z": cells, "x": x, "colorscale": SCALE, "hovertemplate": told, **options}
    ticks = {"dtick": 1} if len(cells) <= 12 else {}
    return _figure([trace], axis, "class", hovermode="closest", yaxis=ticks, xaxis={"showgrid": False})


def layers(found: Mapping[str, tuple[int, Sequence[LayerFlatness]]], quantity: str, axis: str) -> Figure:
    """One quantity of every layer and line: `activity` (mean a² of the input) or `curvature` (λ₁ of the block)."""
    traces = []
    for name, (place, each) in found.items():
        values = [x.activity.mean_square if quantity == "activity" else x.eigenvalues[0] for x in each]
        positive = [value if value > 0 else math.nan for value in values]
        points = {"mode": "lines+markers", "x": [plain(x.name or "the model") for x in each]}
        traces.append(_line(place, name, [], positive) | points)
    return _figure(traces, "", axis, yaxis=log(_heights(traces)), xaxis={"type": "category"})


def duality(found: Mapping[str, tuple[int, Duality]]) -> dict[str, Figure]:
    """The cumulative gap, σ_w, σ_g and c along the directions of descending curvature, for both pairings."""
    gap, size, sharpness, correlation = (list[Figure]() for _ in range(4))
    for name, (place, each) in found.items():
        for direction, pairing in each.pairings.items():
            carried = np.cumsum(pairing.contribution)
            n = np.unique(np.geomspace(1, len(carried), 120).round().astype(int))
            gap.append(_paired(place, name, direction, n, carried[n - 1]))
            for traces, values in ((size, pairing.sigma_w), (sharpness, pairing.sigma_g)):
                at, means = binned(values)
                traces.append(_paired(place, name, direction, at, np.where(means > 0, means, np.nan)))
            correlation.append(_paired(place, name, direction, *binned(correlations(pairing))))
    axis = "direction n, by descending curvature"
    along = log([1.0, max(len(each.eigenvalues) for _, each in found.values())])
    return {
        "Gap of the pairs, up to direction n": _figure(gap, axis, "Σ ℓ", xaxis=along),
        "Size of the solution": _figure(size, axis, "σ_w", xaxis=along, yaxis=log(_heights(size))),
        "Sharpness": _figure(sharpness, axis, "σ_g", xaxis=along, yaxis=log(_heights(sharpness))),
        "Correlation of the two": _figure(correlation, axis, "c", xaxis=along),
    }


def _paired(place: int, name: str, direction: Direction, x: ArrayLike, y: ArrayLike) -> Figure:
    """A line of one pairing: solid for the paper's pairing, dotted for the other."""
    trace = _line(place, f"{name}, {PAIRINGS[direction]}", x, y)
    return trace | {"line": {**trace["line"], "dash": "solid" if direction == "train_to_test" else "dot"}}


def crossing(found: Mapping[str, tuple[int, Landscape]]) -> Figure:
    """Curves of the landscapes along one direction."""
    traces = [_line(place, name, each.axes[0], each.values) for name, (place, each) in found.items()]
    scale = log(_heights(traces)) if _decades([each for _, each in found.values()]) else {}
    return _figure(traces, "step α along the direction", "loss", yaxis=scale)


def surfaces(found: Sequence[Film]) -> list[Figure]:
    """Landscapes over planes on a common scale, with a frame for each round.

    The same `data` is shown as a surface or as a map (`forms`); the page puts the heights of a frame into it, at first
    those of the last round.
    """
    if not found:
        return []
    every = [each for film in found for each in film.landscapes]
    logarithmic = steep(every)
    heights = [_heights_of(each, logarithmic) for each in every]
    finite = np.concatenate([height[np.isfinite(height)] for height in heights])
    low, high = float(finite.min()), float(finite.max())
    low, high = (low, high) if high > low else (low - 0.5, high + 0.5)
    ticks = _powers(low, high) if logarithmic else {}
    reach = float(max(np.abs(each.axes).max() for each in every))
    return [
        _plane(film.landscapes[-1], (low, high), reach, ticks)
        | {"frames": _frames(film, logarithmic), "logarithmic": logarithmic}
        for film in found
    ]


def _heights_of(each: Landscape, logarithmic: bool) -> Any:
    return np.log10(each.values) if logarithmic else each.values


def _frames(film: Film, logarithmic: bool) -> list[Figure]:
    """The heights of each round, over the points that are shown."""
    found = []
    for round, each in zip(film.rounds, film.landscapes, strict=True):
        kept = thinned(each.axes.shape[1], WIDEST)
        height = _heights_of(each, logarithmic)[np.ix_(kept, kept)].T  # Plotly expects the vertical axis first
        found.append({"round": round, "z": [short(row, 4) for row in height]})
    return found


def _plane(each: Landscape, ends: tuple[float, float], reach: float, ticks: Figure) -> Figure:
    kept = thinned(each.axes.shape[1], WIDEST)
    x, y = (short(axis[kept]) for axis in each.axes)
    (low, high), told = ends, "α %{x}, β %{y}: loss %{text}<extra></extra>"
    side = {"range": [-reach, reach], "zeroline": False}
    levels = {"start": low, "end": high, "size": (high - low) / 20, "coloring": "heatmap"}
    within = {**side, "tickvals": [-reach / 2, 0, reach / 2]}  # labels at the corners would cover each other
    scene = {
        "xaxis": {**within, "title": {"text": "α"}},
        "yaxis": {**within, "title": {"text": "β"}},
        "zaxis": {"range": [low, high], "title": {"text": ""}, **ticks},
        "camera": {"eye": {"x": 1.33, "y": -1.46, "z": 0.75}, "center": {"x": 0, "y": 0, "z": -0.15}},
        "aspectratio": {"x": 1, "y": 1, "z": 0.8},
    }
    flat = _figure([], "α", "β", xaxis=side, yaxis=side, hovermode="closest")["layout"]
    bar = {**_bar("loss"), **ticks}
    return {
        "data": [{"x": x, "y": y, "colorscale": SCALE, "hovertemplate": told}],
        "layout": {"margin": {"l": 0, "r": 0, "t": 0, "b": 0}, "scene": scene},
        "forms": {
            "surface": {"trace": {"type": "surface", "cmin": low, "cmax": high, "showscale": False}},
            "map": {
                "trace": {"type": "contour", "zmin": low, "zmax": high, "contours": levels, "colorbar": bar},
                "layout": flat,
            },
        },
    }


def trajectory(found: Trajectory) -> Figure:
    """The rounds of a run and the local models of one round over the loss of their plane."""
    grid = found.surface
    logarithmic = _decades([grid])
    height = _heights_of(grid, logarithmic)
    finite = height[np.isfinite(height)]
    ticks = _powers(float(finite.min()), float(finite.max())) if logarithmic else {}
    x, y = (short(axis) for axis in grid.axes)
    losses = [[f"{loss:.4g}" for loss in row] for row in grid.values.T]
    below = {
        "type": "contour", "x": x, "y": y, "z": [short(row, 4) for row in height.T], "text": losses,
        "colorscale": SCALE, "contours": {"coloring": "heatmap"}, "ncontours": 20, "line": {"width": 0.5},
        "colorbar": {**_bar("loss"), **ticks}, "hovertemplate": "x %{x}, y %{y}: loss %{text}<extra></extra>",
    }  # fmt: skip
    told = [f"round {r}: loss {loss:.4g}, {off:.2g} from the plane" for r, loss, off in zip(
        found.rounds, found.losses, found.off, strict=True)]  # fmt: skip
    traces = [below, _marks(found.path, "white", "circle", 8, told, mode="lines+markers")]
    if found.local_round:
        start, average = found.ends
        legs = np.concatenate([[start, point, [np.nan, np.nan]] for point in found.clients_path]).reshape(-1, 2)
        named = [f"client {client}, round {found.local_round}" for client in found.clients]
        traces.append(_marks(legs, COLOURS[1], "circle", 1, "", mode="lines", hoverinfo="skip", hovertemplate=None))
        traces.append(_marks(found.clients_path, COLOURS[1], "triangle-up", 9, named))
        traces.append(_marks(average[None], COLOURS[3], "star", 13, [f"average, round {found.local_round}"]))
    shares = [f", {share:.0%} of the variance" if math.isfinite(share) else "" for share in found.shares]
    sides = {"xaxis": {"zeroline": False}, "yaxis": {"zeroline": False}}
    return _figure(traces, f"x{shares[0]}", f"y{shares[1]}", hovermode="closest", **sides)


def _marks(points: Any, colour: str, symbol: str, size: int, told: Any, **options: Any) -> Figure:
    """Models in a plane. A dark edge keeps a mark visible on both ends of the map."""
    marker = {"color": colour, "symbol": symbol, "size": size, "line": {"color": "#111", "width": 1}}
    x, y = (short(side) for side in np.asarray(points).T)
    shown = {"mode": "markers", "hovertemplate": "%{text}<extra></extra>", **options}
    return {"type": "scatter", "x": x, "y": y, "text": told, "marker": marker, "line": {"color": colour}, **shown}


def _decades(found: Sequence[Landscape]) -> bool:
    """Whether to draw the losses on a logarithmic scale."""
    values = np.concatenate([each.values[np.isfinite(each.values)] for each in found])
    low, high = float(values.min()), float(values.max())
    return low > 0 and math.log10(high) - math.log10(low) > DECADES


def _powers(low: float, high: float) -> Figure:
    """Ticks at round losses on a logarithmic height axis."""
    losses = _round(low, high)
    return {"tickvals": short(np.log10(losses)), "ticktext": [f"{loss:g}" for loss in losses]} if losses else {}


def _round(low: float, high: float) -> list[float]:
    """A few round numbers between 10^low and 10^high."""
    digits = (1, 2, 5) if high - low < 2 else (1, 3) if high - low < 4 else (1,)
    powers = range(math.floor(low), math.ceil(high) + 1, max(1, math.ceil((high - low) / 6)))
    numbers = [digit * 10.0**power for power in powers for digit in digits]
    return [number for number in numbers if low <= math.log10(number) <= high]


def log(values: Sequence[float]) -> Figure:
    """A logarithmic axis for positive values. Plotly's own tick labels would be bare digits."""
    if not values:
        return {}
    ticks = _round(math.log10(min(values)) - 0.05, math.log10(max(values)) + 0.05)
    written = {"tickvals": ticks, "ticktext": [f"{tick:g}" for tick in ticks]} if len(ticks) > 1 else {}
    return {"type": "log", **written}


def _heights(traces: Sequence[Figure]) -> list[float]:
    return [value for trace in traces for value in trace["y"] if value is not None]


def _bar(title: str) -> Figure:
    return {"title": {"text": title, "side": "right"}, "thickness": 10, "outlinewidth": 0}


def _figure(traces: list[Figure], x: str, y: str, **options: Any) -> Figure:
    axes = {
        "xaxis": {"title": {"text": x}, "automargin": True, **options.pop("xaxis", {})},
        "yaxis": {"title": {"text": y}, "automargin": True, **options.pop("yaxis", {})},
    }
    layout = {"margin": {"l": 52, "r": 12, "t": 12, "b": 44}, "showlegend": False, "hovermode": "x unified"}
    return {"data": traces, "layout": {**layout, **axes, **options}}


def plain(text: str) -> str:
    """Escapes text for Plotly, which would otherwise interpret tags in it."""
    return html.escape(text, quote=False)


def short(values: ArrayLike, digits: int = 5) -> list[float | None]:
    """Numbers for JSON, rounded to a few significant digits; None (null) for values that are not finite."""
    return [float(f"{value:.{digits}g}") if math.isfinite(value) else None for value in np.asarray(values, float)]
