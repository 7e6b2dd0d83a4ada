"""Clients in shared steps: the time of a group relative to the same clients one by one; one thread.

    python benchmarks/grouping.py [--repeats 9]

`fedflat.local.kernels.rows.group_size` must choose groups only if the ratio is below 1; otherwise the script exits 1.
Prints a Markdown table.
"""

import argparse
import sys
from functools import partial
from itertools import pairwise

import torch
from timing import interleaved, ratio
from torch import nn

from fedflat import Dataset, Federation, Samples
from fedflat.local.kernels.rows import group_size
from fedflat.methods.parser import parse
from fedflat.models.vector import Network
from fedflat.recipe import Local
from fedflat.rounds.client import Worker
from fedflat.rounds.server import first_state, view
from fedflat.rounds.setup import Broadcast, Problem

COHORT, IMAGE, SMALL_IMAGE = 100, (1, 28, 28), (1, 8, 8)


def mlp(*widths: int, activation: type[nn.Module] = nn.ReLU) -> nn.Module:
    layers = [nn.Sequential(nn.Linear(a, b), activation()) for a, b in pairwise(widths)]
    return nn.Sequential(nn.Flatten(), *[module for layer in layers for module in layer][:-1])


def conv(channels: int) -> nn.Module:
    layers = [nn.Conv2d(1, channels, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(channels, 2 * channels, 3), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(8 * channels, 10))


MODELS = {
    "linear layers and ReLU": [
        (SMALL_IMAGE, mlp(64, 32, 10)),
        (SMALL_IMAGE, mlp(64, 200, 10)),
        (IMAGE, mlp(784, 32, 10)),
        (IMAGE, mlp(784, 100, 10)),
        (IMAGE, mlp(784, 200, 200, 10)),
        (IMAGE, mlp(784, 300, 300, 10)),
    ],
    "linear layers and tanh": [
        (SMALL_IMAGE, mlp(64, 32, 10, activation=nn.Tanh)),
        (IMAGE, mlp(784, 32, 10, activation=nn.Tanh)),
        (IMAGE, mlp(784, 100, 10, activation=nn.Tanh)),
    ],
    "convolutions": [(IMAGE, conv(8)), (IMAGE, conv(32))],
}


def times(shape: tuple[int, ...], module: nn.Module, group: int, repeats: int) -> tuple[float, float, float]:
    chance = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (60 * group, *shape), generator=chance, dtype=torch.uint8)
    samples = Samples(images, torch.randint(0, 10, (60 * group,), generator=chance))
    federation = Federation(
        Dataset("random", samples, samples, 10, (0.5,), (0.25,)), torch.arange(60 * group).split(60)
    )
    problem = Problem.of(federation, Network(module), parse("fedavg"), Local(epochs=1, batch=10, lr=0.05))
    worker, clients = Worker(problem), list(range(group))
    broadcast = Broadcast(0, 0.05, problem.method.broadcast(view(problem, first_state(problem))))
    together = partial(worker.local_rounds, broadcast, clients, [{}] * group)

    def one_by_one() -> None:
        for client in clients:
            worker.local_round(broadcast, client, {})

    seconds = interleaved({"together": together, "one by one": one_by_one}, repeats)
    return ratio(seconds["together"], seconds["one by one"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    wrong = 0
    print("| model | parameters | group | together ÷ one by one | quartiles | chosen |\n|---|---|---|---|---|---|")
    for kind, cases in MODELS.items():
        for shape, module in cases:
            network = Network(module)
            chosen = group_size(network, COHORT)
            group = chosen if chosen > 1 else 8
            middle, low, high = times(shape, module, group, options.repeats)
            wrong += chosen > 1 and middle >= 1
            choice = "together" if chosen > 1 else "one by one"
            print(f"| {kind} | {network.size:,} | {group} | {middle:.2f} | {low:.2f}–{high:.2f} | {choice} |")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
