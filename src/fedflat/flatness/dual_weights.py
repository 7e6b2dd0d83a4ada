"""Dual weights: the change of a layer's weights with the same effect as a change of its input."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class DualWeights:
    """The dual weights of all pairs k in factored form, ΔW_k = left_kᵀ right_k.

    `left` is k × r × out and `right` is k × r × in, with orthonormal rows. A linear layer at one position has r = 1.
    `residuals` are |A ΔWᵀ − (A' − A) Wᵀ| / |(A' − A) Wᵀ|.
    """

    left: Tensor
    right: Tensor
    residuals: Tensor

    @property
    def squares(self) -> Tensor:
        """|ΔW_k|²."""
        return self.left.square().sum(dim=(1, 2))

    def along(self, directions: Tensor) -> Tensor:
        """ΔW_k · V_n as k × n, for directions n × out × in. Forms the ΔW_k explicitly only if r > 1."""
        if self.left.shape[1] == 1:
            left, right = self.left[:, 0], self.right[:, 0]
            return torch.stack([(right @ direction.T * left).sum(dim=1) for direction in directions], dim=1)
        return (self.left.mT @ self.right).flatten(1) @ directions.flatten(1).T


def dual_weights(before: Tensor, after: Tensor, weight: Tensor) -> DualWeights:
    """The minimum-norm least-squares solution ΔW of A (W + ΔW)ᵀ = A' Wᵀ for each pair.

    With the thin SVD A = Q S V and U = (A' − A) Wᵀ, it is ΔWᵀ = Vᵀ S⁺ Qᵀ U.

    Args:
        before: A, pairs × positions × in.
        after: A', of the same shape.
        weight: W, out × in.

    >>> a, b, w = torch.tensor([[[2.0, 0.0]]]), torch.tensor([[[2.0, 4.0]]]), torch.tensor([[5.0, 3.0]])
    >>> dual = dual_weights(a, b, w)
    >>> dual.left.mT @ dual.right   # 3 · 4 = 6 · 2: the first weight makes up for what the second input gained
    tensor([[[6., 0.]]])
    """
    wanted = (after - before) @ weight.T
    q, s, right = torch.linalg.svd(before, full_matrices=False)
    floor = s[:, :1] * max(before.shape[1:]) * torch.finfo(s.dtype).eps
    inverse = torch.where(s > floor, 1 / s, 0)
    left = inverse[..., None] * (q.mT @ wanted)
    missed = wanted - q @ (s[..., None] * left)
    return DualWeights(left, right, missed.norm(dim=(1, 2)) / wanted.norm(dim=(1, 2)))
