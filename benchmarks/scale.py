"""J10: rounds of 1,000 clients out of 10⁴, 10⁵ and 10⁶: do memory and time grow with the cohort or the federation?

    FEDFLAT_DATA=… python benchmarks/scale.py [--clients 10000 1000000] [--rounds 4] [--repeats 2]

The MLP 784-200-200-10 on MNIST; each client has 10 samples, drawn with replacement, since there are only 60,000. One
local epoch, batch 10, two workers, no evaluation. SCAFFOLD keeps a vector for every client that has taken part, on disk
if that of all clients would not fit into memory. Each run is a process of its own, and federations take turns. PSS is
that of all processes, highest at the ends of rounds. Prints a Markdown table: medians over the turns, and the range of
all rounds but the first of each run.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from contextlib import closing
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "contenders"))

SAMPLES, COHORT = 10, 1000


def run(method: str, clients: int, rounds: int) -> dict[str, Any]:
    """Seconds and memory of one run, in this process."""
    import torch
    from processes import pss_mb

    from fedflat import Dataset, Federation, Samples
    from fedflat.federation.augment import normalise
    from fedflat.federation.datasets import load
    from fedflat.federation.packed import Packed
    from fedflat.methods.parser import parse
    from fedflat.recipe import validated
    from fedflat.rounds.cohort import draw_cohort
    from fedflat.rounds.server import conduct, first_state
    from fedflat.runs.build import assemble
    from fedflat.runs.launch import start_engine

    mnist = load("mnist")
    inputs = normalise(mnist.train.inputs, mnist.mean, mnist.std).contiguous()
    data = Dataset(
        "mnist", Samples(inputs, mnist.train.labels), Samples(inputs[:1], mnist.train.labels[:1]), 10, (), ()
    )
    before, begun = pss_mb(), time.perf_counter()
    indices = torch.randint(len(inputs), (clients * SAMPLES,), generator=torch.Generator().manual_seed(0))
    recipe = validated(
        {
            "data": "mnist", "split": {"name": "given", "clients": clients}, "method": method,
            "local": {"epochs": 1, "batch": 10, "lr": 0.1}, "server": {"rounds": rounds, "cohort": COHORT},
            "evaluation": {"measures": []}, "engine": {"name": "pool", "workers": 2},
        }
    )  # fmt: skip
    problem = assemble(recipe, Federation(data, Packed(indices, [SAMPLES] * clients)), None, parse(method))
    state, seconds, memory = first_state(problem), list[float](), list[float]()
    with closing(start_engine(problem, state)) as engine:
        ready = time.perf_counter() - begun
        for number in range(rounds):
            start = time.perf_counter()
            state, _ = conduct(problem, state, engine, draw_cohort(recipe.server, clients, recipe.seed, number))
            seconds.append(time.perf_counter() - start)
            memory.append(pss_mb())
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu = sum(usage.ru_utime + usage.ru_stime for usage in spent)
    return {"ready": ready, "rounds": seconds[1:], "pss": max(memory), "data": before, "cpu": cpu}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--methods", nargs="+", default=["fedavg", "scaffold"])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(run(options.one[0], int(options.one[1]), options.rounds)))
        return 0
    titles = "method | clients | ready, s | a round of 1,000, s | range | CPU of all, s | PSS, MB"
    print(f"| {titles} | before the clients, MB |\n|{'---|' * 8}", flush=True)
    for method in options.methods:
        found: dict[int, list[dict[str, Any]]] = {clients: [] for clients in options.clients}
        for clients, runs in [*found.items()] * options.repeats:
            command = [sys.executable, __file__, "--rounds", str(options.rounds), "--one", method, str(clients)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
            if done.returncode:
                return done.returncode
            runs.append(json.loads(done.stdout.splitlines()[-1]))
        for clients, runs in found.items():
            rounds = sorted(chain.from_iterable(each["rounds"] for each in runs))
            ready, cpu, pss, data = (median(each[name] for each in runs) for name in ("ready", "cpu", "pss", "data"))
            times = f"{ready:.2f} | {median(rounds):.2f} | {rounds[0]:.2f}–{rounds[-1]:.2f} | {cpu:.1f}"
            print(f"| {method} | {clients:,} | {times} | {pss:.0f} | {data:.0f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
