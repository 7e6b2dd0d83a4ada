"""When it pays to train 16 clients in common steps: time of a group ÷ time of the same clients one by one; one thread.

    python benchmarks/grouping.py [--repeats 9]

`fedflat.group.group_size` must choose groups only where the ratio is below 1. Prints a Markdown table; exits 1 if not.
"""

import argparse
import sys
from functools import partial

import torch
from timing import interleaved, ratio

from fedflat import Dataset, Federation, Samples, models
from fedflat.client import Brief, Problem, Worker
from fedflat.group import SMALL, TOGETHER
from fedflat.methods import parse
from fedflat.recipe import Local
from fedflat.server import first_state
from fedflat.vector import Network

IMAGE, SMALL_IMAGE = (1, 28, 28), (1, 8, 8)
MODELS = ((SMALL_IMAGE, (32,)), (SMALL_IMAGE, (200,)), (IMAGE, (32,)), (IMAGE, (100,)), (IMAGE, (200, 200)))


def times(shape: tuple[int, ...], hidden: tuple[int, ...], repeats: int) -> tuple[int, tuple[float, float, float]]:
    chance = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (60 * TOGETHER, *shape), generator=chance, dtype=torch.uint8)
    samples = Samples(images, torch.randint(0, 10, (60 * TOGETHER,), generator=chance))
    shards = torch.arange(60 * TOGETHER).split(60)
    federation = Federation(Dataset("random", samples, samples, 10, (0.5,), (0.25,)), tuple(shards))
    network = Network(models.build("mlp", shape, 10, hidden=hidden))
    problem = Problem(federation, network, parse("fedavg"), Local(epochs=1, batch=10, lr=0.05))
    worker, clients = Worker(problem), list(range(TOGETHER))
    brief = Brief(0, 0.05, problem.method.send(first_state(problem)))
    together = partial(worker.turns, brief, clients, [{}] * TOGETHER)

    def one_by_one() -> None:
        for client in clients:
            worker.turn(brief, client, {})

    seconds = interleaved({"together": together, "one by one": one_by_one}, repeats)
    return network.size, ratio(seconds["together"], seconds["one by one"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    wrong = 0
    print("| parameters | together ÷ one by one | quartiles | chosen |\n|---|---|---|---|")
    for shape, hidden in MODELS:
        size, (middle, low, high) = times(shape, hidden, options.repeats)
        chosen = size <= SMALL
        wrong += chosen and middle >= 1
        print(f"| {size:,} | {middle:.2f} | {low:.2f}–{high:.2f} | {'together' if chosen else 'one by one'} |")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
