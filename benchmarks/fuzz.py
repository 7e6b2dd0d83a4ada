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

from fuzzing import TARGETS, Verdict, judged

BROKEN = ("crash", "too slow", "no sentence")
PASSES = 10
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
    end = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        trials = [Trial(name, Path(folder) / name, options.seed) for name in options.target]
        for part in range(PASSES):  # in turns, so that every target has its share if time is short
            for trial in trials:
                trial.run(shared(options, trial.name, part), end)
    print("| target | cases | seconds of CPU | outcomes |\n|---|---|---|---|")
    for trial in trials:
        told = ", ".join(f"{outcome} {n:,}" for outcome, n in trial.outcomes.most_common())
        print(f"| {trial.name} | {trial.outcomes.total():,} | {trial.seconds:.0f} | {told} |")
    done, faults = sum(trial.outcomes.total() for trial in trials), sum(trial.faults() for trial in trials)
    print(f"\n{done:,} cases, seed {options.seed}: {faults} broke the invariant")
    return 1 if faults else 0


def shared(options: argparse.Namespace, name: str, part: int) -> range:
    """The numbers of a target's cases in one of the passes."""
    if options.case is not None:
        return range(options.case, options.case + (part == 0))
    total = sum(TARGETS[each].share for each in options.target)
    count = options.cases * TARGETS[name].share / total
    return range(round(count * part / PASSES), round(count * (part + 1) / PASSES))


class Trial:
    """A target, and what came of its cases so far."""

    def __init__(self, name: str, folder: Path, seed: int) -> None:
        self.name, self.seed, self.seconds = name, seed, 0.0
        self.target, self.outcomes = TARGETS[name](folder), Counter[str]()
        self._broken, self._seen = 0, set[str]()

    def run(self, cases: range, end: float) -> None:
        begun = time.process_time()
        for case in cases:
            if time.monotonic() > end:
                break
            verdict = judged(self.target, self.name, self.seed, case)
            self.outcomes[verdict.outcome] += 1
            if verdict.outcome.startswith(BROKEN):
                self._broken += 1
                self._tell(case, verdict)
        self.seconds += time.process_time() - begun

    def _tell(self, case: int, verdict: Verdict) -> None:
        """Print a fault, once for each place in the code."""
        place = verdict.fault[-200:]
        if place not in self._seen and len(self._seen) < 20:
            self._seen.add(place)
            again = f"python benchmarks/fuzz.py --target {self.name} --seed {self.seed} --case {case}"
            print(f"{again}\n{verdict.outcome}\n{verdict.fault}", file=sys.stderr, flush=True)

    def faults(self) -> int:
        """How many cases broke the invariant, and one more if none of many cases was accepted: they test nothing."""
        idle = self.outcomes.total() >= MANY and not self.outcomes["result"]
        if idle:
            print(f"{self.name}: none of {self.outcomes.total()} cases was accepted", file=sys.stderr)
        return self._broken + idle


if __name__ == "__main__":
    sys.exit(main())
