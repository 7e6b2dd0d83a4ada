"""Training of several clients at once, for small models where the overhead of calling torch dominates.

The clients' weights are the rows of one matrix, and their gradients are computed in one vectorised call. Shorter
batches are padded and masked, and the weights of a client that has finished its steps stay constant. The step is the
one in `step.py`: its formulas reduce over the last dimension, so they apply to a vector and to each row of a matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from fedflat.local.kernels import enabled
from fedflat.local.kernels.head import draws_masks
from fedflat.local.kernels.linear import Chain, linear_layers
from fedflat.local.kernels.sgd import FusedUpdate
from fedflat.local.rule import SAMPLED, LocalRule, Loss, Outcome, Vectors
from fedflat.local.step import step
from fedflat.local.watcher import Watcher
from fedflat.models import Layout, Network
from fedflat.randomness import forked

# Largest number of parameters and number of clients per group, measured by benchmarks/grouping.py.
SMALL, TOGETHER, FEWEST = 30_000, 16, 4
# Not measured: on an accelerator, medium-sized models also profit from several clients at once.
SMALL_ACCELERATED = 5_000_000
NOISE, ROUNDING = 0.1, 1e-3  # of the test whether samples are mixed; rounding alone is far below
WEIGHTS = ""  # the weights beside the vectors that an ascent carries, which have names
RowBatch = tuple[Tensor, Tensor, Tensor]  # inputs, labels and shares of every row
ALIKE = ("lr", "momentum", "nesterov", "weight_decay", "clip", "clip_mode", "scale", "decay", "spring")


def group_size(network: Network, cohort: int) -> int:
    """Return how many clients train together: up to 16 for a small model, but at least four groups; otherwise one.

    On a CPU, convolutions with different weights for every client are slow, so these models train one by one.

    >>> small, large = Network(nn.Sequential(nn.Linear(64, 10))), Network(nn.Sequential(nn.Linear(1000, 1000)))
    >>> group_size(small, 100), group_size(small, 10), group_size(large, 100)
    (16, 1, 1)
    """
    size = sum(parameter.numel() for parameter in network.module.parameters())  # frozen parameters count too
    if network.weights.device.type != "cpu":
        return min(TOGETHER, cohort) if size <= SMALL_ACCELERATED else 1
    convolves = any(isinstance(module, nn.modules.conv._ConvNd) for module in network.module.modules())
    small = size <= (0 if convolves else SMALL)
    together = min(TOGETHER, cohort // 4)
    return together if small and together >= FEWEST else 1


def can_share(network: Network, rules: Sequence[LocalRule], loss: Loss, labels: Tensor) -> bool:
    """Return whether these clients can train together.

    Their rules must have the same kind of step, without loss terms or anything else that reads a forward pass. The
    loss must be the cross-entropy, and the labels must be class indices.

    Args:
        network: the network that all clients share.
        rules: the rule of each client.
        loss: the loss of a batch.
        labels: labels of the data; only their type matters.
    """
    if not enabled() or loss is not F.cross_entropy or labels.is_floating_point():
        return False
    first = rules[0]
    plain = not first.terms and not first.pairs and first.frozen is None and first.lr_floor == 1.0
    plain = plain and first.descent is None
    rows = first.ascent is None or getattr(first.ascent, "rows", False)
    still = not network.buffers.numel() and not network.autocast and not draws_masks(network)
    return plain and rows and still and all(getattr(r, name) == getattr(first, name) for r in rules for name in ALIKE)


def mixes_samples(network: Network, weights: Tensor, inputs: Tensor) -> bool:
    """Return whether the logits of a sample depend on others of its batch, as with batch statistics, or on chance.

    Padding would change such logits, so the clients train one by one. The logits of a batch are compared with and
    without its last sample, at w + noise, because a layer may begin with zeros. A network that fails here counts as
    mixing: its clients then fail, or not, on their own.

    Args:
        network: the network that all clients share.
        weights: weights w at which the samples differ, for example those of the server.
        inputs: a few samples.
    """
    if linear_layers(network):
        return False
    chance = torch.Generator().manual_seed(0)
    noise = torch.randn(weights.shape, generator=chance, dtype=weights.dtype).to(weights.device)
    with forked(weights.device), network.standing_at(weights + NOISE * noise, network.buffers):
        network.module.train()
        try:
            fewer, more = network.module(inputs[:-1]), network.module(inputs)[:-1]
        except Exception:
            return True
    return not torch.allclose(fewer, more, rtol=ROUNDING, atol=ROUNDING * float(fewer.abs().max()))


def train_together(
    network: Network, start: Tensor, rules: Sequence[LocalRule], batches: Iterable[tuple[RowBatch, list[int]]]
) -> list[Outcome]:
    """Train several clients from their `start` with the cross-entropy, one step of all clients at a time.

    Args:
        network: the network that all clients share.
        start: the initial weights, one vector for all clients or a row for each.
        rules: the rule of each client; `can_share` must be true for them.
        batches: inputs, labels and sample weights of every step, with the client as the first dimension, and the number
            of samples of each client, after which its row is padding.

    Returns:
        One outcome per client, in the order of `rules`.
    """
    network.module.train()
    rule, starts = _stacked(rules), start.expand(len(rules), -1)
    weights = starts.clone()  # contiguous also if `start` is one vector for all
    velocity = torch.zeros_like(weights) if rule.momentum else None
    carry, losses, looks = dict(rule.carry), weights.new_zeros(len(rules)), [0] * len(rules)
    slope = RowSlope(network, weights)
    update: FusedUpdate | None = None
    at_once = slope.chain if rule.plain else None
    watchers = [Watcher(network, r, F.cross_entropy) for r in rules] if rule.watched else []
    for k, (batch, sizes) in enumerate(batches):
        if k == 0 and FusedUpdate.fits(network, rule, F.cross_entropy, batch[1]):
            update = FusedUpdate(network, rule)
        slope.at(batch, [i for i, r in enumerate(rules) if r.steps <= k])
        _watch(watchers, network, weights, batch, sizes)
        still = _rows({WEIGHTS: weights, **carry}, slope.done)
        if at_once:
            slope.loss = at_once.descend(*batch, rule.lr, rule.decay + rule.weight_decay)
        else:
            gradient, carry = rule.ascent(slope, carry) if rule.ascent else (slope(), carry)  # type: ignore[arg-type]
            slope.look_at_w(k)
            step(weights, gradient, velocity, rule, update=update)
        _restore({WEIGHTS: weights, **carry}, slope.done, still)
        if slope.loss is not None:
            losses += slope.loss
            looks = [count + (r.steps > k) for count, r in zip(looks, rules, strict=True)]
    means = (losses / losses.new_tensor(looks)).tolist()
    return [
        Outcome(
            weights[i] - starts[i],
            means[i],
            r,
            {n: v[i] for n, v in carry.items()},
            watchers[i].means() if watchers else {},
        )
        for i, r in enumerate(rules)
    ]


def _watch(
    watchers: Sequence[Watcher], network: Network, weights: Tensor, batch: RowBatch, sizes: Sequence[int]
) -> None:
    """Evaluate the watched terms of each client at its row, on the samples that are not padding."""
    for watcher, row, inputs, labels, size in zip(watchers, weights, *batch[:2], sizes, strict=False):
        if size:
            network.load(row)
            watcher.look((inputs[:size], labels[:size]))


def _stacked(rules: Sequence[LocalRule]) -> LocalRule:
    """Return one rule for all rows, with the pull and the carry of the clients stacked as matrices."""
    first = rules[0]
    pull = None if first.pull is None else torch.stack([r.pull for r in rules if r.pull is not None])
    carry = {name: torch.stack([r.carry[name] for r in rules]) for name in first.carry}
    return replace(first, pull=pull, carry=carry)


def _rows(vectors: Vectors, done: Tensor | None) -> Vectors:
    """Return the rows of finished clients, which a step must not change."""
    return {} if done is None else {name: x.index_select(0, done) for name, x in vectors.items()}


def _restore(vectors: Vectors, done: Tensor | None, rows: Vectors) -> None:
    """Write the rows of finished clients back, also into new tensors that an ascent has returned."""
    if done is not None:
        for name, kept in rows.items():
            vectors[name].index_copy_(0, done, kept)


class RowSlope:
    """The `Slope` of a group: ∇ loss of every row on its own batch."""

    def __init__(self, network: Network, weights: Tensor) -> None:
        self.weights = weights
        chain = Chain.of(network)
        self.chain = chain.rows(weights) if chain else None
        self._vectorised = _row_gradient(network.module, network.layout)
        self._home = torch.empty_like(weights)
        self.done: Tensor | None = None
        self._finished: list[int] = []

    def at(self, batch: RowBatch, finished: list[int]) -> None:
        """Set the current batches, and the rows whose clients have taken all of their steps.

        They are known from the rules: to look for them in the batches would wait for an accelerator in every step.
        """
        self._batch = batch
        if finished != self._finished:
            self._finished, self.done = finished, torch.tensor(finished, device=self.weights.device)
        self.loss: Tensor | None = None  # of every row at w; undefined for finished rows

    def look_at_w(self, k: int) -> None:
        """Record the loss at w every few steps, if the step took no gradient there."""
        if k % SAMPLED == 0 and self.loss is None:
            self()

    def __call__(self, direction: Tensor | None = None, length: Tensor | None = None, *, spent: bool = False) -> Tensor:
        """Return the gradients at w + ε of all rows, like `Slope` for one client; no direction is overwritten."""
        if direction is not None:
            self._home.copy_(self.weights)
            self.weights.add_(direction if length is None else direction * length)
        if self.chain:
            loss, gradients = self.chain.gradient(*self._batch)
        else:
            gradients, loss = self._vectorised(self.weights, *self._batch)
        if direction is not None:
            self.weights.copy_(self._home)
        if direction is None:
            self.loss = loss
        return gradients


def _row_gradient(module: nn.Module, layout: Layout) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return a vectorised function from (weights, inputs, labels, shares) of all rows to gradients and losses."""

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
