"""The average of low-rank adapters by what they compute, the products BA, instead of by their factors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedflat.errors import RecipeError
from fedflat.local import Vectors
from fedflat.methods.part import Part, ServerView
from fedflat.methods.uploads import Uploads
from fedflat.models import Layout, factors

Factors = tuple[Tensor, Tensor]  # A, with r rows, and B, with r columns
NEGLIGIBLE = 1e-12  # a singular value below this share of the largest is rounding
FLOOR = 1e-3  # smallest singular value of the new A, as a share of its largest


@dataclass(frozen=True)
class ProductAverage(Part):
    """The clients' mean correction instead of their mean factors, for models with LoRA adapters:

        B A ← the nearest matrix of rank r to  P = Σ pᵢ BᵢAᵢ,      by the singular value decomposition of P

    The mean of the factors gives  (Σ pᵢ Bᵢ)(Σ pᵢ Aᵢ) ≠ P,  with an error that grows with the differences between the
    clients. P has a rank of up to n r. What its r largest singular values do not hold is lost: the squared error is
    Σ σⱼ² over j > r, the smallest possible. If all clients have the same A, or if there is one client, nothing is lost
    and the average is the plain one.

    The factors of a product are not unique. A is the mean of the Aᵢ, projected to the rows of P, and B follows, so that
    both stay near the plain average and the next round starts from factors of the usual size. P is not formed if n r is
    less than both of its sides: its decomposition follows from those of the stacked Bᵢ and Aᵢ.

    Weights outside of the adapters are averaged as usual. It is selected by `model.lora.average = "product"`.

    FlexLoRA (Bai et al. 2024, NeurIPS) has the same average, for clients with different ranks, and other factors of it.
    """

    sees = "each"
    stands_for: ClassVar[str] = 'model.lora.average = "product"'

    def fits(self, layout: Layout) -> None:
        if not factors(layout):
            raise RecipeError(
                "method: ProductAverage averages the products of low-rank adapters, and the model has none; "
                "set model.lora, or leave it out"
            )

    def merge(self, move: Tensor, server: ServerView, uploads: Uploads) -> tuple[Tensor, Vectors]:
        move = uploads.average("delta").clone()
        here, there = server.layout.views(server.start), server.layout.views(move)
        deltas = [server.layout.views(upload.delta) for upload in uploads] if here else []
        for a, b in factors(server.layout):
            clients = [(_rows(here[a] + delta[a]), _rows(here[b] + delta[b])) for delta in deltas]
            for name, factor in zip((a, b), refactored(clients, uploads.weights), strict=True):
                there[name].copy_(factor.view_as(here[name]) - here[name])
        return move, {}


def _rows(factor: Tensor) -> Tensor:
    """A factor as a matrix in float64; that of a convolution has its kernel in further dimensions."""
    return factor.flatten(1).double()


def refactored(clients: Sequence[Factors], weights: Sequence[float]) -> Factors:
    """Return factors of the nearest matrix of rank r to P = Σ pᵢ BᵢAᵢ, near the mean of the Aᵢ.

    Args:
        clients: (Aᵢ, Bᵢ) of each client, in float64.
        weights: pᵢ.
    """
    mean = sum((p * a for p, (a, _) in zip(weights, clients, strict=True)), torch.zeros_like(clients[0][0]))
    u, sigma, v = _decomposed(
        torch.cat([p * b for p, (_, b) in zip(weights, clients, strict=True)], dim=1),
        torch.cat([a for a, _ in clients]),
    )
    kept = min(int((sigma > NEGLIGIBLE * sigma[0]).sum()), len(mean))
    u, sigma, v = u[:, :kept], sigma[:kept], v[:, :kept]
    # The new A has the rows of P and, if P has fewer than r, those of the mean A that are farthest from them.
    _, _, rest = torch.linalg.svd(mean - mean @ v @ v.T, full_matrices=False)
    span, _ = torch.linalg.qr(torch.cat([v, rest[: len(mean) - kept].T], dim=1))
    x, stretch, y = torch.linalg.svd(mean @ span)
    stretch = stretch.clamp_min(FLOOR * float(stretch[0]) or 1.0)
    a = x * stretch @ y @ span.T
    b = u * sigma @ (v.T @ span) @ y.T / stretch @ x.T
    return a, b


def _decomposed(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return U, σ and V of the product of two matrices, without forming it if it is larger than what they share."""
    if left.shape[1] >= min(left.shape[0], right.shape[1]):
        u, sigma, v = torch.linalg.svd(left @ right, full_matrices=False)
        return u, sigma, v.T
    outer, t = torch.linalg.qr(left)
    inner, s = torch.linalg.qr(right.T)
    u, sigma, v = torch.linalg.svd(t @ s.T)
    return outer @ u, sigma, inner @ v.T
