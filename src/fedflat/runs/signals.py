"""Graceful stop: after the first signal the round finishes, after the second it stops at once."""

from __future__ import annotations

import signal
import sys
import threading
from contextlib import suppress
from types import FrameType
from typing import Any, Self

CAUGHT = (signal.SIGINT, signal.SIGTERM)
NOTED = "\nfedflat: stopping after this round is finished and saved; interrupt again to stop at once"


class LastRound:
    """A context in which the first SIGINT or SIGTERM is only recorded (`came`) and the second interrupts at once.

    Only the main thread can install signal handlers. In other threads signals are not changed.
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
        with suppress(RuntimeError):  # the signal arrived during another print
            print(NOTED, file=sys.stderr)
