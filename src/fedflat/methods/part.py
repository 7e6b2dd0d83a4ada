"""The base class of parts: one idea of a paper, as functions over named flat vectors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal

import torch
from torch import Generator, Tensor

from fedflat.errors import RecipeError
from fedflat.local import LocalRule, Outcome, Vectors
from fedflat.methods.uploads import RobustUploads, Upload, Uploads
from fedflat.models import Layout
from fedflat.randomness import generator

Crowd = Literal["all", "active"]
Stage = Literal["client", "server", "evaluation"]
Sight = Literal["average", "each"]
Protection = Literal["", "upload", "average"]


@dataclass(frozen=True)
class ServerView:
    """The server as one part sees it: data of the round, and the part's own state as `view["name"]`.

    `start` are the weights from which the clients start: wᵗ, unless a part changes them. `lr` is η_g, and `cohort` is
    the number of clients that the recipe expects in a round. `layout` finds the model's tensors in a vector of size d.
    Random draws depend on the seed and the round; `stream` separates two parts of one class.
    """

    weights: Tensor
    start: Tensor
    round: int
    clients: int
    vectors: Vectors = field(default_factory=dict)
    lr: float = 1.0
    seed: int = 0
    cohort: float = 1.0
    layout: Layout = field(default_factory=lambda: Layout({}))
    stream: str = ""

    def __getitem__(self, name: str) -> Tensor:
        return self.vectors[name]

    def generator(self, purpose: str) -> Generator:
        """Return a new generator for a part's draws on the server, seeded by seed, purpose and round."""
        return generator(self.seed, f"part/{purpose}{self.stream}", self.round)

    def arrival(self, move: Tensor) -> Tensor:
        """Return w + η_g · move: the new weights if no further part changes the move."""
        return torch.add(self.weights, move, alpha=self.lr)


def option(
    default: Any,
    doc: str,
    low: float = -math.inf,
    high: float = math.inf,
    open_low: bool = False,
    choices: tuple[Any, ...] = (),
    open_high: bool = False,
) -> Any:
    """Declare a hyper-parameter of a part: a dataclass field with its meaning and its range or choices.

    Args:
        default: the default value; its type (bool, int or float) is the type of the option.
        doc: the meaning, for the method pages.
        low: the smallest value.
        high: the largest value.
        open_low: whether `low` itself is excluded.
        choices: the allowed values, in place of a range.
        open_high: whether `high` itself is excluded.

    Returns:
        The field. A part raises a RecipeError for a value outside of the range.
    """
    kind = bool if isinstance(default, bool) else int if isinstance(default, int) else float
    return field(default=default, metadata={"doc": doc, "range": Range(kind, low, high, open_low, choices, open_high)})


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
    open_high: bool = False

    def __contains__(self, value: Any) -> bool:
        if self.choices:
            return value in self.choices and isinstance(value, type(self.choices[0]))
        if self.kind is bool or isinstance(value, bool):
            return self.kind is bool and isinstance(value, bool)
        right_kind = isinstance(value, int) or (
            self.kind is float and isinstance(value, float) and math.isfinite(value)
        )
        excluded = (self.open_low and value == self.low) or (self.open_high and value == self.high)
        return right_kind and self.low <= value <= self.high and not excluded

    def __str__(self) -> str:
        if self.choices:
            *others, last = map(repr, self.choices)
            return f"{', '.join(others)} or {last}" if others else last
        if self.kind is bool:
            return "true or false"
        number = "a whole number" if self.kind is int else "a number"
        if math.isinf(self.high):
            return number if math.isinf(self.low) else f"{number} {'>' if self.open_low else '≥'} {self.low:g}"
        if self.open_low or self.open_high:
            above, below = ">" if self.open_low else "≥", "<" if self.open_high else "≤"
            return f"{number} {above} {self.low:g} and {below} {self.high:g}"
        return f"{number} from {self.low:g} to {self.high:g}"


@dataclass(frozen=True)
class Part:
    """One idea of a method. A part holds only its hyper-parameters; state and randomness are passed as arguments.

    In a chain each part receives the result of the part before it. Names are local to the part: it does not see the
    state, memory and messages of other parts, even if they have the same names.

        server   broadcast    what the clients receive in addition to the weights
        client   begin        where this client starts, if not at the weights that it receives
        client   plan         this part's ingredients of the local step
        client   report       the upload with this part's changes, and the client's new memory
        server   merge        the move with this part's changes, and the part's new state

    A part must not modify its arguments. When a `Method` is created it runs all functions on a small example, and
    raises an error if two parts would overwrite each other.
    """

    # When it merges: with the clients' corrections, with the server's step, or after that with the new model.
    stage: ClassVar[Stage] = "client"
    # What its merge may read: sums and averages of the uploads, or single uploads.
    sees: ClassVar[Sight] = "average"
    # What it protects: each upload on the client, or the average on the server.
    protects: ClassVar[Protection] = ""
    # Whether it takes a model's outputs as logits of classes, which those for values or for several labels are not.
    needs_classes: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if "range" in f.metadata and value not in f.metadata["range"]:
                raise RecipeError(f"{type(self).__name__}.{f.name} = {value!r}: must be {f.metadata['range']}")

    @property
    def tensorwise(self) -> tuple[str, ...]:
        """Names of the vectors that the part sends or uploads with one number per tensor of the model."""
        return ()

    @property
    def squares(self) -> tuple[str, ...]:
        """Names of the uploaded vectors that have no negative entries, such as second moments."""
        return ()

    def fits(self, layout: Layout) -> None:
        """Raise a RecipeError if the part cannot be used with a network that has these trained tensors."""

    def first_state(self, weights: Tensor) -> Vectors:
        """Return the server's state for this part before round 0, given the initial weights."""
        return {}

    def first_memory(self, initial: Tensor) -> Vectors:
        """Return a client's memory for this part before its first round, given the federation's initial weights."""
        return {}

    def broadcast(self, server: ServerView) -> Vectors:
        """Return the vectors to send in addition to the weights (server, before the round).

        A vector named "weights" replaces `server.start`, and the clients start from it.
        """
        return {}

    def begin(self, sent: Vectors, memory: Vectors) -> Tensor | None:
        """Return the weights from which this client starts, or None for those that it received (client).

        They replace the received weights for all parts: `sent["weights"]` is the client's start in `plan` and in
        `report`, and Δ is measured from it.

        Args:
            sent: what this part broadcast, and under "weights" the weights that the client received.
            memory: the client's memory for this part.
        """
        return None

    def plan(self, rule: LocalRule, sent: Vectors, memory: Vectors) -> LocalRule:
        """Return the rule with this part's ingredients (client, before training).

        A part whose radius or weight is 0 returns the rule unchanged, and has no effect on the training.

        Args:
            rule: the rule from the previous parts.
            sent: what this part broadcast, and under "weights" the client's initial weights.
            memory: the client's memory for this part.
        """
        return rule

    def report(self, upload: Upload, sent: Vectors, memory: Vectors, outcome: Outcome) -> tuple[Upload, Vectors]:
        """Return the upload with this part's changes, and the client's new memory (client, after training).

        Args:
            upload: the upload from the previous parts; `upload.update(delta=..., name=...)` changes its Δ and adds
                vectors of this part.
            sent: what this part broadcast, and under "weights" the client's initial weights.
            memory: the client's memory for this part.
            outcome: the result of training; `outcome.delta` is the client's actual move, independent of the upload.
        """
        return upload, memory

    def merge(self, move: Tensor, server: ServerView, uploads: Uploads) -> tuple[Tensor, Vectors]:
        """Return the move with this part's changes, and the changed entries of its state (server, after the round).

        Args:
            move: the average of the clients' Δ with the changes of the previous parts; the new weights are
                `server.weights + server.lr * move`.
            server: the server with this part's state.
            uploads: the round's uploads; single uploads are available only if the part declares `sees = "each"`.
        """
        return move, {}

    def evaluated(self, server: ServerView) -> Tensor | None:
        """Return the weights to evaluate in place of the server's, or None."""
        return None


@dataclass(frozen=True)
class Wrapper(Part):
    """A part that wraps another part and uses its plan. The chain keeps the inner part's state and memory."""

    part: Part

    def wrap(self, rule: LocalRule, inner: LocalRule, sent: Vectors, memory: Vectors) -> LocalRule:
        """Return the rule, given the `inner` rule that has only the wrapped part's ingredients."""
        raise NotImplementedError


@dataclass(frozen=True)
class RobustAverage(Part):
    """A part that averages the clients' vectors robustly, when a few clients may send wrong ones.

    The chain uses it for every average and sum of uploads: of Δ, of the other vectors that parts upload, and of
    batch-norm statistics. It cannot be combined with a part that reads single uploads.
    """

    sees = "each"

    @property
    def quorum(self) -> int:
        """The smallest number of uploads of which one may be wrong; with two it is impossible to tell which."""
        return 3

    def locate(self, rows: Sequence[Tensor], server: ServerView, name: str = "") -> Tensor:
        """Return the robust average of one vector per client.

        Args:
            rows: the vectors, all of the same size.
            server: the part's state, the seed and the round.
            name: "delta" if the vectors are the clients' Δ.
        """
        raise NotImplementedError

    def after(self, move: Tensor) -> Vectors:
        """Return the part's new state, given the robust average `move` of the round's Δ."""
        return {}

    def merge(self, move: Tensor, server: ServerView, uploads: Uploads) -> tuple[Tensor, Vectors]:
        found = isinstance(uploads, RobustUploads)
        move = uploads.average("delta") if found else self.locate([u.delta for u in uploads], server, "delta")
        return move, self.after(move)
