"""The largest eigenvalues of a symmetric operator by Lanczos iteration, which stops as soon as they have converged."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedflat.errors import TrainingError
from fedflat.progress import track

if TYPE_CHECKING:
    from fedflat.flatness.hessian import Operator

BASIS_BYTES = 1 << 30
LONGEST, PRODUCTS = 200, 1000


class NotFiniteError(ArithmeticError):
    """A product had an entry that is not finite."""


def largest(operator: Operator, k: int, tolerance: float, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the k algebraically largest eigenvalues of H.

    Q is an orthonormal basis of the Krylov space, T = QᵀHQ = S Θ Sᵀ, and β is the length of the next basis vector
    before it is normalised. Then (θ, Qs) is an approximate eigenpair with the residual ‖H Qs − θ Qs‖ = β |s_m|, where
    s_m is the last entry of s. So the residuals are known after each step, and the iteration ends when all k of them
    are at most tolerance · |θ|. If the basis fills its memory, its best Ritz vectors replace it (thick restart, Wu and
    Simon 2000).

    Args:
        operator: the matrix H.
        k: number of eigenvalues.
        tolerance: relative accuracy of the residuals.
        seed: seed of the start vector.

    Returns:
        The eigenvalues in descending order, the eigenvectors as rows, and the residuals.

    Raises:
        NotFiniteError: a product is not finite.
        TrainingError: no convergence within 1000 products.
    """
    chance = torch.Generator().manual_seed(seed)
    size, dtype = operator.size, operator.dtype
    fewest = min(size, max(4 * k, 20))
    room = min(size, max(fewest, min(LONGEST, BASIS_BYTES // (size * dtype.itemsize))))
    basis = torch.empty(room, size, dtype=dtype)
    projected = torch.zeros(room, room, dtype=torch.float64)
    vector, steps, least = torch.randn(size, generator=chance, dtype=dtype), 0, min(size, k + 1)
    for _ in track(range(PRODUCTS), "Lanczos", 0):
        basis[steps] = vector / vector.norm()
        image = (operator @ basis[steps]).cpu()
        if not image.isfinite().all():
            raise NotFiniteError
        steps += 1
        vector, entries = orthogonal(image, basis[:steps])
        projected[steps - 1, :steps] = projected[:steps, steps - 1] = entries.double()
        values, weights = torch.linalg.eigh(projected[:steps, :steps])
        smallest = 10 * torch.finfo(dtype).eps * float(values.abs().max())
        beta = float(vector.norm()) if steps < size else 0.0
        residuals = beta * weights[-1].abs()
        if beta <= smallest:  # an invariant subspace; other copies of its eigenvalues may be outside
            vector, least = orthogonal(torch.randn(size, generator=chance, dtype=dtype), basis[:steps])[0], fewest
        if steps >= least and bool((residuals <= (tolerance * values.abs()).clamp_min(smallest))[-k:].all()):
            vectors = weights.T[-k:].to(dtype) @ basis[:steps]
            return values[-k:].flip(0).to(dtype), vectors.flip(0), residuals[-k:].flip(0).to(dtype)
        if steps == room:
            steps = k + (room - k) // 3
            basis[:steps] = weights.T[-steps:].to(dtype) @ basis
            projected.zero_()[:steps, :steps] = values[-steps:].diag()
    raise TrainingError(
        f"the {k} largest eigenvalues did not converge to tolerance {tolerance:g} in {PRODUCTS} products; ask for fewer"
    )


def orthogonal(vector: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """The part of a vector that is orthogonal to the rows of a basis, and the coefficients of the rest.

    It projects twice, because rounding in the first pass leaves "ghosts", spurious copies of eigenvalues.
    """
    total = torch.zeros(len(basis), dtype=basis.dtype)
    for _ in range(2):
        entries = basis @ vector
        vector = torch.addmv(vector, basis.T, entries, alpha=-1)
        total += entries
    return vector, total
