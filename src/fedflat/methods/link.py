"""A part's place in a chain: maps the part's own names of vectors to the names in the chain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from fedflat.errors import RecipeError
from fedflat.local import LocalRule, Outcome, Vectors
from fedflat.methods.part import Part, ServerView, Wrapper
from fedflat.methods.uploads import Hidden, Sums, Upload, Uploads


class Drawer(dict[str, str]):
    """Maps a part's names of vectors to their names in the chain.

    A name that an earlier part already uses gets a number, so that parts do not see or overwrite each other's vectors.

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
            if not isinstance(name, str) or not name.isidentifier():  # it becomes a part of a file's name
                raise RecipeError(f"method: {owner} names a vector {name!r}; use letters, digits and _")
            number = 1
            while (free := name if number == 1 else f"{name}.{number}") in taken:
                number += 1
            taken.add(free)
            drawer[name] = free
        return drawer

    def open(self, vectors: Mapping[str, Tensor]) -> Vectors:
        """Return the vectors of this part, by the part's names."""
        return {name: vectors[key] for name, key in self.items()}

    def close(self, own: Mapping[str, Tensor]) -> Vectors:
        """Return the part's vectors by the names in the chain."""
        for name in own:
            if name not in self:
                known = ", ".join(self) or "none"
                raise RecipeError(f"method: {self.owner} hands over {name!r}, which it did not have before ({known})")
        return {self[name]: vector for name, vector in own.items()}


@dataclass(frozen=True)
class Link:
    """A part with its name mappings; `inner` is the link of the part that it wraps.

    `stream` numbers the second and further parts of one class, so that they do not repeat the draws of the first.
    `guard` names the part of the method that protects the average of the uploads from this one.
    """

    part: Part
    inner: Link | None = None
    stream: str = ""
    state: Drawer = field(default_factory=Drawer)
    memory: Drawer = field(default_factory=Drawer)
    sent: Drawer = field(default_factory=Drawer)
    uploads: Drawer = field(default_factory=Drawer)
    guard: str = ""

    @property
    def name(self) -> str:
        """The name of the part in messages: its class, or the recipe field in `stands_for`."""
        return getattr(self.part, "stands_for", type(self.part).__name__)

    def inside_out(self) -> Iterator[Link]:
        """Yield the links of the wrapped part, then this one."""
        if self.inner:
            yield from self.inner.inside_out()
        yield self

    def view(self, server: ServerView) -> ServerView:
        """Return the server with only this part's state."""
        return replace(server, vectors=self.state.open(server.vectors), stream=self.stream)

    def received(self, sent: Vectors) -> Vectors:
        """Return what the client received for this part, and the weights."""
        return {"weights": sent["weights"], **self.sent.open(sent)}

    def seen(self, uploads: Uploads) -> Uploads:
        """Return the uploads, restricted to what this part may read in any round."""
        if self.guard:
            return Hidden(self.guard)
        own = uploads.named(self.uploads)
        return own if self.part.sees == "each" else Sums(own)

    def plan(self, rule: LocalRule, sent: Vectors, memory: Mapping[str, Tensor]) -> LocalRule:
        """Return the rule with this part's ingredients."""
        received, kept, given = self.received(sent), self.memory.open(memory), self.drawing(rule)
        if self.inner and isinstance(self.part, Wrapper):
            made = self.part.wrap(given, self.inner.plan(rule.blank(), sent, memory), received, kept)
        else:
            made = self.part.plan(given, received, kept)
        # In a later round `made` may be of a wrong type, which the chain reports.
        return replace(made, stream=rule.stream) if self.stream and isinstance(made, LocalRule) else made

    def drawing(self, rule: LocalRule) -> LocalRule:
        """Return the rule whose generators are this part's own."""
        return replace(rule, stream=self.stream) if self.stream else rule

    def report(self, upload: Upload, sent: Vectors, kept: Vectors, outcome: Outcome) -> tuple[Upload, Vectors]:
        """Return the upload with this part's changes, and the new values of what it keeps on the client."""
        own = replace(outcome, rule=self.drawing(outcome.rule)) if self.stream else outcome
        return self.part.report(upload, self.received(sent), kept, own)


def reporting(links: Iterable[Link]) -> list[Link]:
    """Return the links in the order in which they report: a part that protects the upload comes last."""
    return sorted(links, key=lambda link: link.part.protects == "upload")


def links_of(parts: Iterable[Part]) -> list[Link]:
    """Return the parts as links with empty name mappings."""
    seen: Counter[type[Part]] = Counter()

    def linked(part: Part) -> Link:
        inner = linked(part.part) if isinstance(part, Wrapper) else None
        seen[type(part)] += 1
        number = seen[type(part)]
        return Link(part, inner, f".{number}" if number > 1 else "")

    return [linked(part) for part in parts]
