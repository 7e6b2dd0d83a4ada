"""The small example on which a chain is observed: a model of 43 weights, and each part's functions on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fedflat.local import LocalRule, Vectors
from fedflat.methods import contract
from fedflat.methods.contract import called
from fedflat.methods.link import Link
from fedflat.methods.part import ServerView
from fedflat.methods.uploads import Sums, Upload, Uploads, collect
from fedflat.models import Layout

LAYOUT = Layout({name: torch.Size(s) for name, s in {
    "0.weight": (5, 4), "0.bias": (5,), "1.weight": (3, 5), "1.bias": (3,)}.items()})  # fmt: skip
HEAD = slice(25, 43)


def drawn(seed: int) -> Tensor:
    """Return small random numbers, one for each weight."""
    return torch.randn(LAYOUT.size, generator=torch.Generator().manual_seed(seed)).div_(10)


def server_view(link: Link) -> ServerView:
    """Return the server as this part sees it in round 1."""
    weights = drawn(1)
    # Most states are zero at first; a small offset makes their effect visible.
    state = {name: v + 0.01 * torch.ones_like(v) for name, v in first_vectors(link, link.part.first_state).items()}
    return ServerView(weights, weights, 1, clients=4, vectors=state, cohort=2.0, layout=LAYOUT)


def messages(link: Link) -> Vectors:
    """Return what a client receives from this part, and the weights."""
    view = server_view(link)
    own = called(link.name, lambda: contract.vectors(link.part.broadcast(view), view.weights), view)
    return {"weights": drawn(1), **own}


def first_vectors(link: Link, function: Callable[[Tensor], Vectors]) -> Vectors:
    """Return the initial state or memory that a function of the part makes."""
    weights = drawn(1)
    return called(link.name, lambda: contract.vectors(function(weights)), weights)


def kept_memory(link: Link) -> Vectors:
    """Return a client's memory for this part, shifted from its initial value."""

    def first(weights: Tensor) -> Vectors:
        return called(link.name, lambda: contract.memory(link.part.first_memory(weights), weights), weights)

    kept = {name: v + 0.01 for name, v in first(drawn(1)).items()}
    first(drawn(1).double())
    return kept


def example_rule() -> LocalRule:
    return LocalRule(0.1, 4, first_lr=0.1, typical_steps=4, momentum=0.5, layout=LAYOUT, head=HEAD, client=-1)


def received(link: Link) -> tuple[Vectors, Vectors]:
    """Return what a client has received and what it remembers for one part, by the names in the chain."""
    sent: Vectors = {"weights": drawn(1)}
    memory: Vectors = {}
    for each in link.inside_out():
        own = messages(each)
        sent |= each.sent.close({name: v for name, v in own.items() if name != "weights"})
        memory |= each.memory.close(kept_memory(each))
    return sent, memory


def planned(link: Link, rule: LocalRule, given: tuple[Vectors, Vectors] | None = None) -> LocalRule:
    """Return the rule after one part's plan; `given` is what the client received and its memory."""
    given = given or received(link)
    return called(link.name, lambda: contract.rule(link.plan(rule, *given)), rule, given)


def planned_alone(link: Link) -> LocalRule:
    return planned(link, example_rule())


def uploaded(link: Link, client: int, rule: LocalRule, delta: Tensor | None = None) -> Upload:
    """Return a client's upload for one part, by the part's names. The part receives `delta`, or the training's Δ."""
    moved = drawn(2 + client)
    upload = Upload(client, 3 + client, rule.steps, rule.mean_lr, 1.0, moved if delta is None else delta)
    outcome, sent, memory = rule.outcome(moved), messages(link), kept_memory(link)
    made, kept = called(
        link.name,
        lambda: contract.reported(link.part.report(upload, sent, dict(memory), outcome), moved, memory),
        (upload, sent, memory, outcome),
    )
    link.memory.close(kept)
    return made


def example_uploads(link: Link) -> Uploads:
    rule = planned_alone(link)
    return collect([uploaded(link, client, rule) for client in range(2)], "samples")


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


def merged(link: Link, move: Tensor, noted: _Noted | None = None) -> Tensor:
    """Return the move after the merge of one part."""
    noted, view = noted or _Noted(example_uploads(link)), server_view(link)
    seen = noted if link.part.sees == "each" else Sums(noted)
    given = (move, view, noted.everything)
    moved, state = called(
        link.name, lambda: contract.merged(link.part.merge(move, view, seen), view.weights, view.vectors), *given
    )
    link.state.close(state)
    return moved


def asks(link: Link) -> set[tuple[str, str]]:
    """Return what the merge of one part reads of the uploads, such as ("average", "delta")."""
    noted = _Noted(example_uploads(link))
    noted.asked.clear()
    merged(link, drawn(9), noted)
    return noted.asked
