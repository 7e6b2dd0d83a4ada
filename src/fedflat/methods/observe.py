"""Runs a chain on a small example to find out what its parts read and write, and whether they fit together.

Each part runs alone and after the others, on a model of 43 weights. If two parts set the same field of the rule, the
result must contain both contributions: pulls, decays and terms are added, scales are multiplied. A part that replaces
what another part has set raises an error that names both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor

from fedflat.errors import RecipeError
from fedflat.local import LocalRule
from fedflat.methods import contract
from fedflat.methods.contract import called
from fedflat.methods.example import (
    LAYOUT,
    asks,
    drawn,
    example_rule,
    first_vectors,
    kept_memory,
    merged,
    messages,
    planned,
    planned_alone,
    received,
    server_view,
    uploaded,
)
from fedflat.methods.link import Drawer, Link, reporting
from fedflat.methods.part import RobustAverage
from fedflat.methods.rehearsal import rehearse
from fedflat.models import Layout

TOGETHER: dict[str, Callable[[Any, Any], Any]] = {
    "pull": torch.add, "decay": float.__add__, "spring": float.__add__, "scale": float.__mul__,
    "terms": tuple.__add__, "watched": tuple.__add__, "frozen": torch.logical_or, "carry": lambda a, b: {**a, **b},
}  # fmt: skip
WORDS = {"lr_floor": "schedule of the learning rate", "frozen": "same frozen weights"}


Size = int | Literal["model", "tensors"]  # of a vector: a number, the size of the model, or one number per tensor


def resolved(sizes: Mapping[str, Size], layout: Layout) -> dict[str, int]:
    """Return the sizes of vectors for a model with this layout."""
    known = {"model": layout.size, "tensors": len(layout.shapes)}
    return {name: size if isinstance(size, int) else known[size] for name, size in sizes.items()}


@dataclass(frozen=True)
class Findings:
    """The result of running a chain on the small example.

    `sent` and `uploads` hold the sizes of the vectors sent and uploaded in addition to w and Δ. `asked` holds what the
    parts read of the uploads, such as ("average", "delta").
    """

    sent: dict[str, Size]
    uploads: dict[str, Size]
    asked: frozenset[tuple[str, str]]

    @property
    def only_averages(self) -> bool:
        return self.asked <= {("average", "delta")}


def observed(links: Sequence[Link]) -> tuple[list[Link], Findings]:
    """Return the links with their name mappings, in the order in which they merge, and the findings.

    Raises:
        RecipeError: two parts write the same thing, a part drops what another one has set, or a part uploads something
            that the method's protection does not cover.
    """
    links = _ordered(_with_drawers(links))
    _refuse_overwriting(links)
    for link in links:
        given = received(link)
        rehearse(link.name, planned(link, example_rule(), given), drawn(1), given)
    _refuse_lost_updates(links)
    _refuse_second_choice(links)
    found = Findings(*_sizes(links), frozenset(ask for link in _flat(links) for ask in asks(link)))
    links = _guarded(links)
    _refuse_single_looks(links)
    return links, found


def _flat(links: Sequence[Link]) -> Iterator[Link]:
    for link in links:
        yield from link.inside_out()


def _with_drawers(links: Sequence[Link]) -> list[Link]:
    taken: dict[str, set[str]] = {
        "state": {"weights", "buffers"}, "memory": {"buffers"},
        "sent": {"weights", "buffers"}, "uploads": {"delta", "buffers"},
    }  # fmt: skip

    def given(link: Link) -> Link:
        link = replace(link, inner=given(link.inner)) if link.inner else link
        link = replace(
            link,
            state=Drawer.of(link.name, first_vectors(link, link.part.first_state), taken["state"]),
            memory=Drawer.of(link.name, first_vectors(link, link.part.first_memory), taken["memory"]),
            sent=Drawer.of(link.name, [name for name in messages(link) if name != "weights"], taken["sent"]),
        )
        beside = uploaded(link, 0, planned_alone(link)).vectors
        return replace(link, uploads=Drawer.of(link.name, beside, taken["uploads"]))

    return [given(link) for link in links]


def _ordered(links: Sequence[Link]) -> list[Link]:
    """Return the links with the one that replaces the average first; there can be only one."""
    replacing = [link for link in links if any(_replaces_the_move(each) for each in link.inside_out())]
    _refuse_pairs(replacing, "replace the average")
    return [*replacing, *(link for link in links if link not in replacing)]


def _replaces_the_move(link: Link) -> bool:
    one, other = drawn(9), drawn(10)
    return torch.equal(merged(link, one), merged(link, other))


def _refuse_pairs(links: Sequence[Link], what: str) -> None:
    if len(links) > 1:
        raise RecipeError(f"method: {links[0].name} and {links[1].name} both {what}; a method can have only one")


def _refuse_overwriting(links: Sequence[Link]) -> None:
    """Check that every field of the rule that two parts set contains both contributions."""
    first, rule = example_rule(), example_rule()
    writers: dict[str, Link] = {}
    for link in links:
        alone, after = planned(link, first), planned(link, replace(rule, carry=dict(rule.carry)))
        for f in fields(LocalRule):
            name = f.name
            before, own, now = getattr(rule, name), getattr(alone, name), getattr(after, name)
            writes = not _same(own, getattr(first, name))
            if name in writers and writes and (name not in TOGETHER or (name == "frozen" and _same(now, before))):
                _refuse_pairs([writers[name], link], f"set the {WORDS.get(name, name)}")
            if name in writers and not _same(now, TOGETHER[name](before, own) if writes else before):
                raise RecipeError(
                    f"method: {link.name} drops the {name} that {writers[name].name} has set; its plan must add to the "
                    "rule that it is given (rule.with_pull, rule.with_term)"
                )
            if writes:
                writers[name] = link
        rule = after
    for link in _flat(links):  # a report may depend on the plans of other parts
        uploaded(link, 0, replace(rule, carry={**rule.carry, **planned_alone(link).carry}))


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and bool(torch.allclose(a.double(), b.double(), rtol=1e-5, atol=1e-7))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    if type(a) is not type(b):
        return False
    if isinstance(a, float | int | bool | str) or a is None:
        return bool(a == b)
    return a is b or all(_same(getattr(a, f.name), getattr(b, f.name)) for f in _fields(a))


def _fields(value: Any) -> Sequence[Any]:
    """Return the fields of a dataclass, and none for other objects, so that two of the same class count as equal."""
    return fields(value) if hasattr(value, "__dataclass_fields__") else ()


def _refuse_lost_updates(links: Sequence[Link]) -> None:
    """Check that no part drops earlier changes of Δ by starting from the training's Δ instead of the upload's."""
    writer: Link | None = None
    for link in reporting(_flat(links)):
        rule, one, other = planned_alone(link), drawn(11), drawn(12)
        made = uploaded(link, 0, rule, one).delta
        if writer and torch.equal(made, uploaded(link, 0, rule, other).delta):
            raise RecipeError(
                f"method: {link.name} drops the Δ that {writer.name} has made; its report must begin with "
                "upload.delta, not with outcome.delta"
            )
        if not torch.equal(made, one):
            writer = link


def _refuse_second_choice(links: Sequence[Link]) -> None:
    """Check that at most one part says which model to evaluate, and at most one where a client starts."""
    flat = [*_flat(links)]
    showing = [link for link in flat if _chosen(link, link.part.evaluated, server_view(link)) is not None]
    starting = [link for link in flat if _chosen(link, link.part.begin, messages(link), kept_memory(link)) is not None]
    _refuse_pairs(showing, "say which model to evaluate")
    _refuse_pairs(starting, "say where a client starts")


def _chosen(link: Link, function: Callable[..., Tensor | None], *given: Any) -> Tensor | None:
    """Return the weights that a function of a part chooses, or None."""

    def weights() -> Tensor | None:
        found = function(*given)
        return None if found is None else contract.vector(found, drawn(1))

    return called(link.name, weights, *given)


def _sizes(links: Sequence[Link]) -> tuple[dict[str, Size], dict[str, Size]]:
    sent: dict[str, Size] = {}
    uploads: dict[str, Size] = {}
    for link in _flat(links):
        own = {name: vector for name, vector in messages(link).items() if name != "weights"}
        made = uploaded(link, 0, planned_alone(link)).vectors
        for found, drawer, vectors in (sent, link.sent, own), (uploads, link.uploads, made):
            drawer.close(vectors)
            found |= {drawer[name]: _size(link, name, vector) for name, vector in vectors.items()}
    return sent, uploads


def _size(link: Link, name: str, vector: Tensor) -> Size:
    if vector.dtype != drawn(1).dtype:  # engines exchange numbers of this type, and would convert others
        raise RecipeError(f"method: {link.name} hands over {name!r} as {vector.dtype}; use the type of the weights")
    if name not in link.part.tensorwise:
        return "model" if vector.numel() == LAYOUT.size else vector.numel()
    if vector.numel() != len(LAYOUT.shapes):
        raise RecipeError(f"method: {link.name} has {vector.numel()} numbers in {name!r}, not one for each tensor")
    return "tensors"


def _refuse_single_looks(links: Sequence[Link]) -> None:
    """Check that no other part reads single uploads if there is a robust average, which cannot protect them."""
    robust = next((link for link in _flat(links) if isinstance(link.part, RobustAverage)), None)
    for link in _flat(links) if robust else ():
        if robust and link is not robust and ("each", "delta") in asks(link):
            raise RecipeError(
                f"method: {link.name} looks at single uploads, which {robust.name} does not protect; leave one out"
            )


def _guarded(links: Sequence[Link]) -> list[Link]:
    """Check that nothing bypasses the part that protects the updates, and hide a protected average from the others."""
    guards = [link for link in _flat(links) if link.part.protects]
    _refuse_pairs(guards, "protect the updates")
    if not guards:
        return [*links]
    guard = guards[0]
    for link in _flat(links):
        if link.uploads:
            beside = ", ".join(link.uploads)
            raise RecipeError(
                f"method: {link.name} uploads {beside}, which {guard.name} does not protect; leave one out"
            )
    return [_hidden(link, guard) for link in links] if guard.part.protects == "average" else [*links]


def _hidden(link: Link, guard: Link) -> Link:
    """Return the link with the uploads hidden from its part, and from the part that it wraps, unless it is the guard.

    On the example the part must not read them, and in a later round it cannot.
    """
    link = replace(link, inner=_hidden(link.inner, guard)) if link.inner else link
    if link.part is guard.part:
        return link
    if asks(link):
        raise RecipeError(
            f"method: {link.name} looks at the updates on the server, which {guard.name} does not protect; leave "
            "one out or take LocalPrivacy (local_dp)"
        )
    return replace(link, guard=guard.name)
