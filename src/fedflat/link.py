"""One part's place in a chain: what it calls by its own names, and what the chain calls it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from fedflat.errors import RecipeError
from fedflat.parts.part import Part, ServerView, Wrapper
from fedflat.parts.uploads import Sums, Uploads
from fedflat.rule import LocalRule, Vectors


class Drawer(dict[str, str]):
    """One part's own names for some vectors, each with the chain's name for it.

    A name that an earlier part has taken gets a number, so that no part sees or overwrites what is another's.

    >>> taken = set()
    >>> first, second = Drawer.of("A", ["drift"], taken), Drawer.of("B", ["drift"], taken)
    >>> first.close({"drift": 1}), second.close({"drift": 2}), second.open({"drift": 1, "drift.2": 2})
    ({'drift': 1}, {'drift.2': 2}, {'drift': 2})
    """

    owner = ""

    @classmethod
    def of(cls, owner: str, names: Iterable[str], taken: set[str]) -> Drawer:
        drawer = cls()
        drawer.owner = owner
        for name in names:
            number = 1
            while (free := name if number == 1 else f"{name}.{number}") in taken:
                number += 1
            taken.add(free)
            drawer[name] = free
        return drawer

    def open(self, vectors: Mapping[str, Tensor]) -> Vectors:
        """What lies in this drawer, by the part's own names."""
        return {name: vectors[key] for name, key in self.items()}

    def close(self, own: Mapping[str, Tensor]) -> Vectors:
        """The part's vectors by the chain's names."""
        for name in own:
            if name not in self:
                known = ", ".join(self) or "none"
                raise RecipeError(f"method: {self.owner} hands over {name!r}, which it did not have before ({known})")
        return {self[name]: vector for name, vector in own.items()}


@dataclass(frozen=True)
class Link:
    """A part with its drawers; `inner` is the link of the part that it wraps."""

    part: Part
    inner: Link | None = None
    state: Drawer = field(default_factory=Drawer)
    memory: Drawer = field(default_factory=Drawer)
    sent: Drawer = field(default_factory=Drawer)
    uploads: Drawer = field(default_factory=Drawer)

    @property
    def name(self) -> str:
        return type(self.part).__name__

    def inside_out(self) -> Iterator[Link]:
        """The wrapped part's links, then this one."""
        if self.inner:
            yield from self.inner.inside_out()
        yield self

    def view(self, server: ServerView) -> ServerView:
        """The server with this part's state alone."""
        return replace(server, vectors=self.state.open(server.vectors))

    def received(self, sent: Vectors) -> Vectors:
        """What the client got for this part, and the weights."""
        return {"weights": sent["weights"], **self.sent.open(sent)}

    def seen(self, uploads: Uploads) -> Uploads:
        """The uploads as this part may see them."""
        own = uploads.named(self.uploads)
        return own if self.part.sees == "each" else Sums(own)

    def plan(self, rule: LocalRule, sent: Vectors, memory: Mapping[str, Tensor]) -> LocalRule:
        """The rule with this part's ingredients."""
        received, kept = self.received(sent), self.memory.open(memory)
        if self.inner and isinstance(self.part, Wrapper):
            return self.part.wrap(rule, self.inner.plan(rule.blank(), sent, memory), received, kept)
        return self.part.plan(rule, received, kept)


def links_of(parts: Iterable[Part]) -> list[Link]:
    """The parts as links whose drawers are still empty."""
    return [_linked(part) for part in parts]


def _linked(part: Part) -> Link:
    return Link(part, _linked(part.part) if isinstance(part, Wrapper) else None)
