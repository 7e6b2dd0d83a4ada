"""What a part is: one idea of one paper, as four functions over named flat vectors."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fedflat.errors import RecipeError
from fedflat.local import LocalRule, Outcome, Vectors

Place = Literal["", "average", "ascent", "server"]


@dataclass(frozen=True)
class ServerState:
    """What the server holds between rounds, and in `move` what it adds to the weights.

    In a merge the move begins as the average of the clients' Δ, and each part may change it.
    """

    weights: Tensor
    buffers: Tensor
    move: Tensor
    vectors: Vectors
    round: int
    clients: int

    def __getitem__(self, name: str) -> Tensor:
        return self.vectors[name]

    def update(self, move: Tensor | None = None, **vectors: Tensor) -> ServerState:
        """The state with some of its vectors, and perhaps the move, replaced."""
        return dataclasses.replace(self, vectors={**self.vectors, **vectors}, move=self.move if move is None else move)


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

    def __getitem__(self, name: str) -> Tensor:
        return self.delta if name == "delta" else self.vectors[name]


class Uploads(Sequence[Upload]):
    """The uploads of a round in the order of client ids, so that every sum is made in one order."""

    def __init__(self, uploads: Sequence[Upload], by: Literal["uniform", "samples"]) -> None:
        self._uploads = sorted(uploads, key=lambda upload: upload.client)
        total = sum(upload.samples for upload in self._uploads)
        self.weights = [u.samples / total if by == "samples" else 1 / len(self._uploads) for u in self._uploads]

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
        return self.sum(name, self.weights)


def option(default: Any, doc: str, low: float = -math.inf, high: float = math.inf, open_low: bool = False) -> Any:
    """A hyper-parameter of a part: a dataclass field with its meaning and range."""
    return field(default=default, metadata={"doc": doc, "low": low, "high": high, "open_low": open_low})


@dataclass(frozen=True)
class Part:
    """One idea. It holds only its hyper-parameters; state is passed in and out, and randomness is an argument.

    `memory` names the vectors that each client keeps between rounds, `state` those of the server, all zero at first;
    `uploads` names the vectors that go up beside Δ. `place` is what only one part of a method can occupy.
    """

    memory: ClassVar[tuple[str, ...]] = ()
    state: ClassVar[tuple[str, ...]] = ()
    uploads: ClassVar[tuple[str, ...]] = ()
    place: ClassVar[Place] = ""
    reference: ClassVar[bool] = False
    passes: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for f in fields(self):
            if f.metadata:
                check_range(f"{type(self).__name__}.{f.name}", getattr(self, f.name), f)

    def send(self, server: ServerState) -> Vectors:
        """Server side, before the round: vectors that go down beside the weights."""
        return {}

    def plan(self, rule: LocalRule, sent: Vectors, memory: Vectors) -> LocalRule:
        """Client side, before training: what this part adds to the client's rule."""
        return rule

    def settle(self, sent: Vectors, memory: Vectors, outcome: Outcome) -> tuple[Vectors, Vectors]:
        """Client side, after training: the vectors to remember, and those to upload."""
        return {}, {}

    def merge(self, server: ServerState, uploads: Uploads) -> ServerState:
        """Server side, after the round: the new state, and perhaps another move."""
        return server


def check_range(name: str, value: Any, f: dataclasses.Field[Any]) -> None:
    """Refuse a hyper-parameter that is not of its default's kind or not in its range, in one sentence."""
    if isinstance(f.default, bool) or not isinstance(f.default, (int, float)):
        if not isinstance(value, type(f.default)):
            raise RecipeError(f"{name} = {value!r}: must be of the kind of {f.default!r}")
        return
    low, high, open_low = f.metadata["low"], f.metadata["high"], f.metadata["open_low"]
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value < low or value > high or (open_low and value == low):
        raise RecipeError(f"{name} = {value!r}: must be {range_text(low, high, open_low)}")


def range_text(low: float, high: float, open_low: bool = False) -> str:
    """A range in words.

    >>> range_text(0, math.inf, open_low=True), range_text(0, 1)
    ('a number > 0', 'a number between 0 and 1')
    """
    if math.isinf(low) and math.isinf(high):
        return "a finite number"
    if math.isinf(high):
        return f"a number {'>' if open_low else '≥'} {low:g}"
    return f"a number {'above' if open_low else 'between'} {low:g} {'up to' if open_low else 'and'} {high:g}"
