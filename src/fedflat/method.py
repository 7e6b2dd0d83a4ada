"""A method: a chain of parts, each with drawers of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property

from torch import Tensor

from fedflat.contract import check_declared
from fedflat.link import Link, links_of
from fedflat.observe import Findings, observed
from fedflat.parts.part import Part, ServerView
from fedflat.parts.uploads import Sealed, Upload, Uploads
from fedflat.rule import LocalRule, Outcome, Vectors

STAGES = ("client", "server", "evaluation")


class Method:
    """A chain of parts. Methods and parts add up: `FEDDYN + ActivationNorm(0.15)`.

    Every function of the parts is threaded through the chain. Parts merge in the order of their stages, and within one
    in the order written; a part that replaces the average comes first, and one that protects uploads reports last.

    When a method is made its chain runs once on a small example (`fedflat.observe`). Two parts that would overwrite
    each other are refused there, by their names.

    >>> from fedflat.parts import Ascent, DynamicDual
    >>> method = Method(DynamicDual(0.1)) + Ascent(0.1)
    >>> method.memory, method.state
    (('drift',), ('mean_drift',))
    >>> method + Ascent(0.2)
    Traceback (most recent call last):
      ...
    fedflat.errors.RecipeError: method: Ascent and Ascent both set the ascent; a method can have only one
    """

    def __init__(self, *parts: Part) -> None:
        for part in parts:
            check_declared(part)
        ordered = sorted(parts, key=lambda part: (part.protects == "upload", STAGES.index(part.stage)))
        self._links, self._found = observed(links_of(ordered))
        self.parts = tuple(link.part for link in self._links)

    @property
    def found(self) -> Findings:
        """What was seen when the method was made: who sends, uploads and writes what."""
        return self._found

    def _all(self) -> Iterator[Link]:
        """Every part's link, a wrapped one before the one around it."""
        for link in self._links:
            yield from link.inside_out()

    @cached_property
    def memory(self) -> tuple[str, ...]:
        """Names of the vectors that each client keeps between rounds."""
        return tuple(name for link in self._all() for name in link.memory.values())

    @cached_property
    def state(self) -> tuple[str, ...]:
        """Names of the vectors that the server keeps between rounds."""
        return tuple(name for link in self._all() for name in link.state.values())

    @property
    def uploads(self) -> tuple[str, ...]:
        """Names of the vectors of size d that go up beside Δ."""
        return tuple(name for name, size in self._found.uploads.items() if size is None)

    @property
    def figures(self) -> dict[str, int]:
        """The few numbers that go up beside them, each with its length."""
        return {name: size for name, size in self._found.uploads.items() if size is not None}

    @property
    def protection(self) -> Part | None:
        """The part that protects the clients' updates."""
        return next((part for part in self.parts if part.protects), None)

    @property
    def only_averages(self) -> bool:
        """Whether the server needs no more of the clients' Δ than their average."""
        return self._found.only_averages

    @property
    def always_moves(self) -> bool:
        """Whether a round without uploads changes the model too, so that nobody can tell that it had none."""
        return self.protection is not None and self.protection.protects == "average"

    def __add__(self, other: Method | Part) -> Method:
        return Method(*self.parts, *(other.parts if isinstance(other, Method) else (other,)))

    def __repr__(self) -> str:
        return f"Method({', '.join(map(repr, self.parts))})"

    def first_state(self, weights: Tensor) -> Vectors:
        """What the server keeps before round 0."""
        return {n: v for link in self._all() for n, v in link.state.close(link.part.first_state(weights)).items()}

    def first_memory(self, initial: Tensor) -> Vectors:
        """What a client keeps before its first round."""
        return {n: v for link in self._all() for n, v in link.memory.close(link.part.first_memory(initial)).items()}

    def evaluated(self, server: ServerView) -> Tensor:
        """The weights to evaluate."""
        for link in self._all():
            weights = link.part.evaluated(link.view(server))
            if weights is not None:
                return weights
        return server.weights

    def broadcast(self, server: ServerView) -> Vectors:
        """All that goes down in a round: the weights to start from and what the parts send beside them."""
        sent: Vectors = {}
        for link in self._all():
            own = link.part.broadcast(link.view(server))
            server = replace(server, start=own.get("weights", server.start))
            sent |= link.sent.close({name: vector for name, vector in own.items() if name != "weights"})
        return {"weights": server.start, **sent}

    def plan(self, rule: LocalRule, sent: Vectors, memory: Mapping[str, Tensor]) -> LocalRule:
        """The rule of one client's round."""
        for link in self._links:
            rule = link.plan(rule, sent, memory)
        return rule

    def report(
        self, upload: Upload, sent: Vectors, memory: Mapping[str, Tensor], outcome: Outcome
    ) -> tuple[Upload, Vectors]:
        """The upload of one client, and what it keeps."""
        kept: Vectors = {}
        beside: Vectors = {}
        for link in self._all():
            upload, mine = link.part.report(
                replace(upload, vectors={}), link.received(sent), link.memory.open(memory), outcome
            )
            kept |= link.memory.close(mine)
            beside |= link.uploads.close(upload.vectors)
        return replace(upload, vectors=beside), {**memory, **kept}

    def merge(self, move: Tensor, server: ServerView, uploads: Uploads) -> tuple[Tensor, Vectors]:
        """The server's move, given the average of the clients' Δ, and the new state."""
        state = dict(server.vectors)
        for link in self._all():
            # Seen from the example no part looks beside the guard, but one may begin to in a later round.
            sealed = self.always_moves and link.part is not self.protection
            seen = Sealed(type(self.protection).__name__) if sealed else link.seen(uploads)
            move, mine = link.part.merge(move, link.view(server), seen)
            state |= link.state.close(mine)
        return move, state
