"""Two checkouts of fedflat on the same jobs, in turns: is the newer one slower, or does it need more memory?

    git worktree add ../before v0.1.0
    FEDFLAT_DATA=… python benchmarks/versions.py ../before --jobs J2=2 J3=60 J3b=6 --bursts 5 --repeats 4
    FEDFLAT_DATA=… python benchmarks/versions.py ../before --jobs J2=3 J3=9 --count --clients 2

Both checkouts run their own contenders/ours.py on the same data and initial weights, by the same clock
(contenders/checkout.py). They take turns: one trains a burst of rounds while the other waits, so that a machine that
gets slower or faster for a while does so for both. Time is the median of a burst's rounds after the first, CPU time the
mean of all of them over all processes, memory the highest PSS of all processes in a first burst that is not timed.
`--repeats` starts both anew. The table has the median over all pairs of bursts of new ÷ old, with the middle half.
Exits 1 if a median is above 1 + `--tolerance`. Run it on an idle machine; CPU time suffers less from others. `--count`
compares what a round does instead: torch's operations, the elements that they write, and calls of functions, with all
clients in one process. These numbers hardly vary, on any machine.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median, quantiles

sys.path.insert(0, str(Path(__file__).parent / "contenders"))

from processes import pss_mb

from engine import write_spec

HERE = Path(__file__).parent.parent
EVERY = 0.2  # seconds between two looks at the memory
Numbers = tuple[float, float, float]


class Side:
    """A checkout that trains a burst of rounds whenever it is asked."""

    def __init__(self, checkout: Path, spec: Path, rounds: int, options: list[str]) -> None:
        driver = Path(__file__).parent / "contenders/checkout.py"
        command = [sys.executable, str(driver), str(rounds), str(checkout), str(spec), *options]
        surroundings = {**os.environ, "PYTHONPATH": str(checkout / "src")}
        self.checkout = checkout
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=surroundings
        )

    def burst(self) -> tuple[float, float]:
        """The median seconds of the rounds after the first, and the mean CPU seconds of all."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        if not (told := self.process.stdout.readline()):
            sys.exit(f"{self.checkout} failed")
        line = json.loads(told)
        return median(line["seconds"][1:]), line["cpu_seconds"] / len(line["seconds"])

    def warm_up(self) -> float:
        """A burst whose time does not count: the highest PSS in MB, which would take time to read in the others."""
        with ThreadPoolExecutor(1) as thread:
            burst, highest = thread.submit(self.burst), 0.0
            while not burst.done():
                highest = max(highest, pss_mb(self.process.pid))
                time.sleep(EVERY)
            burst.result()
        return highest

    def close(self) -> None:
        self.process.communicate("\n")


def timed(before: Path, spec: Path, rounds: int, bursts: int, options: list[str]) -> list[tuple[Numbers, Numbers]]:
    """What both checkouts took in each of their bursts but the first, which warms them up."""
    old, new = (Side(checkout, spec, rounds, options) for checkout in (before, HERE))
    try:
        highest = old.warm_up(), new.warm_up()
        pairs = ((old.burst(), new.burst()) for _ in range(bursts))
        return [((*a, highest[0]), (*b, highest[1])) for a, b in pairs]
    finally:
        old.close()
        new.close()


def counted(checkout: Path, spec: Path, options: list[str]) -> Numbers:
    """The operations of torch in a round, the elements that they write, and the calls of functions."""
    driver = Path(__file__).parent / "contenders/checkout.py"
    command = [sys.executable, str(driver), "--count", str(checkout), str(spec), *options]
    surroundings = {**os.environ, "PYTHONPATH": str(checkout / "src")}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=surroundings, check=True)
    line = json.loads(done.stdout.splitlines()[-1])
    return line["operations"], line["elements"], line["calls"]


def shorten(spec: Path, clients: int) -> None:
    """Keep only the first clients of each cohort."""
    job = json.loads(spec.read_text("utf-8"))
    spec.write_text(json.dumps({**job, "cohorts": [cohort[:clients] for cohort in job["cohorts"]]}), "utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path, help="the older checkout")
    parser.add_argument("--jobs", nargs="+", default=["J2=2", "J3=60", "J3b=6"], help="JOB=ROUNDS of a burst")
    parser.add_argument("--method", default="fedavg")
    parser.add_argument("--bursts", type=int, default=5, help="after a first one that does not count")
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--tolerance", type=float, default=0.03)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clients", type=int, default=0, help="only the first of each cohort")
    parser.add_argument("--count", action="store_true", help="count what a round does, once, in place of its time")
    options = parser.parse_args()
    quantities: tuple[str, ...] = ("seconds a round", "CPU seconds a round", "highest PSS, MB")
    if options.count:
        quantities = ("operations a round", "elements written a round", "calls a round")
    worst = 0.0
    print("| job | quantity | old | new | new ÷ old | middle half |\n|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for job in options.jobs:
            name, _, rounds = job.partition("=")
            length = 1 if options.count else options.bursts + 1
            spec = write_spec(folder, name, int(rounds) * length, options)
            if options.clients:
                shorten(spec, options.clients)
            extra, before = [f"method={options.method}"], options.before.resolve()
            if options.count:
                turns = [(counted(before, spec, extra), counted(HERE, spec, extra))]
            else:
                runs = (timed(before, spec, int(rounds), options.bursts, extra) for _ in range(options.repeats))
                turns = [pair for run in runs for pair in run]
            for place, quantity in enumerate(quantities):
                old, new = ([side[which][place] for side in turns] for which in (0, 1))
                ratios = [b / a for a, b in zip(old, new, strict=True)]
                low, middle, high = quantiles(ratios * 2, n=4, method="inclusive")
                worst = max(worst, middle)
                cells = (f"{median(old):.4g}", f"{median(new):.4g}", f"{middle:.3f}")
                print(f"| {name} | {quantity} | {' | '.join(cells)} | {low:.3f}–{high:.3f} |", flush=True)
    return 0 if worst <= 1 + options.tolerance else 1


if __name__ == "__main__":
    sys.exit(main())
