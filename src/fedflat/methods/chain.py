"""A method: a chain of parts, each with its own namespace for vectors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property, lru_cache

from torch import Tensor

from fedflat.errors import RecipeError
from fedflat.local import LocalRule, Outcome, Vectors
from fedflat.methods.contract import check_declared, handed, kept, merged, vector, vectors
from fedflat.methods.contract import rule as checked_rule
from fedflat.methods.link import Link, links_of, reporting
from fedflat.methods.observe import Findings, observed, resolved
from fedflat.methods.part import Part, RobustAverage, ServerView
from fedflat.methods.trial import Claims, claims, noted
from fedflat.methods.uploads import RobustUploads, Upload, Uploads
from fedflat.models import Layout

STAGES = ("client", "server", "evaluation")


def _composed(parts: list[Part]) -> tuple[list[Link], Findings]:
    """Return the result of `observed`, from a cache if a method with equal parts was built before."""
    key = tuple(parts), repr(parts)
    try:
        hash(key)
    except TypeError:  # an option of a part cannot be hashed, such as a list
        return observed(links_of(parts))
    return _remembered(*key)


@lru_cache(maxsize=1024)
def _remembered(parts: tuple[Part, ...], written: str) -> tuple[list[Link], Findings]:
    """Return the result of `observed`. `written` distinguishes equal but different options: 1, 1.0 and True."""
    return observed(links_of(parts))


class Method:
    """A chain of parts. Methods and parts can be added: `FEDDYN + ActivationNorm(0.15)`.

    Each part receives the result of the part before it. Parts merge in the order of their stages, and within a stage in
    the order written. A part that replaces the average comes first, and one that protects uploads reports last.

    The constructor runs the chain once on a small example (`observe.py`) and raises an error if two parts would
    overwrite each other.

    Args:
        parts: the parts, in order.

    Raises:
        RecipeError: an argument is not a valid part, or two parts do not fit together.

    >>> from fedflat.methods.parts import Ascent, DynamicDual
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
        self._links, self._found = _composed(ordered)
        self.parts = tuple(link.part for link in self._links)

    @property
    def found(self) -> Findings:
        """The findings of the run on the small example: what the parts send, upload and read."""
        return self._found

    def _all(self) -> Iterator[Link]:
        """Yield the links of all parts, a wrapped part before its wrapper."""
        for link in self._links:
            yield from link.inside_out()

    @cached_property
    def _reporting(self) -> list[Link]:
        return reporting(self._all())

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
        """Names of the vectors of size d that clients upload in addition to Δ."""
        return tuple(name for name, size in self._found.uploads.items() if size == "model")

    @property
    def figures(self) -> dict[str, int]:
        """Names and lengths of the short vectors that clients upload, whose length does not depend on the model."""
        return {name: size for name, size in self._found.uploads.items() if isinstance(size, int)}

    @cached_property
    def squares(self) -> frozenset[str]:
        """Names of the uploaded vectors that have no negative entries."""
        return frozenset(link.uploads[name] for link in self._all() for name in link.part.squares)

    def fits(self, layout: Layout) -> None:
        """Raise a RecipeError if a part, or one that it wraps, cannot be used with these trained tensors."""
        for link in self._all():
            link.part.fits(layout)

    def refuse_without_classes(self, task: str) -> None:
        """Check that the method can do without classes.

        Args:
            task: name of a task whose outputs are not classes.

        Raises:
            RecipeError: a part, or one that it wraps, takes the outputs for logits of classes.
        """
        for link in self._all():
            if link.part.needs_classes:
                name = type(link.part).__name__
                raise RecipeError(f"method: {name} compares probabilities of classes, and task = {task!r} has none")

    def sent_sizes(self, layout: Layout) -> dict[str, int]:
        """Return the sizes of all vectors that the server sends for a model, including the weights."""
        return {"weights": layout.size, **resolved(self._found.sent, layout)}

    def upload_sizes(self, layout: Layout) -> dict[str, int]:
        """Return the sizes of all vectors that the clients upload for a model, including Δ."""
        return {"delta": layout.size, **resolved(self._found.uploads, layout)}

    @cached_property
    def notes(self) -> frozenset[str]:
        """Names of the metrics that clients record, with * for the layers of a network."""
        return noted(self)

    def claims(self, rule: LocalRule) -> Claims:
        """Return the steps, learning rate and figures that a client with this rule must report."""
        return claims(self, rule)

    @property
    def protection(self) -> Part | None:
        """The part that protects the clients' updates."""
        return next((link.part for link in self._all() if link.part.protects), None)

    @property
    def quorum(self) -> int:
        """The smallest number of uploads from which the average can be computed."""
        return next((link.part.quorum for link in self._all() if isinstance(link.part, RobustAverage)), 1)

    @property
    def only_averages(self) -> bool:
        """Whether the server uses only the average of the clients' Δ."""
        return self._found.only_averages

    @property
    def always_moves(self) -> bool:
        """Whether the model changes even in a round without uploads, which hides that there were none."""
        return self.protection is not None and self.protection.protects == "average"

    def __add__(self, other: Method | Part) -> Method:
        return Method(*self.parts, *(other.parts if isinstance(other, Method) else (other,)))

    def __repr__(self) -> str:
        return f"Method({', '.join(map(repr, self.parts))})"

    def first_state(self, weights: Tensor) -> Vectors:
        """Return the server's state before round 0."""
        return {n: v for link in self._all() for n, v in link.state.close(link.part.first_state(weights)).items()}

    def first_memory(self, initial: Tensor) -> Vectors:
        """Return a client's memory before its first round."""
        return {n: v for link in self._all() for n, v in link.memory.close(link.part.first_memory(initial)).items()}

    def evaluated(self, server: ServerView) -> Tensor:
        """Return the weights to evaluate."""
        for link in self._all():
            weights = link.part.evaluated(link.view(server))
            if weights is not None:
                return weights
        return server.weights

    def broadcast(self, server: ServerView) -> Vectors:
        """Return everything that the server sends: the initial weights of the round and the vectors of the parts."""
        sent: Vectors = {}
        for link in self._all():
            own = kept(link.name, vectors, link.part.broadcast(link.view(server)), server.weights)
            server = replace(server, start=own.get("weights", server.start))
            sent |= link.sent.close({name: vector for name, vector in own.items() if name != "weights"})
        return {"weights": server.start, **sent}

    def begin(self, sent: Vectors, memory: Mapping[str, Tensor]) -> Vectors:
        """Return what one client received, with the weights from which it starts.

        Args:
            sent: the vectors that the server sent.
            memory: the client's memory.
        """
        for link in self._all():
            start = link.part.begin(link.received(sent), link.memory.open(memory))
            sent = sent if start is None else {**sent, "weights": kept(link.name, vector, start, sent["weights"])}
        return sent

    def plan(self, rule: LocalRule, sent: Vectors, memory: Mapping[str, Tensor]) -> LocalRule:
        """Return the rule of one client's round.

        Args:
            rule: the rule of the recipe, without the method.
            sent: the vectors that the server sent, with the client's initial weights under "weights".
            memory: the client's memory.

        Raises:
            RecipeError: in this round, a part replaces the ascent or the optimiser that another part has set.
        """
        for link in self._links:
            before, rule = rule, kept(link.name, checked_rule, link.plan(rule, sent, memory))
            # No part does this on the example, but one could do so in a later round.
            for name in ("ascent", "descent"):
                if getattr(before, name) is not None and getattr(rule, name) is not getattr(before, name):
                    raise RecipeError(f"method: {link.name} replaces the {name} of another part in round {rule.round}")
        return rule

    def report(
        self, upload: Upload, sent: Vectors, memory: Mapping[str, Tensor], outcome: Outcome
    ) -> tuple[Upload, Vectors]:
        """Return the upload of one client and its new memory.

        Args:
            upload: the upload with the client's Δ.
            sent: the vectors that the server sent, with the client's initial weights under "weights".
            memory: the client's memory before the round.
            outcome: the result of local training.
        """
        new: Vectors = {}
        beside: Vectors = {}
        for link in self._reporting:
            own = link.memory.open(memory)
            made = link.report(replace(upload, vectors={}), sent, own, outcome)
            upload, mine = kept(link.name, handed, made)
            new |= link.memory.close(mine)
            beside |= link.uploads.close(upload.vectors)
        return replace(upload, vectors=beside), {**memory, **new}

    def guarded(self, server: ServerView, uploads: Uploads) -> Uploads:
        """Return the uploads; if the method has a robust average, it computes their sums.

        Args:
            server: the server's state and settings.
            uploads: the uploads of the round.
        """
        link = next((link for link in self._all() if isinstance(link.part, RobustAverage)), None)
        if link is None or not len(uploads) or isinstance(uploads, RobustUploads):
            return uploads
        part, view = link.part, link.view(server)
        assert isinstance(part, RobustAverage)
        return RobustUploads(uploads, lambda rows, name: part.locate(rows, view, name))

    def merge(self, move: Tensor, server: ServerView, uploads: Uploads) -> tuple[Tensor, Vectors]:
        """Return the server's move and its new state.

        Args:
            move: the average of the clients' Δ.
            server: the server's state and settings.
            uploads: the uploads of the round.
        """
        state, uploads = dict(server.vectors), self.guarded(server, uploads)
        for link in self._all():
            view = link.view(server)
            made = link.part.merge(move, view, link.seen(uploads))
            move, mine = kept(link.name, merged, made, server.weights, view.vectors)
            state |= link.state.close(mine)
        return move, state
