"""The jobs: each as a SPEC.json with its data and initial weights, which every contender reads.

    FEDFLAT_DATA=… python contenders/jobs.py FOLDER --jobs J2 J3 [--rounds 5]

Without the data set on disk its images are random; the job then says so. Prints the path of each SPEC.
"""

import argparse
import json
import sys
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import LORA, Job

from fedflat import Dataset, Federation, Samples, federate, models
from fedflat.errors import DataError
from fedflat.federation.augment import normalise
from fedflat.federation.datasets import load
from fedflat.federation.packed import Packed
from fedflat.models.vector import Network
from fedflat.randomness import generator
from fedflat.recipe import Server
from fedflat.rounds.cohort import draw_cohort

SHAPES = {"cifar10": (50_000, 3, 32, 32), "mnist": (60_000, 1, 28, 28)}
NETWORKS = {
    "cnn": "fedavg-cnn", "mlp": "mlp", "resnet": "resnet18-gn", "lenet": "lenet64", "vgg": "vgg11",
    "lstm": "char-lstm", "gpt": "gpt",
}  # fmt: skip
IID: dict[str, Any] = {"split": "iid"}
LDA: dict[str, Any] = {"split": "lda", "alpha": 0.1}
UNEVEN: dict[str, Any] = {"split": "sizes", "exponent": 0.5}
HEAVY: dict[str, float] = {"lr": 0.01, "momentum": 0.9, "weight_decay": 1e-5}
GENTLE: dict[str, float] = {"lr": 0.001, "momentum": 0.9, "weight_decay": 1e-5}
STRONG: dict[str, float] = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-2}
LIGHT: dict[str, float] = {"lr": 0.1, "momentum": 0.0, "weight_decay": 0.0}
PLAIN: dict[str, float] = {"lr": 0.8, "momentum": 0.0, "weight_decay": 0.0}  # LEAF's and FedProx's rate
WINDOWS: dict[str, Any] = {"predict": "next", "stride": 80, "shortest": 1000}
SPARSE: dict[str, Any] = {**WINDOWS, "stride": 400}
EVERY: dict[str, Any] = {"predict": "all", "shortest": 1000}


@dataclass(frozen=True)
class Plan:
    """`samples` of a data set (0 = all) divided among clients, or drawn by each, and how the cohort trains."""

    model: str
    data: str
    clients: int
    cohort: int
    epochs: int
    batch: int
    samples: int = 0
    split: dict[str, Any] = field(default_factory=IID.copy)
    sgd: dict[str, float] = field(default_factory=HEAVY.copy)
    text: dict[str, Any] = field(default_factory=dict)
    drawn: int = 0  # samples that each client draws with replacement, in place of a split


JOBS = {
    "J1": Plan("cnn", "cifar10", clients=100, cohort=10, epochs=5, batch=50, split=LDA),
    "J2": Plan("cnn", "cifar10", clients=100, cohort=10, epochs=5, batch=50),
    "J3": Plan("mlp", "mnist", clients=1000, cohort=10, epochs=1, batch=10, sgd=LIGHT),
    "J3b": Plan("mlp", "mnist", clients=1000, cohort=100, epochs=1, batch=10, sgd=LIGHT),
    "J4": Plan("resnet", "cifar10", clients=100, cohort=2, epochs=1, batch=50),
    # Shakespeare by role, all roles of 1,000 characters or more; windows do not overlap.
    "J6": Plan("lstm", "shakespeare", clients=0, cohort=10, epochs=1, batch=10, sgd=PLAIN, text=WINDOWS),
    "J7": Plan("gpt", "shakespeare", clients=0, cohort=10, epochs=1, batch=10, sgd=LIGHT, text=EVERY),
    "J8": Plan("lenet", "cifar10", clients=100, cohort=10, epochs=1, batch=50),
    "J9": Plan("vgg", "cifar10", clients=100, cohort=2, epochs=1, batch=50),
    # J10: rounds of 1,000 clients out of 10⁴, of 10⁵ (c) and of 10⁶ (m).
    "J10": Plan("mlp", "mnist", clients=10_000, cohort=1000, epochs=1, batch=10, sgd=LIGHT, drawn=10),
    "J10c": Plan("mlp", "mnist", clients=100_000, cohort=1000, epochs=1, batch=10, sgd=LIGHT, drawn=10),
    "J10m": Plan("mlp", "mnist", clients=1_000_000, cohort=1000, epochs=1, batch=10, sgd=LIGHT, drawn=10),
    # Seconds long, to see that all contenders train the same thing: a batch takes all of a client, so that the order of
    # its samples cannot matter, and clients differ in size, so that the weights of the average do.
    "check": Plan("mlp", "mnist", clients=20, cohort=10, epochs=5, batch=2000, samples=2000, split=UNEVEN, sgd=STRONG),
    "check-cnn": Plan(
        "cnn", "cifar10", clients=8, cohort=4, epochs=3, batch=500, samples=500, split=UNEVEN, sgd=STRONG
    ),
    **{
        f"check-{model}": Plan(
            model, "cifar10", clients=4, cohort=2, epochs=1, batch=100, samples=100, split=UNEVEN, sgd=GENTLE
        )
        for model in ("resnet", "lenet", "vgg")
    },
    "check-lstm": Plan("lstm", "shakespeare", clients=6, cohort=3, epochs=2, batch=500, sgd=STRONG, text=SPARSE),
    "check-gpt": Plan("gpt", "shakespeare", clients=6, cohort=3, epochs=2, batch=500, sgd=STRONG, text=EVERY),
}


def write(folder: Path, name: str, rounds: int, seed: int = 0, workers: int = 2) -> Path:
    """The SPEC of a job in a folder, with the files that it names."""
    plan = JOBS[name]
    federation = _roles(plan, seed) if plan.text else _federation(plan, seed)
    data = federation.dataset
    module = _module(plan, data, seed)
    server = Server(cohort=plan.cohort)
    job = Job(
        name=name,
        model=plan.model,
        images=data.name,
        data=str(folder / f"{name}.data.npz"),
        initial=str(folder / f"{name}.weights.npz"),
        cohorts=[draw_cohort(server, federation.clients, seed, number) for number in range(rounds)],
        epochs=plan.epochs,
        batch=plan.batch,
        seed=seed,
        mean=list(data.mean),
        std=list(data.std),
        workers=workers,
        **plan.sgd,
    )
    np.savez(
        job.data,
        inputs=data.train.inputs.numpy(),
        labels=data.train.labels.numpy(),
        indices=torch.cat(tuple(federation.shards)).numpy(),
        offsets=np.cumsum([0, *(federation.samples(client) for client in range(federation.clients))]),
    )
    frozen = [p.detach().flatten() for p in module.parameters() if not p.requires_grad]
    base = {"base": torch.cat(frozen).numpy()} if frozen else {}
    np.savez(job.initial, weights=Network(module).weights.numpy(), **base)
    spec = folder / f"{name}.json"
    # Defaults are left out, so that an older checkout can read the job.
    told = {each.name: vars(job)[each.name] for each in fields(job) if vars(job)[each.name] != each.default}
    spec.write_text(json.dumps(told), "utf-8")
    return spec


def _module(plan: Plan, data: Dataset, seed: int) -> torch.nn.Module:
    options = {"vocabulary": data.vocabulary, "per_token": data.task == "next-token"} if plan.text else {}
    module = models.build(NETWORKS[plan.model], data.shape, data.classes, generator(seed, "weights"), **options)
    return models.lora(module, **LORA, generator=generator(seed, "adapters")) if plan.model == "gpt" else module


def _roles(plan: Plan, seed: int) -> Federation:
    """A client for each role, or for those only that say least."""
    try:
        dataset = load(plan.data, **plan.text)
    except DataError as error:
        print(f"{error}; random letters instead", file=sys.stderr)
        dataset = _random_text(plan.text["predict"] == "all", seed)
    samples = replace(dataset.train, inputs=dataset.train.inputs.long())  # as an embedding wants them
    whole = federate(replace(dataset, train=samples, test=samples), "natural", 0, seed=seed)
    if not plan.clients:
        return replace(whole, tests=None)
    least = sorted(whole.shards, key=len)[: plan.clients]
    rows = torch.cat(least)
    cut = Samples(samples.inputs[rows], samples.labels[rows])
    shards = torch.arange(len(rows)).split([len(shard) for shard in least])
    return Federation(replace(dataset, train=cut, test=cut), tuple(shards))


def _random_text(every: bool, seed: int) -> Dataset:
    """As many roles as in the plays, of sizes as different."""
    chance = generator(seed, "text")
    sizes = torch.empty(110).log_normal_(3.5, 1.0, generator=chance).long().clamp(10, 500)
    rows = torch.randint(0, 80, (int(sizes.sum()), 81), generator=chance)
    labels = rows[:, 1:].contiguous() if every else rows[:, -1].contiguous()
    samples = Samples(rows[:, :-1].contiguous(), labels, torch.arange(110).repeat_interleave(sizes))
    return Dataset("random", samples, samples, 80, (), (), 80, "next-token" if every else "classification")


def _federation(plan: Plan, seed: int) -> Federation:
    dataset = _dataset(plan.data, seed)
    train = dataset.train
    count = plan.samples or len(train)
    inputs, labels = train.inputs[:count].contiguous(), train.labels[:count]
    mean, std = dataset.mean, dataset.std
    if plan.model == "mlp":
        # Floating inputs, normalised beforehand: in the overhead regime even that would be measured.
        inputs, mean, std = normalise(inputs, mean, std).contiguous(), (), ()
    samples = Samples(inputs, labels)
    cut = Dataset(dataset.name, samples, samples, dataset.classes, mean, std)
    if not plan.drawn:
        return federate(cut, clients=plan.clients, seed=seed, **plan.split)
    indices = torch.randint(count, (plan.clients * plan.drawn,), generator=generator(seed, "clients"))
    return Federation(cut, Packed(indices, [plan.drawn] * plan.clients))


def _dataset(name: str, seed: int) -> Dataset:
    try:
        return load(name)
    except DataError as error:
        print(f"{error}; random images instead", file=sys.stderr)
    shape, chance = SHAPES[name], generator(seed, "images")
    images = torch.randint(0, 256, shape, generator=chance, dtype=torch.uint8)
    samples = Samples(images, torch.randint(0, 10, shape[:1], generator=chance))
    return Dataset("random", samples, samples, 10, (0.5,) * shape[1], (0.25,) * shape[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=["J2", "J3"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for name in options.jobs:
        print(write(folder, name, options.rounds, options.seed, options.workers), flush=True)


if __name__ == "__main__":
    main()
