"""Command to write one page about runs: report."""

from pathlib import Path
from typing import Annotated

import typer

from fedflat.cli.app import TrustOption, app, err, out
from fedflat.errors import RecipeError


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="run directories, or directories that contain several runs")],
    file: Annotated[
        Path | None, typer.Option("-o", "--out", help="the page to write; default report.html in the run's directory")
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="also measure flatness, landscape and duality of each line's first seed")
    ] = False,
    target: Annotated[
        float | None, typer.Option(help="value of the metric for `rounds to target`; default the recipe's")
    ] = None,
    trust: TrustOption = False,
) -> None:
    """Make one self-contained page of curves, tables and pictures that compares runs; it opens offline."""
    if file is not None and file.suffix.lower() not in (".html", ".htm"):
        raise RecipeError(f"-o {file}: a report is an HTML page; give it an ending .html, or draw by `fedflat plot`")
    from fedflat.files import write_whole, written_to
    from fedflat.report.page import collect, page

    content = page(collect(runs, err.status, measure, target))
    place = file or (runs[0] if len(runs) == 1 else Path()) / "report.html"
    with written_to(place, "choose another -o"):
        write_whole(place, content, public=True)
    out.print(f"written to {place} ({len(content) / 1e6:.1f} MB)", markup=False, highlight=False)
