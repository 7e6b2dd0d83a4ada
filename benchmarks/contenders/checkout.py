"""One run of another checkout's `ours.py`, by a clock that is the same for all checkouts.

    PYTHONPATH=CHECKOUT/src python contenders/checkout.py ROUNDS CHECKOUT SPEC.json [method=fedsam] …
    PYTHONPATH=CHECKOUT/src python contenders/checkout.py --count CHECKOUT SPEC.json …

For each line of the input, the first form trains a burst of ROUNDS rounds and prints their seconds and the processor
time of all processes. The clock does nothing between the rounds of a burst: whatever it did there would cool the
workers' caches. With `--count`, all clients train in this process, and the one line has what a round after the first
does: operations of torch, elements of their results (without views), and calls of Python and C functions. These numbers
are the same on a busy machine.
"""

import json
import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

VIEWS = ("view", "t", "expand", "slice", "select", "detach", "alias", "as_strided", "split", "split_with_sizes")


def cpu_seconds() -> float:
    """The processor time of this process and its workers."""
    processes = [os.getpid(), *(child.pid for child in multiprocessing.active_children())]
    stats = (Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split() for process in processes)
    return sum(int(fields[11]) + int(fields[12]) for fields in stats) / os.sysconf("SC_CLK_TCK")


class Clock:
    """In place of the checkout's own stopwatch: after every burst of rounds it reports, and waits for a line."""

    burst = 1

    def __init__(self, job: Any) -> None:
        self._seconds = list[float]()
        self._wait()

    def _wait(self) -> None:
        sys.stdin.readline()
        self._seconds.clear()
        self._cpu, self._begun = cpu_seconds(), time.perf_counter()

    def lap(self, weights: object) -> None:
        self._seconds.append(time.perf_counter() - self._begun)
        if len(self._seconds) == self.burst:
            print(json.dumps({"seconds": self._seconds, "cpu_seconds": cpu_seconds() - self._cpu}), flush=True)
            self._wait()
        self._begun = time.perf_counter()

    def report(self, *_: object, **__: object) -> None:
        pass


class Operations(TorchDispatchMode):
    """Counts torch's operations and the elements that they write."""

    count = elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.count += 1
        if isinstance(result, torch.Tensor) and function.__name__.partition(".")[0] not in VIEWS:
            self.elements += result.numel()
        return result


class Counter:
    """In place of a stopwatch: even rounds count operations, odd ones calls, which each would disturb the other."""

    def __init__(self, job: Any) -> None:
        self._round, self._rounds, self._operations, self._calls = 0, len(job.cohorts), Operations(), 0

    def _called(self, frame: object, event: str, argument: object) -> None:
        self._calls += event in ("call", "c_call")

    def lap(self, weights: object) -> None:
        sys.setprofile(None)
        if self._round and self._round % 2 == 0:
            self._operations.__exit__(None, None, None)
        self._round += 1
        if self._round < self._rounds and self._round % 2 == 0:
            self._operations.__enter__()
        elif self._round < self._rounds:
            sys.setprofile(self._called)

    def report(self, *_: object, **__: object) -> None:
        even, odd = (self._rounds - 1) // 2, self._rounds // 2
        found = {"operations": self._operations.count / even, "elements": self._operations.elements / even}
        print(json.dumps({**found, "calls": self._calls / odd}), flush=True)


def main() -> None:
    burst = sys.argv.pop(1)
    counting = burst == "--count"
    sys.path[0] = str(Path(sys.argv.pop(1)) / "benchmarks/contenders")
    import ours

    ours.Stopwatch = Counter if counting else Clock  # type: ignore[misc,assignment]
    if counting:
        recipe_of = ours.recipe_of

        def inline(*facts: Any) -> Any:
            recipe = recipe_of(*facts)
            return recipe.model_copy(update={"engine": recipe.engine.model_copy(update={"name": "inline"})})

        ours.recipe_of = inline
        torch.set_num_threads(1)
    else:
        Clock.burst = int(burst)
    ours.main()


if __name__ == "__main__":
    main()
