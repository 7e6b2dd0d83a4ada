"""Progress of anything that takes longer than two seconds, in a terminal and in a notebook; silent everywhere else."""

from __future__ import annotations

import html
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

Unit = TypeVar("Unit")

WAIT = 2.0  # seconds before a bar appears
PAUSE = 0.1  # seconds between two updates of the screen


@dataclass
class Bar:
    """One line of the display: a title, the units of work done, and their total if it is known."""

    title: str
    total: int | None = None
    done: int = 0
    note: str = ""
    begun: float = field(default_factory=time.monotonic)
    process: int = field(default_factory=os.getpid)

    def advance(self, note: str = "") -> None:
        """Counts one more unit of work."""
        self.reach(self.done + 1, note)

    def reach(self, done: int, note: str = "") -> None:
        """Sets how much is done; the note is shown at the end of the line."""
        self.done, self.note = done, note
        _display.refresh()

    def count(self) -> str:
        left = ""
        if self.total and self.done:
            left = f", {(time.monotonic() - self.begun) * (self.total - self.done) / self.done:.0f} s left"
        return f"{self.done:,}{f'/{self.total:,}' if self.total else ''}{left}{f'  {self.note}' if self.note else ''}"


@contextmanager
def progress(title: str, total: int | None = None) -> Iterator[Bar]:
    """Shows the progress of what happens inside, once it has taken two seconds. Nested bars share a display.

    The display changes only when a bar advances, without a thread of its own, so that processes can be forked inside.

    Args:
        title: what is being done.
        total: the number of units of work; None or 0 if it is not known.

    >>> with progress("points", total=3) as bar:
    ...     for _ in range(3):
    ...         bar.advance()
    >>> bar.done
    3
    """
    bar = Bar(title, total)
    _display.bars.append(bar)
    try:
        yield bar
    finally:
        _display.remove(bar)


def track(units: Iterable[Unit], title: str, total: int | None = None) -> Iterator[Unit]:
    """Yields the units and shows the progress through them.

    >>> [unit for unit in track("abc", "letters")]
    ['a', 'b', 'c']
    """
    if total is None and isinstance(units, Sized):
        total = len(units)
    with progress(title, total) as bar:
        for unit in units:
            yield unit
            bar.advance()


def beat(note: str) -> None:
    """Shows the open bars, the innermost with this note, within a unit of work that may itself take long.

    Does nothing if no bar is open in this process, so a client that computes in a worker stays silent.
    """
    if _display.bars:
        _display.bars[-1].note = note
        _display.refresh()


class Display:
    """The bars that are open now, and where they are shown."""

    def __init__(self) -> None:
        self.bars: list[Bar] = []
        self._screen: Terminal | Notebook | None = None
        self._last = 0.0

    def refresh(self) -> None:
        now = time.monotonic()
        if self.bars[0].process != os.getpid():  # bars of the process that forked this one
            return
        if now - self.bars[0].begun < WAIT or now - self._last < PAUSE:
            return
        self._last = now
        if self._screen is None:
            self._screen = Notebook() if in_notebook() else Terminal()
        self._screen.show(self.bars)

    def remove(self, bar: Bar) -> None:
        self.bars.remove(bar)
        if self._screen is not None and not self.bars:
            self._screen.close()
            self._screen = None


_display = Display()


def in_notebook() -> bool:
    """Whether this code runs in a kernel of Jupyter, which shows HTML."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None and hasattr(shell, "kernel")


class Terminal:
    """Bars at the bottom of a terminal, which disappear at the end; nothing if stderr is not a terminal."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._live: Live | None = None

    def show(self, bars: list[Bar]) -> None:
        if not self._console.is_terminal:
            return
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        self._live.update(Group(*map(self._line, bars)), refresh=True)

    def _line(self, bar: Bar) -> Table:
        line = Table.grid(padding=(0, 1))
        line.add_row(bar.title, ProgressBar(bar.total or 1, bar.done if bar.total else 0, width=24), bar.count())
        return line

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()


class Notebook:
    """Bars as HTML below the cell, which disappear at the end."""

    def __init__(self) -> None:
        from IPython.display import DisplayHandle

        self._handle: Any = DisplayHandle()
        self._open = False

    def show(self, bars: list[Bar]) -> None:
        self._put("".join(map(self._line, bars)))

    def _put(self, text: str) -> None:
        from IPython.display import HTML

        if self._open:
            self._handle.update(HTML(text))
        else:
            self._handle.display(HTML(text))
            self._open = True

    def _line(self, bar: Bar) -> str:
        size = f'max="{bar.total}" value="{bar.done}"' if bar.total else ""
        return f"<div>{html.escape(bar.title)} <progress {size}></progress> {html.escape(bar.count())}</div>"

    def close(self) -> None:
        self._put("")
