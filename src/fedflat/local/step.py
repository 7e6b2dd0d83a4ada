"""One client's training in one round: the local step that all methods share.

    g = clip( a · ∇[loss + Σ terms](w + ε) ) + pull + decay · w          v ← β v + g          w ← w − η v

The parts of a method set a, ε, the terms, the pull and the decay before the first step (`Part.plan`). All vectors are
flat, of size d.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from fedflat.local.kernels import choose
from fedflat.local.kernels.sgd import FusedUpdate
from fedflat.local.rule import Batch, LocalRule, Loss, Outcome, Vectors
from fedflat.local.slope import Slope, sight
from fedflat.local.watcher import Watcher
from fedflat.models import Network


def train(network: Network, start: Tensor, rule: LocalRule, batches: Iterable[Batch], loss: Loss) -> Outcome:
    """Train one client for K steps from `start`.

    Kernels replace the definition where they apply (`kernels/`), except within `definition_only()`.

    Args:
        network: the network to train; its weights are overwritten.
        start: the initial weights.
        rule: the ingredients of the step.
        batches: one batch per step, or two with `rule.pairs`.
        loss: the loss of a batch, from logits and labels.

    Returns:
        Δ, the mean loss, and what the ascent and the terms have recorded.
    """
    network.load(start)
    network.module.train()
    velocity: Tensor | None = None
    memory = rule.descent.start(start) if rule.descent else {}
    carry = dict(rule.carry)
    watcher = Watcher(network, rule, loss)
    with network.listening(**sight([*rule.terms, rule.ascent])) as tap:
        slope = Slope(network, rule, loss, tap)
        stream = iter(batches)
        for k, batch in enumerate(stream):
            watcher.look(batch)
            slope.at(batch, next(stream, None) if rule.pairs else None)
            if k == 0:  # the choice of kernels depends on the labels
                slope.kernels = kernels = choose(network, rule, loss, batch[1])
                if rule.momentum and rule.descent is None and not kernels.own_velocity:
                    velocity = slope.velocity = torch.zeros_like(start)
            if kernels.step:
                kernels.step(slope, velocity, k)
                continue
            gradient, carry = rule.ascent(slope, carry) if rule.ascent else (slope(), carry)
            slope.look_at_w(k)
            memory = step(network.weights, gradient, velocity, rule, k, memory, kernels.update)
            del gradient  # it would take its place in memory until the next step has one
    notes = {**watcher.means(), **slope.notes.means()}
    slope.velocity = None
    # New memory for Δ would be as much again.
    delta = torch.sub(network.weights, start, out=None if _held(velocity, carry) else velocity)
    return Outcome(delta, notes.pop("loss", float("nan")), rule, carry, notes, memory)


def _held(velocity: Tensor | None, carry: Vectors) -> bool:
    """Return whether an ascent has carried the momentum on, so that `report` will find it in the outcome."""
    if velocity is None:
        return False
    held = {vector.untyped_storage().data_ptr() for vector in carry.values() if isinstance(vector, Tensor)}
    return velocity.untyped_storage().data_ptr() in held


@torch.no_grad()
def step(
    weights: Tensor,
    gradient: Tensor,
    velocity: Tensor | None,
    rule: LocalRule,
    k: int = 0,
    memory: Vectors | None = None,
    update: FusedUpdate | None = None,
) -> Vectors:
    """Update w ← w − η v with v ← β v + clip(a g + pull) + decay w, in place.

    With an optimiser other than SGD, v is its direction, and the weight decay is decoupled.

    Args:
        weights: the weights w, updated in place.
        gradient: the gradient g of the loss and the terms.
        velocity: the momentum v, updated in place; None without momentum.
        rule: the ingredients of the step.
        k: the number of the step, from 0.
        memory: the state of an optimiser other than SGD.
        update: the kernel for the SGD update, if one applies.

    Returns:
        The new state of the optimiser; empty for SGD.
    """
    lr, decoupled = rule.lr_at(k), rule.weight_decay if rule.descent else 0.0
    g, decay = corrected(weights, gradient, replace(rule, weight_decay=0.0) if decoupled else rule)
    if rule.descent is None:
        if update:
            update(weights, g, velocity, lr, decay)
        else:
            sgd(weights, g, velocity, lr, rule, decay)
        return {}
    g = g.add(weights, alpha=decay) if decay else g
    direction, memory = rule.descent(g, weights, memory or {}, rule.layout, k)
    if rule.frozen is not None:
        direction = direction.masked_fill(rule.frozen, 0.0)
    # Decay the weights before the step, as torch.optim.AdamW does; frozen weights do not decay.
    shrunk = weights * (lr * decoupled)
    weights.sub_(shrunk if rule.frozen is None else shrunk.masked_fill(rule.frozen, 0.0))
    weights.sub_(direction, alpha=lr)
    return memory


@torch.no_grad()
def sgd(weights: Tensor, g: Tensor, velocity: Tensor | None, lr: float, rule: LocalRule, decay: float) -> None:
    """Update v ← β v + g + decay w and w ← w − η v; with Nesterov momentum w ← w − η (g + decay w + β v)."""
    g = g + decay * weights
    if velocity is not None:
        velocity.mul_(rule.momentum).add_(g)
        g = g + rule.momentum * velocity if rule.nesterov else velocity
    weights.sub_(g, alpha=lr)


@torch.no_grad()
def corrected(weights: Tensor, gradient: Tensor, rule: LocalRule) -> tuple[Tensor, float]:
    """Return clip(a g + pull) and the factor of the decay that is still to be added.

    `rule.clip_mode` says what is clipped: `loss_only` the gradient of the loss, `official` the gradient with pull and
    spring but without decay (as in the authors' code, where the proximal term is part of the optimiser's weight
    decay), and `all` the whole sum.

    Args:
        weights: the current weights w.
        gradient: the gradient g of the loss and the terms.
        rule: the ingredients of the step.
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
    """Return g · min(1, c/‖g‖), for each row."""
    if limit is None:
        return g
    norm: Tensor = g.norm(dim=-1, keepdim=True)
    return g * (limit / (norm + 1e-6)).clamp(max=1.0)
