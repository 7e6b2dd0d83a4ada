"""The update of SGD in one pass over memory."""

from __future__ import annotations

import torch
from torch import Tensor

from fedflat.rule import LocalRule


@torch.no_grad()
def descend(ws: list[Tensor], gs: list[Tensor], vs: list[Tensor], lr: float, rule: LocalRule, decay: float) -> None:
    """v ← β v + g + decay w and w ← w − η v, in one pass over memory, by the kernel of torch.optim.SGD(fused=True)."""
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
