"""One client's turn in a round, the same in a simulation and in a deployment: plan, train, settle."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, Protocol, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from fedflat.errors import RecipeError, SplitError
from fedflat.federation.federation import Federation, batch_steps
from fedflat.heap import first_step_apart, keep_freed_memory
from fedflat.kernels.rows import can_share, train_together
from fedflat.method import Method
from fedflat.metrics import Score, proximal_loss, score
from fedflat.parts import Upload
from fedflat.randomness import forked, generator, key
from fedflat.recipe import Local
from fedflat.rule import Batch, LocalRule, Loss, Outcome, Vectors
from fedflat.step import train
from fedflat.vector import Network

BufferPolicy = Literal["average", "local", "refuse"]
STAGES = ("planning", "training", "settling", "evaluating")
SCORED = 500  # samples of a chunk, when a client looks at all of its own
FAILURES = ("raised", "hung", "died")  # why a client may have no upload at all
About = Literal["hessian", "gradient", "rise", "margin"]
ABOUT: tuple[About, ...] = get_args(About)  # what a client can be asked; a task names it by its place here


@dataclass
class Problem:
    """All that stays the same over the rounds."""

    federation: Federation
    network: Network
    method: Method
    local: Local
    seed: int = 0
    loss: Loss = F.cross_entropy
    shuffle: bool = True
    buffers: BufferPolicy = "average"
    group: int = 1
    measures: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.buffers == "refuse" and self.network.buffer_layout.shapes:
            names = ", ".join(self.network.buffer_layout.shapes)
            raise RecipeError(f'model.buffers = "refuse", but the model has the buffers {names}')
        guard = self.method.protection
        if guard and "buffers" in self.uploads:
            raise RecipeError(
                f"method: {type(guard).__name__} does not protect the batch-norm statistics that clients "
                'upload; set model.buffers = "local" or take a model without them'
            )
        if (client := self.federation.empty()) is not None:
            raise SplitError(f"client {client} holds no sample; give it one or leave it out")

    @property
    def memory(self) -> dict[str, int]:
        """The vectors that each client keeps between rounds, with their sizes."""
        sizes = dict.fromkeys(self.method.memory, self.network.size)
        statistics = self.network.buffers.numel()
        return {**sizes, "buffers": statistics} if statistics and self.buffers == "local" else sizes

    @property
    def uploads(self) -> dict[str, int]:
        """The vectors that each client sends up, with their sizes."""
        sizes = {**dict.fromkeys(("delta", *self.method.uploads), self.network.size), **self.method.figures}
        statistics = self.network.buffers.numel()
        return {**sizes, "buffers": statistics} if statistics and self.buffers != "local" else sizes

    def first_memory(self) -> Vectors:
        """What a client's memory begins with, while the network still has its initial weights."""
        network = self.network
        memory = {name: v.clone() for name, v in self.method.first_memory(network.weights).items()}
        return {**memory, "buffers": network.buffers.clone()} if "buffers" in self.memory else memory

    def room(self, slots: int = 0) -> int:
        """The bytes of all clients' memory, and of `slots` uploads with what those clients want to keep."""
        kept, up = sum(self.memory.values()), self.network.size * (3 + len(self.method.uploads))
        return (self.federation.clients * kept + slots * (kept + up)) * self.network.weights.element_size()


@dataclass(frozen=True)
class Brief:
    """What every client of a cohort is told at the start of a round."""

    round: int
    lr: float
    sent: Vectors


@dataclass(frozen=True)
class Refusal:
    """A client whose round does not count: why in a word, and in a few more."""

    client: int
    reason: str
    detail: str
    error: Exception | None = field(default=None, compare=False)


def mishap(error: Exception, stage: str) -> str:
    """What was raised, at which stage of a turn and where in the code."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} while {stage}: {error} ({Path(where.filename).name}, line {where.lineno})"


@contextmanager
def _lent_generator(seed: int, device: torch.device) -> Iterator[None]:
    """Dropout draws from the global generator: lend it one that belongs to this turn."""
    with forked(device):
        if device.type == "cpu":
            torch.default_generator.manual_seed(seed)
        else:
            torch.manual_seed(seed)
        yield


class Question(Protocol):
    """What a client can tell from its samples, with the global model in the problem's network: a vector about one."""

    def __call__(self, problem: Problem, client: int, vector: Tensor) -> Tensor: ...


Questions = Question | Mapping[About, Question]  # one for whatever is asked, or several by name


class Worker:
    """Gives one client after the other its turn, scores models and answers a question, in one resident network."""

    def __init__(
        self,
        problem: Problem,
        question: Questions | None = None,
        stage: Tensor | None = None,
        first: Vectors | None = None,
    ) -> None:
        keep_freed_memory()
        self._new = True
        self.problem, self._question = problem, question
        # In shared memory, so that the server can tell at which stage a worker was lost.
        self._stage = (torch.zeros(1, dtype=torch.int64) if stage is None else stage).numpy()
        self._first = problem.first_memory() if first is None else first

    @property
    def stage(self) -> str:
        """Where in a turn this worker is."""
        return STAGES[self._stage[0]]

    def _enter(self, stage: str) -> None:
        self._stage[0] = STAGES.index(stage)

    def turn(self, brief: Brief, client: int, memory: Vectors | None) -> Upload:
        """One client's round; `memory` is None if the client never took part before."""
        problem, network, sent = self.problem, self.problem.network, brief.sent
        memory, rule = self._plan(brief, client, memory)
        network.reset_counters()
        if network.buffers.numel():
            network.buffers.copy_(memory["buffers"] if "buffers" in memory else sent["buffers"])
        batches = self._batches(brief, client, rule)
        if self._new:
            batches, self._new = first_step_apart(batches), False
        self._enter("training")
        with _lent_generator(key(problem.seed, "dropout", brief.round, client), network.weights.device):
            outcome = train(network, sent["weights"], rule, batches, problem.loss)
        return self._settle(brief, client, memory, outcome)

    def turns(self, brief: Brief, clients: Sequence[int], memories: Sequence[Vectors | None]) -> list[Upload]:
        """The rounds of several clients, in common steps if their rules allow it and one by one if not."""
        problem, named = self.problem, list(zip(clients, memories, strict=True))
        soft = problem.federation.dataset.train.labels.is_floating_point()
        if len(clients) == 1 or problem.loss is not F.cross_entropy or soft or problem.federation.augment.draws:
            return [self.turn(brief, client, memory) for client, memory in named]
        plans = [self._plan(brief, client, memory) for client, memory in named]
        rules = [rule for _, rule in plans]
        if not can_share(problem.network, rules):
            return [self.turn(brief, client, memory) for client, memory in named]
        orders = [self._order(brief, client) for client in clients]
        steps = [rule.steps for rule in rules]
        batches = problem.federation.batches_together(clients, problem.local.batch, steps, orders)
        self._enter("training")
        outcomes = train_together(problem.network, brief.sent["weights"], rules, batches)
        planned = zip(clients, plans, outcomes, strict=True)
        return [self._settle(brief, client, memory, outcome) for client, (memory, _), outcome in planned]

    def _plan(self, brief: Brief, client: int, memory: Vectors | None) -> tuple[Vectors, LocalRule]:
        self._enter("planning")
        device = self.problem.network.weights.device
        known = self._first if memory is None else {name: vector.to(device) for name, vector in memory.items()}
        return known, self.problem.method.plan(self._rule(brief, client), brief.sent, known)

    def _settle(self, brief: Brief, client: int, memory: Vectors, outcome: Outcome) -> Upload:
        self._enter("settling")
        problem, rule, buffers = self.problem, outcome.rule, self.problem.network.buffers
        trained = Upload(
            client=client,
            samples=problem.federation.samples(client),
            steps=rule.steps,
            lr=rule.mean_lr,
            loss=outcome.loss,
            delta=outcome.delta,
            notes={**outcome.notes, **self._noted(brief, client, outcome)},
        )
        upload, kept = problem.method.report(trained, brief.sent, memory, outcome)
        vectors = dict(upload.vectors)
        if buffers.numel():
            (kept if "buffers" in memory else vectors)["buffers"] = buffers.clone()
        return replace(upload, vectors=vectors, memory=kept)

    def _noted(self, brief: Brief, client: int, outcome: Outcome) -> dict[str, float]:
        """What the recipe wants to know of the model that the client ended with."""
        problem, start = self.problem, brief.sent["weights"]
        if "proximal" not in problem.measures:
            return {}
        indices = problem.federation.shard(client).split(SCORED)
        batches = (problem.federation.batch(some, None) for some in indices)
        return {"proximal_loss": proximal_loss(problem.network, start, start + outcome.delta, batches)}

    def _rule(self, brief: Brief, client: int) -> LocalRule:
        local, federation = self.problem.local, self.problem.federation
        return LocalRule(
            lr=brief.lr,
            steps=batch_steps(federation.samples(client), local.batch, local.epochs, local.steps),
            epochs=1 if local.steps else local.epochs,
            first_lr=local.lr,
            typical_steps=batch_steps(federation.mean_samples, local.batch, local.epochs, local.steps),
            momentum=local.momentum,
            nesterov=local.nesterov,
            weight_decay=local.weight_decay,
            clip=local.clip or None,
            clip_mode=local.clip_mode,
            share=federation.share(client),
            layout=self.problem.network.layout,
            head=self.problem.network.head,
            measures=self.problem.measures,
            seed=self.problem.seed,
            round=brief.round,
            client=client,
            frozen=self.problem.network.fixed,
        )

    def _batches(self, brief: Brief, client: int, rule: LocalRule) -> Iterator[Batch]:
        problem = self.problem
        order = self._order(brief, client)
        chance = generator(problem.seed, "augment", brief.round, client) if problem.shuffle else None
        steps = rule.steps * (1 + rule.pairs)
        return problem.federation.batches(client, problem.local.batch, steps, order, chance)

    def _order(self, brief: Brief, client: int) -> torch.Generator | None:
        return generator(self.problem.seed, "batches", brief.round, client) if self.problem.shuffle else None

    def score(self, weights: Tensor, buffers: Tensor, part: str, start: int, stop: int) -> Score:
        """A model's score on one chunk of the test or training samples."""
        problem = self.problem
        self._load(weights, buffers)
        inputs, labels = problem.federation.held_out(part, start, stop)
        return score(problem.network.module, inputs, labels, problem.loss, problem.federation.dataset.classes)

    def answer(self, weights: Tensor, buffers: Tensor, client: int, vector: Tensor, about: About = "hessian") -> Tensor:
        """What a client answers to the question about a vector, at these weights."""
        question = self._question.get(about) if isinstance(self._question, Mapping) else self._question
        if question is None:
            raise RuntimeError("this engine was started without a question to its clients")
        self._load(weights, buffers)
        return question(self.problem, client, vector)

    def _load(self, weights: Tensor, buffers: Tensor) -> None:
        self._enter("evaluating")
        self.problem.network.weights.copy_(weights)
        self.problem.network.buffers.copy_(buffers)
