"""Personalisation: every client adapts the global model of a finished run and tests it on its own label distribution.

A client's test samples have the label distribution q of its training samples: ⌊size · q_c⌋ of each class c, or all if
there are fewer (so a size much larger than the test set flattens q). The ways to adapt are

    finetune   e epochs of plain SGD on all parameters, also those that the method froze (FedAvg-FT, FedSoL-FT, FedBABU)
    perfedavg  the meta steps of e epochs, with the settings of the method, or the defaults of `perfedavg`
    knn        like finetune; then the outputs are mixed with those of the nearest training samples (kNN-Per)
    local      e epochs of each client alone, from the initial weights of the federation, at the rate η · 0.99^epoch
    none       no adaptation: the global model itself

The learning rate is constant (except for `local`), and the momentum buffer is kept over all epochs. Clients adapt one
after the other, in one thread.
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

from fedflat.errors import RecipeError, RunError, TrainingError, nearest
from fedflat.federation import Federation, batch_steps
from fedflat.local import Batch, LocalRule, train
from fedflat.methods import MetaStep
from fedflat.randomness import generator
from fedflat.rounds import Problem, chunks, one_thread, score
from fedflat.runs.folder import beside, write_whole
from fedflat.runs.neighbours import CHUNK, Mixture, Neighbours

EPOCHS: dict[str, tuple[int, ...]] = {
    "finetune": (1, 5),
    "perfedavg": (1, 5),
    "knn": (1, 5),
    "local": (200,),
    "none": (0,),
}
ALONE = 0.99  # decay factor of the learning rate per epoch in local-only training


@dataclass(frozen=True)
class Personal:
    """The accuracy of one client before and after adaptation; None if the client has no test samples."""

    client: int
    epochs: int
    samples: int
    test_samples: int
    accuracy_before: float | None
    accuracy_after: float | None


@dataclass(frozen=True)
class EpochRule(LocalRule):
    """A rule whose learning rate is multiplied by γ after every epoch of L steps:  η_k = η γ^⌊k/L⌋.

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
    """Adapts `weights` to each client and tests the result after each of the given numbers of epochs.

    A client trains once for all of them: its result after 5 epochs continues from that after 1 epoch, including the
    momentum. The network of the problem is restored at the end.

    Args:
        problem: the federation, the network and the method of the run.
        weights: the weights of the global model, or the initial weights for "local".
        epochs: the numbers of epochs after which each client is tested; those of `EPOCHS` by default.
        how: "finetune", "perfedavg", "knn", "local" or "none".
        lr: the learning rate; for "perfedavg", that of the inner step. The η of the recipe by default.
        lr_decay: for "local", the factor of the learning rate after every epoch.
        size: the number of test samples of a client.
        neighbours: the settings of "knn".
        watch: wraps the sequence of clients, for example to show progress.

    Returns:
        One result for each client and number of epochs.

    Raises:
        RecipeError: an argument is invalid, or the labels are not class indices.
        TrainingError: the model of a client diverged.

    >>> from fedflat.recipe import load
    >>> from fedflat.runs.build import prepare
    >>> problem = prepare(load())
    >>> results = personalise(problem, problem.network.weights, epochs=(0, 1))
    >>> [(row["epochs"], row["clients"]) for row in summary(results)]
    [(0, 20), (1, 20)]
    """
    network, start = problem.network, weights.clone()
    if start.shape != network.weights.shape:
        raise RecipeError(f"weights: {start.numel()} numbers, but the model has {network.size} trained parameters")
    rate = problem.recipe.local.lr if lr is None else lr
    walk = Walk(problem, how, epoch_marks(how, epochs), rate, lr_decay)
    adaptation = Adaptation(walk, _exam(problem, size), neighbours or Neighbours())
    home, buffers, results = network.weights.clone(), network.buffers.clone(), list[Personal]()
    try:
        for client in watch(range(problem.federation.clients)):
            network.buffers.copy_(buffers)
            with one_thread():
                results += adaptation.of(client, start)
    finally:
        network.load(home)
        network.buffers.copy_(buffers)
        network.module.eval()
    return results


def epoch_marks(how: str, epochs: Sequence[int] | None) -> tuple[int, ...]:
    """The sorted numbers of epochs without repetition; those of `EPOCHS` by default."""
    if how not in EPOCHS:
        raise RecipeError(f"how = {how!r}: there is no such way to personalise; {nearest(how, EPOCHS)}")
    marks = tuple(sorted(set(EPOCHS[how] if epochs is None else epochs)))
    if not marks or marks[0] < 0:
        raise RecipeError(f"epochs = {', '.join(map(str, marks)) or 'nothing'}: must be whole numbers, 0 or more")
    if how == "none" and marks != (0,):
        raise RecipeError(f'epochs = {marks[-1]}: how = "none" does not train; leave epochs out')
    return marks


def _exam(problem: Problem, size: int) -> Federation:
    """The federation of test samples, in which each shard has the label distribution of the client's training data."""
    federation = problem.federation
    if size < 1:
        raise RecipeError(f"size = {size}: a client's test set must have at least 1 sample")
    if federation.dataset.train.labels.is_floating_point():
        raise RecipeError(
            f"{federation.dataset.name}: its labels are not class indices, so there are no matching test sets"
        )
    shards = federation.local_tests(problem.seed, size)
    return replace(federation, dataset=replace(federation.dataset, train=federation.dataset.test), shards=shards)


@dataclass(frozen=True)
class Walk:
    """The adaptation of a client from given weights, with stops at the marks, which are numbers of epochs.

    It uses plain SGD or meta steps with the local settings of the recipe, and no other parts of the method.
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
        """Adapts one client. Calls `reached` at each mark, while the network has the weights of that moment."""
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
        return batch_steps(self.problem.federation.samples(client), self.problem.recipe.local.batch, 1, None)

    def _steps(self, client: int, epochs: int) -> int:
        """The number of steps in some epochs: ⌈L/E⌉ meta steps per epoch if a round has E epochs, otherwise L steps."""
        length, local = self._length(client), self.problem.recipe.local
        if self._meta:
            return self._meta.pairs_after(epochs, length, 1 if local.steps else local.epochs)
        return epochs * length

    def _rule(self, client: int) -> LocalRule:
        local = self.problem.recipe.local
        rule = EpochRule(
            lr=self.lr,
            steps=self._steps(client, self.marks[-1]),
            momentum=local.momentum,
            nesterov=local.nesterov,
            weight_decay=local.weight_decay,
            clip=local.clip or None,
            clip_mode=local.clip_mode,
            length=self._length(client),
            falling=self.lr_decay if self.how == "local" else 1.0,
        )
        return self._meta.paired(rule, rule.steps) if self._meta else rule

    def _batches(self, client: int, rule: LocalRule, reached: Callable[[int], None]) -> Iterator[Batch]:
        """The batches of all steps, from one stream of repeated passes over the samples."""
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
        """The batches of repeated passes. Each pass has its own generators, so longer training starts like shorter."""
        problem, length = self.problem, self._length(client)
        for number in count():
            order = generator(problem.seed, "personal", number, client) if problem.shuffle else None
            chance = generator(problem.seed, "personal augment", number, client) if problem.shuffle else None
            yield from problem.federation.batches(client, problem.recipe.local.batch, length, order, chance)


@dataclass(frozen=True)
class Adaptation:
    """Adapts clients from the same weights and tests them at the marks."""

    walk: Walk
    exam: Federation
    neighbours: Neighbours

    def of(self, client: int, start: Tensor) -> list[Personal]:
        """The results of one client. The network keeps the client's final weights."""
        walk, problem = self.walk, self.walk.problem
        samples, tested = problem.federation.samples(client), self.exam.samples(client)
        if not tested:
            return [Personal(client, mark, samples, 0, None, None) for mark in walk.marks]
        module = problem.network.module
        problem.network.load(start)
        before, after = self._accuracy(client, module), dict[int, float]()

        def reached(mark: int) -> None:
            mixed = walk.how == "knn"
            after[mark] = self._accuracy(client, Mixture(problem, client, self.neighbours) if mixed else module)

        walk.of(client, start, reached)
        return [Personal(client, mark, samples, tested, before, after[mark]) for mark in walk.marks]

    def _accuracy(self, client: int, module: nn.Module) -> float:
        shard = self.exam.shards[client]
        parts = (self.exam.batch(shard[start:stop], None) for start, stop in chunks(len(shard), CHUNK))
        problem = self.walk.problem
        total = reduce(add, (score(module, *part, problem.task) for part in parts))
        return total.values[problem.task.metric(problem.recipe.evaluation.metric).name]


def summary(results: Iterable[Personal]) -> list[dict[str, Any]]:
    """Mean and standard deviation over the clients with test samples, for each number of epochs."""
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
    """Writes personal-HOW.jsonl to a run's directory atomically, with one line for each client and number of epochs."""
    path = beside(directory, f"personal-{how}.jsonl")
    try:
        write_whole(path, "".join(json.dumps(asdict(result)) + "\n" for result in results).encode())
    except OSError as error:
        raise RunError(f"{path}: cannot be written ({error.strerror})") from None
    return path
