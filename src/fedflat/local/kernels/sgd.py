"""Fused SGD update: one pass over memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedflat.local.kernels.linear import ChainGradient
from fedflat.local.rule import LocalRule, Loss
from fedflat.models import Network

if TYPE_CHECKING:
    from fedflat.local.slope import Slope

DEVICES = ("cpu", "cuda", "mps")  # device types for which torch has the kernel


@torch.no_grad()
def descend(ws: list[Tensor], gs: list[Tensor], vs: list[Tensor], lr: float, rule: LocalRule, decay: float) -> None:
    """Update v ← β v + g + decay w and w ← w − η v in one pass, with the kernel of torch.optim.SGD(fused=True)."""
    torch._fused_sgd_(
        ws,
        gs,
        vs if rule.momentum else [],
        weight_decay=decay,
        momentum=rule.momentum,
        lr=lr,
        dampening=0.0,
        nesterov=rule.nesterov and rule.momentum > 0,
        maximize=False,
        is_first_step=False,
    )


class FusedUpdate:
    """Updates flat vectors, for one client or for the rows of several clients."""

    def __init__(self, network: Network, rule: LocalRule) -> None:
        self._rule = rule

    @classmethod
    def fits(cls, network: Network, rule: LocalRule, loss: Loss, labels: Tensor) -> bool:
        return rule.descent is None and network.weights.device.type in DEVICES

    def __call__(self, weights: Tensor, g: Tensor, velocity: Tensor | None, lr: float, decay: float) -> None:
        descend([weights], [g], [] if velocity is None else [velocity], lr, self._rule, decay)


class DirectStep:
    """Computes the whole step of a rule that uses the gradients of autograd unchanged, parameter by parameter.

    The gradients are not copied into a flat vector. The kernel does not apply to a chain of linear layers: its
    hand-written gradient is flat already, which is faster.
    """

    own_velocity = False

    def __init__(self, network: Network, rule: LocalRule) -> None:
        self._network, self._rule, self._decay = network, rule, rule.decay + rule.weight_decay

    @classmethod
    def fits(cls, network: Network, rule: LocalRule, loss: Loss, labels: Tensor) -> bool:
        facts = network, rule, loss, labels
        return rule.direct and FusedUpdate.fits(*facts) and not ChainGradient.fits(*facts)

    def __call__(self, slope: Slope, velocity: Tensor | None, k: int) -> None:
        self.descend_from(slope.objective(), velocity, self._rule.lr_at(k))

    def descend_from(self, objective: Tensor, velocity: Tensor | None, lr: float) -> None:
        """Take a step of rate η = `lr` from the gradient of this scalar."""
        network = self._network
        gradients = network.partials(objective)
        velocities = [] if velocity is None else [*network.layout.views(velocity).values()]
        parameters: list[Tensor] = [*network.trained]
        descend(parameters, gradients, velocities, lr, self._rule, self._decay)
