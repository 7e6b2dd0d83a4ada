"""The sections of a report about flatness: at a glance, in full, landscapes, trajectories, duality."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from fedflat.flatness import Landscape, Measurement, paired_differences, student
from fedflat.report import figures
from fedflat.report.flatness_table import duality_columns, flatness_cells, headline
from fedflat.report.geometry_table import locality_cells
from fedflat.report.markup import Canvas, Section, film_control, form_button, grid, heading, paragraph, section, table
from fedflat.report.measured import OVER, Row
from fedflat.report.sections import Content

PLANES = {"eigen": "The plane of the two top eigenvectors", "random": "Random directions"}
MOST_SURFACES = 15  # on a page: browsers allow about sixteen WebGL contexts
HEAD = {"lambda1": "λ₁", "trace": "trace", "adaptive": "adaptive sharpness (scale-invariant)"}
BY_SEED = Mapping[int, Mapping[str, float]]


def glance(content: Content, _: Canvas, __: int) -> Section | None:
    """The metric, λ₁, trace and one scale-invariant number of each line, with intervals, and the differences."""
    if not content.flatness:
        return None
    head = _head(content)
    found = {k: _by_seed(content, k) for k in content.flatness}
    rows = [(content.name(k), *(_over_seeds(each, name, content.flatness[k]) for name in head))
            for k, each in found.items()]  # fmt: skip
    shown = table("Flatness at a glance", ("line", *head.values()), rows, [*found])
    most = max(map(len, found.values()))
    samples = next(row["samples"] for rows in content.flatness.values() for row in rows.values())
    note = (
        "Around a flat minimum the loss rises slowly in all directions: λ₁, the largest curvature, and the trace, the "
    )
    note += (
        f"sum of all, are small. Hessian of the loss over {samples} training samples; {content.metric} of the global "
        "model. "
    )
    if most > 1:
        note += f"Mean over {most} seeds ± half of the 95 % interval (Student's t)."
    else:
        note += "One seed: the interval of the trace is that of its estimate, and there are none over seeds."
    note += " Only the adaptive sharpness stays the same when layers are rescaled."
    return section("glance", "Flatness at a glance", note, shown, _differences(content))


def _head(content: Content) -> dict[str, str]:
    """The titles of the columns by the name of their number; the first is the metric that the page follows."""
    return {"metric": content.metric, **HEAD}


def _by_seed(content: Content, place: int) -> dict[int, dict[str, float]]:
    """The headline numbers of each measured seed of a line."""
    curves = {run.recipe.seed: run.curve(content.metric) for run in content.lines[place].runs}
    found = {}
    for seed, row in content.flatness[place].items():
        curve = curves.get(seed) or {0: math.nan}
        found[seed] = {"metric": curve[max(curve)], **{name: value for name, (value, _) in headline(row).items()}}
    return found


def _over_seeds(found: BY_SEED, name: str, rows: Mapping[int, Row]) -> str:
    values = [each[name] for each in found.values()]
    if len(values) > 1:
        return _interval(values)
    (row,) = rows.values()
    error = headline(row).get(name, (0.0, None))[1]
    return _within(values[0], error) if error else f"{values[0]:.4g}"


def _interval(values: Sequence[float]) -> str:
    """The mean ± half the width of its 95 % interval.

    >>> _interval([-1.0, -2.0, -3.0])
    '−2.0 ± 2.5'
    """
    found = student(values)
    return _within(found.mean, found.high - found.mean)


def _within(value: float, half: float) -> str:
    """A number with two digits of its error.

    >>> _within(31.234, 12.3), _within(0.95021, 0.0153)
    ('31 ± 12', '0.950 ± 0.015')
    """
    digits = max(0, 1 - math.floor(math.log10(half))) if 0 < half < math.inf else 4
    return f"{value:.{digits}f} ± {half:.{digits}f}".replace("-", "−")


def _differences(content: Content) -> str:
    """The differences from the first line over the seeds that both have, seed by seed."""
    first, *others = content.flatness
    measured = [
        Measurement(str(k), seed, each) for k in content.flatness for seed, each in _by_seed(content, k).items()
    ]
    found = {(each.method, each.measure): each for each in paired_differences(measured)} if others else {}
    head, rows = _head(content), {}
    for place in others:
        cells = [found[str(place), name] for name in head]
        if any(len(each.seeds) > 1 for each in cells):
            told = (_within(each.mean, each.high - each.mean) if len(each.seeds) > 1 else "–" for each in cells)
            rows[place] = (f"{content.name(place)} − {content.name(first)}", *told)
    title = "Paired differences, seed by seed"
    return heading(title) + table(title, ("lines", *head.values()), [*rows.values()], [*rows]) if rows else ""


def flatness(content: Content, canvas: Canvas, _: int) -> Section | None:
    """The flatness table, and the activations and curvature of every layer."""
    if not content.flatness:
        return None
    rows = {place: next(iter(each.values())) for place, each in content.flatness.items()}
    columns = {content.name(place): flatness_cells(row) for place, row in rows.items()}
    layers = {place: found for place, each in content.measured.items() if (found := each.flatness.layers)}
    by_layer = {content.name(place): (place, found) for place, found in layers.items()}
    plots = (
        []
        if not by_layer
        else (
            canvas.plot(figures.layers(by_layer, quantity, axis), title, "layer by layer, for each line")
            for quantity, axis, title in (
                ("activity", "mean a²", "Input activations of each layer"),
                ("curvature", "λ₁ of the layer's block", "Curvature of the layer's weights"),
            )
        )
    )
    note = "The first seed of each line; mean loss over training samples in evaluation mode. Intervals are of 95 %."
    blocks = [heading("All measures"), _beside("Flatness", columns), grid(plots)]
    local = {content.name(k): locality_cells(each.locality) for k, each in content.measured.items() if each.locality}
    if local:
        blocks += [heading("Local against global flatness"), _beside("Local against global flatness", local)]
    return section("flatness", "Flatness of the minima", note, *blocks)


def _beside(caption: str, columns: Mapping[str, Mapping[str, str]]) -> str:
    """A table with one column for each line and one row for each quantity."""
    names = dict.fromkeys(name for cells in columns.values() for name in cells)
    rows = [(name, *(cells.get(name, "–") for cells in columns.values())) for name in names]
    return table(caption, ("", *columns), rows)


def landscapes(content: Content, canvas: Canvas, _: int) -> Section | None:
    """The loss around the minima: surfaces or maps on a common scale, and curves for single directions."""
    blocks, logarithmic = [], False
    most = MOST_SURFACES // max(1, len(content.landscapes))
    for plane, found in content.landscapes.items():
        wide = {k: each for k, each in found.items() if len(each.landscapes[0].axes) == 2}
        shown = dict([*wide.items()][:most])
        drawn = figures.surfaces([*shown.values()])
        logarithmic = logarithmic or any(figure["logarithmic"] for figure in drawn)
        plots = [
            canvas.plot(figure, content.name(k), _told(each.landscapes[-1]), k)
            for (k, each), figure in zip(shown.items(), drawn, strict=True)
        ]
        blocks.append(heading(_title(plane)))
        blocks += [paragraph(f"The first {most} of {len(wide)} lines.")] if len(wide) > len(shown) else []
        rounds = sorted({round for each in shown.values() for round in each.rounds})
        button = form_button() if wide and not any('id="form"' in block for block in blocks) else ""
        blocks.append(film_control(rounds, grid(plots, "plots surfaces"), button))
        last = {k: each.landscapes[-1] for k, each in found.items()}
        if along := {content.name(k): (k, each) for k, each in last.items() if len(each.axes) == 1}:
            blocks.append(grid([canvas.plot(figures.crossing(along), "Along one direction", "the loss")]))
        rows = [(content.name(k), f"{each.centre:.4g}", f"{each.rise:.4g}") for k, each in last.items()]
        blocks.append(table("Loss", ("line", "loss of the last model", "largest rise around it"), rows, [*found]))
    note = "The height is the loss after steps α and β from the model along two directions of weight space. All lines "
    note += "share one scale for steps, heights and colours, so a minimum that looks flatter is flatter"
    note += ", but where heights are logarithmic a deep minimum looks narrow." if logarithmic else "."
    return section("landscapes", "The loss around the minima", note, *blocks)


def _told(each: Landscape) -> str:
    return f"loss {each.centre:.3g}, rises by {each.rise:.3g}"


def _title(plane: str) -> str:
    kind, rounds = plane.removesuffix(OVER), plane.endswith(OVER)
    return PLANES.get(kind, kind) + (" of the last model, around the models of each round" if rounds else "")


def trajectories(content: Content, canvas: Canvas, _: int) -> Section | None:
    """The trajectory of each line's first seed through weight space."""
    plots = [
        canvas.plot(figures.trajectory(each), content.name(k), "rounds and clients over the loss of a plane", k)
        for k, each in content.trajectories.items()
    ]
    note = (
        "Models projected into a plane of weight space: the global models of the kept rounds (white), the models of "
        "one round's clients (triangles) and their average (star), over the loss in that plane. Hover to see how far "
        "a model is from the plane."
    )
    return section("trajectory", "The way through weight space", note, grid(plots))


def duality(content: Content, canvas: Canvas, _: int) -> Section | None:
    """The decomposition of the generalisation gap over the directions of the last layer."""
    found = {content.name(k): (k, each.duality) for k, each in content.measured.items() if each.duality}
    if not found:
        return None
    columns = duality_columns({f"{name}: {each.layer}": each for name, (_, each) in found.items()})
    plots = (canvas.plot(figure, title, "for each line") for title, figure in figures.duality(found).items())
    note = (
        "The loss difference between paired train and test samples, written as changes of the last layer's weights. "
        "Solid lines: each training sample with its nearest test sample, as in the paper. Dotted lines: each test "
        "sample with its nearest training sample, as in the authors' demo."
    )
    return section("duality", "Activity–weight duality", note, grid(plots), _beside("Duality", columns))
