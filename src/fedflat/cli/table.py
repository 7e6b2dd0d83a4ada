"""Command for tables of your own runs and of the papers: table."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fedflat.cli.app import app, complain, names_in_package, out
from fedflat.errors import RecipeError, nearest

if TYPE_CHECKING:
    from fedflat.report.sheets import Sheet

Settings = list[str] | None


class Form(StrEnum):
    """The output format of a table."""

    terminal = "terminal"
    markdown = "markdown"
    latex = "latex"
    csv = "csv"
    html = "html"


class Best(StrEnum):
    """Which number of a column is the best."""

    highest = "highest"
    lowest = "lowest"


@app.command()
def table(
    name: Annotated[
        str | None,
        typer.Argument(
            help="directory of a sweep or of runs; or a paper's table, as in fedsol-table1",
            autocompletion=names_in_package("published"),
        ),
    ] = None,
    results: Annotated[list[Path] | None, typer.Argument(help="further directories, or their results.jsonl")] = None,
    rows: Annotated[Settings, typer.Option(help="setting that names the rows, can be repeated; default method")] = None,
    columns: Annotated[
        Settings, typer.Option(help="setting that names the columns, such as split; default all others that vary")
    ] = None,
    value: Annotated[Settings, typer.Option(help="metric, such as accuracy or lambda1; can be repeated")] = None,
    only: Annotated[Settings, typer.Option(help="select runs: --only split.alpha=0.1")] = None,
    best: Annotated[Best | None, typer.Option(help="which number is bold; default by the metric")] = None,
    reference: Annotated[
        str | None, typer.Option(help="row that the others are compared with, seed by seed; default the first")
    ] = None,
    digits: Annotated[int | None, typer.Option(help="digits after the decimal point", min=0, max=12)] = None,
    form: Annotated[Form | None, typer.Option("--format", help="output format")] = None,
    file: Annotated[Path | None, typer.Option("-o", "--out", help="file to write (.tex, .md, .csv, .html)")] = None,
) -> None:
    """Make a table of your runs: mean ± deviation over seeds, the best in bold, a star where paired seeds differ.

    With a paper's table: the published numbers beside those of RESULTS, with the difference and what differs in the
    settings. Without NAME, lists the papers' tables.
    """
    from fedflat.report.tables import published_names

    shape = {"--rows": rows, "--columns": columns, "--value": value, "--only": only, "--best": best}
    asked = shape | {"--reference": reference, "--digits": digits}
    given = [option for option, choice in asked.items() if choice is not None]
    if name is None:
        if given:
            raise RecipeError(f"{given[0]}: say of which table, by the directory of a sweep or of runs")
        print("\n".join(published_names()))
        return
    if name in published_names():
        if given:
            raise RecipeError(f"{given[0]}: {name} is a paper's table, which has its rows and columns; leave it out")
        sheet = _papers(name, results or [])
    elif Path(name).exists():
        from fedflat.report.pivot import table as own

        way: Literal["highest", "lowest"] | None = best.value if best else None
        sheet = own(
            name, *results or [], rows=rows, columns=columns, value=value, only=only or (), best=way,
            reference=reference, digits=digits,
        )  # fmt: skip
    else:
        hint = nearest(name, published_names()) if "/" not in name else "give one that `fedflat sweep` or `run` wrote"
        raise RecipeError(f"there is no directory or paper's table {name!r}; {hint}")
    _put(sheet, form, file)


def _papers(name: str, results: list[Path]) -> "Sheet":
    """A paper's table beside the results; says so if none of them belongs to it."""
    from fedflat.report.tables import compared, no_match, published
    from fedflat.runs.sweep.results import read_rows

    found = [row for source in results for row in read_rows(source)]
    sheet, silent = compared(published(name), found), no_match(published(name), len(found))
    if silent in sheet.notes:
        complain(silent)
    return sheet


def _put(sheet: "Sheet", form: Form | None, file: Path | None) -> None:
    """Print the table, or write it to a file whose ending sets the format."""
    from fedflat.report.sheets import terminal

    if file is not None:
        if not file.parent.is_dir():
            raise RecipeError(f"--out {file}: there is no directory {file.parent}; make it, or choose another")
        sheet.save(file, form.value if form else None)
    elif form in (None, Form.terminal):
        print(terminal(sheet, out.width, out.is_terminal), end="")
    else:
        print(sheet.write(form.value), end="")
