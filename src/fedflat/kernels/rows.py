"""Several clients in one step: where models are small, calling torch costs more than the arithmetic.

The clients' weights are the rows of one matrix, and one vectorised gradient serves them all. Batches of unequal length
are padded and masked, and a client whose steps are done stands still. The step itself is that of `step.py`: its
formulas reduce over the last dimension, so they hold for a vector and for each row of a matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from fedflat.rule import SAMPLED, LocalRule, Outcome, Vectors
from fedflat.step import step
from fedflat.vector import Layout, Network

# Measured by benchmarks/grouping.py: up to how many parameters clients share steps, and how many of them.
SMALL_CHAIN, SMALL, TOGETHER, FEWEST = 100_000, 30_000, 16, 4
# Not measured: an accelerator is filled by several clients of a middling model.
SMALL_ACCELERATED = 5_000_000
RowBatch = tuple[Tensor, Tensor, Tensor]  # inputs, labels and shares of every row
ALIKE = ("lr", "momentum", "nesterov", "weight_decay", "clip", "clip_mode", "scale", "decay", "spring")


def group_size(network: Network, cohort: int) -> int:
    """How many clients share a step: 16 where the model is small, or as many as leave four groups; else one.

    On a processor, convolutions with weights of their own for every client are slow and go one by one.

    >>> small, large = Network(nn.Sequential(nn.Linear(64, 10))), Network(nn.Sequential(nn.Linear(1000, 1000)))
    >>> group_size(small, 100), group_size(small, 10), group_size(large, 100)
    (16, 1, 1)
    """
    if network.weights.device.type != "cpu":
        return min(TOGETHER, cohort) if network.size <= SMALL_ACCELERATED else 1
    convolves = any(isinstance(module, nn.modules.conv._ConvNd) for module in network.module.modules())
    small = network.size <= (SMALL_CHAIN if network.chain else 0 if convolves else SMALL)
    size = min(TOGETHER, cohort // 4)
    return size if small and size >= FEWEST else 1


def can_share(network: Network, rules: Sequence[LocalRule]) -> bool:
    """Whether these clients can go together: steps of one kind, with nothing in them that looks into a pass."""
    first = rules[0]
    plain = not first.terms and not first.pairs and first.frozen is None and first.lr_floor == 1.0
    plain = plain and first.descent is None
    rows = first.ascent is None or getattr(first.ascent, "rows", False)
    random = any(isinstance(module, nn.modules.dropout._DropoutNd) for module in network.module.modules())
    still = not network.buffers.numel() and not network.autocast and not random
    return plain and rows and still and all(getattr(r, name) == getattr(first, name) for r in rules for name in ALIKE)


def train_together(
    network: Network, start: Tensor, rules: Sequence[LocalRule], batches: Iterable[RowBatch]
) -> list[Outcome]:
    """Each client's own K steps from `start` with the cross-entropy, all clients in one step at a time."""
    network.module.train()
    rule, weights = _stacked(rules), start.repeat(len(rules), 1)
    velocity = torch.zeros_like(weights) if rule.momentum else None
    carry, losses, looks = dict(rule.carry), weights.new_zeros(len(rules)), weights.new_zeros(len(rules))
    slope = RowSlope(network, weights)
    for k, batch in enumerate(batches):
        slope.at(batch)
        with _standing_still(slope.done, weights, carry):
            if not slope.descend(rule):
                gradient, carry = rule.ascent(slope, carry) if rule.ascent else (slope(), carry)  # type: ignore[arg-type]
                slope.look_at_w(k)
                step(weights, gradient, velocity, rule)
        if slope.loss is not None:
            losses += slope.loss
            looks += 1.0 if slope.done is None else (~slope.done).to(looks)
    return [
        Outcome(weights[i] - start, float(losses[i] / looks[i]), r, {n: v[i] for n, v in carry.items()}, {})
        for i, r in enumerate(rules)
    ]


def _stacked(rules: Sequence[LocalRule]) -> LocalRule:
    """One rule for all rows: what differs between the clients, the pull and the carry, as matrices."""
    first = rules[0]
    pull = None if first.pull is None else torch.stack([r.pull for r in rules if r.pull is not None])
    carry = {name: torch.stack([r.carry[name] for r in rules]) for name in first.carry}
    return replace(first, pull=pull, carry=carry)


@contextmanager
def _standing_still(done: Tensor | None, weights: Tensor, carry: Vectors) -> Iterator[None]:
    """Rows that are done come out as they went in."""
    kept = None if done is None else [(x, x[done].clone()) for x in (weights, *carry.values())]
    yield
    for x, rows in kept or ():
        x[done] = rows


class RowSlope:
    """∇ loss of every row on its own batch: the `Slope` of a group."""

    def __init__(self, network: Network, weights: Tensor) -> None:
        self.weights = weights
        chain = network.chain
        self._chain = chain.rows(weights) if chain else None
        self._vectorised = _row_gradient(network.module, network.layout)
        self._home = torch.empty_like(weights)

    def at(self, batch: RowBatch) -> None:
        """Move on to the next batches."""
        self._batch = batch
        done = batch[2][:, 0] == 0
        self.done = done if bool(done.any()) else None
        self.loss: Tensor | None = None  # at w, of every row; a row that is done has none

    def look_at_w(self, k: int) -> None:
        """Note the loss at w in a step that took no gradient there, once in a few steps."""
        if k % SAMPLED == 0 and self.loss is None:
            self()

    def __call__(self, direction: Tensor | None = None, length: Tensor | None = None) -> Tensor:
        """The gradients at w + ε, row by row, as `Slope` gives one."""
        if direction is not None:
            self._home.copy_(self.weights)
            self.weights.add_(direction if length is None else direction * length)
        if self._chain:
            loss, gradients = self._chain.gradient(*self._batch)
        else:
            gradients, loss = self._vectorised(self.weights, *self._batch)
        if direction is not None:
            self.weights.copy_(self._home)
        if direction is None and self.loss is None:
            self.loss = loss
        return gradients

    def descend(self, rule: LocalRule) -> bool:
        """The whole step at once, where it is a plain one of a chain; otherwise nothing is done."""
        if not self._chain or not rule.plain:
            return False
        self.loss = self._chain.descend(*self._batch, rule.lr, rule.decay + rule.weight_decay)
        return True


def _row_gradient(module: nn.Module, layout: Layout) -> Callable[..., tuple[Tensor, Tensor]]:
    """(weights, inputs, labels, shares) of every row ↦ the gradients and losses, in one vectorised call."""

    def loss(parameters: Any, inputs: Tensor, labels: Tensor, shares: Tensor) -> Tensor:
        logits = functional_call(module, parameters, (inputs,))
        return (F.cross_entropy(logits, labels, reduction="none") * shares).sum()

    vectorised = vmap(grad_and_value(loss))

    def gradients(weights: Tensor, inputs: Tensor, labels: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
        rows = len(weights)
        views = {name: weights[:, span].view(rows, *layout.shapes[name]) for name, span in layout.slices.items()}
        slopes, losses = vectorised(views, inputs, labels, shares)
        return torch.cat([slopes[name].reshape(rows, -1) for name in layout.shapes], dim=1), losses

    return gradients
