"""A method: a chain of parts."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from fedflat.errors import RecipeError
from fedflat.local import LocalRule, Outcome, Vectors
from fedflat.parts.part import Part, ServerState, Uploads
from fedflat.parts.privacy import CentralPrivacy, LocalPrivacy, Privacy

ORDER = {"average": 0, "": 1, "ascent": 1, "server": 2, "shown": 3}


def probe_state(part: Method | Part) -> ServerState:
    """A state of the least size, to see what a part or method would send."""
    probe = torch.zeros(3)
    return ServerState(probe, probe, probe, part.first_state(probe), 0, 1)


class SealedError(RecipeError):
    """A part looked into uploads that it may not see."""


class Sealed(Uploads):
    """The uploads for the parts after a private average: whatever they ask of them is refused."""

    def __init__(self) -> None:
        pass

    def __getattr__(self, name: str) -> NoReturn:
        raise SealedError("method: a part after CentralPrivacy looks at single updates; leave it out")


class Method:
    """A chain of parts. Methods and parts add up: `FEDDYN + ActivationNorm(0.15)`.

    >>> from fedflat.parts import Ascent, DynamicDual
    >>> method = Method(DynamicDual(0.1)) + Ascent(0.1)
    >>> method.memory, method.state
    (('drift',), ('mean_drift',))
    >>> method + Ascent(0.2)
    Traceback (most recent call last):
      ...
    fedflat.errors.RecipeError: method: Ascent and Ascent both want to be the ascent; a method can have only one
    """

    def __init__(self, *parts: Part) -> None:
        self.parts = tuple(sorted(parts, key=lambda part: ORDER[part.place]))
        self.memory = tuple(name for part in self.parts for name in part.memory)
        self.state = tuple(name for part in self.parts for name in part.state)
        self.uploads = tuple(name for part in self.parts for name in part.uploads)
        self.figures = {name: size for part in self.parts for name, size in part.figures.items()}
        self._refuse_conflicts()
        self._refuse_leaks()

    def _refuse_conflicts(self) -> None:
        holder: dict[str, Part] = {}
        for part in self.parts:
            claims = [f"be the {part.place}"] if part.place else []
            claims += [f"keep {name!r}" for name in (*part.memory, *part.state)]
            claims += [f"send {name!r}" for name in part.send(probe_state(part))]
            for claim in claims:
                if claim in holder:
                    pair = f"{type(holder[claim]).__name__} and {type(part).__name__}"
                    raise RecipeError(f"method: {pair} both want to {claim}; a method can have only one")
                holder[claim] = part

    @property
    def privacy(self) -> Privacy | None:
        """The part that protects the clients' updates."""
        return next((part for part in self.parts if isinstance(part, Privacy)), None)

    @property
    def only_averages(self) -> bool:
        """Whether no part merges, so that the server needs no more of the clients' Δ than their average."""
        return all(type(part).merge is Part.merge for part in self.parts)

    @property
    def always_moves(self) -> bool:
        """Whether a round without uploads changes the model too, so that nobody can tell that it had none."""
        return isinstance(self.privacy, CentralPrivacy)

    def _refuse_leaks(self) -> None:
        """A private method uploads Δ alone, and none of its parts goes around what protects it."""
        if self.privacy is None:
            return
        guard = type(self.privacy).__name__
        for part in self.parts:
            name, beside = type(part).__name__, ", ".join((*part.uploads, *part.figures))
            if isinstance(part, Privacy) and part is not self.privacy:
                raise RecipeError(f"method: {guard} and {name} both want to protect the updates; take one of them")
            if beside:
                raise RecipeError(f"method: {name} uploads {beside}, which {guard} does not protect; leave one out")
            if self.always_moves and part is not self.privacy and self._looks(part):
                raise RecipeError(
                    f"method: {name} looks at single updates on the server, which {guard} does not protect; "
                    f"leave one out or take {LocalPrivacy.__name__} (local_dp)"
                )

    def _looks(self, part: Part) -> bool:
        try:
            part.merge(probe_state(self), Sealed())
        except SealedError:
            return True
        return False

    def __add__(self, other: Method | Part) -> Method:
        return Method(*self.parts, *(other.parts if isinstance(other, Method) else (other,)))

    def __repr__(self) -> str:
        return f"Method({', '.join(map(repr, self.parts))})"

    def first_state(self, weights: Tensor) -> Vectors:
        """What the server keeps before round 0."""
        return {name: v for part in self.parts for name, v in part.first_state(weights).items()}

    def first_memory(self, initial: Tensor) -> Vectors:
        """What a client keeps before its first round."""
        return {name: v for part in self.parts for name, v in part.first_memory(initial).items()}

    def shown(self, server: ServerState) -> Tensor:
        """The weights to evaluate."""
        others = [weights for part in self.parts if (weights := part.shown(server)) is not None]
        return others[-1] if others else server.weights

    def send(self, server: ServerState) -> Vectors:
        """All that goes down in a round: the weights to start from and what the parts send beside them."""
        sent = {"weights": server.weights}
        for part in self.parts:
            sent.update(part.send(server))
        return sent

    def plan(self, rule: LocalRule, sent: Vectors, memory: Vectors) -> LocalRule:
        for part in self.parts:
            rule = part.plan(rule, sent, memory)
        return rule

    def settle(self, sent: Vectors, memory: Vectors, outcome: Outcome) -> tuple[Vectors, Vectors]:
        kept, uploads = dict(memory), {}
        for part in self.parts:
            remembered, uploaded = part.settle(sent, memory, outcome)
            kept.update(remembered)
            uploads.update(uploaded)
        return kept, uploads

    def merge(self, server: ServerState, uploads: Uploads) -> ServerState:
        for part in self.parts:
            server = part.merge(server, uploads)
            if isinstance(part, CentralPrivacy):
                uploads = Sealed()
        return server
