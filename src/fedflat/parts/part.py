"""What a part is: one idea of one paper, as four functions over named flat vectors."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fedflat.errors import RecipeError
from fedflat.parts.uploads import Upload, Uploads
from fedflat.rule import LocalRule, Outcome, Vectors

Crowd = Literal["all", "active"]
Stage = Literal["client", "server", "evaluation"]
Sight = Literal["average", "each"]
Protection = Literal["", "upload", "average"]


@dataclass(frozen=True)
class ServerView:
    """The server as one part sees it: facts of the round, and under `view["name"]` the part's own state.

    `start` is what the clients start from: the weights wᵗ, unless a part changed it. `lr` is η_g; `cohort` is the
    number of clients that the recipe expects in a round; draws are made from the seed and the round.
    """

    weights: Tensor
    start: Tensor
    round: int
    clients: int
    vectors: Vectors = field(default_factory=dict)
    lr: float = 1.0
    seed: int = 0
    cohort: float = 1.0

    def __getitem__(self, name: str) -> Tensor:
        return self.vectors[name]

    def arrival(self, move: Tensor) -> Tensor:
        """w + η_g · move: where the weights will be if no further part changes the move."""
        return torch.add(self.weights, move, alpha=self.lr)


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
    """One idea. It holds only its hyper-parameters: state is passed in and out, and randomness is an argument.

    What a chain passes on is threaded: each part gets what the one before it made. Names are the part's own: another
    part's state, memory and messages are out of its sight, even where they have the same names.

        server   broadcast    what goes down to the clients beside the weights
        client   plan         this part's ingredients of the local step
        client   report       the upload as this part changes it, and what the client keeps
        server   merge        the move as this part changes it, and the part's new state

    What a part is given is only to be read; what it returns is its own. A `Method` runs all four on a small example
    when it is made. It sees there who writes what, and refuses parts that would overwrite each other.
    """

    # When it merges: with the clients' corrections, with the server's step, or after it, when the new model is known.
    stage: ClassVar[Stage] = "client"
    # What its merge may look at: sums and averages of the uploads, or each of them.
    sees: ClassVar[Sight] = "average"
    # What it protects: each upload on the client, or the average on the server.
    protects: ClassVar[Protection] = ""

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if "range" in f.metadata and value not in f.metadata["range"]:
                raise RecipeError(f"{type(self).__name__}.{f.name} = {value!r}: must be {f.metadata['range']}")

    def first_state(self, weights: Tensor) -> Vectors:
        """What the server keeps for this part before round 0, given the initial weights."""
        return {}

    def first_memory(self, initial: Tensor) -> Vectors:
        """What a client keeps for this part before its first round, given the initial weights of the federation."""
        return {}

    def broadcast(self, server: ServerView) -> Vectors:
        """Server side, before the round: vectors that go down beside the weights.

        A vector named "weights" goes down in place of `server.start`, and the clients start there.
        """
        return {}

    def plan(self, rule: LocalRule, sent: Vectors, memory: Vectors) -> LocalRule:
        """Client side, before training: the rule with this part's ingredients.

        Args:
            rule: the rule as the parts before this one have made it.
            sent: what this part broadcast, and under "weights" what the client starts from.
            memory: what the client keeps for this part.
        """
        return rule

    def report(self, upload: Upload, sent: Vectors, memory: Vectors, outcome: Outcome) -> tuple[Upload, Vectors]:
        """Client side, after training: the upload as this part changes it, and what the client keeps for this part.

        Args:
            upload: the upload as the parts before this one have made it; `upload.update(delta=..., name=...)` changes
                its Δ and adds vectors of this part's own.
            outcome: how the training went; `outcome.delta` is how far the client moved, whatever it uploads.
        """
        return upload, memory

    def merge(self, move: Tensor, server: ServerView, uploads: Uploads) -> tuple[Tensor, Vectors]:
        """Server side, after the round: the move as this part changes it, and the part's state as far as it is new.

        Args:
            move: the average of the clients' Δ as the parts before this one have changed it; the server goes to
                `server.weights + server.lr * move`.
            uploads: the round's uploads; single ones can be had only if the part declares `sees = "each"`.
        """
        return move, {}

    def evaluated(self, server: ServerView) -> Tensor | None:
        """Server side: the weights to evaluate in place of the server's, if this part has others."""
        return None


@dataclass(frozen=True)
class Wrapper(Part):
    """A part around another one, whose plan it uses in a way of its own. The chain keeps the inner part's drawers."""

    part: Part

    def wrap(self, rule: LocalRule, inner: LocalRule, sent: Vectors, memory: Vectors) -> LocalRule:
        """The rule, given the `inner` rule that has the wrapped part's ingredients and no others."""
        raise NotImplementedError
