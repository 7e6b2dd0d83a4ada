"""The Hessian written out, for an objective with few weights."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from fedflat.flatness.objective import Objective, flat
from fedflat.progress import track


def dense_hessian(objective: Objective, rows: int) -> Tensor:
    """∇²f as a dense matrix, computed `rows` rows at a time. The rows of a batch share its first backward pass."""
    total = torch.zeros(objective.size, objective.size, dtype=objective.dtype)
    unit = torch.eye(objective.size, dtype=objective.dtype)
    for batch in track(objective.batches, "Hessian of the layer"):
        slope = flat(objective.slopes(batch))
        for some, directions in zip(total.split(rows), unit.split(rows), strict=True):
            some.add_(_products(slope, objective.parameters, directions), alpha=objective.share(batch))
    return total


def _products(slope: Tensor, parameters: Sequence[Tensor], directions: Tensor) -> Tensor:
    """H v for each direction v, as rows. Falls back to one at a time if an autograd function cannot be batched."""
    if len(directions) > 1:
        with suppress(RuntimeError):
            found = torch.autograd.grad(slope, parameters, directions, retain_graph=True, is_grads_batched=True)
            return torch.cat([part.flatten(1) for part in found], dim=1)
    return torch.stack([flat(torch.autograd.grad(slope, parameters, v, retain_graph=True)) for v in directions])
