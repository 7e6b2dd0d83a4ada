"""The memory of J2's processes during training: ours compared with the naive script, and FedSMOO's with FedAvg's.

    FEDFLAT_DATA=… python benchmarks/memory.py [--rounds 3] [--repeats 2] [--contenders ours "ours, fedsmoo"]

PSS of all processes of a contender, twice per second from its start to the end of the last round, in turns. Other
processes that map the same libraries are counted for a share of them, so no other torch process may run. Exits 1 if our
highest sample exceeds that of the naive script by more than one model for each worker, or FedSMOO's median 1.3 times
ours.
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


def samples(contender: str, spec: Path) -> list[float]:
    """MB at each look at a contender while it trains."""
    script, *options = ("ours", VARIANTS[contender]) if contender in VARIANTS else (contender,)
    command = [sys.executable, SCRIPTS / f"{script}.py", spec, *options]
    begun, seen = time.monotonic(), list[tuple[float, float]]()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            seen.append((time.monotonic() - begun, pss_mb(process.pid)))
            time.sleep(EVERY)
        told = process.stdout.read() if process.stdout else ""
    if process.returncode:
        sys.exit(f"{contender} failed")
    run = json.loads(next(line for line in told.splitlines() if line.startswith('{"contender"')))
    end = run["first_round"] + sum(run["seconds"][1:])  # afterwards it looks at the loss
    return [mb for at, mb in seen if at <= end]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--contenders", nargs="+", default=["naive", "ours", SMOO])
    options = argparse.Namespace(**vars(parser.parse_args()), workers=2, seed=0)
    found: dict[str, list[list[float]]] = {contender: [] for contender in options.contenders}
    with tempfile.TemporaryDirectory() as folder:
        spec = write_spec(folder, "J2", options.rounds, options)
        with np.load(json.loads(spec.read_text("utf-8"))["initial"]) as initial:
            model = initial["weights"].nbytes / 2**20
        for _ in range(options.repeats):
            for contender, runs in found.items():
                runs.append(samples(contender, spec))
    print("| contender | highest in each turn, MB | median, MB |\n|---|---|---|")
    for contender, runs in found.items():
        print(f"| {contender} | {', '.join(f'{max(r):.0f}' for r in runs)} | {median(chain(*runs)):.0f} |")
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
