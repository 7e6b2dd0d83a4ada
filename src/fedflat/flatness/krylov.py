"""Lanczos with full orthogonalisation: a basis of a Krylov space, and the operator in that basis."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedflat.flatness.hessian import Operator
from fedflat.flatness.lanczos import orthogonal
from fedflat.progress import track

MISSED = 1e-6  # probability that a random start is too close to orthogonal to the top eigenvector
ROUNDING = 10  # in units of eps, relative to the matrix; a smaller β counts as 0
HALVINGS = 60  # number of times that the interval around the bound is halved


@dataclass(frozen=True)
class Krylov:
    """An orthonormal basis Q (rows) of span{v, Hv, H²v, …}, and the tridiagonal matrix T = Q H Qᵀ.

    `alphas` is the diagonal of T and `betas` the diagonal beside it.
    """

    basis: Tensor
    alphas: Tensor
    betas: Tensor


def krylov(operator: Operator, start: Tensor, steps: int) -> Krylov:
    """Runs Lanczos for a number of steps, one product each, or until the Krylov space ends.

    The basis is fully orthogonalised, twice; otherwise spurious copies of eigenvalues ("ghosts") appear.
    Memory: steps · d floats.

    Args:
        operator: the matrix H.
        start: the start vector v.
        steps: maximum number of steps.
    """
    steps = min(steps, operator.size)
    basis = torch.empty(steps, operator.size, dtype=operator.dtype)
    basis[0] = start / start.norm()
    alphas: list[float] = []
    betas: list[float] = []
    for step in track(range(steps), "Lanczos"):
        w = (operator @ basis[step]).cpu()
        alphas.append(float(w @ basis[step]))
        w, _ = orthogonal(w, basis[: step + 1])
        beta = float(w.norm())
        scale = max(map(abs, alphas + betas))
        if step + 1 == steps or beta <= ROUNDING * torch.finfo(operator.dtype).eps * scale:
            break
        betas.append(beta)
        basis[step + 1] = w / beta
    return Krylov(basis[: len(alphas)], *(torch.tensor(x, dtype=torch.float64) for x in (alphas, betas)))


def ritz(alphas: Tensor, betas: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues in ascending order and eigenvectors (columns) of one tridiagonal matrix or a batch of them.

    >>> ritz(torch.tensor([2.0, 2.0]), torch.tensor([1.0]))[0].tolist()
    [1.0, 3.0]
    """
    values, vectors = torch.linalg.eigh(torch.diag_embed(alphas) + torch.diag_embed(betas, offset=-1))
    return values, vectors


def certified(alphas: Tensor, betas: Tensor, size: int) -> Tensor:
    """An upper bound on λ_max of each matrix of a batch, after k steps of Lanczos from random directions.

    The largest Ritz value θ₁ never exceeds λ_max, and θ₁ plus its residual may be below it. Let v be the start, u the
    top eigenvector and χ(t) = Π(t − θⱼ). Lanczos minimises ‖χ(H)v‖, and this minimum is known: it is β₁β₂…β_k. Since
    ‖χ(H)v‖ ≥ |χ(λ_max)| |⟨u, v⟩|,

        Π(λ_max − θⱼ) ≤ β₁β₂…β_k / |⟨u, v⟩| .

    The left side increases above θ₁, so its solution bounds λ_max from above. For v uniform on the sphere of d
    dimensions P(|⟨u, v⟩| < c) ≤ c √(2d/π). With c = `MISSED` √(π/2d) the bound holds with probability 1 − 10⁻⁶ for each
    matrix, up to rounding. If the Krylov space has ended, the last β is 0 and the bound is θ₁ itself. A β of the size
    of rounding errors counts as 0, as in `krylov`.

    Args:
        alphas: the diagonals of the tridiagonal matrices, batch × k.
        betas: β₁ … β_k, of which the last one leads out of the Krylov space, batch × k.
        size: d.

    >>> alphas, betas = torch.tensor([[2.0, 2.0]]), torch.tensor([[1.0, 0.0]])
    >>> certified(alphas, betas, size=2).tolist()   # the whole matrix, with eigenvalues 1 and 3
    [3.0]
    """
    rounding = ROUNDING * torch.finfo(alphas.dtype).eps
    scale = torch.cat([alphas, betas], dim=1).abs().amax(dim=1, keepdim=True)
    betas = torch.where(betas > rounding * scale, betas, 0).double()
    alphas = alphas.double()
    nodes = ritz(alphas, betas[:, :-1])[0]
    reach = betas.log().sum(dim=1) - math.log(MISSED * math.sqrt(math.pi / (2 * size)))
    low = nodes[:, -1].clone()
    high = low + (reach / nodes.shape[1]).exp()  # Π(t − θⱼ) ≥ (t − θ₁)ᵏ
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        over = (middle[:, None] - nodes).log().sum(dim=1) >= reach
        low, high = torch.where(over, low, middle), torch.where(over, middle, high)
    return high
