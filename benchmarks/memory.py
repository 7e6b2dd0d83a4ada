"""The memory of J2's processes during training: ours compared with the naive script, and FedSMOO's with FedAvg's.

    FEDFLAT_DATA=… python benchmarks/memory.py [--rounds 3] [--repeats 2] [--epochs 1] [--contenders ours …]

PSS of all processes of a contender, twice per second from its start to the end of the last round, in turns. Other
processes that map the same libraries are counted for a share of them, so no other torch process may run. PSS leaves out
what no process holds: the last column has all of our shared files, which are in memory too and include the clients'
memory. What is held does not depend on the local epochs, so fewer of them save time. Exits 1 if our highest sample
exceeds that of the naive script by more than one model for each worker, or FedSMOO's median 1.3 times ours.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from itertools import chain
from pathlib import Path
from statistics import median

import numpy as np

sys.path.insert(0, str(Path(__file__).parent / "contenders"))

from processes import pss_mb

from engine import SCRIPTS, VARIANTS, write_spec

EVERY = 0.5  # seconds
SMOO, TIMES = "ours, fedsmoo", 1.3


def shared_files_mb(process: int) -> float:
    """The size of a process's files in shared memory; 0 while it removes them."""
    try:
        found = Path("/dev/shm").glob(f"fedflat-{process}-*/*")
        return sum(file.stat().st_blocks * 512 for file in found) / 2**20
    except FileNotFoundError:
        return 0.0


def samples(contender: str, spec: Path) -> list[tuple[float, float]]:
    """MB of processes and of shared files at each look at a contender while it trains."""
    script, *options = ("ours", VARIANTS[contender]) if contender in VARIANTS else (contender,)
    command = [sys.executable, SCRIPTS / f"{script}.py", spec, *options]
    begun, seen = time.monotonic(), list[tuple[float, float, float]]()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            seen.append((time.monotonic() - begun, pss_mb(process.pid), shared_files_mb(process.pid)))
            time.sleep(EVERY)
        told = process.stdout.read() if process.stdout else ""
    if process.returncode:
        sys.exit(f"{contender} failed")
    run = json.loads(next(line for line in told.splitlines() if line.startswith('{"contender"')))
    end = run["first_round"] + sum(run["seconds"][1:])  # afterwards it looks at the loss
    return [(held, files) for at, held, files in seen if at <= end]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--epochs", type=int, help="local epochs, by default J2's")
    parser.add_argument("--contenders", nargs="+", default=["naive", "ours", SMOO])
    options = argparse.Namespace(**vars(parser.parse_args()), workers=2, seed=0)
    found: dict[str, list[list[float]]] = {contender: [] for contender in options.contenders}
    shared = dict.fromkeys(found, 0.0)
    with tempfile.TemporaryDirectory() as folder:
        spec = write_spec(folder, "J2", options.rounds, options)
        job = json.loads(spec.read_text("utf-8"))
        spec.write_text(json.dumps(job | ({"epochs": options.epochs} if options.epochs else {})), "utf-8")
        with np.load(job["initial"]) as initial:
            model = initial["weights"].nbytes / 2**20
        for _ in range(options.repeats):
            for contender, runs in found.items():
                held, files = zip(*samples(contender, spec), strict=True)
                runs.append([*held])
                shared[contender] = max(shared[contender], *files)
    print("| contender | highest in each turn, MB | median, MB | shared files at most, MB |\n|---|---|---|---|")
    for contender, runs in found.items():
        highest = ", ".join(f"{max(run):.0f}" for run in runs)
        print(f"| {contender} | {highest} | {median(chain(*runs)):.0f} | {shared[contender]:.0f} |")
    good = True
    if {"naive", "ours"} <= found.keys():
        bound = max(map(max, found["naive"])) + options.workers * model
        print(f"\nBound: {bound:.0f} MB, the naive script's highest and {options.workers} models of {model:.1f} MB.")
        good = max(map(max, found["ours"])) <= bound
    if {SMOO, "ours"} <= found.keys():
        middle, top = (measure(chain(*found[SMOO])) / measure(chain(*found["ours"])) for measure in (median, max))
        print(f"\nFedSMOO ÷ FedAvg: {middle:.2f} by the medians, {top:.2f} by the highest; the bound is {TIMES}.")
        good = good and middle <= TIMES
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
