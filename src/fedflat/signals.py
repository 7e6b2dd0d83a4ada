"""Leaving at a good moment: the first signal lets the round finish, the second does not."""

from __future__ import annotations

import signal
import sys
import threading
from contextlib import suppress
from types import FrameType
from typing import Any, Self

CAUGHT = (signal.SIGINT, signal.SIGTERM)
NOTED = "\nfedflat: this round is finished and saved before it stops; once more to stop at once"


class LastRound:
    """While it is entered, SIGINT and SIGTERM are only noted (`came`); a second one interrupts at once.

    Handlers belong to the main thread; in another one signals stay as they are.
    """

    def __init__(self) -> None:
        self.came = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in CAUGHT}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        if self.came:
            raise KeyboardInterrupt
        self.came = number
        with suppress(RuntimeError):  # the signal came while something else was being printed
            print(NOTED, file=sys.stderr)
