"""Text tables and their output as terminal text, Markdown, LaTeX, CSV or HTML."""

from __future__ import annotations

import csv
import html
import io
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from os import PathLike
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedflat.errors import RecipeError, literal, nearest, visible
from fedflat.files import write_whole, written_to
from fedflat.report.display import fitted


@dataclass(frozen=True)
class Cell:
    """One cell of a table."""

    text: str
    bold: bool = False
    mark: str = ""  # after the number, never bold


@dataclass
class Sheet:
    """A table with column heads on several levels, lines grouped into blocks, and notes below it.

    A line is (block name, line name, cells). If no line has one of these names, it has no column; `corner` is above
    them. A notebook shows the table as HTML.
    """

    title: str
    heads: list[list[str]]
    blocks: list[list[tuple[str, str, list[Cell]]]]
    notes: list[str] = field(default_factory=list)
    corner: tuple[str, str] = ("", "")

    def __repr__(self) -> str:
        return terminal(self)

    def _repr_html_(self) -> str:
        return page(self)

    def write(self, form: str = "terminal") -> str:
        """The table as text: terminal, markdown, latex, csv or html. Raises `RecipeError` for another form."""
        if form not in FORMS:
            raise RecipeError(f"table: there is no form {form!r}; {nearest(form, FORMS)}")
        return FORMS[form](self)

    def save(self, path: str | PathLike[str], form: str | None = None) -> None:
        """Writes the table to a file.

        Args:
            path: the file; its ending (.tex, .md, .csv, .html, .txt) sets the form, unless `form` is given.
            form: terminal, markdown, latex, csv or html.

        Raises:
            RecipeError: neither the form nor the ending is known.
            RunError: the file cannot be written.
        """
        file = Path(path)
        if form is None and file.suffix not in ENDINGS:
            raise RecipeError(
                f"{file}: a table is written as .tex, .md, .csv, .html or .txt; choose one of these endings"
            )
        text = self.write(form or ENDINGS[file.suffix])
        with written_to(file, "choose another file"):
            write_whole(file, text.encode(), public=True)

    def led(self, name: str, kind: str) -> list[str]:
        """The cells before the numbers: the names of block and line, each only if any line of the table has one."""
        every = [line[:2] for block in self.blocks for line in block]
        return [text for k, text in enumerate((name, kind)) if any(line[k] for line in every)]

    def __post_init__(self) -> None:
        """Keep each text on its line: a line break would end a comment in LaTeX and a row in Markdown."""
        self.title, self.notes = _line(self.title), [*map(_line, self.notes)]
        self.heads = [[*map(_line, level)] for level in self.heads]
        self.blocks = [
            [
                (_line(name), _line(kind), [replace(c, text=_line(c.text), mark=_line(c.mark)) for c in cells])
                for name, kind, cells in block
            ]
            for block in self.blocks
        ]

    def joined(self, by: str = " ") -> list[str]:
        """The heads of all levels of each column, joined into one string."""
        return [by.join(filter(None, levels)) for levels in zip(*self.heads, strict=True)]

    def lines(self) -> Iterator[tuple[str, str, list[Cell]]]:
        """All lines, with the block's name only in its first line."""
        for block in self.blocks:
            for number, (name, kind, cells) in enumerate(block):
                yield "" if number else name, kind, cells


def _line(text: str) -> str:
    return visible(text).replace("\n", " ")


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
    for head in sheet.led(*sheet.corner):
        table.add_column(Text(head))
    for head in sheet.joined("\n"):
        table.add_column(Text(head), justify="right")
    for block in sheet.blocks:
        for number, (name, kind, cells) in enumerate(block):
            # Without this space, a narrow column breaks before the deviation and not inside it.
            texts = (Text(_shown(cell).replace("± ", "±"), "bold" if cell.bold else "") for cell in cells)
            table.add_row(*map(Text, sheet.led("" if number else name, kind)), *texts)
        table.add_section()
    # In a notebook, rich would display the text instead of writing it to the file.
    console = Console(
        file=io.StringIO(),
        width=width,
        force_terminal=colour,
        force_jupyter=False,
        color_system="auto" if colour else None,
    )
    console.print(fitted(table, width))
    for note in sheet.notes:
        console.print(Text(f"• {note}"))
    assert isinstance(console.file, io.StringIO)
    return "".join(f"{line.rstrip()}\n" for line in console.file.getvalue().splitlines())


def _shown(cell: Cell) -> str:
    return cell.text + cell.mark


def markdown(sheet: Sheet) -> str:
    """The table in the Markdown of GitHub and pandoc."""

    def row(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cells)} |\n"

    def plain(text: str) -> str:
        return text.replace("|", "\\|").replace("*", "\\*").replace("<", "&lt;")

    def shown(cell: Cell) -> str:
        return (f"**{plain(cell.text)}**" if cell.bold else plain(cell.text)) + plain(cell.mark)

    lines = [row([*map(plain, sheet.led(name, kind)), *map(shown, cells)]) for name, kind, cells in sheet.lines()]
    corner = sheet.led(*sheet.corner)
    rule = row([*["---"] * len(corner), *["---:"] * len(sheet.heads[0])])
    head = row([*map(plain, corner), *map(plain, sheet.joined())]) + rule
    return f"**{plain(sheet.title)}**\n\n{head}{''.join(lines)}\n" + "".join(f"- {plain(n)}\n" for n in sheet.notes)


LATEX = {"\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
         "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "–": "--", "±": r"$\pm$", "↑": r"$\uparrow$",
         "↓": r"$\downarrow$", "−": "$-$", "‖": r"$\|$", "²": "$^2$", "₁": "$_1$", "ᵢ": "$_i$", "Σ": r"$\Sigma$",
         "Δ": r"$\Delta$", "α": r"$\alpha$", "β": r"$\beta$", "γ": r"$\gamma$", "δ": r"$\delta$",
         "ε": r"$\varepsilon$", "ζ": r"$\zeta$", "η": r"$\eta$", "λ": r"$\lambda$", "μ": r"$\mu$", "ρ": r"$\rho$",
         "σ": r"$\sigma$", "τ": r"$\tau$"}  # fmt: skip
GREEK = dict(alpha="α", beta="β", gamma="γ", delta="δ", epsilon="ε", zeta="ζ", eta="η", lambda1="λ₁", mu="μ", rho="ρ",
             sigma="σ", tau="τ")  # fmt: skip


def _symbols(head: str, title: str) -> str:
    """A head as a paper writes it: symbols for the names of Greek letters, and % for what is in per cent.

    >>> _symbols("alpha = 0.1", ""), _symbols("accuracy_last", "accuracy_last in %: mean"), _symbols("lambda1_all", "")
    ('α = 0.1', 'accuracy (%)', 'λ₁ all')
    """
    words = re.sub(r"[^\W_]+", lambda word: GREEK.get(word[0], word[0]), head).removesuffix("_last").replace("_", " ")
    return f"{words} (%)" if f"{head} in %" in title else words


def latex(sheet: Sheet) -> str:
    """The table as a LaTeX tabular. It needs the package booktabs."""

    def plain(text: str) -> str:
        return "".join(LATEX.get(character, character) for character in text)

    def shown(cell: Cell) -> str:
        mark = f"$^{{{plain(cell.mark)}}}$" if cell.mark else ""
        return (rf"\textbf{{{plain(cell.text)}}}" if cell.bold else plain(cell.text)) + mark

    def spanned(level: Sequence[tuple[str, int]]) -> list[str]:
        heads = [(plain(_symbols(head, sheet.title)).replace("$$", ""), n) for head, n in level]
        return [rf"\multicolumn{{{n}}}{{c}}{{{head}}}" if n > 1 else head for head, n in heads]

    def row(cells: Sequence[str]) -> str:
        return " & ".join(cells) + r" \\" + "\n"

    blocks = []
    for block in sheet.blocks:
        names = [block[0][0], *[""] * (len(block) - 1)]
        leads = [map(plain, sheet.led(name, kind)) for name, (_, kind, _) in zip(names, block, strict=True)]
        lines = (row([*lead, *map(shown, cells)]) for lead, (_, _, cells) in zip(leads, block, strict=True))
        blocks.append("".join(lines))
    notes = "".join(f"% {' '.join(note.split())}\n" for note in (sheet.title, *sheet.notes))
    corner = [plain(_symbols(name, "")).replace("$$", "") for name in sheet.led(*sheet.corner)]
    levels = spans(sheet.heads)
    corners = [[""] * len(corner)] * (len(levels) - 1) + [corner]
    heads = "".join(row([*lead, *spanned(level)]) for lead, level in zip(corners, levels, strict=True))
    begin, end = rf"\begin{{tabular}}{{{'l' * len(corner)}{'r' * len(sheet.heads[0])}}}", r"\end{tabular}"
    rules = ("\\midrule\n" if len(blocks) < sum(map(len, sheet.blocks)) else "").join(blocks)
    return f"{notes}{begin}\n\\toprule\n{heads}\\midrule\n{rules}\\bottomrule\n{end}\n"


def page(sheet: Sheet) -> str:
    """The table as an HTML fragment without styles."""

    def shown(cell: Cell) -> str:
        text, mark = html.escape(cell.text), f"<sup>{html.escape(cell.mark)}</sup>" if cell.mark else ""
        return f"<td><strong>{text}</strong>{mark}</td>" if cell.bold else f"<td>{text}{mark}</td>"

    def head(text: str, columns: int) -> str:
        span = f' colspan="{columns}"' if columns > 1 else ""
        return f'<th scope="col"{span}>{html.escape(text)}</th>'

    levels = ["".join(head(*each) for each in level) for level in spans(sheet.heads)]
    corner = sheet.led(*sheet.corner)
    corners = [[""] * len(corner)] * (len(levels) - 1) + [corner]
    empty = ["".join(f"<td>{html.escape(text)}</td>" for text in texts) for texts in corners]
    heads = "".join(f"<tr>{lead}{level}</tr>\n" for lead, level in zip(empty, levels, strict=True))
    blocks = []
    for block in sheet.blocks:
        lines = []
        for number, (name, kind, cells) in enumerate(block):
            group = "" if number else f'<th scope="rowgroup" rowspan="{len(block)}">{html.escape(name)}</th>'
            lead = sheet.led(group, f'<th scope="row">{html.escape(kind)}</th>')
            lines.append(f"<tr>{''.join(lead)}{''.join(map(shown, cells))}</tr>\n")
        blocks.append(f"<tbody>\n{''.join(lines)}</tbody>\n")
    caption = f"<caption>{html.escape(sheet.title)}</caption>\n"
    notes = "".join(f"<li>{html.escape(note)}</li>\n" for note in sheet.notes)
    table = f"<table>\n{caption}<thead>\n{heads}</thead>\n{''.join(blocks)}</table>\n"
    return table + (f"<ul>\n{notes}</ul>\n" if notes else "")


def comma_separated(sheet: Sheet) -> str:
    """The table as CSV, with the heads of all levels in one line and without notes."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(map(literal, [*sheet.led(*sheet.corner), *sheet.joined()]))
    for block in sheet.blocks:
        writer.writerows(map(literal, [*sheet.led(*names), *map(_shown, cells)]) for *names, cells in block)
    return text.getvalue()


FORMS: dict[str, Callable[[Sheet], str]] = {
    "terminal": terminal,
    "markdown": markdown,
    "latex": latex,
    "csv": comma_separated,
    "html": page,
}
ENDINGS = {".txt": "terminal", ".md": "markdown", ".tex": "latex", ".csv": "csv", ".html": "html"}
