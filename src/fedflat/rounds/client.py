"""One client's local round, the same in a simulation and in a deployment: plan, train, report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, Protocol, get_args

import torch
from torch import Tensor

from fedflat.federation import batch_steps
from fedflat.local import Batch, LocalRule, Outcome, Vectors, can_share, mixes_samples, train, train_together
from fedflat.methods import Upload
from fedflat.randomness import forked, generator
from fedflat.rounds.metrics import Score, proximal_loss, score
from fedflat.rounds.setup import Broadcast, Problem

STAGES = ("planning", "training", "reporting", "evaluating")
ALIGNED = 64  # bytes; kernels may sum in another order at other addresses
SCORED = 500  # samples per chunk when a client evaluates all of its samples
About = Literal["hessian", "gradient", "rise", "margin", "curvature"]
Feed = Callable[[Iterator[Batch]], Iterator[Batch]]  # wraps the batches of a local round
ABOUT: tuple[About, ...] = get_args(About)  # what a client can be asked; a task refers to it by its index here


@contextmanager
def lent_generator(chance: torch.Generator, device: torch.device) -> Iterator[None]:
    """Seed the global generator, which dropout uses, for this local round, and restore it afterwards."""
    with forked(device):
        if device.type == "cpu":
            torch.default_generator.set_state(chance.get_state())
        else:
            torch.manual_seed(chance.initial_seed())
        yield


class Trained(NamedTuple):
    """The result of a client's local round: its upload, and the memory it keeps once the upload is merged."""

    upload: Upload
    kept: Vectors


def local_rule(problem: Problem, broadcast: Broadcast, client: int, samples: int, share: float = 1.0) -> LocalRule:
    """The local rule of a client's round before the method's parts modify it; `share` is nᵢ m/N."""
    local, network = problem.recipe.local, problem.network
    return LocalRule(
        lr=broadcast.lr,
        steps=batch_steps(samples, local.batch, local.epochs, local.steps),
        epochs=1 if local.steps else local.epochs,
        first_lr=local.lr,
        typical_steps=batch_steps(problem.federation.mean_samples, local.batch, local.epochs, local.steps),
        momentum=local.momentum,
        nesterov=local.nesterov,
        weight_decay=local.weight_decay,
        clip=local.clip or None,
        clip_mode=local.clip_mode,
        share=share,
        layout=network.layout,
        head=network.head,
        measures=problem.recipe.evaluation.measures,
        seed=problem.seed,
        round=broadcast.round,
        client=client,
        graph=problem.recipe.engine.graph,
    )


class Question(Protocol):
    """A function of a client's samples and a vector, evaluated with the global model in the problem's network.

    The answer is a vector of size d, or in a pool any other object, which is then sent through the worker's pipe.
    """

    def __call__(self, problem: Problem, client: int, vector: Tensor) -> Any: ...


Questions = Question | Mapping[About, Question]  # one question, or several by name


class Worker:
    """Runs local rounds one client at a time, scores models and answers questions, with one network.

    Args:
        problem: what the recipe describes.
        question: what the clients can be asked.
        stage: one integer that always holds the current stage.
        first: the memory of a client before its first round; default: the problem's.
        feed: wraps the batches of every local round.
    """

    def __init__(
        self,
        problem: Problem,
        question: Questions | None = None,
        stage: Tensor | None = None,
        first: Vectors | None = None,
        feed: Feed = iter,
    ) -> None:
        self.problem, self._question = problem, question
        # In shared memory, so that the server can tell at which stage a worker was lost.
        self._stage = (torch.zeros(1, dtype=torch.int64) if stage is None else stage).numpy()
        self._first = problem.first_memory() if first is None else first
        self._feed = feed
        self._mixes: bool | None = None

    @property
    def stage(self) -> str:
        """The current stage of the local round."""
        return STAGES[self._stage[0]]

    def _enter(self, stage: str) -> None:
        self._stage[0] = STAGES.index(stage)

    def local_round(self, broadcast: Broadcast, client: int, memory: Vectors | None) -> Trained:
        """Run one client's round; `memory` is None if the client has never taken part."""
        problem, network = self.problem, self.problem.network
        sent, memory, rule = self._plan(broadcast, client, memory)
        network.reset_counters()
        if network.buffers.numel():
            network.buffers.copy_(memory["buffers"] if "buffers" in memory else sent["buffers"])
        batches = self._feed(self._batches(broadcast, client, rule))
        self._enter("training")
        chance = generator(problem.seed, "dropout", broadcast.round, client)
        with lent_generator(chance, network.weights.device):
            outcome = train(network, sent["weights"], rule, batches, problem.loss)
        return self._report(sent, client, memory, outcome)

    def local_rounds(
        self, broadcast: Broadcast, clients: Sequence[int], memories: Sequence[Vectors | None]
    ) -> list[Trained]:
        """Run the rounds of several clients, in common steps if their rules allow it, else one by one."""
        problem, named = self.problem, list(zip(clients, memories, strict=True))
        labels = problem.federation.dataset.train.labels
        if len(clients) == 1 or problem.federation.augment.draws:
            return [self.local_round(broadcast, client, memory) for client, memory in named]
        plans = [self._plan(broadcast, client, memory) for client, memory in named]
        starts, rules = [sent["weights"] for sent, _, _ in plans], [rule for _, _, rule in plans]
        if not can_share(problem.network, rules, problem.loss, labels) or self._mixes_samples(starts[0]):
            return [self.local_round(broadcast, client, memory) for client, memory in named]
        orders = [self._order(broadcast, client) for client in clients]
        steps = [rule.steps for rule in rules]
        batches = problem.federation.batches_together(clients, problem.recipe.local.batch, steps, orders)
        self._enter("training")
        outcomes = train_together(problem.network, torch.stack(starts), rules, batches)
        planned = zip(clients, plans, outcomes, strict=True)
        return [self._report(sent, client, memory, outcome) for client, (sent, memory, _), outcome in planned]

    def _mixes_samples(self, weights: Tensor) -> bool:
        """Whether the network mixes the samples of a batch; found out once, on the same samples in every process."""
        if self._mixes is None:
            last = self.problem.federation.size("train") - 1
            some = torch.tensor(sorted({0, last // 2, last}))
            self._mixes = mixes_samples(self.problem.network, weights, self.problem.federation.batch(some, None)[0])
        return self._mixes

    def _plan(self, broadcast: Broadcast, client: int, memory: Vectors | None) -> tuple[Vectors, Vectors, LocalRule]:
        """Return what the client received, with its own start as the weights, its memory, and its rule."""
        self._enter("planning")
        device, method = self.problem.network.weights.device, self.problem.method
        known = self._first if memory is None else {name: vector.to(device) for name, vector in memory.items()}
        sent = method.begin(broadcast.sent, known)
        return sent, known, method.plan(self._rule(broadcast, client), sent, known)

    def _report(self, sent: Vectors, client: int, memory: Vectors, outcome: Outcome) -> Trained:
        self._enter("reporting")
        problem, rule, buffers = self.problem, outcome.rule, self.problem.network.buffers
        trained = Upload(
            client=client,
            samples=problem.federation.samples(client),
            steps=rule.steps,
            lr=rule.mean_lr,
            loss=outcome.loss,
            delta=outcome.delta,
            notes={**outcome.notes, **self._noted(sent["weights"], client, outcome)},
        )
        upload, kept = problem.method.report(trained, sent, memory, outcome)
        if buffers.numel():
            (kept if "buffers" in memory else upload.vectors)["buffers"] = buffers.clone()
        return Trained(upload, kept)

    def _noted(self, start: Tensor, client: int, outcome: Outcome) -> dict[str, float]:
        """The measures that the recipe requests of the client's final model."""
        problem = self.problem
        if "proximal" not in problem.recipe.evaluation.measures:
            return {}
        indices = problem.federation.shard(client).split(SCORED)
        batches = (problem.federation.batch(some, None) for some in indices)
        return {"proximal_loss": proximal_loss(problem.network, start, start + outcome.delta, batches)}

    def _rule(self, broadcast: Broadcast, client: int) -> LocalRule:
        federation = self.problem.federation
        return local_rule(self.problem, broadcast, client, federation.samples(client), federation.share(client))

    def _batches(self, broadcast: Broadcast, client: int, rule: LocalRule) -> Iterator[Batch]:
        problem = self.problem
        order = self._order(broadcast, client)
        chance = generator(problem.seed, "augment", broadcast.round, client) if problem.shuffle else None
        steps = rule.steps * (1 + rule.pairs)
        return problem.federation.batches(client, problem.recipe.local.batch, steps, order, chance)

    def _order(self, broadcast: Broadcast, client: int) -> torch.Generator | None:
        return generator(self.problem.seed, "batches", broadcast.round, client) if self.problem.shuffle else None

    def score(self, weights: Tensor, buffers: Tensor, part: str, start: int, stop: int) -> Score:
        """Score a model on one chunk of the test or training samples."""
        problem = self.problem
        self._enter("evaluating")
        inputs, labels = problem.federation.held_out(part, start, stop)
        weights = weights if weights.data_ptr() % ALIGNED == 0 else weights.clone()
        with problem.network.standing_at(weights, buffers):  # without a copy of the model for every chunk
            return score(problem.network.module, inputs, labels, problem.task)

    def answer(self, weights: Tensor, buffers: Tensor, client: int, vector: Tensor, about: About = "hessian") -> Any:
        """Return a client's answer to the question about a vector, at these weights.

        Raises:
            RuntimeError: if the worker was created without this question.
        """
        question = self._question.get(about) if isinstance(self._question, Mapping) else self._question
        if question is None:
            raise RuntimeError("this engine was started without a question to its clients")
        self._load(weights, buffers)
        return question(self.problem, client, vector)

    def _load(self, weights: Tensor, buffers: Tensor) -> None:
        self._enter("evaluating")
        self.problem.network.load(weights)
        self.problem.network.buffers.copy_(buffers)
