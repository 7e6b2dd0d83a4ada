"""One client's training in one round: the local step that all methods share, and nothing else.

    g = clip( a · ∇[loss + Σ terms](w + ε) ) + pull + decay · w          v ← β v + g          w ← w − η v

A method's parts fill in a, ε, the terms, the pull and the decay before the first step (`Part.plan`); here they are only
obeyed. All vectors are flat, of size d.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fedflat.randomness import forked
from fedflat.vector import Forward, Layout, Network, Tap

Vectors = dict[str, Tensor]
Batch = tuple[Tensor, Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]
ClipMode = Literal["loss_only", "official", "all"]


class Term(Protocol):
    """Something added to the loss of a batch: a scalar made from a pass and, if need be, from a reference's pass.

    A term or an ascent with `features = True` finds in each pass what entered the head, and one with
    `activations = True` the hidden activations.
    """

    def __call__(self, here: Pass) -> Tensor: ...


class Ascent(Protocol):
    """Where the gradient is taken: given ∇[loss + Σ terms] as a function of ε, the gradient to descend by.

    One with `rows = True` also works on a matrix whose rows are the weights of several clients.
    """

    def __call__(self, slope: Slope, carry: Vectors) -> tuple[Tensor, Vectors]: ...


@dataclass(frozen=True)
class LocalRule:
    """What one client does in one round.

    The upper fields are facts of the round that parts may read: `share` is nᵢ m/N, `first_lr` is η of round 0,
    `typical_steps` is the K of a client of mean size, `epochs` are the passes over the samples that make the steps (1
    where the recipe counts steps); draws are made from seed, round and client.

    The lower ones are theirs to fill, by the methods below where several parts may. `spring` is a decay inside the
    clip. `carry` is what an ascent hands from step to step (FedSMOO's μ), and `report` finds it in the outcome.
    `frozen` marks the weights that no step changes; with `pairs` every step has a second batch, and `buffered` counts
    the gradients of a step that enter the momentum.
    """

    lr: float
    steps: int
    epochs: int = 1
    first_lr: float = 0.0
    typical_steps: int = 1
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float | None = None
    clip_mode: ClipMode = "loss_only"
    share: float = 1.0
    layout: Layout = field(default_factory=lambda: Layout({}))
    head: slice = field(default_factory=lambda: slice(0))
    measures: Sequence[str] = ()
    seed: int = 0
    round: int = 0
    client: int = 0

    scale: float = 1.0
    pull: Tensor | None = None
    decay: float = 0.0
    spring: float = 0.0
    terms: tuple[Term, ...] = ()
    ascent: Ascent | None = None
    carry: Vectors = field(default_factory=dict)
    lr_floor: float = 1.0
    frozen: Tensor | None = None
    pairs: bool = False
    buffered: int = 1

    def with_pull(self, pull: Tensor, decay: float = 0.0, spring: float = 0.0) -> LocalRule:
        """The rule with one more pull, decay and spring."""
        pull = pull if self.pull is None else self.pull + pull
        return replace(self, pull=pull, decay=self.decay + decay, spring=self.spring + spring)

    def with_term(self, term: Term) -> LocalRule:
        """The rule with one more term of the loss."""
        return replace(self, terms=(*self.terms, term))

    def with_ascent(self, ascent: Ascent, **carry: Tensor) -> LocalRule:
        """The rule with an ascent, and what it carries from step to step."""
        return replace(self, ascent=ascent, carry={**self.carry, **carry})

    def blank(self) -> LocalRule:
        """The facts of the rule, and none of its ingredients."""
        empty = LocalRule(self.lr, self.steps)
        return replace(self, **{name: getattr(empty, name) for name in INGREDIENTS})

    @property
    def direct(self) -> bool:
        """Whether a step goes down ∇[loss + Σ terms](w) as it is, with momentum and decay but nothing else."""
        bare = self.pull is None and self.ascent is None and self.frozen is None and not self.pairs
        return bare and not self.clip and self.scale == 1.0 and not self.spring

    @property
    def plain(self) -> bool:
        """Whether a step is w ← w − η (∇loss + decay · w) and nothing else."""
        return self.direct and not self.terms and not self.momentum

    def lr_at(self, k: int) -> float:
        """η_k, falling linearly towards `lr_floor` · η over the K steps."""
        return self.lr * (1 - (1 - self.lr_floor) * k / self.steps)

    @property
    def mean_lr(self) -> float:
        """The mean of the η_k."""
        return self.lr * (1 - (1 - self.lr_floor) * (self.steps - 1) / (2 * self.steps))

    @property
    def effective_steps(self) -> float:
        """K, or with momentum β the sum of the weights with which the gradients enter Δ/η:

        Σ_k (1 − β^{bk})/(1 − β),   k = 1 … K,   with b gradients entering the momentum in every step
        """
        beta, steps = self.momentum, self.steps
        fading = beta**self.buffered
        return (steps - fading * (1 - fading**steps) / (1 - fading)) / (1 - beta)


# The fields of a rule that parts fill; what the model freezes is a fact.
INGREDIENTS = ("scale", "pull", "decay", "spring", "terms", "ascent", "carry", "lr_floor", "pairs", "buffered")
SAMPLED = 8  # steps between two looks at w in methods that never take a gradient there


@dataclass(frozen=True)
class Outcome:
    """What a client's training came to: Δ = w_K − w_0, after K steps."""

    delta: Tensor
    loss: float
    rule: LocalRule
    carry: Vectors
    notes: dict[str, float]


@dataclass(frozen=True)
class Pass:
    """One forward pass as the terms see it."""

    forward: Forward
    labels: Tensor
    slope: Slope
    at_w: bool = True

    @property
    def logits(self) -> Tensor:
        return self.forward.logits

    @cached_property
    def loss(self) -> Tensor:
        """The loss of the batch, without any term."""
        return self.slope.loss(self.logits, self.labels)

    def under(self, reference: Tensor) -> Forward:
        """The batch through a frozen model with these weights; run once per batch, however often it is asked for."""
        return self.slope.under(reference)

    def note(self, name: str, value: Tensor) -> None:
        """Report a number of a pass at w; its mean over the client's steps becomes a metric of the round."""
        if self.at_w:
            self.slope.notes.add(name, value)


class Notes:
    """Means of what was noted, kept as tensors so that no step waits for a number."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}

    def add(self, name: str, value: Tensor) -> None:
        if name in self._sums:
            self._sums[name].add_(value.detach())
        else:
            self._sums[name] = value.detach().clone()
        self._counts[name] = self._counts.get(name, 0) + 1

    def means(self) -> dict[str, float]:
        return {name: float(total) / self._counts[name] for name, total in self._sums.items()}


class Slope:
    """∇[loss + Σ terms] on the current batch, as a function of the offset ε at which it is taken.

    `velocity` is the momentum v of the client's steps, for an ascent that takes steps of its own.
    """

    velocity: Tensor | None = None

    def __init__(self, network: Network, rule: LocalRule, loss: Loss, tap: Tap) -> None:
        self.network, self.rule, self.loss, self.notes = network, rule, loss, Notes()
        self._tap = tap
        self._first_statistics = network.buffers.clone()
        self._chain = network.chain if loss is F.cross_entropy and not rule.terms else None

    def at(self, batch: Batch, other: Batch | None = None) -> Slope:
        """Move on to the next batch, with perhaps a second one for those who look at two."""
        self._inputs, self._labels = batch
        self._other = other or batch
        self._seen: dict[int, Forward] = {}
        self._noted: set[str] = set()
        self._kept: Forward | None = None
        self._statistics: Tensor | None = None
        return self

    def on_other_batch(self, offset: Tensor) -> Tensor:
        """The gradient at w + ε on the step's second batch."""
        (self._inputs, self._labels), self._seen = self._other, {}
        return self(offset)

    @property
    def weights(self) -> Tensor:
        """w, where the client stands; not to be written to."""
        return self.network.weights

    def __call__(
        self,
        direction: Tensor | None = None,
        length: Tensor | None = None,
        *,
        terms: tuple[Term, ...] | None = None,
        data: bool = True,
    ) -> Tensor:
        """The gradient at w + ε of the loss (if `data`) and the terms (the rule's, unless others are given).

        ε is the direction times the length (1 if none is given). The result is the caller's own.
        """
        if direction is None:
            return self._gradient(terms, data, at_w=True)
        with self._moved(direction, length):
            return self._gradient(terms, data, at_w=False)

    def _gradient(self, terms: tuple[Term, ...] | None, data: bool, at_w: bool) -> Tensor:
        if self._chain and not terms and data and not self._labels.is_floating_point():
            loss, gradient = self._chain.gradient(self._inputs, self._labels)
            if at_w:
                self._note_loss(loss)
            return gradient
        return self.network.differentiate(self._objective(terms, data, at_w=at_w))

    def descend(self, velocity: Tensor | None, k: int) -> bool:
        """The whole step at once, where its gradient is used as it is and need not be gathered in a vector.

        Returns False, and does nothing, where that is not so.
        """
        rule, lr, decay = self.rule, self.rule.lr_at(k), self.rule.decay + self.rule.weight_decay
        chain = None if self._labels.is_floating_point() else self._chain
        if chain and rule.plain:
            self._note_loss(chain.descend(self._inputs, self._labels, lr, decay))
        elif rule.direct and not chain:
            gradients = self.network.partials(self._objective(None, True))
            velocities = [] if velocity is None else [*self.network.layout.views(velocity).values()]
            _descend([*self.network.module.parameters()], gradients, velocities, lr, rule.momentum, decay)
        else:
            return False
        return True

    def look_at_w(self, k: int) -> None:
        """Note the loss and the terms at w in a step that took no gradient there: once in a few steps, without one.

        Looking changes nothing: the masks of a dropout are drawn as if nobody had looked.
        """
        wanted = {"loss", "terms"} if self.rule.terms else {"loss"}
        if k % SAMPLED == 0 and wanted - self._noted:
            with forked(self.weights.device):
                self._objective(None, True)

    def in_head(self, terms: tuple[Term, ...]) -> Tensor:
        """The terms' gradient at w with respect to the head alone. The pass through the body is kept for `at_head`."""
        self._kept = self._forward()
        here = self._pass(self._kept)
        self._note_loss(here.loss)
        return self.network.differentiate_head(self._sum([term(here) for term in terms]))

    def at_head(self, offset: Tensor) -> Tensor:
        """The gradient at w + ε with ε in the head alone: of the network only the head is run again."""
        with self._moved(offset, None, self.network.head):
            if self._kept is None or self._kept.features is None:
                return self.network.differentiate(self._objective(None, True, at_w=False))
            logits = self._tap.through(self.network.head_module, self._kept.features)
            return self.network.differentiate(
                self._objective(None, True, replace(self._kept, logits=logits), at_w=False)
            )

    @cached_property
    def _home(self) -> Tensor:
        return torch.empty_like(self.weights)

    @contextmanager
    def _moved(self, direction: Tensor, length: Tensor | None, span: slice = slice(None)) -> Iterator[None]:
        """The network at w + ε; afterwards the weights are put back by copy, the same to the bit."""
        self._home[span].copy_(self.weights[span])
        if length is None:
            self.weights[span].add_(direction)
        else:
            self.weights[span].addcmul_(direction, length)
        yield
        self.weights[span].copy_(self._home[span])

    def _forward(self) -> Forward:
        """A pass over the batch. The step's first one makes the batch statistics; later ones leave them as they are."""
        forward = self._tap(self._inputs)
        if self._statistics is None:
            self._statistics = self.network.buffers.clone()
        self.network.buffers.copy_(self._statistics)
        return forward

    def _pass(self, forward: Forward, at_w: bool = True) -> Pass:
        return Pass(forward, self._labels, self, at_w and "terms" not in self._noted)

    def _objective(
        self, terms: tuple[Term, ...] | None, data: bool, forward: Forward | None = None, at_w: bool = True
    ) -> Tensor:
        here = self._pass(forward or self._forward(), at_w)
        if at_w:
            self._note_loss(here.loss)
        parts = [here.loss] * data + [term(here) for term in (self.rule.terms if terms is None else terms)]
        if at_w and data:
            self._noted.add("terms")
        return self._sum(parts)

    def _note_loss(self, loss: Tensor) -> None:
        """The step's first loss at w is the one to report."""
        if "loss" not in self._noted:
            self.notes.add("loss", loss)
            self._noted.add("loss")

    @staticmethod
    def _sum(parts: list[Tensor]) -> Tensor:
        return torch.stack(parts).sum() if len(parts) > 1 else parts[0]

    def under(self, reference: Tensor) -> Forward:
        """The batch through a frozen model with other weights and the batch statistics of the round's start."""
        if id(reference) not in self._seen:
            with self.network.standing_at(reference, self._first_statistics):
                self._seen[id(reference)] = self._tap(self._inputs)
        return self._seen[id(reference)]


def train(network: Network, start: Tensor, rule: LocalRule, batches: Iterable[Batch], loss: Loss) -> Outcome:
    """K steps of the rule from `start`, in the network's own memory."""
    network.weights.copy_(start)
    network.module.train()
    velocity = torch.zeros_like(start) if rule.momentum else None
    carry = dict(rule.carry)
    lookers = [*rule.terms, rule.ascent]
    features, activations = (any(getattr(x, kind, False) for x in lookers) for kind in ("features", "activations"))
    with network.listening(features, activations) as tap:
        slope = Slope(network, rule, loss, tap)
        slope.velocity = velocity
        stream = iter(batches)
        for k, batch in enumerate(stream):
            slope.at(batch, next(stream, None) if rule.pairs else None)
            if slope.descend(velocity, k):
                continue
            gradient, carry = rule.ascent(slope, carry) if rule.ascent else (slope(), carry)
            slope.look_at_w(k)
            step(network.weights, gradient, velocity, rule, k)
    notes = slope.notes.means()
    velocity = slope.velocity = None  # Δ takes its place in memory
    return Outcome(network.weights - start, notes.pop("loss", float("nan")), rule, carry, notes)


@torch.no_grad()
def step(weights: Tensor, gradient: Tensor, velocity: Tensor | None, rule: LocalRule, k: int = 0) -> None:
    """w ← w − η v with v ← β v + clip(a g + pull) + decay w; weights and velocity change in place."""
    g, decay = corrected(weights, gradient, rule)
    _descend([weights], [g], [] if velocity is None else [velocity], rule.lr_at(k), rule.momentum, decay)


@torch.no_grad()
def corrected(weights: Tensor, gradient: Tensor, rule: LocalRule) -> tuple[Tensor, float]:
    """clip(a g + pull), and the factor of the decay that is still to be added.


    The clip's place is one of three: around the gradient of the loss only (the clean one), around gradient, pull and
    spring but not the decay (the authors' code, which hides the proximal term in the optimiser's weight decay), or
    around all.
    """
    decay, mode = rule.decay + rule.weight_decay, rule.clip_mode
    g = gradient * rule.scale if rule.scale != 1.0 else gradient
    if mode == "loss_only":
        g = _clipped(g, rule.clip)
    if rule.pull is not None:
        g = g + rule.pull
    if rule.spring:
        g = g.add(weights, alpha=rule.spring)
    if mode == "official":
        g = _clipped(g, rule.clip)
    if decay and (mode == "all" or rule.frozen is not None):
        g = g.add(weights, alpha=decay)
        decay = 0.0
    if mode == "all":
        g = _clipped(g, rule.clip)
    if rule.frozen is not None:
        g = g.masked_fill(rule.frozen, 0.0)
    return g, decay


@torch.no_grad()
def _descend(ws: list[Tensor], gs: list[Tensor], vs: list[Tensor], lr: float, momentum: float, decay: float) -> None:
    """v ← β v + g + decay w and w ← w − η v, in one pass over memory, by the kernel of torch.optim.SGD(fused=True)."""
    torch._fused_sgd_(
        ws,
        gs,
        vs if momentum else [],
        weight_decay=decay,
        momentum=momentum,
        lr=lr,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=False,
    )


def _clipped(g: Tensor, limit: float | None) -> Tensor:
    """g · min(1, c/‖g‖), row by row."""
    if limit is None:
        return g
    norm: Tensor = g.norm(dim=-1, keepdim=True)
    return g * (limit / (norm + 1e-6)).clamp(max=1.0)
