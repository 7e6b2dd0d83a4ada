"""Runs one real step and one report of a method on the small example, to find its cost, metrics and fixed numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from fedflat.local import Batch, LocalRule, Outcome, Slope, Vectors, train
from fedflat.methods.example import HEAD, LAYOUT, drawn, example_rule
from fedflat.methods.part import ServerView
from fedflat.methods.rehearsal import example_network
from fedflat.methods.uploads import Upload
from fedflat.models import Layout, Network
from fedflat.recipe import Measure

MEASURES: tuple[str, ...] = get_args(Measure)
# A network of another size: a number that is the same for both does not depend on the network.
OTHER = Layout({name: torch.Size(s) for name, s in {
    "0.weight": (4, 3), "0.bias": (4,), "1.weight": (2, 4), "1.bias": (2,)}.items()})  # fmt: skip
NETWORKS = {1: (LAYOUT, HEAD), 2: (OTHER, slice(16, 26))}  # by the seed of a trial


class Planner(Protocol):
    """The functions of a method that a trial uses."""

    def first_memory(self, initial: Tensor) -> Vectors: ...

    def first_state(self, weights: Tensor) -> Vectors: ...

    def broadcast(self, server: ServerView) -> Vectors: ...

    def plan(self, rule: LocalRule, sent: Vectors, memory: Vectors) -> LocalRule: ...

    def report(self, upload: Upload, sent: Vectors, memory: Vectors, outcome: Outcome) -> tuple[Upload, Vectors]: ...


def _received(method: Planner, seed: int, round: int = 1) -> tuple[Vectors, Vectors]:
    """Return what a client of the example has at the start of its round: the broadcast and its memory."""
    layout = NETWORKS[seed][0]
    weights = drawn(seed)[: layout.size]
    state = {name: vector + 0.01 * seed for name, vector in method.first_state(weights).items()}
    sent = method.broadcast(ServerView(weights, weights, round, 4, state, cohort=2.0, layout=layout))
    return sent, {name: vector + 0.01 * seed for name, vector in method.first_memory(weights).items()}


def _one_step(method: Planner, measures: Sequence[str] = ()) -> tuple[Network, LocalRule, Batch]:
    """Return the network of the example, the rule of a client with one step, and its batch."""
    network = example_network(drawn(1) + 0.1)  # differs from the broadcast weights, as after a few steps
    rule = method.plan(replace(example_rule(), steps=1, measures=measures), *_received(method, 1))
    return network, rule, (drawn(3)[:8].view(2, 4), torch.tensor([0, 1]))


def passes(method: Planner) -> tuple[float, float]:
    """Count the passes per local step of a method: those with a gradient, and those through frozen models.

    An ascent in every k-th step only is averaged over k steps. The attribute `passes` of a term adds to the cost of
    every gradient, or of the step if the term is only watched.
    """
    network, rule, batch = _one_step(method)
    steps = getattr(rule.ascent, "every", 1)
    rule = replace(rule, steps=steps)
    counts = {"gradients": 0, "forwards": 0}

    def counted(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            counts[kind] += 1
            return function(*arguments)

        return call

    for name, kind in ("differentiate", "gradients"), ("partials", "gradients"), ("standing_at", "forwards"):
        setattr(network, name, counted(kind, getattr(network, name)))
    train(network, network.weights.clone(), rule, [batch] * steps * (2 if rule.pairs else 1), F.cross_entropy)
    each, watched = (sum(getattr(term, "passes", 0) for term in terms) for terms in (rule.terms, rule.watched))
    found = (1 + each) * counts["gradients"] / steps + watched, counts["forwards"] / steps
    gradients, forwards = (int(count) if count.is_integer() else count for count in found)
    return gradients, forwards


def noted(method: Planner) -> frozenset[str]:
    """Return the names of the metrics that a method's clients record in one real step with all measures.

    A name that ends in a layer of the example's network, such as "lambda/0", is returned as "lambda/*", because the
    layers of other networks have other names.
    """
    network, rule, batch = _one_step(method, MEASURES)
    layers = {name for name, _ in network.module.named_modules()}
    watched: dict[str, float] = {}
    with suppress(Exception):
        batches = [batch, batch] if rule.pairs else [batch]
        watched = train(network, network.weights.clone(), rule, batches, F.cross_entropy).notes
    with network.listening(features=True, activations=True) as tap:
        slope = Slope(network, rule, F.cross_entropy, tap)
        with suppress(Exception):  # a part may not support the example; earlier notes count
            slope.at(batch, batch if rule.pairs else None)
            _ = rule.ascent(slope, dict(rule.carry)) if rule.ascent else slope()
            slope.look_at_w(0)
    names = (slope.notes.means().keys() | watched.keys()) - {"loss"}
    split = {name: name.rpartition("/") for name in names}
    return frozenset(f"{root}/*" if root and layer in layers else name for name, (root, _, layer) in split.items())


@dataclass(frozen=True)
class Claims:
    """The numbers of an upload that are determined by the rule of its round; None if they depend on anything else."""

    steps: int | None = None
    lr: float | None = None
    figures: dict[str, list[float]] = field(default_factory=dict)


def claims(method: Planner, rule: LocalRule) -> Claims:
    """Return the steps, learning rate and figures that a client with this rule must report.

    The method runs twice with this rule, on networks of two sizes with different weights, memory and Δ. A number that
    is the same both times is determined by the rule, and therefore holds for the client's own model and samples too.
    """
    try:
        one, other = (_reported(method, rule, seed) for seed in NETWORKS)
    except Exception:  # a part does not support the rule: nothing is known
        return Claims()
    figures = {name: v.tolist() for name, v in one.vectors.items() if v.numel() != LAYOUT.size}
    return Claims(
        one.steps if one.steps == other.steps else None,
        one.lr if one.lr == other.lr else None,
        {name: values for name, values in figures.items() if torch.equal(one[name], other[name])},
    )


def _reported(method: Planner, rule: LocalRule, seed: int) -> Upload:
    sent, memory = _received(method, seed, rule.round)
    layout, head = NETWORKS[seed]
    planned = method.plan(replace(rule, layout=layout, head=head, frozen=None), sent, memory)
    outcome = planned.outcome(drawn(seed + 7)[: layout.size])
    upload = Upload(rule.client, 1, planned.steps, planned.mean_lr, 1.0, outcome.delta)
    return method.report(upload, sent, memory, outcome)[0]
