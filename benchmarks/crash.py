"""Kills runs, resumes them, and compares them with undisturbed runs; exits 1 if a bit differs.

    python benchmarks/crash.py [--kills 50] [--seed 0]

A run is killed with SIGKILL after a random time, or at a random disk operation: before a sync, a removal or a rename,
the last with only a part of the file written. Then it is resumed to its end. Weights, server state, client memory and
metrics (all except `seconds`) must equal those of the undisturbed run. Tiny rounds on digits; prints a Markdown table.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from fedflat.recipe import load
from fedflat.rounds import Problem
from fedflat.runs.build import prepare
from fedflat.runs.experiment import execute
from fedflat.runs.manifest import verified

METHODS = ("fedavg", "scaffold", "fedsmoo + man(0.15)", "fedadam")
TINY = ["model.hidden=[8]", "split.clients=8", "server.cohort=3", "server.rounds=12", "local.steps=3",
        "checkpoint.every=2"]  # fmt: skip
ENGINES = ("inline", "pool")
COLUMNS = {
    "clock": "killed by the clock",
    "step": "at a step on the disk",
    "early": "before a checkpoint",
    "half": "half a file left",
}
STEPS = 100  # on the disk in a run, roughly; a kill that comes too late is drawn again


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    chance = random.Random(options.seed)
    cases = {method: Case(method) for method in METHODS}
    for number in range(options.kills):
        # Every method meets every engine and both ways to be killed.
        turn = number // len(METHODS)
        cases[METHODS[number % len(METHODS)]].kill(ENGINES[turn // 2 % 2], turn % 2 == 0, chance)
    print(f"| method | {' | '.join(COLUMNS.values())} | equal to the bit |\n|{'---|' * (len(COLUMNS) + 2)}")
    for method, case in cases.items():
        cells = [f"{case.seen[name]:d}" for name in COLUMNS]
        print(f"| {method} | {' | '.join(cells)} | {case.seen['equal']:d} of {case.seen['killed']} |")
    equal = sum(case.seen["equal"] for case in cases.values())
    print(f"\n{equal} of {options.kills} equal")
    return 0 if equal == options.kills else 1


class Case:
    """A method, its run from beginning to end, and what became of the runs that were killed."""

    def __init__(self, method: str) -> None:
        settings = [*TINY, f"method={method}", "engine.workers=2"]
        self._problems = {engine: prepare(load(None, [*settings, f"engine={engine}"])) for engine in ENGINES}
        self.seen: Counter[str] = Counter()
        with tempfile.TemporaryDirectory() as folder:
            begun = time.perf_counter()
            self._trained(Path(folder), "inline")
            self._seconds = time.perf_counter() - begun
            self._whole = outcome(Path(folder))

    def kill(self, engine: str, clock: bool, chance: random.Random) -> None:
        """Kill a run, finish it, and note how it went."""
        while True:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder)
                if clock:
                    code = self._trained(path, engine, after=chance.uniform(0, self._seconds))
                else:
                    code = self._trained(path, engine, arm=(chance.randint(1, STEPS), chance.random()))
                if code != -signal.SIGKILL:
                    continue
                files = [file.name for file in path.rglob("*") if file.is_file()]
                half = any(name.startswith(".") and name != ".lock" for name in files)
                early = not any(file.endswith(".json") and not file.startswith(".") for file in files)
                equal = self._trained(path, engine, resume=True) == 0 and outcome(path) == self._whole
                self.seen.update(killed=1, clock=clock, step=not clock, half=half, early=early, equal=equal)
                return

    def _trained(
        self, folder: Path, engine: str, resume: bool = False, after: float | None = None, arm: Any = None
    ) -> int:
        """The exit code of a process that trains in a folder, killed after some seconds or by itself."""
        process = get_context("fork").Process(target=train, args=(self._problems[engine], folder, resume, arm))
        process.start()
        process.join(after)
        process.kill()
        process.join()
        return int(process.exitcode or 0)


def train(problem: Problem, folder: Path, resume: bool, arm: tuple[int, float] | None) -> None:
    if arm:
        strike(*arm)
    execute(problem, folder, resume=resume, warn=surprised)


def surprised(damage: str) -> None:
    raise AssertionError(f"a kill damages nothing, but: {damage}")


def strike(step: int, share: float) -> None:
    """From now on: SIGKILL at a step on the disk; if that renames a file, with only a share of its bytes written."""
    steps = count(1)

    def watched(act: Callable[..., Any]) -> Callable[..., Any]:
        def call(file: Any, *rest: Any, **named: Any) -> Any:
            if next(steps) == step:
                if act is rename:
                    os.truncate(file, int(share * os.path.getsize(file)))
                os.kill(os.getpid(), signal.SIGKILL)
            return act(file, *rest, **named)

        return call

    rename = os.replace
    os.fsync, os.replace, os.unlink = map(watched, (os.fsync, os.replace, os.unlink))


def outcome(folder: Path) -> dict[str, Any]:
    """All that a run has come to, but the seconds that it took."""
    last = verified(max(folder.glob("checkpoints/*.json")))
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    memory = {
        client: {name: vector.numpy().tobytes() for name, vector in kept.items()} for client, kept in last.memory()
    }
    return {
        "model": (folder / "model.safetensors").read_bytes(),
        "server": (last.folder / last.manifest["server"]["file"]).read_bytes(),
        "memory": memory,
        "metrics": [{name: value for name, value in record.items() if name != "seconds"} for record in records],
    }


if __name__ == "__main__":
    sys.exit(main())
