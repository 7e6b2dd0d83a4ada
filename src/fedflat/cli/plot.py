"""Command for figures of runs in the style of a paper: plot."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from fedflat.cli.app import app, out


class KindName(StrEnum):
    """What a figure shows."""

    curves = "curves"
    target = "target"
    flatness = "flatness"
    who = "split"
    landscape = "landscape"


class WidthName(StrEnum):
    """How wide a figure is on a two-column page."""

    column = "column"
    page = "page"


class MeasureName(StrEnum):
    """A measure of flatness."""

    lambda1 = "lambda1"
    trace = "trace"
    adaptive_sharpness = "adaptive_sharpness"


@app.command()
def plot(
    runs: Annotated[
        list[Path], typer.Argument(help="run directories, or directories that contain several runs, such as a sweep")
    ],
    kind: Annotated[KindName, typer.Option(help="what to draw")] = KindName.curves,
    metric: Annotated[str | None, typer.Option(help="name of a metric in metrics.jsonl; default the runs' own")] = None,
    target: Annotated[float | None, typer.Option(help="value of the metric to reach; default the recipe's")] = None,
    measure: Annotated[
        MeasureName, typer.Option(help="measure of flatness, for --kind flatness")
    ] = MeasureName.lambda1,
    width: Annotated[WidthName, typer.Option(help="3.3 inches (column) or 6.9 (page)")] = WidthName.column,
    only: Annotated[list[str] | None, typer.Option(help="select runs: --only split.alpha=0.1")] = None,
    file: Annotated[
        Path | None, typer.Option("-o", "--out", help="file to write (.pdf, .svg, .png); default KIND.pdf")
    ] = None,
) -> None:
    """Draw runs for a paper: curves with bands over seeds, rounds to a target, flatness, splits, landscapes."""
    from fedflat.report.paper import plot as draw

    place = file or Path(f"{kind.value}.pdf")
    draw(
        *runs,
        kind=kind.value,
        metric=metric,
        target=target,
        measure=measure.value,
        width=width.value,
        only=only or (),
        out=place,
    )
    out.print(f"drawn to {place}", markup=False, highlight=False, soft_wrap=True)
