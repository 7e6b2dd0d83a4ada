"""Personalisation: the global model of a finished run, adapted by every client and tested on samples like its own.

A client's test samples have the label distribution q of its training samples: ⌊size · q_c⌋ of each class c, or all that
there are (so a size far beyond the test set's classes flattens q). How it adapts is one of

    finetune   e epochs of plain SGD on all parameters, also those that the method froze (FedAvg-FT, FedSoL-FT, FedBABU)
    perfedavg  the meta steps of e epochs: those of the method if it has them, else the defaults of `perfedavg`
    knn        as finetune; then the model's answers are mixed with those of the nearest training samples (kNN-Per)
    local      e epochs from the initial weights of the federation, at the rate η · 0.99^epoch: each client alone
    none       not at all: the global model as it is

The learning rate is constant (but for `local`), and one momentum buffer serves all epochs. Clients adapt one after the
other, in one thread.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import reduce
from itertools import count, islice
from operator import add
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from torch import Tensor, nn

from fedflat.client import Problem
from fedflat.engine.engine import chunks, one_thread
from fedflat.errors import RecipeError, RunError, TrainingError, nearest
from fedflat.federation.federation import Federation, batch_steps
from fedflat.folder import beside, write_whole
from fedflat.metrics import score
from fedflat.neighbours import CHUNK, Mixture, Neighbours
from fedflat.parts import MetaStep
from fedflat.randomness import generator
from fedflat.rule import Batch, LocalRule
from fedflat.step import train

EPOCHS: dict[str, tuple[int, ...]] = {
    "finetune": (1, 5),
    "perfedavg": (1, 5),
    "knn": (1, 5),
    "local": (200,),
    "none": (0,),
}
ALONE = 0.99  # what local-only training multiplies its learning rate by after every epoch


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
    lr_decay: float = ALONE,
    size: int = 1000,
    neighbours: Neighbours | None = None,
    watch: Callable[[Sequence[int]], Iterable[int]] = iter,
) -> list[Personal]:
    """Adapt `weights` to each client, and test it after each of the numbers of epochs (else those of `EPOCHS`).

    One walk serves them all: after 5 epochs a client is where it was after 1 and 4 more, momentum included. The
    problem's network is left as it was.

    Args:
        problem: the federation, the network and the method of the run.
        weights: the global model's, for "local" the initial ones.
        epochs: after which numbers of epochs each client is tested.
        how: "finetune", "perfedavg", "knn", "local" or "none".
        lr: the learning rate, for "perfedavg" that of the inner step; the recipe's η unless given.
        lr_decay: "local": what the learning rate is multiplied by after every epoch.
        size: the number of test samples of a client.
        neighbours: the settings of "knn".
        watch: goes around the clients to show progress.

    Returns:
        One result for each client and number of epochs.

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
    walk = Walk(problem, how, epoch_marks(how, epochs), rate, lr_decay)
    adaptation = Adaptation(walk, _exam(problem, size), neighbours or Neighbours())
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


def epoch_marks(how: str, epochs: Sequence[int] | None) -> tuple[int, ...]:
    """The numbers of epochs in order, each once; those of `EPOCHS` if none are given."""
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
class Walk:
    """A client's way from given weights through all the marks, which are numbers of epochs.

    Plain SGD, or meta steps, with the recipe's local settings and none of the method's other parts.
    """

    problem: Problem
    how: str
    marks: tuple[int, ...]
    lr: float
    lr_decay: float = ALONE

    def __post_init__(self) -> None:
        for name in ("lr", "lr_decay"):
            if not 0 < getattr(self, name) < math.inf:
                raise RecipeError(f"{name} = {getattr(self, name)}: must be a number above 0")

    def of(self, client: int, start: Tensor, reached: Callable[[int], None]) -> None:
        """Let one client adapt; `reached` is told of each mark while the network stands there."""
        problem, rule = self.problem, self._rule(client)
        outcome = train(problem.network, start, rule, self._batches(client, rule, reached), problem.loss)
        if not math.isfinite(float(outcome.delta.sum())):
            raise TrainingError(
                f"client {client}: its model is no longer finite; the learning rate {self.lr:g} is too high"
            )

    @property
    def _meta(self) -> MetaStep | None:
        if self.how != "perfedavg":
            return None
        return next((part for part in self.problem.method.parts if isinstance(part, MetaStep)), MetaStep())

    def _length(self, client: int) -> int:
        """L, the number of batches in an epoch."""
        return batch_steps(self.problem.federation.samples(client), self.problem.local.batch, 1, None)

    def _steps(self, client: int, epochs: int) -> int:
        """The steps that end some epochs: ⌈L/E⌉ meta steps an epoch, where a round has E, or else L."""
        length, local = self._length(client), self.problem.local
        if self._meta:
            return self._meta.pairs_after(epochs, length, 1 if local.steps else local.epochs)
        return epochs * length

    def _rule(self, client: int) -> LocalRule:
        local = self.problem.local
        rule = EpochRule(
            lr=self.lr,
            steps=self._steps(client, self.marks[-1]),
            momentum=local.momentum,
            nesterov=local.nesterov,
            weight_decay=local.weight_decay,
            clip=local.clip or None,
            clip_mode=local.clip_mode,
            frozen=self.problem.network.fixed,
            length=self._length(client),
            falling=self.lr_decay if self.how == "local" else 1.0,
        )
        return self._meta.paired(rule, rule.steps) if self._meta else rule

    def _batches(self, client: int, rule: LocalRule, reached: Callable[[int], None]) -> Iterator[Batch]:
        """The batches of all steps, from one stream that passes over the samples again and again."""
        each = 2 if rule.pairs else 1
        for k, batch in enumerate(islice(self._stream(client), each * rule.steps)):
            if k % each == 0:
                self._tell(client, k // each, reached)
            yield batch
        self._tell(client, rule.steps, reached)

    def _tell(self, client: int, steps: int, reached: Callable[[int], None]) -> None:
        for mark in self.marks:
            if self._steps(client, mark) == steps:
                reached(mark)
                self.problem.network.module.train()

    def _stream(self, client: int) -> Iterator[Batch]:
        """Each pass draws from generators of its own, so a longer walk begins like a shorter one."""
        problem, length = self.problem, self._length(client)
        for number in count():
            order = generator(problem.seed, "personal", number, client) if problem.shuffle else None
            chance = generator(problem.seed, "personal augment", number, client) if problem.shuffle else None
            yield from problem.federation.batches(client, problem.local.batch, length, order, chance)


@dataclass(frozen=True)
class Adaptation:
    """What every client does: walk from the same weights, and be tested at the marks."""

    walk: Walk
    exam: Federation
    neighbours: Neighbours

    def of(self, client: int, start: Tensor) -> list[Personal]:
        """One client's results; the network ends wherever the client does."""
        walk, problem = self.walk, self.walk.problem
        samples, tested = problem.federation.samples(client), self.exam.samples(client)
        if not tested:
            return [Personal(client, mark, samples, 0, None, None) for mark in walk.marks]
        module = problem.network.module
        problem.network.weights.copy_(start)
        before, after = self._accuracy(client, module), dict[int, float]()

        def reached(mark: int) -> None:
            mixed = walk.how == "knn"
            after[mark] = self._accuracy(client, Mixture(problem, client, self.neighbours) if mixed else module)

        walk.of(client, start, reached)
        return [Personal(client, mark, samples, tested, before, after[mark]) for mark in walk.marks]

    def _accuracy(self, client: int, module: nn.Module) -> float:
        shard, classes = self.exam.shards[client], self.exam.dataset.classes
        parts = (self.exam.batch(shard[start:stop], None) for start, stop in chunks(len(shard), CHUNK))
        return reduce(add, (score(module, *part, self.walk.problem.loss, classes) for part in parts)).accuracy


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
