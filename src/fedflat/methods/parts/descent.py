"""Parts that replace SGD as the optimiser of the local step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedflat.local import LocalRule, Vectors
from fedflat.methods.part import Part, option
from fedflat.models import Layout

# The quintic polynomial of Muon's Newton–Schulz iteration, which brings singular values to about 1 in a few steps.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


@dataclass(frozen=True)
class LocalAdamW(Part):
    """AdamW as the client's optimiser, reset in every round, with the recipe's η and weight decay:

        m ← β₁ m + (1 − β₁) g,      v ← β₂ v + (1 − β₂) g²
        w ← w − η wd · w − η m̂/(√v̂ + ε),      m̂ = m/(1 − β₁ᵏ),  v̂ = v/(1 − β₂ᵏ)

    g is the full gradient of a local step, with the clip and the pulls of other parts; the weight decay is decoupled.
    The recipe's momentum is not used. Methods that divide Δ by K η (SCAFFOLD, FedCM, FedNova) assume SGD and cannot be
    combined with this part.

    Deviations: none from torch.optim.AdamW.
    """

    beta1: float = option(0.9, "decay β₁ of the mean", low=0, high=1, open_high=True)
    beta2: float = option(0.999, "decay β₂ of the square", low=0, high=1, open_high=True)
    eps: float = option(1e-8, "ε beside the root", low=0, open_low=True)

    def plan(self, rule: LocalRule, sent: Vectors, memory: Vectors) -> LocalRule:
        return rule.with_descent(self)

    def start(self, weights: Tensor) -> Vectors:
        return {"mean": torch.zeros_like(weights), "square": torch.zeros_like(weights)}

    def __call__(self, g: Tensor, weights: Tensor, memory: Vectors, layout: Layout, k: int) -> tuple[Tensor, Vectors]:
        return self.direction(g, memory, k + 1, k + 1)

    def direction(self, g: Tensor, memory: Vectors, k: int, t: int) -> tuple[Tensor, Vectors]:
        """Return m̂/(√v̂ + ε) and the new moments, if m began k steps ago and v began t steps ago."""
        mean = torch.lerp(memory["mean"], g, 1 - self.beta1)
        square = self.beta2 * memory["square"] + (1 - self.beta2) * g * g
        spread = (square / (1 - self.beta2**t)).sqrt_().add_(self.eps)
        return mean / (1 - self.beta1**k) / spread, {"mean": mean, "square": square}


@dataclass(frozen=True)
class LocalMuon(Part):
    """Muon as the client's optimiser, reset in every round. For each matrix W with m rows and n columns:

        B ← μ B + G,      W ← W − η wd · W − η √max(1, m/n) · orthogonal(G + μ B)

    orthogonal(·) brings all singular values close to 1 by Newton–Schulz iterations. Convolution kernels are treated as
    matrices with one row per output. Biases and norms use AdamW with the same η.

    Deviations: the iteration runs in the precision of the weights, whereas torch.optim.Muon uses bfloat16; otherwise
    they agree. torch's B is the mean (1 − μ) B, whose length orthogonal(·) ignores. Embeddings and the head are treated
    as matrices too.
    """

    momentum: float = option(0.95, "momentum μ", low=0, high=1)
    steps: int = option(5, "Newton–Schulz iterations", low=1)
    beta1: float = option(0.9, "β₁ of AdamW for biases and norms", low=0, high=1, open_high=True)
    beta2: float = option(0.999, "β₂ of AdamW for biases and norms", low=0, high=1, open_high=True)
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
        return self.direction(g, g + self.momentum * buffer, {**memory, "buffer": buffer}, layout, k)

    def direction(self, g: Tensor, ahead: Tensor, memory: Vectors, layout: Layout, k: int) -> tuple[Tensor, Vectors]:
        """Return orthogonal(`ahead`) for the matrices and AdamW's direction for the rest, and the new state."""
        direction, rest = self._rest.direction(g, memory, k + 1, k + 1)
        for name, tensor in layout.views(ahead).items():
            if tensor.dim() >= 2:
                direction[layout.slices[name]] = orthogonal(tensor.flatten(1), self.steps).flatten()
        return direction, {**memory, **rest}


def orthogonal(matrix: Tensor, steps: int) -> Tensor:
    """Approximate √max(1, m/n) · U Vᵀ of a matrix U S Vᵀ.

    The iteration is  X ← a X + (b X Xᵀ + c (X Xᵀ)²) X,  starting from X = matrix/‖matrix‖.
    """
    a, b, c = NEWTON_SCHULZ
    rows, columns = matrix.shape
    x = matrix.t() if rows > columns else matrix
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.t()
        x = a * x + (b * gram + c * gram @ gram) @ x
    scaled: Tensor = (x.t() if rows > columns else x) * max(1.0, rows / columns) ** 0.5
    return scaled
