"""Adapts a global model to one client, and tests it after given numbers of epochs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from itertools import count, islice
from operator import add

from torch import Tensor, nn

from fedflat.errors import RecipeError, TrainingError
from fedflat.federation import Federation, batch_steps
from fedflat.local import Batch, LocalRule, train
from fedflat.methods import MetaStep
from fedflat.randomness import generator
from fedflat.rounds import Problem, chunks, lent_generator, score
from fedflat.runs.neighbours import CHUNK, Mixture, Neighbours

ALONE = 0.99  # decay factor of the learning rate per epoch in local-only training


@dataclass(frozen=True)
class Personal:
    """The accuracy of one client, or another metric of the task, before and after adaptation.

    It is None if the client has no test samples, or none for which the metric is defined: R² needs two.
    """

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
        chance = generator(problem.seed, "personal dropout", client=client)
        with lent_generator(chance, start.device):
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
        """The batches of repeated passes. Each pass has its own generators, so longer runs begin like shorter ones."""
        problem, length = self.problem, self._length(client)
        for number in count():
            order = generator(problem.seed, "personal", number, client) if problem.shuffle else None
            chance = generator(problem.seed, "personal augment", number, client) if problem.shuffle else None
            yield from problem.federation.batches(client, problem.recipe.local.batch, length, order, chance)


@dataclass(frozen=True)
class Adaptation:
    """Adapts clients from the same weights and batch statistics, and tests them at the marks.

    It is also a question that an engine can ask its clients about the weights.
    """

    walk: Walk
    exam: Federation
    neighbours: Neighbours
    statistics: Tensor

    def __call__(self, problem: Problem, client: int, vector: Tensor) -> list[Personal]:
        return self.of(client, vector)

    def of(self, client: int, start: Tensor) -> list[Personal]:
        """The results of one client. The network keeps the client's final weights."""
        walk, problem = self.walk, self.walk.problem
        samples, tested = problem.federation.samples(client), self.exam.samples(client)
        if not tested:
            return [Personal(client, mark, samples, 0, None, None) for mark in walk.marks]
        module = problem.network.module
        problem.network.load(start)
        problem.network.buffers.copy_(self.statistics)
        problem.network.reset_counters()
        before, after = self._accuracy(client, module), dict[int, float | None]()

        def reached(mark: int) -> None:
            mixed = walk.how == "knn"
            after[mark] = self._accuracy(client, Mixture(problem, client, self.neighbours) if mixed else module)

        walk.of(client, start, reached)
        return [Personal(client, mark, samples, tested, before, after[mark]) for mark in walk.marks]

    def _accuracy(self, client: int, module: nn.Module) -> float | None:
        shard = self.exam.shards[client]
        parts = (self.exam.batch(shard[start:stop], None) for start, stop in chunks(len(shard), CHUNK))
        problem = self.walk.problem
        total = reduce(add, (score(module, *part, problem.task) for part in parts))
        value = total.values[problem.task.metric(problem.recipe.evaluation.metric).name]
        return None if math.isnan(value) else value
