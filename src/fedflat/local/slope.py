"""The gradient of a batch as a function of the point where it is taken, and the metrics recorded on the way."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from fedflat.local.kernels import Kernels
from fedflat.local.rule import SAMPLED, Batch, LocalRule, Loss, Term
from fedflat.models import Forward, Network, Tap, twice_differentiable
from fedflat.randomness import forked
from fedflat.tokens import counted_rows


@dataclass(frozen=True)
class Pass:
    """One forward pass, as passed to the terms.

    If every token has a label, a term sees one row of logits and features for each token that counts, as if these were
    the samples.
    """

    whole: Forward
    every_label: Tensor
    slope: Slope
    at_w: bool = True

    @cached_property
    def forward(self) -> Forward:
        return self._counted(self.whole)

    @property
    def logits(self) -> Tensor:
        return self.forward.logits

    @cached_property
    def labels(self) -> Tensor:
        return counted_rows(self.whole.logits, self.every_label)[1]

    @cached_property
    def loss(self) -> Tensor:
        """The loss of the batch without the terms."""
        return self.slope.loss(self.whole.logits, self.every_label)

    def under(self, reference: Tensor) -> Forward:
        """Return the pass of the batch through a frozen model with these weights; it is cached for the batch."""
        return self._counted(self.slope.under(reference))

    def _counted(self, forward: Forward) -> Forward:
        labels = self.every_label
        if labels.is_floating_point() or labels.ndim == 1:
            return forward
        logits, _ = counted_rows(forward.logits, labels)
        features = None if forward.features is None else counted_rows(forward.features, labels)[0]
        return replace(forward, logits=logits, features=features)

    def note(self, name: str, value: Tensor) -> None:
        """Record a number of a pass at w; its mean over the client's steps becomes a metric of the round."""
        if self.at_w:
            self.slope.notes.add(name, value)


def sight(lookers: Iterable[object]) -> dict[str, bool]:
    """Return what these terms and ascents need to see of a pass, as arguments of `Network.listening`."""
    lookers = [*lookers]
    return {kind: any(getattr(x, kind, False) for x in lookers) for kind in ("features", "activations", "attention")}


class Notes:
    """Running means of recorded values, kept as tensors so that no step waits for a device."""

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

    `velocity` is the momentum v of the client's steps, for an ascent that takes steps itself. `kernels` may compute the
    gradient in place of autograd; `train` chooses them.
    """

    velocity: Tensor | None = None

    def __init__(self, network: Network, rule: LocalRule, loss: Loss, tap: Tap, notes: Notes | None = None) -> None:
        self.network, self.rule, self.loss, self.tap, self.notes = network, rule, loss, tap, notes or Notes()
        self.kernels = Kernels()
        self._first_statistics = network.buffers.clone()
        self._bent = any(getattr(term, "curvature", False) for term in rule.terms)

    def at(self, batch: Batch, other: Batch | None = None) -> Slope:
        """Set the batch of the next step, and return the slope.

        Args:
            batch: the inputs and labels.
            other: a second batch, for steps that use two.
        """
        self.batch = batch
        self._other = other or batch
        self._seen: dict[int, Forward] = {}
        self._noted: set[str] = set()
        self._statistics: Tensor | None = None
        return self

    def beside(self, batch: Batch) -> Slope:
        """Return the slope of another batch, which records nothing here."""
        return Slope(self.network, self.rule, self.loss, self.tap).at(batch)

    def on_other_batch(self, offset: Tensor) -> Tensor:
        """Return the gradient at w + ε on the step's second batch."""
        self.batch, self._seen = self._other, {}
        return self(offset)

    @contextmanager
    def first(self, share: float) -> Iterator[None]:
        """Within this context, passes see only the first ⌈share · B⌉ of the batch's B samples."""
        batch, seen = self.batch, self._seen
        count = max(1, math.ceil(round(share * len(batch[1]), 9)))  # 0.56 · 25 is a little more than 14
        if count < len(batch[1]):
            self.batch, self._seen = (batch[0][:count], batch[1][:count]), {}
        yield
        self.batch, self._seen = batch, seen

    @property
    def weights(self) -> Tensor:
        """The client's current weights w; read-only."""
        return self.network.weights

    def __call__(
        self,
        direction: Tensor | None = None,
        length: Tensor | None = None,
        *,
        terms: tuple[Term, ...] | None = None,
        data: bool = True,
        spent: bool = False,
    ) -> Tensor:
        """Return the gradient at w + ε of the loss and the terms, as a new tensor.

        Args:
            direction: the direction of ε; without it the gradient is taken at w.
            length: factor on the direction, 1 by default.
            terms: the terms to include, by default those of the rule.
            data: whether to include the loss.
            spent: whether the caller does not need the direction any more; it is overwritten with w + ε, which saves a
                vector.
        """
        if direction is None:
            return self._gradient(terms, data, at_w=True)
        # The sum is written elsewhere: to move the weights and back would take two copies more.
        away = direction if spent else self._away
        if length is None:
            torch.add(self.weights, direction, out=away)
        else:
            torch.addcmul(self.weights, direction, length, out=away)
        with self.network.moved_to(away):
            return self._gradient(terms, data, at_w=False)

    def _gradient(self, terms: tuple[Term, ...] | None, data: bool, at_w: bool) -> Tensor:
        if self.kernels.gradient and not terms and data:
            loss, gradient = self.kernels.gradient(*self.batch)
            if at_w:
                self.note_loss(loss)
            return gradient
        return self.network.differentiate(self.objective(terms, data, at_w=at_w))

    def look_at_w(self, k: int) -> None:
        """Record the loss and the terms at w every few steps, if the step took no gradient there.

        This does not change the training: the random state of dropout is restored afterwards.
        """
        wanted = {"loss", "terms"} if self.rule.terms else {"loss"}
        if k % SAMPLED == 0 and wanted - self._noted:
            with forked(self.weights.device):
                self.objective()

    def evaluate(self, terms: tuple[Term, ...]) -> None:
        """Evaluate the terms on a pass at w, only for the values that they record."""
        with twice_differentiable():
            here = self._pass(self.forward())
        for term in terms:
            term(here)

    def in_head(self, terms: tuple[Term, ...]) -> Tensor:
        """Return the gradient of the terms at w with respect to the head."""
        if self.kernels.head:
            return self.kernels.head.in_head(self, terms)
        return self(terms=terms, data=False)[self.network.head]

    def at_head(self, offset: Tensor) -> Tensor:
        """Return the gradient at w + ε, where ε is nonzero only in the head."""
        head = self.weights[self.network.head]
        home = head.clone()
        head.add_(offset)
        gradient = self.kernels.head.at_head(self) if self.kernels.head else self._gradient(None, True, at_w=False)
        head.copy_(home)
        return gradient

    @cached_property
    def _away(self) -> Tensor:
        return torch.empty_like(self.weights)

    def forward(self) -> Forward:
        """Run a pass over the batch. Only the first pass of a step updates the batch-norm statistics."""
        with twice_differentiable() if self._bent else nullcontext():
            forward = self.tap(self.batch[0])
        if self._statistics is None:
            self._statistics = self.network.buffers.clone()
        self.network.buffers.copy_(self._statistics)
        return forward

    def _pass(self, forward: Forward, at_w: bool = True) -> Pass:
        return Pass(forward, self.batch[1], self, at_w and "terms" not in self._noted)

    def objective(
        self,
        terms: tuple[Term, ...] | None = None,
        data: bool = True,
        forward: Forward | None = None,
        at_w: bool = True,
    ) -> Tensor:
        """Return loss + Σ terms of the batch as a differentiable scalar.

        Args:
            terms: the terms; by default those of the rule.
            data: whether to include the loss.
            forward: the forward pass to use; by default a new one.
            at_w: whether the pass is at the client's weights w, where loss and terms are noted.
        """
        here = self._pass(forward or self.forward(), at_w)
        if at_w:
            self.note_loss(here.loss)
        parts = [here.loss] * data + [term(here) for term in (self.rule.terms if terms is None else terms)]
        if at_w and data:
            self._noted.add("terms")
        return self._sum(parts)

    def note_loss(self, loss: Tensor) -> None:
        """Record the loss at w; only the first one of a step counts."""
        if "loss" not in self._noted:
            self.notes.add("loss", loss)
            self._noted.add("loss")

    @staticmethod
    def _sum(parts: list[Tensor]) -> Tensor:
        return torch.stack(parts).sum() if len(parts) > 1 else parts[0]

    def under(self, reference: Tensor) -> Forward:
        """Return the pass of the batch through a frozen model with these weights.

        It uses the batch-norm statistics from the start of the round.
        """
        if id(reference) not in self._seen:
            with self.network.standing_at(reference, self._first_statistics):
                self._seen[id(reference)] = self.tap(self.batch[0])
        return self._seen[id(reference)]
