"""Metrics of a client's steps, computed without side effects on the training."""

from __future__ import annotations

from copy import copy
from dataclasses import replace

from torch import Tensor

from fedflat.local.rule import Batch, LocalRule, Loss
from fedflat.local.slope import Notes, Slope, sight
from fedflat.models import Network
from fedflat.randomness import forked


class Watcher:
    """Evaluates the watched terms of a rule at w, on the batch of each step.

    Weights, batch-norm statistics and the random state of dropout are restored afterwards, and all hooks are removed.
    The following step is therefore the same as without a watcher, and uses the same kernel.
    """

    def __init__(self, network: Network, rule: LocalRule, loss: Loss) -> None:
        self._network, self._rule, self._loss, self._notes = network, rule, loss, Notes()

    def look(self, batch: Batch) -> None:
        """Evaluate the watched terms on a batch and record their values."""
        watched, network = self._rule.watched, self._network
        if not watched:
            return
        rule = replace(self._rule, terms=tuple(map(copy, self._rule.terms)))  # a term may have state
        buffers: list[Tensor] = [*network.module.buffers()]
        kept = [buffer.clone() for buffer in buffers]
        with forked(network.weights.device), network.listening(**sight([*watched, *rule.terms])) as tap:
            Slope(network, rule, self._loss, tap, self._notes).at(batch).evaluate(watched)
        for buffer, before in zip(buffers, kept, strict=True):
            buffer.copy_(before)

    def means(self) -> dict[str, float]:
        """Return the means of all recorded values except the loss, which the steps record themselves."""
        return {name: mean for name, mean in self._notes.means().items() if name != "loss"}
