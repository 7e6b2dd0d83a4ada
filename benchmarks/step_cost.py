"""The cost of a local step of each method, relative to FedAvg's, for the FedAvg-CNN on CIFAR-10; one thread.

    python benchmarks/step_cost.py [--repeats 9] [--methods fedsam looksam] [--cpu]

It uses random images. `--cpu` takes the processor time in place of the clock, on a busy machine. Exits 1 if a bound is
missed. Prints a Markdown table.
"""

import argparse
import sys
import time

import torch
from timing import interleaved, ratio

from fedflat import Dataset, Federation, Samples, models
from fedflat.engine.heap import settled_worker
from fedflat.methods.parser import parse
from fedflat.models.vector import Network
from fedflat.recipe import Local
from fedflat.rounds.server import first_state, view
from fedflat.rounds.setup import Broadcast, Problem

BOUNDS = {
    "man": 1.10, "fedsam": 2.1, "fedasam": 2.1, "mofedsam": 2.1, "fedgamma": 2.1, "fedspeed": 2.1, "fedsmoo": 2.1,
    "fedsol(scope='head')": 1.5, "fedlesam": 1.1, "looksam": 1.3, "looksam(every=1, fraction=0.5)": 1.6,
}  # fmt: skip
OTHERS = (
    "fedprox",
    "feddyn",
    "scaffold",
    "fedntd",
    "moon",
    "fedsol",
    "fedsol(scope='body')",
    "fedgf",
    "top_eigenvalue",
)
STEPS = 10  # so that two of them are looksam's ascents


def local_round(written: str, federation: Federation, network: Network) -> object:
    """A client's local round of a few steps with a method, as a job to be timed; the client has taken part before."""
    local = Local(steps=STEPS, batch=50, lr=0.01, momentum=0.9, weight_decay=1e-5)
    problem = Problem.of(federation, network, parse(written), local)
    worker, state = settled_worker(problem), first_state(problem)
    memory = {name: torch.randn(network.size) * 1e-3 for name in problem.memory}
    moved = {name: vector + 1e-3 for name, vector in problem.method.broadcast(view(problem, state)).items()}
    return lambda: worker.local_round(Broadcast(1, 0.01, moved), 0, memory)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--methods", nargs="+", default=[*BOUNDS, *OTHERS])
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    chance = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (500, 3, 32, 32), generator=chance, dtype=torch.uint8)
    samples = Samples(images, torch.randint(0, 10, (500,), generator=chance))
    federation = Federation(Dataset("random", samples, samples, 10, (0.5,) * 3, (0.25,) * 3), (torch.arange(500),))
    network = Network(models.build("fedavg-cnn", (3, 32, 32), 10))
    names = ("fedavg", *options.methods)
    jobs = {name: local_round(name, federation, network) for name in names}
    seconds = interleaved(jobs, options.repeats, time.process_time if options.cpu else time.perf_counter)
    missed = 0
    print("| method | step ÷ FedAvg's | quartiles | bound |\n|---|---|---|---|")
    for name in names[1:]:
        middle, low, high = ratio(seconds[name], seconds["fedavg"])
        bound = BOUNDS.get(name)
        missed += bound is not None and middle > bound
        print(f"| {name} | {middle:.2f} | {low:.2f}–{high:.2f} | {'' if bound is None else f'≤ {bound}'} |")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
