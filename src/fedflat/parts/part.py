"""What a part is: one idea of one paper, as four functions over named flat vectors."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fedflat.errors import RecipeError
from fedflat.local import LocalRule, Outcome, Vectors

Crowd = Literal["all", "active"]
Place = Literal["", "average", "ascent", "server", "shown"]


@dataclass(frozen=True)
class ServerState:
    """What the server holds between rounds, and in `move` what it adds to the weights.

    In a merge the move begins as the average of the clients' Δ, and each part may change it. `cohort` is the number of
    clients that the recipe expects in a round; draws are made from the seed and the round.
    """

    weights: Tensor
    buffers: Tensor
    move: Tensor
    vectors: Vectors
    round: int
    clients: int
    lr: float = 1.0
    seed: int = 0
    cohort: float = 1.0

    @property
    def arrival(self) -> Tensor:
        """w + η_g · move: where the weights will be if no further part changes the move."""
        return torch.add(self.weights, self.move, alpha=self.lr)

    def __getitem__(self, name: str) -> Tensor:
        return self.vectors[name]

    def update(self, move: Tensor | None = None, **vectors: Tensor) -> ServerState:
        """The state with some of its vectors, and perhaps the move, replaced."""
        return replace(self, vectors={**self.vectors, **vectors}, move=self.move if move is None else move)


@dataclass(frozen=True)
class Upload:
    """What one client sends back, and what it keeps: `memory` stays with the client and never reaches a merge."""

    client: int
    samples: int
    steps: int
    lr: float
    loss: float
    delta: Tensor
    vectors: Vectors = field(default_factory=dict)
    memory: Vectors = field(default_factory=dict)
    notes: dict[str, float] = field(default_factory=dict)

    @cached_property
    def norm(self) -> float:
        """‖Δ‖; it is not finite if any entry of Δ is not."""
        return float(torch.linalg.vector_norm(self.delta))

    def __getitem__(self, name: str) -> Tensor:
        return self.delta if name == "delta" else self.vectors[name]


class Uploads(Sequence[Upload]):
    """The uploads of a round, with every sum made in one order: that of the clients given, or of their numbers.

    They may still be coming in: the sum of the Δᵢ is made while others train, as far as the clients have come without a
    gap but for those who are `away`. If `release` is given no Δᵢ is kept beyond that, and it is told whose can go.
    """

    def __init__(
        self,
        arriving: Iterable[Upload],
        by: Literal["uniform", "samples"],
        order: Sequence[int] = (),
        away: Set[int] = frozenset(),
        release: Callable[[int], None] | None = None,
    ) -> None:
        self._by, self._release = by, release
        self._delta = torch.zeros(0)
        self._uploads: list[Upload] = []
        self._shares: list[int] = []
        waiting, due = dict[int, Upload](), deque(order)
        for upload in arriving:
            waiting[upload.client] = upload
            while due and (due[0] in waiting or due[0] in away):
                self._take(waiting, due.popleft())
        for client in [*due, *sorted(waiting)]:
            self._take(waiting, client)
        total = sum(self._shares)
        self.weights = [share / total for share in self._shares]
        self._delta.div_(total or 1)

    def _take(self, waiting: dict[int, Upload], client: int) -> None:
        if client in waiting:
            self._add(waiting.pop(client))

    def _add(self, upload: Upload) -> None:
        share = upload.samples if self._by == "samples" else 1
        if self._uploads:
            self._delta.add_(upload.delta, alpha=share)
        else:
            self._delta = upload.delta * share
        if self._release:
            upload = replace(upload, delta=upload.delta.new_empty(0))
            self._release(upload.client)
        self._uploads.append(upload)
        self._shares.append(share)

    def __len__(self) -> int:
        return len(self._uploads)

    def __getitem__(self, index: Any) -> Any:
        return self._uploads[index]

    def __iter__(self) -> Iterator[Upload]:
        return iter(self._uploads)

    def sum(self, name: str, weights: Sequence[float] | None = None) -> Tensor:
        """Σᵢ pᵢ xᵢ over the uploads, with pᵢ = 1 unless weights are given."""
        total = torch.zeros_like(self._uploads[0][name])
        for upload, weight in zip(self._uploads, weights or [1.0] * len(self), strict=True):
            total.add_(upload[name], alpha=weight)
        return total

    def average(self, name: str) -> Tensor:
        """Σᵢ pᵢ xᵢ with the recipe's weights, uniform or by samples."""
        return self._delta if name == "delta" else self.sum(name, self.weights)


def option(
    default: Any,
    doc: str,
    low: float = -math.inf,
    high: float = math.inf,
    open_low: bool = False,
    choices: tuple[Any, ...] = (),
) -> Any:
    """A hyper-parameter of a part: a dataclass field with its meaning and its range or choices."""
    kind = bool if isinstance(default, bool) else int if isinstance(default, int) else float
    return field(default=default, metadata={"doc": doc, "range": Range(kind, low, high, open_low, choices)})


@dataclass(frozen=True)
class Range:
    """The values that an option may take.

    >>> print(Range(float, 0, math.inf, open_low=True)), print(Range(int, 1)), print(Range(float, choices=("a", "b")))
    a number > 0
    a whole number ≥ 1
    'a' or 'b'
    (None, None, None)
    """

    kind: type
    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False
    choices: tuple[Any, ...] = ()

    def __contains__(self, value: Any) -> bool:
        if self.choices:
            return value in self.choices and isinstance(value, type(self.choices[0]))
        if self.kind is bool or isinstance(value, bool):
            return self.kind is bool and isinstance(value, bool)
        right_kind = isinstance(value, int) or (
            self.kind is float and isinstance(value, float) and math.isfinite(value)
        )
        return right_kind and self.low <= value <= self.high and not (self.open_low and value == self.low)

    def __str__(self) -> str:
        if self.choices:
            return " or ".join(map(repr, self.choices))
        if self.kind is bool:
            return "true or false"
        number = "a whole number" if self.kind is int else "a number"
        if math.isinf(self.high):
            return number if math.isinf(self.low) else f"{number} {'>' if self.open_low else '≥'} {self.low:g}"
        return f"{number} {'above' if self.open_low else 'from'} {self.low:g} to {self.high:g}"


@dataclass(frozen=True)
class Part:
    """One idea. It holds only its hyper-parameters; state is passed in and out, and randomness is an argument.

    A subclass says what it keeps by plain class attributes, as in `memory = ("drift",)`.
    """

    @property
    def memory(self) -> tuple[str, ...]:
        """Names of the vectors that each client keeps between rounds."""
        return ()

    @property
    def state(self) -> tuple[str, ...]:
        """Names of the vectors that the server keeps between rounds."""
        return ()

    @property
    def uploads(self) -> tuple[str, ...]:
        """Names of the vectors of size d that go up beside Δ."""
        return ()

    @property
    def figures(self) -> dict[str, int]:
        """The few numbers that go up beside them, each with its length."""
        return {}

    @property
    def place(self) -> Place:
        """What only one part of a method can be: the ascent, the average, the server's step, the model shown."""
        return ""

    @property
    def references(self) -> int:
        """How many frozen models are run on every batch."""
        return 0

    @property
    def gradients(self) -> int:
        """Forward and backward passes in every step."""
        return 1

    # What an ascent wants to see of each pass beside the logits, and whether it also works on rows of clients.
    features: ClassVar[bool] = False
    activations: ClassVar[bool] = False
    rows: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if "range" in f.metadata and value not in f.metadata["range"]:
                raise RecipeError(f"{type(self).__name__}.{f.name} = {value!r}: must be {f.metadata['range']}")

    def first_state(self, weights: Tensor) -> Vectors:
        """What the server keeps before round 0: zeros."""
        return {name: torch.zeros_like(weights) for name in self.state}

    def first_memory(self, initial: Tensor) -> Vectors:
        """What a client keeps before its first round, given the initial weights of the federation: zeros."""
        return {name: torch.zeros_like(initial) for name in self.memory}

    def send(self, server: ServerState) -> Vectors:
        """Server side, before the round: vectors that go down beside the weights."""
        return {}

    def plan(self, rule: LocalRule, sent: Vectors, memory: Vectors) -> LocalRule:
        """Client side, before training: what this part adds to the client's rule. Sent and memory are only read."""
        return rule

    def settle(self, sent: Vectors, memory: Vectors, outcome: Outcome) -> tuple[Vectors, Vectors]:
        """Client side, after training: the vectors to remember, and those to upload.

        An upload named "delta" goes up in place of the outcome's Δ.
        """
        return {}, {}

    def merge(self, server: ServerState, uploads: Uploads) -> ServerState:
        """Server side, after the round: the new state, and perhaps another move."""
        return server

    def shown(self, server: ServerState) -> Tensor | None:
        """Server side: the weights to evaluate in place of the server's, if this part has others."""
        return None
