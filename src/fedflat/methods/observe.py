"""Runs a chain on a small example to find out what its parts read and write, and whether they fit together.

Each part runs alone and after the others, on a model of 43 weights. If two parts set the same field of the rule, the
result must contain both contributions: pulls, decays and terms are added, scales are multiplied. A part that replaces
what another part has set raises an error that names both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from fedflat.errors import RecipeError
from fedflat.local import LocalRule, Vectors
from fedflat.methods import contract
from fedflat.methods.contract import called
from fedflat.methods.link import Drawer, Link
from fedflat.methods.part import RobustAverage, ServerView
from fedflat.methods.rehearsal import rehearse
from fedflat.methods.uploads import Sums, Upload, Uploads, collect
from fedflat.models import Layout

LAYOUT = Layout({name: torch.Size(s) for name, s in {
    "0.weight": (5, 4), "0.bias": (5,), "1.weight": (3, 5), "1.bias": (3,)}.items()})  # fmt: skip
HEAD = slice(25, 43)
TOGETHER: dict[str, Callable[[Any, Any], Any]] = {
    "pull": torch.add, "decay": float.__add__, "spring": float.__add__, "scale": float.__mul__,
    "terms": tuple.__add__, "watched": tuple.__add__, "frozen": torch.logical_or, "carry": lambda a, b: {**a, **b},
}  # fmt: skip
WORDS = {"lr_floor": "schedule of the learning rate", "frozen": "same frozen weights"}


@dataclass(frozen=True)
class Findings:
    """The result of running a chain on the small example.

    `sent` and `uploads` hold the sizes of the vectors sent and uploaded in addition to w and Δ, with None for d.
    `asked` holds what the parts read of the uploads, such as ("average", "delta").
    """

    sent: dict[str, int | None]
    uploads: dict[str, int | None]
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
        rehearse(link.name, _planned_alone(link), drawn(1))
    _refuse_lost_updates(links)
    _refuse_second_choice(links)
    found = Findings(*_sizes(links), frozenset(ask for link in _flat(links) for ask in _asks(link)))
    _refuse_leaks(links)
    _refuse_single_looks(links)
    return links, found


def _flat(links: Sequence[Link]) -> Iterator[Link]:
    for link in links:
        yield from link.inside_out()


def drawn(seed: int) -> Tensor:
    return torch.randn(LAYOUT.size, generator=torch.Generator().manual_seed(seed)).div_(10)


def _view(link: Link) -> ServerView:
    weights = drawn(1)
    # Most states are zero at first; a small offset makes their effect visible.
    state = {name: v + 0.01 * torch.ones_like(v) for name, v in _first(link, link.part.first_state).items()}
    return ServerView(weights, weights, 1, clients=4, vectors=state, cohort=2.0)


def _sent(link: Link) -> Vectors:
    view = _view(link)
    own = called(link.name, lambda: contract.vectors(link.part.broadcast(view), LAYOUT.size), view)
    return {"weights": drawn(1), **own}


def _first(link: Link, function: Callable[[Tensor], Vectors]) -> Vectors:
    weights = drawn(1)
    return called(link.name, lambda: contract.vectors(function(weights)), weights)


def _memory(link: Link) -> Vectors:
    def first(weights: Tensor) -> Vectors:
        return called(link.name, lambda: contract.memory(link.part.first_memory(weights), weights), weights)

    kept = {name: v + 0.01 for name, v in first(drawn(1)).items()}
    first(drawn(1).double())
    return kept


def example_rule() -> LocalRule:
    return LocalRule(0.1, 4, first_lr=0.1, typical_steps=4, momentum=0.5, layout=LAYOUT, head=HEAD, client=-1)


def _planned(link: Link, rule: LocalRule) -> LocalRule:
    """Return the rule after one part's plan, with that part's messages and memory by the names in the chain."""
    sent: Vectors = {"weights": drawn(1)}
    memory: Vectors = {}
    for each in link.inside_out():
        own = _sent(each)
        sent |= each.sent.close({name: v for name, v in own.items() if name != "weights"})
        memory |= each.memory.close(_memory(each))
    return called(link.name, lambda: contract.rule(link.plan(rule, sent, memory)), rule, sent, memory)


def _planned_alone(link: Link) -> LocalRule:
    return _planned(link, example_rule())


def _upload(link: Link, client: int, rule: LocalRule, delta: Tensor | None = None) -> Upload:
    """Return a client's upload for one part, by the part's names. The part receives `delta`, or the training's Δ."""
    moved = drawn(2 + client)
    upload = Upload(client, 3 + client, rule.steps, rule.mean_lr, 1.0, moved if delta is None else delta)
    outcome, sent, memory = rule.outcome(moved), _sent(link), _memory(link)
    made, kept = called(
        link.name,
        lambda: contract.reported(link.part.report(upload, sent, dict(memory), outcome), LAYOUT.size, memory),
        (upload, sent, memory, outcome),
    )
    link.memory.close(kept)
    return made


def _with_drawers(links: Sequence[Link]) -> list[Link]:
    taken: dict[str, set[str]] = {
        "state": set(), "memory": {"buffers"}, "sent": {"weights", "buffers"}, "uploads": {"delta", "buffers"},
    }  # fmt: skip

    def given(link: Link) -> Link:
        link = replace(link, inner=given(link.inner)) if link.inner else link
        link = replace(
            link,
            state=Drawer.of(link.name, _first(link, link.part.first_state), taken["state"]),
            memory=Drawer.of(link.name, _first(link, link.part.first_memory), taken["memory"]),
            sent=Drawer.of(link.name, [name for name in _sent(link) if name != "weights"], taken["sent"]),
        )
        uploaded = _upload(link, 0, _planned_alone(link)).vectors
        return replace(link, uploads=Drawer.of(link.name, uploaded, taken["uploads"]))

    return [given(link) for link in links]


def _uploads(link: Link) -> Uploads:
    rule = _planned_alone(link)
    return collect([_upload(link, client, rule) for client in range(2)], "samples")


class _Noted(Uploads):
    """Uploads that record what is read of them."""

    def __init__(self, uploads: Uploads) -> None:
        super().__init__(list(uploads), uploads.weights, uploads.average("delta"))
        self.asked: set[tuple[str, str]] = set()
        self.everything = [*uploads, uploads.average("delta")]

    def sum(self, name: str, weights: Sequence[float] | None = None) -> Tensor:
        self.asked.add(("sum", name))
        return super().sum(name, weights)

    def average(self, name: str) -> Tensor:
        self.asked.add(("average", name))
        return super().average(name)

    def __iter__(self) -> Iterator[Upload]:
        self.asked.add(("each", "delta"))
        return super().__iter__()

    def __getitem__(self, index: Any) -> Any:
        self.asked.add(("each", "delta"))
        return super().__getitem__(index)


def _merged(link: Link, move: Tensor, noted: _Noted | None = None) -> Tensor:
    """Return the move after the merge of one part."""
    noted, view = noted or _Noted(_uploads(link)), _view(link)
    seen = noted if link.part.sees == "each" else Sums(noted)
    given = (move, view, noted.everything)
    moved, state = called(
        link.name, lambda: contract.merged(link.part.merge(move, view, seen), LAYOUT.size, view.vectors), *given
    )
    link.state.close(state)
    return moved


def _asks(link: Link) -> set[tuple[str, str]]:
    noted = _Noted(_uploads(link))
    noted.asked.clear()
    _merged(link, drawn(9), noted)
    return noted.asked


def _ordered(links: Sequence[Link]) -> list[Link]:
    """Return the links with the one that replaces the average first; there can be only one."""
    replacing = [link for link in links if any(_replaces_the_move(each) for each in link.inside_out())]
    _refuse_pairs(replacing, "replace the average")
    return [*replacing, *(link for link in links if link not in replacing)]


def _replaces_the_move(link: Link) -> bool:
    one, other = drawn(9), drawn(10)
    return torch.equal(_merged(link, one), _merged(link, other))


def _refuse_pairs(links: Sequence[Link], what: str) -> None:
    if len(links) > 1:
        raise RecipeError(f"method: {links[0].name} and {links[1].name} both {what}; a method can have only one")


def _refuse_overwriting(links: Sequence[Link]) -> None:
    """Check that every field of the rule that two parts set contains both contributions."""
    first, rule = example_rule(), example_rule()
    writers: dict[str, Link] = {}
    for link in links:
        alone, after = _planned(link, first), _planned(link, replace(rule, carry=dict(rule.carry)))
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
        _upload(link, 0, replace(rule, carry={**rule.carry, **_planned_alone(link).carry}))


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
    for link in _flat(links):
        rule, one, other = _planned_alone(link), drawn(11), drawn(12)
        made = _upload(link, 0, rule, one).delta
        if writer and torch.equal(made, _upload(link, 0, rule, other).delta):
            raise RecipeError(
                f"method: {link.name} drops the Δ that {writer.name} has made; its report must begin with "
                "upload.delta, not with outcome.delta"
            )
        if not torch.equal(made, one):
            writer = link


def _refuse_second_choice(links: Sequence[Link]) -> None:
    """Check that at most one part says which model to evaluate, and at most one where a client starts."""
    flat = [*_flat(links)]
    showing = [link for link in flat if _chosen(link, link.part.evaluated, _view(link)) is not None]
    starting = [link for link in flat if _chosen(link, link.part.begin, _sent(link), _memory(link)) is not None]
    _refuse_pairs(showing, "say which model to evaluate")
    _refuse_pairs(starting, "say where a client starts")


def _chosen(link: Link, function: Callable[..., Tensor | None], *given: Any) -> Tensor | None:
    """Return the weights that a function of a part chooses, if it does."""

    def weights() -> Tensor | None:
        found = function(*given)
        return None if found is None else contract.vector(found, LAYOUT.size)

    return called(link.name, weights, *given)


def _sizes(links: Sequence[Link]) -> tuple[dict[str, int | None], dict[str, int | None]]:
    def size(vector: Tensor) -> int | None:
        return None if vector.numel() == LAYOUT.size else vector.numel()

    sent: dict[str, int | None] = {}
    uploads: dict[str, int | None] = {}
    for link in _flat(links):
        own = {name: vector for name, vector in _sent(link).items() if name != "weights"}
        sent |= {name: size(vector) for name, vector in link.sent.close(own).items()}
        made = _upload(link, 0, _planned_alone(link))
        uploads |= {name: size(vector) for name, vector in link.uploads.close(made.vectors).items()}
    return sent, uploads


def _refuse_single_looks(links: Sequence[Link]) -> None:
    """Check that no other part reads single uploads if there is a robust average, which cannot protect them."""
    robust = next((link for link in links if isinstance(link.part, RobustAverage)), None)
    for link in _flat(links) if robust else ():
        if robust and link is not robust and ("each", "delta") in _asks(link):
            raise RecipeError(
                f"method: {link.name} looks at single uploads, which {robust.name} does not protect; leave one out"
            )


def _refuse_leaks(links: Sequence[Link]) -> None:
    """Check that a protected method uploads only Δ and that no part bypasses the protection."""
    guards = [link for link in links if link.part.protects]
    _refuse_pairs(guards, "protect the updates")
    for link in _flat(links) if guards else ():
        guard = guards[0]
        if link.uploads:
            beside = ", ".join(link.uploads)
            raise RecipeError(
                f"method: {link.name} uploads {beside}, which {guard.name} does not protect; leave one out"
            )
        if guard.part.protects == "average" and link is not guard and _asks(link):
            raise RecipeError(
                f"method: {link.name} looks at the updates on the server, which {guard.name} does not protect; leave "
                "one out or take LocalPrivacy (local_dp)"
            )
