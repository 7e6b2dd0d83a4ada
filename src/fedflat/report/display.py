"""Progress and tables in the terminal, with plain lines if the output is not a terminal."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

Record = Mapping[str, Any]


class RoundProgress:
    """Shows the progress of one run. Prints about twenty lines in total if the output is not a terminal."""

    def __init__(self, title: str, rounds: int, console: Console) -> None:
        self._title, self._rounds, self._console = title, rounds, console
        self._begun = time.perf_counter()
        self._before: int | None = None
        self._accuracy: float | None = None
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
        done, self._accuracy = record["round"], record.get("accuracy", self._accuracy)
        self._before = done - 1 if self._before is None else self._before  # the rounds before a resumed run
        speed = (done - self._before) / max(time.perf_counter() - self._begun, 1e-9)
        for line in troubles(record):
            self._console.print(line, style="yellow", markup=False, highlight=False, soft_wrap=True)
        found = f"{'' if self._accuracy is None else f'accuracy {self._accuracy:.4f}  '}{speed:.1f} rounds/s"
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


def troubles(record: Record, most: int = 3) -> list[str]:
    """Lines about the clients that a round refused, and whether the round was skipped."""
    refused = [f"client {r['client']} refused: {r['reason']}: {r['detail']}" for r in record.get("refused", ())]
    more = [f"and {len(refused) - most} more"] if len(refused) > most else []
    skipped = ["skipped: too few clients were accepted"] if record.get("skipped") else []
    return [f"round {record['round']}: {line}" for line in refused[:most] + more + skipped]


def comparison(results: Sequence[tuple[str, Sequence[Record], Record]], samples: str) -> Table:
    """Compares runs side by side.

    Args:
        results: (method, history, summary) of each run.
        samples: the samples that the accuracy was computed on, "test" or "train".
    """
    table = Table(title=f"accuracy of the global model on the {samples} samples", title_justify="left")
    frozen = any(summary.get("parameters_trained") != summary.get("parameters") for _, _, summary in results)
    trained = ("trained",) if frozen else ()
    for name in ("method", "last", "best", "last 10", "consistency", *trained, "MB sent", "seconds"):
        table.add_column(name, justify="left" if name == "method" else "right")
    for method, history, summary in results:
        shown = (summary.get(f"accuracy_{name}") for name in ("last", "best", "mean_of_last_10"))
        traffic = (summary["bytes_down"] + summary["bytes_up"]) / 1e6
        table.add_row(
            method,
            *("–" if value is None else f"{value:.4f}" for value in shown),
            "–" if (value := history[-1].get("consistency")) is None else f"{value:.3g}",
            *(f"{summary['parameters_trained']:,} of {summary['parameters']:,}" for _ in trained),
            f"{traffic:.1f}",
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
