"""The gradient of a batch as a function of where it is taken, and what is noted on the way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from fedflat.kernels.sgd import descend
from fedflat.randomness import forked
from fedflat.rule import SAMPLED, Batch, LocalRule, Loss, Term
from fedflat.vector import Forward, Network, Tap


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
            descend([*self.network.module.parameters()], gradients, velocities, lr, rule, decay)
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
