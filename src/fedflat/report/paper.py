"""Figures for a paper: curves, rounds to a target, flatness against a metric, splits and landscapes of runs."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedflat.drawing import (
    COLOURS,
    COLUMN,
    MARKERS,
    PAGE,
    check_ending,
    draw_band,
    new_figure,
    paper_style,
    save_figure,
)
from fedflat.errors import RecipeError, RunError, nearest
from fedflat.flatness import Landscape, Scale, check_comparable, draw_lines, draw_map
from fedflat.report.lines import Line, Sources, read_lines
from fedflat.report.measured import landscapes, recorded, split_counts
from fedflat.report.picture import draw_counts
from fedflat.rounds import flat_record

Kind = Literal["curves", "target", "flatness", "split", "landscape"]
Width = Literal["column", "page"]
MEASURES = {"lambda1": "λ₁ of the Hessian", "trace": "trace of the Hessian", "adaptive_sharpness": "adaptive sharpness"}
INSIDE = 4  # number of names that fit into the axes
ROW, HANDLE, CHARACTER = 0.16, 0.45, 0.054  # inches: a row of a legend, the line before a name, a letter of it
DPI = 300


@dataclass(frozen=True)
class Asked:
    """What a figure shows besides its lines."""

    metric: str
    target: float | None
    measure: str


def plot(
    *sources: Sources,
    kind: Kind = "curves",
    metric: str | None = None,
    target: float | None = None,
    measure: str = "lambda1",
    width: Width = "column",
    only: Iterable[str] = (),
    out: str | Path | None = None,
) -> Any:
    """Draws runs in a style that fits a two-column page, and returns the matplotlib figure.

    Runs that differ only in the seed form one line: its mean, and a band from the lowest to the highest seed.

    Args:
        sources: directories of runs or of several runs, such as sweeps; results of `train`; or lists of them.
        kind: `curves` of a metric over the rounds; `target`, the rounds to a value of the metric; `flatness`, a measure
            of flatness against the metric; `split`, the clients' samples by class; `landscape`, the loss around minima.
        metric: by default the one that the runs follow.
        target: the value for `target`; by default the recipe's.
        measure: `lambda1`, `trace` or `adaptive_sharpness`, as measured by `fedflat flatness`.
        width: width of the figure, one `column` (3.3 inches) or the whole `page` (6.9 inches).
        only: conditions `setting=value` that select the runs, such as `split.alpha=0.1`.
        out: a file to write, .pdf, .svg or .png.

    Raises:
        RecipeError: an argument is unknown, or the runs have nothing of this kind to show.
        RunError: a run cannot be read, or the file cannot be written.
    """
    for name, given, known in (("kind", kind, KINDS), ("width", width, WIDTHS), ("measure", measure, MEASURES)):
        if given not in known:
            raise RecipeError(f"plot: {name} = {given!r} is unknown; {nearest(str(given), known)}")
    if target is not None and not math.isfinite(target):
        raise RecipeError(f"plot: the target is {target}; give a finite number")
    if out is not None:
        check_ending(Path(out))
    lines = read_lines(sources, only)
    if not lines:
        raise RecipeError("plot: there are no runs; give directories that `fedflat run` or `fedflat sweep` wrote")
    recipe = lines[0].recipe
    goal = target if target is not None else next((t for each in lines if (t := each.recipe.evaluation.target)), None)
    with paper_style():
        figure = KINDS[kind](lines, Asked(metric or recipe.metric, goal, measure), WIDTHS[width])
        if out is not None:
            save_figure(figure, Path(out), DPI)
    return figure


def _curves(lines: Sequence[Line], asked: Asked, width: float) -> Any:
    """A metric over the rounds."""
    _refuse_unknown(asked.metric, lines)
    bands = [(line.name, band) for line in lines if (band := line.band(asked.metric))]
    figure, axes = _axes(width, [name for name, _ in bands])
    for place, (name, band) in enumerate(bands):
        draw_band(axes, place, name, band.rounds, band.mean, (band.low, band.high))
    if asked.target is not None and asked.metric == lines[0].recipe.metric:
        axes.axhline(asked.target, color="0.5", linewidth=0.8, linestyle=":")
    axes.set(xlabel="round", ylabel=asked.metric)
    _named(figure, axes, [name for name, _ in bands])
    return figure


def _refuse_unknown(metric: str, lines: Sequence[Line]) -> None:
    """Raise `RecipeError` for a metric that no round has as a number."""
    records = [flat_record(record) for line in lines for run in line.runs for record in run.history]
    if not records:
        raise RecipeError(f"plot: {lines[0].runs[0].path} and the other runs have no finished round yet")
    named = {name for record in records for name in record if name != "round"}
    known = {name for name in named if all(isinstance(record.get(name, 0), int | float) for record in records)}
    if metric not in known:
        raise RecipeError(f"plot: no run has recorded a number {metric!r}; {nearest(metric, known)}")


def _targets(lines: Sequence[Line], asked: Asked, width: float) -> Any:
    """Rounds to the target: a bar for the mean of each line, a dot for each seed; hatched if a seed missed it."""
    if asked.target is None:
        raise RecipeError("plot: there is no target; give --target, or train with evaluation.target")
    rounds = [[run.summary(asked.target).get("rounds_to_target") for run in line.runs] for line in lines]
    if all(round is None for found in rounds for round in found):
        last = [run.history[-1].get(asked.metric) for line in lines for run in line.runs if run.history]
        known = sorted(value for value in last if isinstance(value, int | float))
        ends = f"; their last values are {known[0]:.4g} to {known[-1]:.4g}" if known else ""
        raise RecipeError(f"plot: no run reaches {asked.metric} {asked.target:g}{ends}")
    figure = new_figure(width, 0.5 + 0.26 * len(lines))
    axes = figure.subplots()
    for place, (line, found) in enumerate(zip(lines, rounds, strict=True)):
        reached = [round for round in found if round is not None]
        longest = max(run.history[-1]["round"] if run.history else 0 for run in line.runs)
        missed = len(reached) < len(found)
        length = longest if missed else float(np.mean(reached))
        hatch = {"hatch": "////", "fill": False} if missed else {"alpha": 0.75}
        axes.barh(
            place, length, 0.62, edgecolor=COLOURS[place % len(COLOURS)], color=COLOURS[place % len(COLOURS)], **hatch
        )
        axes.plot(reached, [place] * len(reached), "o", color="black", markersize=2.5)
        told = f"  > {longest} ({len(reached)} of {len(found)} seeds)" if missed else f"  {length:.3g}"
        axes.text(max([length, *reached]), place, told, va="center", fontsize=7)
    axes.set(yticks=range(len(lines)), yticklabels=[line.name for line in lines], ylim=(len(lines) - 0.5, -0.5))
    axes.set(xlabel=f"rounds to {asked.metric} {asked.target:g}")
    axes.margins(x=0.3)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3, axis="x")
    return figure


def _marker(place: int) -> str:
    """The marker of a line. Lines with the same colour have different markers."""
    return MARKERS[(place + place // len(COLOURS)) % len(MARKERS)]


def _flatness(lines: Sequence[Line], asked: Asked, width: float) -> Any:
    """A measure of flatness against the metric: a small marker for each seed, a large one for the mean."""
    _refuse_unknown(asked.metric, lines)
    points = [(line.name, found) for line in lines if (found := _measured(line, asked))]
    if not points:
        path = lines[0].runs[0].path
        raise RecipeError(f"plot: no run has a measured flatness; run `fedflat flatness {path}` first, for each run")
    figure, axes = _axes(width, [name for name, _ in points])
    for place, (name, found) in enumerate(points):
        style = {"color": COLOURS[place % len(COLOURS)], "marker": _marker(place), "linestyle": ""}
        x, y = zip(*found, strict=True)
        if len(found) > 1:
            axes.plot(x, y, markersize=3, alpha=0.45, **style)
        axes.plot(
            np.mean(x), np.mean(y), markersize=6, markeredgecolor="black", markeredgewidth=0.5, label=name, **style
        )
    every = [x for _, found in points for x, _ in found]
    if min(every) > 0 and max(every) > 10 * min(every):
        axes.set_xscale("log")
    axes.set(xlabel=MEASURES[asked.measure], ylabel=asked.metric)
    axes.grid(alpha=0.3)
    _named(figure, axes, [name for name, _ in points])
    return figure


def _measured(line: Line, asked: Asked) -> list[tuple[float, float]]:
    """(flatness, metric) after the last round of each seed that has both."""
    found = []
    for run in line.runs:
        row, curve = recorded(run.path), run.curve(asked.metric)
        if row and curve:
            spectrum = row["spectrum"]
            numbers = {"lambda1": spectrum["eigenvalues"][0], "trace": spectrum["trace"]["mean"], **row}
            found.append((float(numbers[asked.measure]), float(curve[max(curve)])))
    return found


def _split(lines: Sequence[Line], _: Asked, width: float) -> Any:
    """The number of samples of each client and class, for each distinct split."""
    splits: dict[str, Any] = {}
    for line in lines:
        split = line.recipe.split
        options = ", ".join(f"{name} {value}" for name, value in split.options().items() if value is not False)
        splits.setdefault(f"{split.name} {options}".strip(), (line.recipe, line.runs[0].path))
    found: dict[str, list[list[int]]] = {}
    for title, each in splits.items():
        counts = split_counts(*each)
        if isinstance(counts, str):
            raise RunError(f"plot: {title}: {counts[0].lower()}{counts[1:].rstrip('.')}")
        found[title] = counts
    figure = new_figure(width, 2.1 * len(found))
    for axes, (title, counts) in zip(np.ravel(figure.subplots(len(found))), found.items(), strict=True):
        draw_counts(figure, axes, counts)
        axes.set_title(title if len(found) > 1 else "")
    return figure


def _landscapes(lines: Sequence[Line], _: Asked, width: float) -> Any:
    """The loss around the minimum of each line's first seed that was measured, on one scale."""
    found: dict[str, Landscape] = {}
    for line in lines:
        films = (film for run in line.runs for film in landscapes(run.path).values())
        if film := next(films, None):
            found[line.name] = film.landscapes[-1]
    if not found:
        path = lines[0].runs[0].path
        raise RecipeError(f"plot: no run has a landscape; run `fedflat landscape {path}` first, for each run")
    check_comparable(found)
    scale = Scale.of(found)
    if len(next(iter(found.values())).axes) == 1:
        figure, axes = _axes(width, list(found))
        draw_lines(axes, found, scale)
        _named(figure, axes, list(found))
        return figure
    across = min(len(found), 2 if width == COLUMN else 4)
    down = -(-len(found) // across)
    figure = new_figure(width, down * ((width - 0.9) / across + 0.15) + 0.3)
    figure.set_layout_engine("compressed")  # the maps are squares
    panels = np.ravel(figure.subplots(down, across, squeeze=False))
    for axes, (name, each) in zip(panels, found.items(), strict=False):
        filled = draw_map(axes, each, scale)
        axes.set_title(name, fontsize=7)
        reach = each.axes[0, -1]
        axes.set(xticks=[-reach, 0, reach], yticks=[-reach, 0, reach])
        axes.label_outer()
    for axes in panels[len(found) :]:
        axes.set_visible(False)
    heights, labels = scale.ticks()
    figure.colorbar(filled, ax=list(panels[: len(found)]), label="loss", aspect=30).set_ticks(heights, labels=labels)
    return figure


def _axes(width: float, names: Sequence[str]) -> tuple[Any, Any]:
    """A figure with one pair of axes, and room for the names below if they are many or long."""
    below = 0.0 if _fit_inside(width, names) else ROW * sum(name.count("\n") + 1 for name in _wrapped(width, names))
    figure = new_figure(width, (2.2 if width == COLUMN else 2.6) + below / _across(width, names))
    return figure, figure.subplots()


def _named(figure: Any, axes: Any, names: Sequence[str]) -> None:
    """Adds a legend with the names of the lines: inside the axes if they are few and short, otherwise below."""
    width = figure.get_figwidth()
    handles = axes.get_legend_handles_labels()[0]
    if _fit_inside(width, names):
        axes.legend(handles, names, framealpha=0.7, edgecolor="none", borderpad=0.2)
        return
    shown = _wrapped(width, names)
    figure.legend(handles, shown, loc="outside lower center", ncols=_across(width, names), frameon=False)


def _fit_inside(width: float, names: Sequence[str]) -> bool:
    return len(names) <= INSIDE and CHARACTER * max(map(len, names)) < 0.55 * width


def _across(width: float, names: Sequence[str]) -> int:
    """How many columns of names fit side by side."""
    return max(1, min(len(names), int(width // (CHARACTER * max(map(len, names)) + HANDLE))))


def _wrapped(width: float, names: Sequence[str]) -> list[str]:
    return [textwrap.fill(name, max(12, int((width - HANDLE) / CHARACTER))) for name in names]


KINDS: dict[str, Callable[[Sequence[Line], Asked, float], Any]] = {
    "curves": _curves,
    "target": _targets,
    "flatness": _flatness,
    "split": _split,
    "landscape": _landscapes,
}
WIDTHS: dict[str, float] = {"column": COLUMN, "page": PAGE}
