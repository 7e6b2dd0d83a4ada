"""One run of another checkout's `ours.py`, by a clock that is the same for all checkouts.

    PYTHONPATH=CHECKOUT/src python contenders/checkout.py CHECKOUT SPEC.json [method=fedsam] …

The last line of the output has the seconds of each round, and the processor time of all processes over the rounds after
the first. The clock does nothing between rounds: whatever it did there would cool the workers' caches.
"""

import json
import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import Any


def cpu_seconds() -> float:
    """The processor time of this process and its workers."""
    processes = [os.getpid(), *(child.pid for child in multiprocessing.active_children())]
    stats = (Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split() for process in processes)
    return sum(int(fields[11]) + int(fields[12]) for fields in stats) / os.sysconf("SC_CLK_TCK")


class Clock:
    """In place of the checkout's own stopwatch."""

    def __init__(self, job: Any) -> None:
        self._rounds, self._seconds, self._begun = len(job.cohorts), list[float](), time.perf_counter()

    def lap(self, weights: object) -> None:
        self._seconds.append(time.perf_counter() - self._begun)
        if len(self._seconds) == 1:
            self._cpu = cpu_seconds()
        elif len(self._seconds) == self._rounds:
            self._cpu = cpu_seconds() - self._cpu
        self._begun = time.perf_counter()

    def report(self, *_: object, **__: object) -> None:
        print(json.dumps({"seconds": self._seconds, "cpu_seconds": self._cpu}), flush=True)


def main() -> None:
    checkout = Path(sys.argv.pop(1))
    sys.path[0] = str(checkout / "benchmarks/contenders")
    import ours

    ours.Stopwatch = Clock  # type: ignore[misc,assignment]
    ours.main()


if __name__ == "__main__":
    main()
