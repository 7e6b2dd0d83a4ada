"""Progress and tables in the terminal, with plain lines if the output is not a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from rich.cells import cell_len
from rich.console import Console, Group
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

Record = Mapping[str, Any]


class RoundProgress:
    """Shows the progress of one run. Prints about twenty lines in total if the output is not a terminal."""

    def __init__(self, title: str, rounds: int, console: Console, metric: str = "accuracy") -> None:
        self._title, self._rounds, self._console, self._metric = title, rounds, console, metric
        self._begun = time.perf_counter()
        self._before: int | None = None
        self._score: float | None = None
        self._bar: Progress | None = None
        self._task = TaskID(0)

    def __enter__(self) -> RoundProgress:
        self._begun = time.perf_counter()
        if self._console.is_terminal:
            columns = ("[progress.description]{task.description}", "{task.fields[found]}")
            self._bar = Progress(
                TextColumn(columns[0]), BarColumn(24), MofNCompleteColumn(), TextColumn(columns[1]),
                TimeRemainingColumn(compact=True), console=self._console, refresh_per_second=4,
            )  # fmt: skip
            self._bar.start()
            self._task = self._bar.add_task(self._title, total=self._rounds, found="")
        return self

    def __call__(self, record: Record) -> None:
        done, self._score = record["round"], record.get(self._metric, self._score)
        self._before = done - 1 if self._before is None else self._before  # the rounds before a resumed run
        speed = (done - self._before) / max(time.perf_counter() - self._begun, 1e-9)
        for line in troubles(record):
            self._console.print(line, style="yellow", markup=False, highlight=False, soft_wrap=True)
        found = f"{'' if self._score is None else f'{self._metric} {self._score:.4f}  '}{speed:.1f} rounds/s"
        if self._bar is not None:
            self._bar.update(self._task, completed=done, found=found)
        elif done % max(1, self._rounds // 20) == 0 or done == self._rounds:
            left = (self._rounds - done) / speed
            line = f"{self._title}: round {done}/{self._rounds}  {found}  {left:.0f} s left"
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


NARROWEST = 12  # characters that a column of texts keeps at least


def fitted(table: Table, width: int) -> Table | Group:
    """The table with whole numbers and folded texts or, if that is wider than `width`, a list of its rows.

    Columns that are aligned to the right hold numbers, which must never be cut: `0.44…` can be anything.
    """
    numbers = [column for column in table.columns if column.justify == "right"]
    for column in table.columns:
        column.overflow, column.no_wrap = "fold", column in numbers
    if _needed(table) > width:
        for column in numbers:
            column.header = _plain(column.header).replace(" ", "\n")
    return table if _needed(table) <= width else _listed(table, width)


def _needed(table: Table) -> int:
    """The narrowest form of a table: its columns, a margin on both sides of each, and the lines between."""
    widths = []
    for column in table.columns:
        lines = (line for text in (column.header, *column.cells) for line in _plain(text).split("\n"))
        widest = max(map(cell_len, lines))
        widths.append(widest if column.no_wrap else min(widest, NARROWEST))
    return sum(widths) + 3 * len(widths) + 1


def _listed(table: Table, width: int) -> Group:
    """Each row of the table as a list of names and values. Names take half of the width at most.

    If the first column has no name, its cells are the headings of the lists.
    """
    heads = [" ".join(_plain(column.header).split()) for column in table.columns]
    rows: list[Text | Table] = [Text(_plain(table.title), "italic")] if table.title else []
    for cells in zip(*(column.cells for column in table.columns), strict=True):
        listed = Table.grid(padding=(0, 2))
        listed.add_column(overflow="fold", max_width=width // 2)
        listed.add_column(overflow="fold")
        headed = not heads[0]
        for head, cell in list(zip(heads, cells, strict=True))[headed:]:
            listed.add_row(head, cell)
        rows += [*([Text(_plain(cells[0]), "bold")] if headed else []), listed, Text()]
    return Group(*rows)


def _plain(text: Any) -> str:
    return text.plain if isinstance(text, Text) else Text.from_markup(str(text or "")).plain


def troubles(record: Record, most: int = 3) -> list[str]:
    """Lines about the clients that a round refused, and whether the round was skipped."""
    refused = [f"client {r['client']} refused: {r['reason']}: {r['detail']}" for r in record.get("refused", ())]
    more = [f"and {len(refused) - most} more"] if len(refused) > most else []
    skipped = ["skipped: too few clients were accepted"] if record.get("skipped") else []
    return [f"round {record['round']}: {line}" for line in refused[:most] + more + skipped]


def _trained(summary: Record) -> str:
    return f"{summary['parameters_trained']:,} of {summary['parameters']:,}"


def _megabytes(*names: str) -> Callable[[Record], str]:
    """Sums numbers of a summary, with three digits at least."""

    def shown(summary: Record) -> str:
        if any(name not in summary for name in names):
            return "–"
        size = sum(summary[name] for name in names) / 1e6
        return f"{size:,.1f}" if size >= 10 or not size else f"{size:.3g}"

    return shown


SENT = {"MB sent": _megabytes("bytes_down", "bytes_up")}
# Quantities that frozen weights make smaller. A client keeps the vectors of its method between rounds.
FROZEN = {
    "trained": _trained,
    "MB down": _megabytes("bytes_down"),
    "MB up": _megabytes("bytes_up"),
    "MB kept by a client": _megabytes("bytes_kept"),
    "MB of a checkpoint": _megabytes("bytes_checkpoint"),
}


def comparison(
    results: Sequence[tuple[str, Sequence[Record], Record]], samples: str, metric: str = "accuracy"
) -> Table:
    """Compares runs side by side.

    Args:
        results: (method, history, summary) of each run.
        samples: the samples that the metric was computed on, "test" or "train".
        metric: the metric to show.
    """
    table = Table(title=f"{metric} of the global model on the {samples} samples", title_justify="left")
    frozen = any(summary.get("parameters_trained") != summary.get("parameters") for _, _, summary in results)
    columns = FROZEN if frozen else SENT
    for name in ("method", "last", "best", "last 10", "consistency", *columns, "seconds"):
        table.add_column(name, justify="left" if name == "method" else "right")
    for method, history, summary in results:
        shown = (summary.get(f"{metric}_{name}") for name in ("last", "best", "mean_of_last_10"))
        table.add_row(
            method,
            *("–" if value is None else f"{value:.4f}" for value in shown),
            "–" if (value := history[-1].get("consistency")) is None else f"{value:.3g}",
            *(column(summary) for column in columns.values()),
            f"{summary['seconds']:.1f}",
        )
    return table


def split_table(counts: Sequence[Sequence[int]], most: int = 20) -> Table:
    """A table of clients × classes with sample counts; for more than 12 classes, each client's three largest."""
    classes = len(counts[0])
    total = sum(map(sum, counts))
    table = Table(title=f"{len(counts)} clients, {total} samples, {classes} classes", title_justify="left")
    few = classes <= 12
    for name in ("client", "samples", *(map(str, range(classes)) if few else ("classes", "largest"))):
        table.add_column(name, justify="right" if few or name != "largest" else "left")
    for client, row in enumerate(counts[:most]):
        held = sorted(((n, c) for c, n in enumerate(row) if n), reverse=True)
        largest = ", ".join(f"{n} of class {c}" for n, c in held[:3])
        cells = [str(n) if n else "·" for n in row] if few else [str(len(held)), largest]
        table.add_row(str(client), str(sum(row)), *cells)
    if len(counts) > most:
        table.add_row("…", "…", *("…" for _ in range(classes if few else 2)))
    if few:
        table.add_section()
        table.add_row("all", str(total), *(str(sum(column)) for column in zip(*counts, strict=True)))
    return table
