"""AdamW on the client; FedSoL comes from the catalogue: "fedsol + own.local_adamw:MyAdamW"."""

from dataclasses import dataclass

import torch

from fedflat import Part, option


@dataclass(frozen=True)
class MyAdamW(Part):
    """m ← β₁ m + (1 − β₁) g,  v ← β₂ v + (1 − β₂) g²;  the direction is m̂/(√v̂ + ε)."""

    beta1: float = option(0.9, "decay β₁ of the mean", low=0, high=1)
    beta2: float = option(0.999, "decay β₂ of the square", low=0, high=1)
    eps: float = option(1e-8, "ε beside the root", low=0, open_low=True)

    def plan(self, rule, sent, memory):
        return rule.with_descent(self)

    def start(self, weights):
        return {"mean": torch.zeros_like(weights), "square": torch.zeros_like(weights)}

    def __call__(self, g, weights, memory, layout, k):
        mean = self.beta1 * memory["mean"] + (1 - self.beta1) * g
        square = self.beta2 * memory["square"] + (1 - self.beta2) * g * g
        root = (square / (1 - self.beta2 ** (k + 1))).sqrt()
        return mean / (1 - self.beta1 ** (k + 1)) / (root + self.eps), {"mean": mean, "square": square}
