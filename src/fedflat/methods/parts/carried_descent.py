"""Local AdamW and Muon whose state and direction the clients share through the server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedflat.local import LocalRule, Outcome, Vectors
from fedflat.methods.part import Part, ServerView, option
from fedflat.methods.parts.descent import LocalAdamW, LocalMuon
from fedflat.methods.parts.pulls import mean_gradient
from fedflat.methods.uploads import Upload, Uploads
from fedflat.models import Layout


@dataclass(frozen=True)
class CarriedDescent(Part):
    """A local optimiser that starts each round from the mean of one of the clients' state vectors, the `carried` one.

    The server also sends the last global update as a direction, Δ_G = −mean_S Δᵢ/(K η).
    """

    sees = "each"
    carried: ClassVar[str]

    def first_state(self, weights: Tensor) -> Vectors:
        return {"direction": torch.zeros_like(weights), self.carried: torch.zeros_like(weights)}

    def broadcast(self, server: ServerView) -> Vectors:
        return {**server.vectors, self.carried: self.packed(server[self.carried], server.layout)}

    def report(self, upload: Upload, sent: Vectors, memory: Vectors, outcome: Outcome) -> tuple[Upload, Vectors]:
        return upload.update(**{self.carried: self.packed(outcome.descent[self.carried], outcome.rule.layout)}), {}

    def merge(self, move: Tensor, server: ServerView, uploads: Uploads) -> tuple[Tensor, Vectors]:
        carried = self.unpacked(uploads.average(self.carried), server.layout)
        return move, {"direction": mean_gradient(uploads), self.carried: carried}

    def packed(self, state: Tensor, layout: Layout) -> Tensor:
        """Return the carried state in the form in which server and clients send it."""
        return state

    def unpacked(self, sent: Tensor, layout: Layout) -> Tensor:
        """Return the carried state, as a vector of the model's size, from the form in which it was sent."""
        return sent


@dataclass(frozen=True)
class CarriedAdamW(CarriedDescent):
    """AdamW on the clients, with the mean of their second moments and the last global update (FedAdamW):

        client:  m = 0,  v = v̄  at the start of a round; in step k = 1 … K of round r:
                 m ← β₁ m + (1 − β₁) g,      v ← β₂ v + (1 − β₂) g²
                 w ← w − η ( m̂/(√v̂ + ε) + α Δ_G ) − η wd · w,      m̂ = m/(1 − β₁ᵏ),  v̂ = v/(1 − β₂ᵗ),  t = r K + k
        server:  v̄ = mean_S of the clients' v, averaged over each block,      Δ_G = −mean_S Δᵢ/(K η)

    A block is one tensor of the model, and all of its entries get the mean of their v. Only the means are sent, one
    number per tensor in each direction. In the first round v̄ and Δ_G are 0, and the steps are those of `adamw`.

    Deviations: the equations are taken from summaries by others of the paper's arXiv version, and from the released
    code. The paper prints −λ w inside the bracket, which would make the weights grow; the decay here is AdamW's. The
    paper divides the tensors of attention into smaller blocks. The released code shares v without the mean over blocks
    (`blocks=False`), as a vector of the model's size. K is the client's own number of steps.
    """

    carried = "square"

    align: float = option(0.5, "weight α of the last global update", low=0)
    blocks: bool = option(True, "average v over each tensor")
    beta1: float = option(0.9, "decay β₁ of the mean", low=0, high=1, open_high=True)
    beta2: float = option(0.999, "decay β₂ of the square", low=0, high=1, open_high=True)
    eps: float = option(1e-8, "ε beside the root", low=0, open_low=True)

    @property
    def tensorwise(self) -> tuple[str, ...]:
        return ("square",) if self.blocks else ()

    @property
    def squares(self) -> tuple[str, ...]:
        return ("square",)

    def plan(self, rule: LocalRule, sent: Vectors, memory: Vectors) -> LocalRule:
        square = self.unpacked(sent["square"], rule.layout)
        return rule.with_descent(AlignedAdamW(self, sent["direction"], square, rule.round * rule.steps))

    def packed(self, state: Tensor, layout: Layout) -> Tensor:
        return layout.means(state) if self.blocks else state

    def unpacked(self, sent: Tensor, layout: Layout) -> Tensor:
        return layout.spread(sent) if self.blocks else sent


@dataclass(frozen=True)
class AlignedAdamW:
    """The optimiser of `CarriedAdamW`; `before` is the number of earlier steps of v."""

    part: CarriedAdamW
    direction: Tensor
    square: Tensor
    before: int

    @property
    def _adamw(self) -> LocalAdamW:
        return LocalAdamW(self.part.beta1, self.part.beta2, self.part.eps)

    def start(self, weights: Tensor) -> Vectors:
        return {**self._adamw.start(weights), "square": self.square}

    def __call__(self, g: Tensor, weights: Tensor, memory: Vectors, layout: Layout, k: int) -> tuple[Tensor, Vectors]:
        own, memory = self._adamw.direction(g, memory, k + 1, self.before + k + 1)
        return own.add_(self.direction, alpha=self.part.align), memory


@dataclass(frozen=True)
class CarriedMuon(CarriedDescent):
    """Muon on the clients, with the mean of their momenta and the last global update (FedMuon):

        client:  M = M̄  at the start of a round;      M ← μ M + g
                 w ← w − η ( (1 − α) orthogonal(M) + α Δ_G ) − η wd · w
        server:  M̄ = mean_S Mᵢ,      Δ_G = −mean_S Δᵢ/(K η)

    orthogonal(·) is the same as in `muon`, with the factor √max(1, m/n) for a matrix of m rows and n columns. Biases
    and norms use AdamW, reset in every round, in place of orthogonal(M). In the first round Δ_G is 0 and the steps are
    multiplied by 1 − α.

    Deviations: the equations are taken from summaries by others of the paper's arXiv version (2510.27403), and from
    the released code. The code uses Nesterov momentum and multiplies the rate of the matrices by a constant; neither
    is in the equations. Another FedMuon (arXiv 2509.26337) corrects the bias of orthogonal(·) by control
    variates and is a different method.
    """

    carried = "buffer"

    align: float = option(0.5, "weight α of the last global update", low=0, high=1)
    momentum: float = option(0.95, "momentum μ", low=0, high=1)
    steps: int = option(5, "Newton–Schulz iterations", low=1)

    def plan(self, rule: LocalRule, sent: Vectors, memory: Vectors) -> LocalRule:
        return rule.with_descent(AlignedMuon(self, sent["direction"], sent["buffer"]))


@dataclass(frozen=True)
class AlignedMuon:
    """The optimiser of `CarriedMuon`."""

    part: CarriedMuon
    direction: Tensor
    buffer: Tensor

    @property
    def _muon(self) -> LocalMuon:
        return LocalMuon(self.part.momentum, self.part.steps)

    def start(self, weights: Tensor) -> Vectors:
        return {**self._muon.start(weights), "buffer": self.buffer}

    def __call__(self, g: Tensor, weights: Tensor, memory: Vectors, layout: Layout, k: int) -> tuple[Tensor, Vectors]:
        buffer = self.part.momentum * memory["buffer"] + g
        own, memory = self._muon.direction(g, buffer, {**memory, "buffer": buffer}, layout, k)
        return torch.lerp(own, self.direction, self.part.align), memory
