"""The papers' networks: CPU time of a client's local round compared with the usual loop, one thread, in turns.

    python benchmarks/networks.py [--repeats 7] [--networks mlp cnn lenet resnet vgg] [--bf16] [--profile]

Both train 250 random images of CIFAR-10's shape in batches of 50, with momentum, from the same weights; the MLP trains
60 of MNIST's shape in batches of 10, as on J3. The usual loop is that of contenders/naive.py: a DataLoader, autograd,
torch.optim.SGD; with `--bf16` only our passes are in bfloat16. This is the part of a round that does not depend on
processes; CPU time bears a busy machine. `engine.py` compares whole rounds. Prints a Markdown table; with `--profile`
also one of the operators that take most of our time.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from timing import interleaved, operators, ratio
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

SAMPLES, BATCH, SHAPE = 250, 50, (3, 32, 32)
SMALL_SAMPLES, SMALL_BATCH, SMALL_SHAPE = 60, 10, (1, 28, 28)  # the MLP's, as on J3


def sizes(name: str) -> tuple[int, int, tuple[int, int, int]]:
    """Samples of a client, batch, and shape of a sample."""
    return (SMALL_SAMPLES, SMALL_BATCH, SMALL_SHAPE) if name == "mlp" else (SAMPLES, BATCH, SHAPE)


def rounds(name: str, bf16: bool = False) -> dict[str, Callable[[], object]]:
    """A local round in the usual way and in ours."""
    count, batch, shape = sizes(name)
    chance = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (count, *shape), generator=chance, dtype=torch.uint8)
    labels = torch.randint(0, 10, (count,), generator=chance)
    mean, std = [0.5] * shape[0], [0.25] * shape[0]
    network = Network(models.build(NETWORKS[name], shape, 10), autocast=bf16)
    momentum, decay = 0.9, 1e-5
    if name == "mlp":
        images, mean, std, momentum, decay = images / 255, [], [], 0.0, 0.0
    job = Job(name, name, "random", "", "", [], 1, batch, 0.01, momentum, decay, 0, mean, std, 1)
    plain, samples = job.network(network.weights.clone()), TensorDataset(images, labels)
    data = Dataset("random", Samples(images, labels), Samples(images[:1], labels[:1]), 10, tuple(mean), tuple(std))
    local = Local(epochs=1, batch=batch, lr=job.lr, momentum=job.momentum, weight_decay=job.weight_decay)
    problem = Problem.of(Federation(data, (torch.arange(count),)), network, parse("fedavg"), local)
    sent = dict(problem.method.broadcast(view(problem, first_state(problem))))
    worker = settled_worker(problem)
    return {
        "usual": lambda: fit(plain, samples, job),
        "ours": lambda: worker.local_round(Broadcast(1, job.lr, sent), 0, {}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    images = ["mlp", "cnn", "lenet", "resnet", "vgg"]
    parser.add_argument("--networks", nargs="+", choices=images, default=images)
    parser.add_argument("--bf16", action="store_true", help="our passes in bfloat16")
    parser.add_argument("--profile", action="store_true", help="also print where our time goes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| network | usual loop, ms a step | ours | usual ÷ ours | quartiles |\n|---|---|---|---|---|", flush=True)
    profiles = []
    for name in options.networks:
        sides = rounds(name, options.bf16)
        seconds = interleaved(sides, options.repeats, time.process_time)
        middle, low, high = ratio(seconds["usual"], seconds["ours"])
        count, batch, _ = sizes(name)
        usual, ours = (1000 * median(seconds[side]) / (count // batch) for side in ("usual", "ours"))
        print(f"| {NETWORKS[name]} | {usual:.3g} | {ours:.3g} | {middle:.2f} | {low:.2f}–{high:.2f} |", flush=True)
        if options.profile:
            found = operators(sides["ours"], most=10)
            profiles += [f"| {NETWORKS[name]} | {operator} | {share:.1%} |" for operator, share in found]
    if profiles:
        print("\n".join(["\n| network | operator | share of our time |", "|---|---|---|", *profiles]))


if __name__ == "__main__":
    main()
