"""How long it takes to start: `import fedflat`, `fedflat --help`, and `fedflat run` until its first round is recorded.

    python benchmarks/start.py [--repeats 9]

Processes of their own in turns, after one turn that writes the bytecode. For comparison also `import torch`, which a
run cannot avoid. Time is that of a clock; CPU time is that of the process and, for a run, its workers, until it ends
(with one round). Prints a Markdown table; exits 1 if a median misses its bound. Run it on an idle machine.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

BOUNDS = {"import fedflat": 0.05, "fedflat --help": 0.25, "fedflat run: first record": 1.2}


def start(*command: str | Path) -> subprocess.Popen[str]:
    """Python with these arguments, with its output thrown away, and with bytecode as after an installation."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return subprocess.Popen([sys.executable, *command], stdout=subprocess.DEVNULL, text=True, env=kept)


def whole(*command: str) -> float:
    """Seconds until the process has ended."""
    begun = time.perf_counter()
    with start(*command):
        pass
    return time.perf_counter() - begun


def first_record() -> float:
    """Seconds until the line of the first round is in the run's directory."""
    with tempfile.TemporaryDirectory() as folder:
        records, begun = Path(folder, "run", "metrics.jsonl"), time.perf_counter()
        with start("-m", "fedflat.cli", "run", "--out", records.parent, "--set", "server.rounds=1") as process:
            while not (records.exists() and records.stat().st_size):
                if process.poll():
                    sys.exit("fedflat run failed")
                time.sleep(0.002)
            seconds = time.perf_counter() - begun
    return seconds


def cpu() -> float:
    """Seconds that the ended processes of this one have computed."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    jobs: dict[str, Callable[[], float]] = {
        "import fedflat": lambda: whole("-c", "import fedflat"),
        "fedflat --help": lambda: whole("-m", "fedflat.cli", "--help"),
        "import torch": lambda: whole("-c", "import torch"),
        "fedflat run: first record": first_record,
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in jobs}
    for turn in range(options.repeats + 1):
        for name, job in jobs.items():
            before = cpu()
            seconds = job()
            if turn:
                found[name].append((seconds, cpu() - before))
    missed = 0
    print("| what | seconds | range | CPU seconds | range | bound |\n|---|---|---|---|---|---|")
    for name, turns in found.items():
        cells = [
            cell for row in map(sorted, zip(*turns, strict=True))
            for cell in (f"{median(row):.3f}", f"{row[0]:.3f}–{row[-1]:.3f}")
        ]  # fmt: skip
        bound = BOUNDS.get(name)
        missed += bound is not None and median(seconds for seconds, _ in turns) > bound
        print(f"| {name} | {' | '.join(cells)} | {'' if bound is None else f'≤ {bound}'} |")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
