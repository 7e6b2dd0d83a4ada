"""The data structures of a round: the problem, the server's broadcast and the refusal of a client."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from fedflat.errors import RecipeError, SplitError
from fedflat.federation import Federation
from fedflat.local import Loss, Vectors
from fedflat.methods import Method, Privacy, spell
from fedflat.models import Network
from fedflat.randomness import Secret
from fedflat.recipe import BufferPolicy, Engine, Evaluation, Local, Measure, Model, Recipe
from fedflat.tasks import CLASSIFICATION, Task

FAILURES = ("raised", "hung", "died")  # reasons why a client may send no upload


@dataclass
class Problem:
    """Everything that stays the same over the rounds: the recipe, and the four objects that it names.

    The recipe's `data`, `split`, `model`, `method` and `task` are names, as a file holds them; `federation`, `network`,
    `method` and `task` are what was built from them, or given in Python. All settings are in the recipe alone.

    `secret` seeds the draws of this side of a deployment, instead of the recipe's seed. `deployed` is true if the
    clients, and so their privacy, are real. `discarded` is the number of rounds that a deployment has discarded to
    return to an earlier checkpoint.
    """

    federation: Federation
    network: Network
    method: Method
    recipe: Recipe = Recipe()
    task: Task = CLASSIFICATION
    shuffle: bool = True
    secret: Secret | None = None
    deployed: bool = False
    discarded: int = 0

    @classmethod
    def of(
        cls,
        federation: Federation,
        network: Network,
        method: Method,
        local: Local | None = None,
        *,
        seed: int = 0,
        buffers: BufferPolicy = "average",
        group: int = 1,
        measures: Sequence[Measure] = (),
        task: Task = CLASSIFICATION,
        loss: Loss | None = None,
        **others: Any,
    ) -> Problem:
        """Create a problem from a few settings; the rest of the recipe has its defaults. `loss` replaces the task's."""
        recipe = Recipe(
            seed=seed,
            method=spell(method),
            model=Model(buffers=buffers),
            local=local or Local(),
            evaluation=Evaluation(measures=[*measures]),
            engine=Engine(group=group),
        )
        return cls(federation, network, method, recipe, task.with_loss(loss) if loss else task, **others)

    def __post_init__(self) -> None:
        if self.recipe.model.buffers == "refuse" and self.network.buffer_layout.shapes:
            names = ", ".join(self.network.buffer_layout.shapes)
            raise RecipeError(f'model.buffers = "refuse", but the model has the buffers {names}')
        self.method.fits(self.network.layout)
        if self.task.output in ("values", "labels"):
            self.method.refuse_without_classes(self.task.name)
            if "proximal" in self.recipe.evaluation.measures:
                told = f"compares probabilities of classes, and task = {self.task.name!r} has none"
                raise RecipeError(f"evaluation.measures: proximal {told}")
        guard = self.method.protection
        if self.deployed and isinstance(guard, Privacy):
            guard.refuse_seeded()
        if guard and "buffers" in self.uploads:
            raise RecipeError(
                f"method: {type(guard).__name__} does not protect the batch-norm statistics that clients "
                'upload; set model.buffers = "local" or take a model without them'
            )
        if (client := self.federation.empty()) is not None:
            raise SplitError(f"client {client} holds no sample; give it one or leave it out")

    @property
    def loss(self) -> Loss:
        """The loss of outputs and labels."""
        return self.task.loss

    @property
    def seed(self) -> int:
        """The seed of the draws on this side."""
        return self.recipe.seed if self.secret is None else self.secret

    @property
    def group(self) -> int:
        """The number of clients that share a step."""
        return self.recipe.engine.group or 1

    @cached_property
    def memory(self) -> dict[str, int]:
        """The vectors that each client keeps between rounds, with their sizes."""
        sizes = dict.fromkeys(self.method.memory, self.network.size)
        statistics = self.network.buffers.numel()
        return {**sizes, "buffers": statistics} if statistics and self.recipe.model.buffers == "local" else sizes

    @property
    def notes(self) -> frozenset[str]:
        """The names of the notes that clients may report; * stands for a layer of the network."""
        return self.method.notes | ({"proximal_loss"} if "proximal" in self.recipe.evaluation.measures else set())

    @cached_property
    def uploads(self) -> dict[str, int]:
        """The vectors that each client uploads, with their sizes."""
        sizes = self.method.upload_sizes(self.network.layout)
        statistics = self.network.buffers.numel()
        return {**sizes, "buffers": statistics} if statistics and self.recipe.model.buffers != "local" else sizes

    def first_memory(self) -> Vectors:
        """The initial memory of a client, computed while the network still has its initial weights."""
        network = self.network
        memory = {name: v.clone() for name, v in self.method.first_memory(network.weights).items()}
        return {**memory, "buffers": network.buffers.clone()} if "buffers" in self.memory else memory

    @property
    def kept(self) -> int:
        """The bytes that each client keeps between rounds."""
        return sum(self.memory.values()) * self.network.weights.element_size()

    def memory_room(self) -> int:
        """The bytes of all clients' memory."""
        return self.federation.clients * self.kept

    def upload_room(self, slots: int) -> int:
        """The bytes of a round with `slots` uploads and their clients' new memory."""
        return slots * (self.kept + (3 + len(self.method.uploads)) * self.network.weights.nbytes)


@dataclass(frozen=True)
class Broadcast:
    """What every client of a cohort receives at the start of a round."""

    round: int
    lr: float
    sent: Vectors


@dataclass(frozen=True)
class Refusal:
    """A client whose round does not count: a one-word reason and a short explanation."""

    client: int
    reason: str
    detail: str
    error: Exception | None = field(default=None, compare=False)


def failure(error: Exception, stage: str) -> str:
    """Describe an exception: what was raised, at which stage of a local round and where in the code."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} while {stage}: {error} ({Path(where.filename).name}, line {where.lineno})"
