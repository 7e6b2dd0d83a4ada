"""Text tables and their output as terminal text, Markdown, LaTeX or HTML."""

from __future__ import annotations

import html
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from rich.console import Console
from rich.table import Table
from rich.text import Text


@dataclass(frozen=True)
class Cell:
    """One cell of a table."""

    text: str
    bold: bool = False


@dataclass
class Sheet:
    """A table with column heads on several levels, lines grouped into blocks, and notes below it.

    A line is (block name, line name, cells).
    """

    title: str
    heads: list[list[str]]
    blocks: list[list[tuple[str, str, list[Cell]]]]
    notes: list[str] = field(default_factory=list)

    def joined(self, by: str = " ") -> list[str]:
        """The heads of all levels of each column, joined into one string."""
        return [by.join(filter(None, levels)) for levels in zip(*self.heads, strict=True)]

    def lines(self) -> Iterator[tuple[str, str, list[Cell]]]:
        """All lines, with the block's name only in its first line."""
        for block in self.blocks:
            for number, (name, kind, cells) in enumerate(block):
                yield "" if number else name, kind, cells


def spans(heads: Sequence[Sequence[str]]) -> list[list[tuple[str, int]]]:
    """The heads of each level with the number of columns they span.

    On all levels except the last, neighbouring columns with equal heads from the top down share one head.

    >>> spans([["CIFAR-10", "CIFAR-10", "SVHN"], ["s = 2", "s = 2", "s = 2"]])
    [[('CIFAR-10', 2), ('SVHN', 1)], [('s = 2', 1), ('s = 2', 1), ('s = 2', 1)]]
    """
    columns = list(zip(*heads, strict=True))
    upper = [
        [(path[-1], len(list(same))) for path, same in groupby(columns, key=lambda column: column[: depth + 1])]
        for depth in range(len(heads) - 1)
    ]
    return [*upper, [(head, 1) for head in heads[-1]]]


def terminal(sheet: Sheet, width: int = 120, colour: bool = False) -> str:
    """The table as box-drawn text. Bold text needs `colour`."""
    table = Table(title=sheet.title, title_justify="left", show_lines=False)
    for head in ("", "", *sheet.joined("\n")):
        table.add_column(Text(head), justify="right" if head else "left")
    for block in sheet.blocks:
        for number, (name, kind, cells) in enumerate(block):
            # Without this space, a narrow column breaks before the deviation and not inside it.
            texts = (Text(cell.text.replace("± ", "±"), "bold" if cell.bold else "") for cell in cells)
            table.add_row(Text("" if number else name), Text(kind), *texts)
        table.add_section()
    console = Console(file=io.StringIO(), width=width, force_terminal=colour, color_system="auto" if colour else None)
    console.print(table)
    for note in sheet.notes:
        console.print(Text(f"• {note}"))
    assert isinstance(console.file, io.StringIO)
    return "".join(f"{line.rstrip()}\n" for line in console.file.getvalue().splitlines())


def markdown(sheet: Sheet) -> str:
    """The table in the Markdown of GitHub and pandoc."""

    def row(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cells)} |\n"

    def plain(text: str) -> str:
        return text.replace("|", "\\|").replace("*", "\\*")

    def shown(cell: Cell) -> str:
        return f"**{plain(cell.text)}**" if cell.bold else plain(cell.text)

    width = len(sheet.heads[0])
    lines = [row([plain(name), kind, *map(shown, cells)]) for name, kind, cells in sheet.lines()]
    head = row(["", "", *map(plain, sheet.joined())]) + row(["---", "---", *["---:"] * width])
    return f"**{plain(sheet.title)}**\n\n{head}{''.join(lines)}\n" + "".join(f"- {plain(n)}\n" for n in sheet.notes)


LATEX = {"\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
         "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "–": "--", "±": r"$\pm$", "↑": r"$\uparrow$",
         "↓": r"$\downarrow$", "−": "$-$", "‖": r"$\|$", "²": "$^2$", "₁": "$_1$", "ᵢ": "$_i$", "Σ": r"$\Sigma$",
         "Δ": r"$\Delta$", "α": r"$\alpha$", "β": r"$\beta$", "δ": r"$\delta$", "ε": r"$\varepsilon$",
         "λ": r"$\lambda$", "ρ": r"$\rho$", "σ": r"$\sigma$"}  # fmt: skip


def latex(sheet: Sheet) -> str:
    """The table as a LaTeX tabular. It needs the package booktabs."""

    def plain(text: str) -> str:
        return "".join(LATEX.get(character, character) for character in text)

    def shown(cell: Cell) -> str:
        return rf"\textbf{{{plain(cell.text)}}}" if cell.bold else plain(cell.text)

    def spanned(level: Sequence[tuple[str, int]]) -> list[str]:
        return [rf"\multicolumn{{{n}}}{{c}}{{{plain(head)}}}" if n > 1 else plain(head) for head, n in level]

    def row(cells: Sequence[str]) -> str:
        return " & ".join(cells) + r" \\" + "\n"

    blocks = []
    for block in sheet.blocks:
        names = [plain(block[0][0]), *[""] * (len(block) - 1)]
        lines = (row([n, plain(kind), *map(shown, cells)]) for n, (_, kind, cells) in zip(names, block, strict=True))
        blocks.append("".join(lines))
    notes = "".join(f"% {note}\n" for note in (sheet.title, *sheet.notes))
    heads = "".join(row(["", "", *spanned(level)]) for level in spans(sheet.heads))
    begin, end = rf"\begin{{tabular}}{{ll{'r' * len(sheet.heads[0])}}}", r"\end{tabular}"
    rules = "\\midrule\n".join(blocks)
    return f"{notes}{begin}\n\\toprule\n{heads}\\midrule\n{rules}\\bottomrule\n{end}\n"


def page(sheet: Sheet) -> str:
    """The table as an HTML fragment without styles."""

    def shown(cell: Cell) -> str:
        text = html.escape(cell.text)
        return f"<td><strong>{text}</strong></td>" if cell.bold else f"<td>{text}</td>"

    def head(text: str, columns: int) -> str:
        span = f' colspan="{columns}"' if columns > 1 else ""
        return f'<th scope="col"{span}>{html.escape(text)}</th>'

    levels = ("".join(head(*each) for each in level) for level in spans(sheet.heads))
    heads = "".join(f"<tr><td></td><td></td>{level}</tr>\n" for level in levels)
    blocks = []
    for block in sheet.blocks:
        lines = []
        for number, (name, kind, cells) in enumerate(block):
            first = "" if number else f'<th scope="rowgroup" rowspan="{len(block)}">{html.escape(name)}</th>'
            lines.append(f'<tr>{first}<th scope="row">{html.escape(kind)}</th>{"".join(map(shown, cells))}</tr>\n')
        blocks.append(f"<tbody>\n{''.join(lines)}</tbody>\n")
    caption = f"<caption>{html.escape(sheet.title)}</caption>\n"
    notes = "".join(f"<li>{html.escape(note)}</li>\n" for note in sheet.notes)
    table = f"<table>\n{caption}<thead>\n{heads}</thead>\n{''.join(blocks)}</table>\n"
    return table + (f"<ul>\n{notes}</ul>\n" if notes else "")


FORMS: dict[str, Callable[[Sheet], str]] = {
    "terminal": terminal,
    "markdown": markdown,
    "latex": latex,
    "html": page,
}
