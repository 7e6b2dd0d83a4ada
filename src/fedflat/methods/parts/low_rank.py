"""An average of low-rank adapters that averages their products BA instead of their factors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar

import torch
from torch import Tensor

from fedflat.errors import RecipeError
from fedflat.local import Vectors
from fedflat.methods.part import Part, ServerView
from fedflat.methods.uploads import Uploads
from fedflat.models import Layout, factors

Factors = tuple[Tensor, Tensor]  # A, with r rows, and B, with r columns
NEGLIGIBLE = 1e-12  # singular values below this share of the largest are rounding errors
FLOOR = 1e-3  # smallest singular value of the new A, as a share of its largest


@dataclass(frozen=True)
class ProductAverage(Part):
    """Average the products BA of the clients' LoRA adapters instead of the factors A and B:

        B A ← the nearest matrix of rank r to  P = Σ pᵢ BᵢAᵢ,      by the singular value decomposition of P

    The mean of the factors gives  (Σ pᵢ Bᵢ)(Σ pᵢ Aᵢ) ≠ P,  with an error that grows with the differences between the
    clients. P has a rank of up to n r. Only its r largest singular values are kept: the squared error is Σ σⱼ² over
    j > r, which is the smallest possible. If all clients have the same A, or if there is only one client, the error is
    0 and the result is the plain average.

    The factors of a product are not unique. A is the mean of the Aᵢ, projected to the rows of P, and B follows, so that
    both stay near the plain average and the next round starts from factors of the usual size. P is not formed if n r is
    less than both of its dimensions: its decomposition follows from those of the stacked Bᵢ and Aᵢ.

    Weights outside of the adapters are averaged as usual. It is selected by `model.lora.average = "product"`.

    FlexLoRA (Bai et al. 2024, NeurIPS) uses the same average, for clients with different ranks, with other factors.
    """

    sees = "each"
    stands_for: ClassVar[str] = 'model.lora.average = "product"'

    def fits(self, layout: Layout) -> None:
        if not factors(layout):
            raise RecipeError(
                "method: ProductAverage averages the products of low-rank adapters, and the model has none; "
                "set model.lora, or leave it out"
            )
        for a, b in factors(layout):
            if layout.shapes[a][0] != prod(layout.shapes[b][1:]):
                raise RecipeError(
                    f"method: ProductAverage averages products of a whole A and B, and {b} has the shape "
                    f"{tuple(layout.shapes[b])}, as in a grouped convolution; leave that layer without an adapter"
                )

    def merge(self, move: Tensor, server: ServerView, uploads: Uploads) -> tuple[Tensor, Vectors]:
        move = uploads.average("delta").clone()
        here, there = server.layout.views(server.start), server.layout.views(move)
        deltas = [server.layout.views(upload.delta) for upload in uploads]
        for a, b in factors(server.layout):
            clients = [(_rows(here[a] + delta[a]), _rows(here[b] + delta[b])) for delta in deltas]
            for name, factor in zip((a, b), refactored(clients, uploads.weights), strict=True):
                there[name].copy_(factor.view_as(here[name]) - here[name])
        return move, {}


def _rows(factor: Tensor) -> Tensor:
    """Return a factor as a matrix in float64; the factors of a convolution have further dimensions for its kernel."""
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
    # The new A spans the rows of P and, if P has a rank below r, the directions of the mean A farthest from them.
    _, _, rest = torch.linalg.svd(mean - mean @ v @ v.T, full_matrices=False)
    span, _ = torch.linalg.qr(torch.cat([v, rest[: len(mean) - kept].T], dim=1))
    x, stretch, y = torch.linalg.svd(mean @ span, full_matrices=False)
    stretch = stretch.clamp_min(FLOOR * float(stretch[0]) or 1.0)
    a = x * stretch @ y @ span.T
    b = u * sigma @ (v.T @ span) @ y.T / stretch @ x.T
    return a, b


def _decomposed(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return U, σ and V of a product of two matrices, without forming it if the inner dimension is the smallest."""
    if left.shape[1] >= min(left.shape[0], right.shape[1]):
        u, sigma, v = torch.linalg.svd(left @ right, full_matrices=False)
        return u, sigma, v.T
    outer, t = torch.linalg.qr(left)
    inner, s = torch.linalg.qr(right.T)
    u, sigma, v = torch.linalg.svd(t @ s.T)
    return outer @ u, sigma, inner @ v.T
