"""Two checkouts of fedflat on the same jobs, in turns: is the newer one slower, or does it need more memory?

    git worktree add ../before v0.1.0
    FEDFLAT_DATA=… python benchmarks/versions.py ../before --jobs J2=3 J3=60 J3b=15 --repeats 5
    FEDFLAT_DATA=… python benchmarks/versions.py ../before --jobs J2=3 J3=9 --count --clients 2

Each turn runs the older checkout's contenders/ours.py and then this one's on the same data and initial weights, by the
same clock (contenders/checkout.py). Time is the median of a run's rounds after the first, CPU time the mean of these
rounds over all processes, memory the highest PSS of all processes. The table has the median over turns of new ÷ old,
with the range. Exits 1 if a median is above 1 + `--tolerance`. Run it on an idle machine; CPU time suffers less from
others. `--count` compares what a round does instead: torch's operations, the elements that they write, and calls of
functions, with all clients in one process. These numbers hardly vary, on any machine.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent / "contenders"))

from processes import pss_mb

from engine import write_spec

HERE = Path(__file__).parent.parent
EVERY = 1.0  # seconds between two looks at the memory, each of which takes a part of the machine


def run(checkout: Path, spec: Path, options: list[str]) -> tuple[float, float, float]:
    """Of the rounds after the first the median seconds and the mean CPU seconds, and the highest PSS in MB."""
    driver = Path(__file__).parent / "contenders/checkout.py"
    command = [sys.executable, str(driver), str(checkout), str(spec), *options]
    surroundings = {**os.environ, "PYTHONPATH": str(checkout / "src")}
    highest = 0.0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=surroundings) as process:
        while process.poll() is None:
            highest = max(highest, pss_mb(process.pid))
            time.sleep(EVERY)
        told = process.stdout.read() if process.stdout else ""
    if process.returncode:
        sys.exit(f"{checkout} failed on {spec.stem}")
    line = json.loads(told.splitlines()[-1])
    seconds = line["seconds"][1:]
    return median(seconds), line["cpu_seconds"] / len(seconds), highest


def counted(checkout: Path, spec: Path, options: list[str]) -> tuple[float, float, float]:
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
    parser.add_argument("--jobs", nargs="+", default=["J2=3", "J3=60", "J3b=15"], help="JOB=ROUNDS")
    parser.add_argument("--method", default="fedavg")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tolerance", type=float, default=0.03)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clients", type=int, default=0, help="only the first of each cohort")
    parser.add_argument("--count", action="store_true", help="count what a round does, once, in place of its time")
    options = parser.parse_args()
    measure, quantities = run, ("seconds a round", "CPU seconds a round", "highest PSS, MB")
    if options.count:
        measure, quantities = counted, ("operations a round", "elements written a round", "calls a round")
        options.repeats = 1
    worst = 0.0
    print("| job | quantity | old | new | new ÷ old | range |\n|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for job in options.jobs:
            name, _, rounds = job.partition("=")
            spec = write_spec(folder, name, int(rounds), options)
            if options.clients:
                shorten(spec, options.clients)
            extra = [f"method={options.method}"]
            pairs = (
                (measure(side, spec, extra) for side in (options.before.resolve(), HERE))
                for _ in range(options.repeats)
            )
            turns = [tuple(pair) for pair in pairs]
            for place, quantity in enumerate(quantities):
                old, new = ([side[which][place] for side in turns] for which in (0, 1))
                ratios = sorted(b / a for a, b in zip(old, new, strict=True))
                worst = max(worst, median(ratios))
                cells = (f"{median(old):.4g}", f"{median(new):.4g}", f"{median(ratios):.3f}")
                print(f"| {name} | {quantity} | {' | '.join(cells)} | {ratios[0]:.3f}–{ratios[-1]:.3f} |", flush=True)
    return 0 if worst <= 1 + options.tolerance else 1


if __name__ == "__main__":
    sys.exit(main())
