"""The papers' networks: CPU time of a client's local round compared with the usual loop, one thread, in turns.

    python benchmarks/networks.py [--repeats 7] [--networks cnn lenet resnet vgg]

Both train 250 random images of CIFAR-10's shape in batches of 50, with momentum, from the same weights. The usual loop
is that of contenders/naive.py: a DataLoader, autograd, torch.optim.SGD. This is the part of a round that does not
depend on processes; CPU time bears a busy machine. `engine.py` compares whole rounds. Prints a Markdown table.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from timing import interleaved, ratio
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).parent / "contenders"))

from common import Job, fit
from jobs import NETWORKS

from fedflat import Dataset, Federation, Samples, models
from fedflat.engine.heap import settled_worker
from fedflat.methods.parser import parse
from fedflat.models.vector import Network
from fedflat.recipe import Local
from fedflat.rounds.server import first_state, view
from fedflat.rounds.setup import Broadcast, Problem

SAMPLES, BATCH = 250, 50


def rounds(name: str) -> dict[str, Callable[[], object]]:
    """A local round in the usual way and in ours."""
    chance = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (SAMPLES, 3, 32, 32), generator=chance, dtype=torch.uint8)
    labels = torch.randint(0, 10, (SAMPLES,), generator=chance)
    mean, std = [0.5] * 3, [0.25] * 3
    network = Network(models.build(NETWORKS[name], (3, 32, 32), 10))
    job = Job(name, name, "random", "", "", [], 1, BATCH, 0.01, 0.9, 1e-5, 0, mean, std, 1)
    plain, samples = job.network(network.weights.clone()), TensorDataset(images, labels)
    data = Dataset("random", Samples(images, labels), Samples(images[:1], labels[:1]), 10, tuple(mean), tuple(std))
    local = Local(epochs=1, batch=BATCH, lr=job.lr, momentum=job.momentum, weight_decay=job.weight_decay)
    problem = Problem.of(Federation(data, (torch.arange(SAMPLES),)), network, parse("fedavg"), local)
    sent = dict(problem.method.broadcast(view(problem, first_state(problem))))
    worker = settled_worker(problem)
    return {
        "usual": lambda: fit(plain, samples, job),
        "ours": lambda: worker.local_round(Broadcast(1, job.lr, sent), 0, {}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=["cnn", "lenet", "resnet", "vgg"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| network | usual loop, ms a step | ours | usual ÷ ours | quartiles |\n|---|---|---|---|---|", flush=True)
    for name in options.networks:
        seconds = interleaved(rounds(name), options.repeats, time.process_time)
        middle, low, high = ratio(seconds["usual"], seconds["ours"])
        steps = SAMPLES // BATCH
        usual, ours = (1000 * sorted(seconds[side])[options.repeats // 2] / steps for side in ("usual", "ours"))
        print(f"| {NETWORKS[name]} | {usual:.0f} | {ours:.0f} | {middle:.2f} | {low:.2f}–{high:.2f} |", flush=True)


if __name__ == "__main__":
    main()
