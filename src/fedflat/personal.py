"""Personalisation: the global model of a finished run, adapted by every client and tested on samples like its own.

A client's test samples have the label distribution q of its training samples: ⌊size · q_c⌋ of each class c, or all that
there are (so a size far beyond the test set's classes flattens q). How it adapts is one of

    finetune   e epochs of plain SGD on all parameters, also those that the method froze (FedAvg-FT, FedSoL-FT, FedBABU)
    knn        the same; then the model's answers are mixed with those of the nearest training samples (kNN-Per)
    local      e epochs from the weights that the federation began with: what a client comes to alone
    none       not at all: the global model as it is

Clients are worked on one after the other, by one thread.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import reduce
from operator import add
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import torch
from torch import Tensor, nn

from fedflat.client import Problem
from fedflat.engine.engine import chunks, one_thread
from fedflat.errors import RecipeError, RunError, TrainingError, nearest
from fedflat.federation.federation import Federation, batch_steps
from fedflat.folder import beside, write_whole
from fedflat.local import Batch, LocalRule, train
from fedflat.metrics import score
from fedflat.randomness import generator
from fedflat.vector import Network

EPOCHS: dict[str, tuple[int, ...]] = {"finetune": (1, 5), "knn": (1, 5), "local": (200,), "none": (0,)}
ALONE = 0.99  # what local-only training multiplies its learning rate by after every epoch
CHUNK = 500  # samples in one pass when a model is tested


@dataclass(frozen=True)
class Personal:
    """How one client's model did after some epochs; accuracies are None where there is no test sample to tell."""

    client: int
    epochs: int
    samples: int
    test_samples: int
    accuracy_before: float | None
    accuracy_after: float | None


@dataclass(frozen=True)
class Neighbours:
    """kNN-Per:  p = λ p_knn + (1 − λ) softmax(model),  with  p_knn(c) ∝ Σ exp(−d²/(dim · scale))  over those of the k
    nearest stored samples whose label is c, and d their distance in what enters the head.

    `capacity` is the number of training samples that a client stores, drawn at random if it has more; `mix` is λ.
    """

    k: int = 5
    mix: float = 0.5
    scale: float = 1.0
    capacity: int = 500

    def __post_init__(self) -> None:
        bounds = {"k": self.k >= 1, "mix": 0 <= self.mix <= 1, "scale": self.scale > 0, "capacity": self.capacity >= 1}
        for name, good in bounds.items():
            if not good:
                wanted = "from 0 to 1" if name == "mix" else "above 0"
                raise RecipeError(f"{name} = {getattr(self, name)}: must be a number {wanted}")


@dataclass(frozen=True)
class EpochRule(LocalRule):
    """A rule whose learning rate falls by a factor γ after every epoch of L steps:  η_k = η γ^⌊k/L⌋.

    >>> [EpochRule(lr=1.0, steps=6, length=2, falling=0.5).lr_at(k) for k in range(6)]
    [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]
    """

    length: int = 1
    falling: float = 1.0

    def lr_at(self, k: int) -> float:
        return self.lr * self.falling ** (k // self.length)


def personalise(
    problem: Problem,
    weights: Tensor,
    epochs: Sequence[int] | None = None,
    how: str = "finetune",
    *,
    lr: float | None = None,
    size: int = 1000,
    neighbours: Neighbours | None = None,
    watch: Callable[[Sequence[int]], Iterable[int]] = iter,
) -> list[Personal]:
    """Adapt `weights` to each client, and test it after each of the numbers of epochs (else those of `EPOCHS`).

    One walk serves them all: after 5 epochs a client is where it was after 1 and 4 more, momentum included. `weights`
    are the global model's, for "local" the initial ones; `lr` is the recipe's η unless given. The problem's network is
    left as it was. `watch` goes around the clients to show progress.

    >>> from fedflat.recipe import load
    >>> from fedflat.prepare import prepare
    >>> problem, _ = prepare(load())
    >>> results = personalise(problem, problem.network.weights, epochs=(0, 1))
    >>> [(row["epochs"], row["clients"]) for row in summary(results)]
    [(0, 20), (1, 20)]
    """
    network, start = problem.network, weights.clone()
    if start.shape != network.weights.shape:
        raise RecipeError(f"weights: {start.numel()} numbers, but the model has {network.size} parameters")
    rate = problem.local.lr if lr is None else lr
    adaptation = Adaptation(problem, _exam(problem, size), _marks(how, epochs), how, rate, neighbours or Neighbours())
    home, buffers, results = network.weights.clone(), network.buffers.clone(), list[Personal]()
    try:
        for client in watch(range(problem.federation.clients)):
            network.buffers.copy_(buffers)
            with one_thread():
                results += adaptation.of(client, start)
    finally:
        network.weights.copy_(home)
        network.buffers.copy_(buffers)
        network.module.eval()
    return results


def _marks(how: str, epochs: Sequence[int] | None) -> tuple[int, ...]:
    if how not in EPOCHS:
        raise RecipeError(f"how = {how!r}: there is no such way to personalise; {nearest(how, EPOCHS)}")
    marks = tuple(sorted(set(EPOCHS[how] if epochs is None else epochs)))
    if not marks or marks[0] < 0:
        raise RecipeError(f"epochs = {', '.join(map(str, marks)) or 'nothing'}: must be whole numbers, 0 or more")
    if how == "none" and marks != (0,):
        raise RecipeError(f'epochs = {marks[-1]}: how = "none" adapts nothing; leave epochs out')
    return marks


def _exam(problem: Problem, size: int) -> Federation:
    """The federation of the test samples: each client's shard has the label distribution of its training samples."""
    federation = problem.federation
    if size < 1:
        raise RecipeError(f"size = {size}: a client's test set must have at least 1 sample")
    if federation.dataset.train.labels.is_floating_point():
        raise RecipeError(f"{federation.dataset.name}: its labels are no classes, so no test set can match them")
    shards = federation.local_tests(problem.seed, size)
    return replace(federation, dataset=replace(federation.dataset, train=federation.dataset.test), shards=shards)


@dataclass(frozen=True)
class Adaptation:
    """What every client does: walk from the same weights, and be tested at the marks, which are numbers of epochs."""

    problem: Problem
    exam: Federation
    marks: tuple[int, ...]
    how: str
    lr: float
    neighbours: Neighbours

    def of(self, client: int, start: Tensor) -> list[Personal]:
        """One client's results; the network ends wherever the client does."""
        samples, tested = self.problem.federation.samples(client), self.exam.samples(client)
        if not tested:
            return [Personal(client, mark, samples, 0, None, None) for mark in self.marks]
        module = self.problem.network.module
        self.problem.network.weights.copy_(start)
        before = self._accuracy(client, module)
        after: dict[int, float] = {}

        def reached(epoch: int) -> None:
            if epoch in self.marks:
                mixed = self.how == "knn"
                after[epoch] = self._accuracy(
                    client, Mixture(self.problem, client, self.neighbours) if mixed else module
                )
                module.train()

        self._walk(client, start, reached)
        return [Personal(client, mark, samples, tested, before, after[mark]) for mark in self.marks]

    def _walk(self, client: int, start: Tensor, reached: Callable[[int], None]) -> None:
        """Plain SGD on the client's samples with the recipe's local settings and none of the method's parts."""
        problem, local = self.problem, self.problem.local
        length = batch_steps(problem.federation.samples(client), local.batch, 1, None)
        rule = EpochRule(
            lr=self.lr,
            steps=self.marks[-1] * length,
            momentum=local.momentum,
            weight_decay=local.weight_decay,
            clip=local.clip or None,
            clip_mode=local.clip_mode,
            frozen=problem.network.fixed,
            length=length,
            falling=ALONE if self.how == "local" else 1.0,
        )
        outcome = train(problem.network, start, rule, self._batches(client, length, reached), problem.loss)
        if not math.isfinite(float(outcome.delta.sum())):
            raise TrainingError(
                f"client {client}: its model is no longer finite; the learning rate {self.lr:g} is too high"
            )

    def _batches(self, client: int, length: int, reached: Callable[[int], None]) -> Iterator[Batch]:
        """The client's batches; `reached` is told of the start as 0 and of every epoch's end, with the network there.

        An epoch draws from generators of its own, so a longer walk begins like a shorter one.
        """
        problem = self.problem
        for epoch in range(self.marks[-1]):
            reached(epoch)
            order = generator(problem.seed, "personal", epoch, client) if problem.shuffle else None
            chance = generator(problem.seed, "personal augment", epoch, client) if problem.shuffle else None
            yield from problem.federation.batches(client, problem.local.batch, length, order, chance)
        reached(self.marks[-1])

    def _accuracy(self, client: int, module: nn.Module) -> float:
        shard, classes = self.exam.shards[client], self.exam.dataset.classes
        parts = (self.exam.batch(shard[start:stop], None) for start, stop in chunks(len(shard), CHUNK))
        return reduce(add, (score(module, *part, self.problem.loss, classes) for part in parts)).accuracy


class Mixture(nn.Module):
    """The log-probabilities of kNN-Per: the network as it stands, and the client's samples as it sees them."""

    def __init__(self, problem: Problem, client: int, neighbours: Neighbours) -> None:
        super().__init__()
        self.module = problem.network.module.eval()
        self._network, self._rule, self._classes = problem.network, neighbours, problem.federation.dataset.classes
        shard = problem.federation.shards[client]
        chosen = torch.randperm(len(shard), generator=generator(problem.seed, "personal store", client=client))
        stored = shard[chosen[: neighbours.capacity]]
        parts = [problem.federation.batch(indices, None) for indices in stored.split(CHUNK)]
        self._keys = torch.cat([features_and_logits(self._network, inputs)[0] for inputs, _ in parts])
        self._labels = torch.cat([labels for _, labels in parts])

    def forward(self, inputs: Tensor) -> Tensor:
        features, logits = features_and_logits(self._network, inputs)
        near = nearest_labels(features, self._keys, self._labels, self._classes, self._rule)
        return torch.lerp(logits.softmax(1), near, self._rule.mix).log()


@torch.no_grad()
def features_and_logits(network: Network, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """What enters the head, one row for each sample, and what leaves it."""
    with network.listening(features=True) as tap:
        forward = tap(inputs)
    assert forward.features is not None
    return forward.features.flatten(1), forward.logits


def nearest_labels(queries: Tensor, keys: Tensor, labels: Tensor, classes: int, rule: Neighbours) -> Tensor:
    """p_knn of each query.

    >>> keys, labels = torch.tensor([[0.0], [1.0], [9.0]]), torch.tensor([0, 1, 2])
    >>> nearest_labels(torch.tensor([[0.5]]), keys, labels, 3, Neighbours(k=2))
    tensor([[0.5000, 0.5000, 0.0000]])
    """
    # By differences: the faster way by a matrix product loses the small distances, which have the large weights.
    distances = torch.cdist(queries, keys, compute_mode="donot_use_mm_for_euclid_dist")
    found = distances.topk(min(rule.k, len(keys)), dim=1, largest=False)
    # A softmax is exp(−d²/…) divided by its sum, and does not vanish where all neighbours are far away.
    shares = (-found.values.square() / (keys.shape[1] * rule.scale)).softmax(1)
    return queries.new_zeros(len(queries), classes).scatter_add_(1, labels[found.indices], shares)


def summary(results: Iterable[Personal]) -> list[dict[str, Any]]:
    """For each number of epochs the mean and the standard deviation over the clients that have test samples."""
    rows, results = [], list(results)
    for epochs in sorted({result.epochs for result in results}):
        here = [result for result in results if result.epochs == epochs]
        row: dict[str, Any] = {"epochs": epochs, "clients": sum(r.test_samples > 0 for r in here)}
        row["left_out"] = len(here) - row["clients"]
        for name in ("accuracy_before", "accuracy_after"):
            values = [value for r in here if (value := getattr(r, name)) is not None]
            row |= {name: fmean(values) if values else None, f"{name}_std": pstdev(values) if values else None}
        rows.append(row)
    return rows


def save(directory: Path, how: str, results: Iterable[Personal]) -> Path:
    """Write personal-HOW.jsonl into a run's directory, whole or not at all: one line for each client and epochs."""
    path = beside(directory, f"personal-{how}.jsonl")
    try:
        write_whole(path, "".join(json.dumps(asdict(result)) + "\n" for result in results).encode())
    except OSError as error:
        raise RunError(f"{path}: cannot be written ({error.strerror})") from None
    return path
