"""Gradients clipped by a running median that each client remembers, and a running mean of the global models."""

from dataclasses import dataclass

import torch

from fedflat import Part, option


@dataclass(frozen=True)
class QuantileClip(Part):
    """Clip the gradient of each step at c;  c ← c · exp(γ sign(‖g‖ − c)),  which goes on in the client's next round."""

    pace: float = option(0.3, "pace γ of c", low=0)

    def first_memory(self, initial):
        return {"limit": torch.full_like(initial, 0.5)}

    def plan(self, rule, sent, memory):
        def ascent(slope, carry):
            g, c = slope(), carry["limit"]
            return g * (c / g.norm()).clamp(max=1), {"limit": c * torch.exp(self.pace * torch.sign(g.norm() - c))}

        return rule.with_ascent(ascent, limit=memory["limit"])

    def report(self, upload, sent, memory, outcome):
        return upload, {"limit": outcome.carry["limit"]}


@dataclass(frozen=True)
class RunningMean(Part):
    """Evaluate  w̄ ← ½ (w̄ + w)."""

    stage = "evaluation"

    def first_state(self, weights):
        return {"mean": weights.clone()}

    def merge(self, move, server, uploads):
        return move, {"mean": (server["mean"] + server.arrival(move)) / 2}

    def evaluated(self, server):
        return server["mean"]
