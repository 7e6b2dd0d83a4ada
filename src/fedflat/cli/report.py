"""Command to write one page about runs: report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedflat.cli.app import TrustOption, app, err, out


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="directories of runs, or of several runs each")],
    file: Annotated[
        Path | None, typer.Option("-o", "--out", help="the page; else report.html in the only directory, or here")
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="also measure flatness, landscape and duality of each line's first seed")
    ] = False,
    target: Annotated[
        float | None, typer.Option(help="accuracy for `rounds to target`; else the recipe's", min=0, max=1)
    ] = None,
    trust: TrustOption = False,
) -> None:
    """Make one self-contained page of curves, tables and pictures that compares runs; it opens offline."""
    from fedflat.report.page import collect, page
    from fedflat.runs.folder import write_whole, written_to

    content = page(collect(runs, err.status, measure, target))
    place = file or (runs[0] if len(runs) == 1 else Path()) / "report.html"
    with written_to(place, "choose another -o"):
        write_whole(place, content, public=True)
    out.print(f"written to {place} ({len(content) / 1e6:.1f} MB)", markup=False, highlight=False)
