"""Everything that others can send or write, spoilt by chance: one sentence or a correct result, and the run goes on.

    python benchmarks/fuzz.py [--cases 100000] [--target upload recipe …] [--seed 0] [--minutes 60]
    python benchmarks/fuzz.py --target upload --case 123        # one case again, with its traceback

A case follows from its target, the seed and its number. Real client and server code reads it, within ten seconds of CPU
and 3 GB of address space. Prints a Markdown table of each target's outcomes and CPU time; exits 1 if the
invariant was broken.
"""

import argparse
import contextlib
import faulthandler
import io
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from fuzzing import TARGETS, judged

BROKEN = ("crash", "too slow", "no sentence")
MANY = 500  # cases of which at least one must be a correct result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--target", nargs="+", choices=TARGETS, default=[*TARGETS])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int)
    parser.add_argument("--minutes", type=float, default=600.0, help="stop early after so long")
    options = parser.parse_args()
    faulthandler.enable()  # a case that ends the process by a signal is a crash too
    total, end = sum(TARGETS[name].share for name in options.target), time.monotonic() + 60 * options.minutes
    faults, done = 0, 0
    print("| target | cases | seconds of CPU | outcomes |\n|---|---|---|---|", flush=True)
    for name in options.target:
        count = round(options.cases * TARGETS[name].share / total)
        cases = range(count) if options.case is None else [options.case]
        begun = time.process_time()
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            outcomes, broken = _run(name, Path(folder), options.seed, cases, end)
        faults, done = faults + broken, done + outcomes.total()
        told = ", ".join(f"{outcome} {n:,}" for outcome, n in outcomes.most_common())
        print(f"| {name} | {outcomes.total():,} | {time.process_time() - begun:.0f} | {told} |", flush=True)
    print(f"\n{done:,} cases, seed {options.seed}: {faults} broke the invariant")
    return 1 if faults else 0


def _run(name: str, folder: Path, seed: int, cases: range | list[int], end: float) -> tuple[Counter[str], int]:
    target, outcomes, broken, seen = TARGETS[name](folder / "work"), Counter[str](), 0, set[str]()
    for case in cases:
        if time.monotonic() > end:
            break
        verdict = judged(target, name, seed, case)
        outcomes[verdict.outcome] += 1
        if verdict.outcome.startswith(BROKEN):
            broken += 1
            place = verdict.fault[-200:]
            if place not in seen and len(seen) < 20:
                seen.add(place)
                again = f"python benchmarks/fuzz.py --target {name} --seed {seed} --case {case}"
                print(f"{again}\n{verdict.outcome}\n{verdict.fault}", file=sys.stderr, flush=True)
    if outcomes.total() >= MANY and not outcomes["result"]:  # something refuses all of them before they are read
        print(f"{name}: none of {outcomes.total()} cases was accepted, so they test nothing", file=sys.stderr)
        broken += 1
    return outcomes, broken


if __name__ == "__main__":
    sys.exit(main())
