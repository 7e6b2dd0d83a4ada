"""Parts that choose the optimiser of the local step in place of SGD."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedflat.parts.part import Part, option
from fedflat.rule import LocalRule, Vectors
from fedflat.vector import Layout

# The quintic polynomial of Muon's Newton–Schulz iteration, which takes singular values to about 1 in a few steps.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


@dataclass(frozen=True)
class LocalAdamW(Part):
    """AdamW as the client's optimiser, begun anew in every round, with the recipe's η and weight decay:

        m ← β₁ m + (1 − β₁) g,      v ← β₂ v + (1 − β₂) g²
        w ← w − η wd · w − η m̂/(√v̂ + ε),      m̂ = m/(1 − β₁ᵏ),  v̂ = v/(1 − β₂ᵏ)

    g is the whole gradient of a local step, with the clip and the pulls of other parts; the weight decay stands apart.
    The recipe's momentum has no part in it. Methods that divide Δ by K η (SCAFFOLD, FedCM, FedNova) assume SGD and are
    refused beside it.

    Deviations: none from torch.optim.AdamW.
    """

    beta1: float = option(0.9, "decay β₁ of the mean", low=0, high=1)
    beta2: float = option(0.999, "decay β₂ of the square", low=0, high=1)
    eps: float = option(1e-8, "ε beside the root", low=0, open_low=True)

    def plan(self, rule: LocalRule, sent: Vectors, memory: Vectors) -> LocalRule:
        return rule.with_descent(self)

    def start(self, weights: Tensor) -> Vectors:
        return {"mean": torch.zeros_like(weights), "square": torch.zeros_like(weights)}

    def __call__(self, g: Tensor, weights: Tensor, memory: Vectors, layout: Layout, k: int) -> tuple[Tensor, Vectors]:
        mean = torch.lerp(memory["mean"], g, 1 - self.beta1)
        square = self.beta2 * memory["square"] + (1 - self.beta2) * g * g
        spread = (square / (1 - self.beta2 ** (k + 1))).sqrt_().add_(self.eps)
        return mean / (1 - self.beta1 ** (k + 1)) / spread, {"mean": mean, "square": square}


@dataclass(frozen=True)
class LocalMuon(Part):
    """Muon as the client's optimiser, begun anew in every round: for each matrix W of m rows and n columns

        B ← μ B + G,      W ← W − η wd · W − η √max(1, m/n) · orthogonal(G + μ B)

    orthogonal(·) brings all singular values near 1 by Newton–Schulz iterations. Kernels of convolutions are matrices
    with one row for each output. Biases and norms take AdamW's step with the same η.

    Deviations: the iteration runs in the weights' precision, where torch.optim.Muon takes bfloat16. Embeddings and the
    head count as matrices too.
    """

    nesterov: ClassVar[bool] = True

    momentum: float = option(0.95, "momentum μ", low=0, high=1)
    steps: int = option(5, "Newton–Schulz iterations", low=1)
    beta1: float = option(0.9, "β₁ of AdamW for biases and norms", low=0, high=1)
    beta2: float = option(0.999, "β₂ of AdamW for biases and norms", low=0, high=1)
    eps: float = option(1e-8, "ε of AdamW for biases and norms", low=0, open_low=True)

    def plan(self, rule: LocalRule, sent: Vectors, memory: Vectors) -> LocalRule:
        return rule.with_descent(self)

    @property
    def _rest(self) -> LocalAdamW:
        return LocalAdamW(self.beta1, self.beta2, self.eps)

    def start(self, weights: Tensor) -> Vectors:
        return {"buffer": torch.zeros_like(weights), **self._rest.start(weights)}

    def __call__(self, g: Tensor, weights: Tensor, memory: Vectors, layout: Layout, k: int) -> tuple[Tensor, Vectors]:
        buffer = self.momentum * memory["buffer"] + g
        ahead = g + self.momentum * buffer
        direction, rest = self._rest(g, weights, memory, layout, k)
        for name, tensor in layout.views(ahead).items():
            if tensor.dim() >= 2:
                direction[layout.slices[name]] = orthogonal(tensor.flatten(1), self.steps).flatten()
        return direction, {"buffer": buffer, **rest}


def orthogonal(matrix: Tensor, steps: int) -> Tensor:
    """√max(1, m/n) · U Vᵀ of a matrix U S Vᵀ, about:  X ← a X + (b X Xᵀ + c (X Xᵀ)²) X  from X = matrix/‖matrix‖."""
    a, b, c = NEWTON_SCHULZ
    rows, columns = matrix.shape
    x = matrix.t() if rows > columns else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        gram = x @ x.t()
        x = a * x + (b * gram + c * gram @ gram) @ x
    scaled: Tensor = (x.t() if rows > columns else x) * max(1.0, rows / columns) ** 0.5
    return scaled
