"""One client's training in one round: the local step that all methods share, and nothing else.

    g = clip( a · ∇[loss + Σ terms](w + ε) ) + pull + decay · w          v ← β v + g          w ← w − η v

A method's parts fill in a, ε, the terms, the pull and the decay before the first step (`Part.plan`); here they are only
obeyed. All vectors are flat, of size d.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from fedflat.kernels.sgd import descend
from fedflat.rule import Batch, LocalRule, Loss, Outcome, Vectors
from fedflat.slope import Slope
from fedflat.vector import Network


def train(network: Network, start: Tensor, rule: LocalRule, batches: Iterable[Batch], loss: Loss) -> Outcome:
    """K steps of the rule from `start`, in the network's own memory."""
    network.weights.copy_(start)
    network.module.train()
    velocity = torch.zeros_like(start) if rule.momentum and rule.descent is None else None
    memory = rule.descent.start(start) if rule.descent else {}
    carry = dict(rule.carry)
    lookers = [*rule.terms, rule.ascent]
    features, activations = (any(getattr(x, kind, False) for x in lookers) for kind in ("features", "activations"))
    with network.listening(features, activations) as tap:
        slope = Slope(network, rule, loss, tap)
        slope.velocity = velocity
        stream = iter(batches)
        for k, batch in enumerate(stream):
            slope.at(batch, next(stream, None) if rule.pairs else None)
            if slope.descend(velocity, k):
                continue
            gradient, carry = rule.ascent(slope, carry) if rule.ascent else (slope(), carry)
            slope.look_at_w(k)
            memory = step(network.weights, gradient, velocity, rule, k, memory)
    notes = slope.notes.means()
    velocity = slope.velocity = None  # Δ takes its place in memory
    del memory
    return Outcome(network.weights - start, notes.pop("loss", float("nan")), rule, carry, notes)


@torch.no_grad()
def step(
    weights: Tensor,
    gradient: Tensor,
    velocity: Tensor | None,
    rule: LocalRule,
    k: int = 0,
    memory: Vectors | None = None,
) -> Vectors:
    """w ← w − η v with v ← β v + clip(a g + pull) + decay w; weights and velocity change in place.

    With another descent than SGD, v is its direction, the weight decay stands apart, and its new memory is returned.
    """
    lr, decoupled = rule.lr_at(k), rule.weight_decay if rule.descent else 0.0
    g, decay = corrected(weights, gradient, replace(rule, weight_decay=0.0) if decoupled else rule)
    if rule.descent is None:
        descend([weights], [g], [] if velocity is None else [velocity], lr, rule, decay)
        return {}
    g = g.add(weights, alpha=decay) if decay else g
    direction, memory = rule.descent(g, weights, memory or {}, rule.layout, k)
    if rule.frozen is not None:
        direction = direction.masked_fill(rule.frozen, 0.0)
    # torch.optim.AdamW shrinks first; what is frozen does not shrink.
    shrunk = weights * (lr * decoupled)
    weights.sub_(shrunk if rule.frozen is None else shrunk.masked_fill(rule.frozen, 0.0))
    weights.sub_(direction, alpha=lr)
    return memory


@torch.no_grad()
def corrected(weights: Tensor, gradient: Tensor, rule: LocalRule) -> tuple[Tensor, float]:
    """clip(a g + pull), and the factor of the decay that is still to be added.


    The clip's place is one of three: around the gradient of the loss only (the clean one), around gradient, pull and
    spring but not the decay (the authors' code, which hides the proximal term in the optimiser's weight decay), or
    around all.
    """
    decay, mode = rule.decay + rule.weight_decay, rule.clip_mode
    g = gradient * rule.scale if rule.scale != 1.0 else gradient
    if mode == "loss_only":
        g = _clipped(g, rule.clip)
    if rule.pull is not None:
        g = g + rule.pull
    if rule.spring:
        g = g.add(weights, alpha=rule.spring)
    if mode == "official":
        g = _clipped(g, rule.clip)
    if decay and (mode == "all" or rule.frozen is not None):
        g = g.add(weights, alpha=decay)
        decay = 0.0
    if mode == "all":
        g = _clipped(g, rule.clip)
    if rule.frozen is not None:
        g = g.masked_fill(rule.frozen, 0.0)
    return g, decay


def _clipped(g: Tensor, limit: float | None) -> Tensor:
    """g · min(1, c/‖g‖), row by row."""
    if limit is None:
        return g
    norm: Tensor = g.norm(dim=-1, keepdim=True)
    return g * (limit / (norm + 1e-6)).clamp(max=1.0)
