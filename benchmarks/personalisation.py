"""Personalisation of CIFAR-10 clients one by one and over several workers: the same numbers, and how much faster.

    FEDFLAT_DATA=… python benchmarks/personalisation.py [--clients 6] [--epochs 5] [--workers 2] [--model fedavg-cnn]

Clients of 500 samples adapt an untrained model for some epochs (batch 50, momentum) and are tested on 500 samples.
Prints the seconds of both and what 100 clients would take; exits 1 if a number differs.
"""

import argparse
import os
import sys
import time

from fedflat import federate
from fedflat.methods.parser import parse
from fedflat.recipe import validated
from fedflat.runs.build import assemble
from fedflat.runs.personal import personalise


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--model", default="fedavg-cnn")
    options = parser.parse_args()
    limit = 500 * options.clients
    federation = federate("cifar10", "iid", options.clients, limit=limit, directory=os.environ["FEDFLAT_DATA"])
    local = {"batch": 50, "lr": 0.01, "momentum": 0.9, "weight_decay": 1e-5}
    recipe = validated({"data": "cifar10", "model": {"name": options.model}, "local": local, "method": "fedavg"})
    problem = assemble(recipe, federation, None, parse("fedavg"))
    found, seconds = [], []
    for workers in (1, options.workers):
        begun = time.perf_counter()
        start = problem.network.weights.clone()
        found.append(personalise(problem, start, (options.epochs,), size=500, workers=workers))
        seconds.append(time.perf_counter() - begun)
    alone, together = seconds
    print(f"{options.model}, {options.clients} clients, {options.epochs} epochs: {alone:.1f} s one by one, ", end="")
    print(f"{together:.1f} s with {options.workers} workers ({alone / together:.2f} times as fast); ", end="")
    print(f"100 clients: {100 / 60 * alone / options.clients:.1f} and {100 / 60 * together / options.clients:.1f} min")
    return 0 if found[0] == found[1] else 1


if __name__ == "__main__":
    sys.exit(main())
