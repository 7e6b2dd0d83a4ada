"""A method's chain on a small example: who writes what is seen, not declared.

Each part runs alone and after the others, on a model of 43 weights. Where a part changes what another one has set, the
result must hold both: pulls, decays and terms add up, scales multiply. A part that replaces what another one set is
refused, with both names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedflat import contract
from fedflat.contract import called
from fedflat.errors import RecipeError
from fedflat.link import Drawer, Link
from fedflat.parts.part import ServerView
from fedflat.parts.uploads import Sums, Upload, Uploads, collect
from fedflat.rule import LocalRule, Outcome, Vectors
from fedflat.step import train
from fedflat.vector import Layout, Network

LAYOUT = Layout({name: torch.Size(s) for name, s in {
    "0.weight": (5, 4), "0.bias": (5,), "1.weight": (3, 5), "1.bias": (3,)}.items()})  # fmt: skip
HEAD = slice(25, 43)
TOGETHER: dict[str, Callable[[Any, Any], Any]] = {
    "pull": torch.add, "decay": float.__add__, "spring": float.__add__, "scale": float.__mul__,
    "terms": tuple.__add__, "frozen": torch.logical_or, "carry": lambda a, b: {**a, **b},
}  # fmt: skip
WORDS = {"lr_floor": "schedule of the learning rate", "frozen": "same frozen weights"}


@dataclass(frozen=True)
class Findings:
    """What was seen of a chain.

    `sent` and `uploads` have the sizes of what goes down and up beside w and Δ, None standing for d; `asked` has what
    the parts asked of the uploads, as ("average", "delta").
    """

    sent: dict[str, int | None]
    uploads: dict[str, int | None]
    asked: frozenset[tuple[str, str]]

    @property
    def only_averages(self) -> bool:
        return self.asked <= {("average", "delta")}


def observed(links: Sequence[Link]) -> tuple[list[Link], Findings]:
    """The links with their drawers, in the order in which they merge, and what was seen of them.

    Raises:
        RecipeError: two parts write the same thing, a part drops what another one has set, or an upload would leave a
            client beside what protects it.
    """
    links = _ordered(_with_drawers(links))
    _refuse_overwriting(links)
    _refuse_lost_updates(links)
    _refuse_second_evaluation(links)
    found = Findings(*_sizes(links), frozenset(ask for link in _flat(links) for ask in _asks(link)))
    _refuse_leaks(links)
    return links, found


def _flat(links: Sequence[Link]) -> Iterator[Link]:
    for link in links:
        yield from link.inside_out()


def _random(seed: int) -> Tensor:
    return torch.randn(LAYOUT.size, generator=torch.Generator().manual_seed(seed)).div_(10)


def _view(link: Link) -> ServerView:
    weights = _random(1)
    # States begin with zeros; a little of everything shows what is made of them.
    state = {name: v + 0.01 * torch.ones_like(v) for name, v in _first(link, link.part.first_state).items()}
    return ServerView(weights, weights, 1, clients=4, vectors=state, cohort=2.0)


def _sent(link: Link) -> Vectors:
    view = _view(link)
    own = called(link.name, lambda: contract.vectors(link.part.broadcast(view), LAYOUT.size), view)
    return {"weights": _random(1), **own}


def _first(link: Link, function: Callable[[Tensor], Vectors]) -> Vectors:
    weights = _random(1)
    return called(link.name, lambda: contract.vectors(function(weights)), weights)


def _memory(link: Link) -> Vectors:
    return {name: v + 0.01 for name, v in _first(link, link.part.first_memory).items()}


def _rule() -> LocalRule:
    return LocalRule(0.1, 4, first_lr=0.1, typical_steps=4, momentum=0.5, layout=LAYOUT, head=HEAD, client=-1)


def _planned(link: Link, rule: LocalRule) -> LocalRule:
    """The rule after one part's plan, with that part's own messages and memory by the chain's names."""
    sent: Vectors = {"weights": _random(1)}
    memory: Vectors = {}
    for each in link.inside_out():
        own = _sent(each)
        sent |= each.sent.close({name: v for name, v in own.items() if name != "weights"})
        memory |= each.memory.close(_memory(each))
    return called(link.name, lambda: contract.rule(link.plan(rule, sent, memory)), rule, sent, memory)


def _planned_alone(link: Link) -> LocalRule:
    return _planned(link, _rule())


def _upload(link: Link, client: int, rule: LocalRule, delta: Tensor | None = None) -> Upload:
    """What a client sends up for one part, by the part's own names. The part is given this Δ, or the training's."""
    moved = _random(2 + client)
    upload = Upload(client, 3 + client, rule.steps, rule.mean_lr, 1.0, moved if delta is None else delta)
    outcome, sent, memory = Outcome(moved, 1.0, rule, rule.carry, {}), _sent(link), _memory(link)
    made, kept = called(
        link.name,
        lambda: contract.reported(link.part.report(upload, sent, memory, outcome), LAYOUT.size),
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
    """Uploads that note what is asked of them."""

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
    """The move as one part alone changes it."""
    noted, view = noted or _Noted(_uploads(link)), _view(link)
    seen = noted if link.part.sees == "each" else Sums(noted)
    given = (move, view, noted.everything)
    moved, state = called(link.name, lambda: contract.merged(link.part.merge(move, view, seen), LAYOUT.size), *given)
    link.state.close(state)
    return moved


def _asks(link: Link) -> set[tuple[str, str]]:
    noted = _Noted(_uploads(link))
    noted.asked.clear()
    _merged(link, _random(9), noted)
    return noted.asked


def _ordered(links: Sequence[Link]) -> list[Link]:
    """Whoever replaces the average comes first; only one part can."""
    replacing = [link for link in links if any(_replaces_the_move(each) for each in link.inside_out())]
    _refuse_pairs(replacing, "replace the average")
    return [*replacing, *(link for link in links if link not in replacing)]


def _replaces_the_move(link: Link) -> bool:
    one, other = _random(9), _random(10)
    return torch.equal(_merged(link, one), _merged(link, other))


def _refuse_pairs(links: Sequence[Link], what: str) -> None:
    if len(links) > 1:
        raise RecipeError(f"method: {links[0].name} and {links[1].name} both {what}; a method can have only one")


def _refuse_overwriting(links: Sequence[Link]) -> None:
    """Every field of the rule that two parts set must hold what both have set."""
    first, rule = _rule(), _rule()
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
    for link in _flat(links):  # a report may depend on what other parts have planned
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
    """The fields of a dataclass; anything else cannot be compared, and two such things of one class count as equal."""
    return fields(value) if hasattr(value, "__dataclass_fields__") else ()


def _refuse_lost_updates(links: Sequence[Link]) -> None:
    """A part that makes its Δ of the training's, not of the upload's, drops what the parts before it have made of Δ."""
    writer: Link | None = None
    for link in _flat(links):
        rule, one, other = _planned_alone(link), _random(11), _random(12)
        made = _upload(link, 0, rule, one).delta
        if writer and torch.equal(made, _upload(link, 0, rule, other).delta):
            raise RecipeError(
                f"method: {link.name} drops the Δ that {writer.name} has made; its report must begin with "
                "upload.delta, not with outcome.delta"
            )
        if not torch.equal(made, one):
            writer = link


def _refuse_second_evaluation(links: Sequence[Link]) -> None:
    _refuse_pairs([link for link in _flat(links) if _evaluated(link) is not None], "say which model to evaluate")


def _evaluated(link: Link) -> Tensor | None:
    view = _view(link)

    def weights() -> Tensor | None:
        found = link.part.evaluated(view)
        return None if found is None else contract.vector(found, LAYOUT.size)

    return called(link.name, weights, view)


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


def _refuse_leaks(links: Sequence[Link]) -> None:
    """A protected method uploads Δ alone, and no part goes around what protects it."""
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


class Planner(Protocol):
    """What `passes` needs of a method."""

    def first_memory(self, initial: Tensor) -> Vectors: ...

    def first_state(self, weights: Tensor) -> Vectors: ...

    def broadcast(self, server: ServerView) -> Vectors: ...

    def plan(self, rule: LocalRule, sent: Vectors, memory: Vectors) -> LocalRule: ...


def passes(method: Planner) -> tuple[int, int]:
    """Passes in a local step of a method: with a gradient, and through frozen models; counted in one real step.

    A term with `passes` makes every gradient cost so many more.
    """
    network = Network(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)))
    weights = _random(1)
    network.weights.copy_(weights)
    server = ServerView(weights, weights, 1, 4, method.first_state(weights), cohort=2.0)
    memory = {name: v + 0.01 for name, v in method.first_memory(weights).items()}
    counts = {"gradients": 0, "forwards": 0}

    def counted(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            counts[kind] += 1
            return function(*arguments)

        return call

    for name, kind in ("differentiate", "gradients"), ("partials", "gradients"), ("standing_at", "forwards"):
        setattr(network, name, counted(kind, getattr(network, name)))
    batch = _random(3)[:8].view(2, 4), torch.tensor([0, 1])
    rule = method.plan(replace(_rule(), steps=1), method.broadcast(server), memory)
    train(network, weights + 0.1, rule, [batch, batch] if rule.pairs else [batch], F.cross_entropy)
    each = 1 + sum(getattr(term, "passes", 0) for term in rule.terms)
    return each * counts["gradients"], counts["forwards"]
