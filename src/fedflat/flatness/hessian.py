"""The Hessian of the mean loss over fixed samples, at fixed weights, in evaluation mode: products, spectrum, trace."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from scipy.sparse.linalg import ArpackError, ArpackNoConvergence, LinearOperator, eigsh
from torch import Tensor

from fedflat.errors import TrainingError
from fedflat.flatness.objective import Objective


class Operator(Protocol):
    """A symmetric matrix that is only known by its products with vectors; it counts them."""

    @property
    def size(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype: ...

    products: int

    def __matmul__(self, vector: Tensor) -> Tensor: ...


class Hessian:
    """H = ∇²f(w) of an objective, as an operator: `hessian @ v` is the derivative of ∇f along v.

    The samples are fixed and in a fixed order, and nothing is drawn, so the operator is the same one at every product.

    >>> x = torch.tensor([[1.0], [3.0]])
    >>> f = Objective(torch.nn.Linear(1, 1, bias=False), lambda z, y: 0.5 * (z - y).square().mean(), [(x, x)])
    >>> float(Hessian(f) @ torch.tensor([2.0]))   # the mean of x² is 5
    10.0
    """

    def __init__(self, objective: Objective) -> None:
        self.objective = objective
        self.products = 0

    @property
    def size(self) -> int:
        return self.objective.size

    @property
    def dtype(self) -> torch.dtype:
        return self.objective.dtype

    def __matmul__(self, vector: Tensor) -> Tensor:
        self.products += 1
        return self.objective.product(vector)


class GaussNewton(Hessian):
    """G = E[Jᵀ ∇²_z ℓ J], the Hessian's part that does not bend the network: J = ∂z/∂w, z its outputs.

    For a loss that is convex in z, as the cross-entropy is, G is positive semidefinite. H = G + E Σ_c (∂ℓ/∂z_c) ∇²z_c.
    """

    def __matmul__(self, vector: Tensor) -> Tensor:
        self.products += 1
        return self.objective.gauss_newton(vector)


@dataclass(frozen=True)
class Eigen:
    """The k largest eigenvalues in falling order, their vectors as rows, and ‖H v − λ v‖ of each."""

    values: Tensor
    vectors: Tensor
    residuals: Tensor
    products: int

    @property
    def ratio(self) -> float:
        """λ₁/λ_k."""
        return float(self.values[0] / self.values[-1])


def top_eigenvalues(hessian: Operator, k: int = 5, tolerance: float = 1e-3, seed: int = 0) -> Eigen:
    """The k algebraically largest eigenvalues by SciPy's Lanczos; the start vector comes from the seed.

    A matrix that is hardly larger than k is written out instead. They are NaN where a product is not finite. Only the
    products wait for the operator's device.
    """
    before = hessian.products
    if hessian.size <= k + 1:
        identity = torch.eye(hessian.size, dtype=hessian.dtype)
        found, columns = torch.linalg.eigh(torch.stack([(hessian @ unit).cpu() for unit in identity]))
        top, vectors = found.flip(0)[:k], columns.T.flip(0)[:k].contiguous()
    else:
        top, vectors = _lanczos(hessian, k, tolerance, seed)
    spent = hessian.products - before
    residuals = torch.stack([((hessian @ v).cpu() - value * v).norm() for value, v in zip(top, vectors, strict=True)])
    return Eigen(top, vectors, residuals, spent)


def _lanczos(hessian: Operator, k: int, tolerance: float, seed: int) -> tuple[Tensor, Tensor]:
    """Eigenvalues in falling order, and their vectors as rows."""

    def product(vector: Any) -> Any:
        image = (hessian @ torch.from_numpy(np.ascontiguousarray(vector)).reshape(-1)).cpu().numpy()
        if not np.isfinite(image).all():
            raise FloatingPointError  # ARPACK would take it for a zero
        return image

    dtype = np.float64 if hessian.dtype == torch.float64 else np.float32
    operator = LinearOperator((hessian.size, hessian.size), matvec=product, dtype=dtype)
    start = np.random.default_rng(seed).standard_normal(hessian.size).astype(dtype)
    subspace = min(hessian.size, max(4 * k, 20))
    try:
        values, columns = eigsh(operator, k=k, which="LA", tol=tolerance, v0=start, ncv=subspace)
    except ArpackNoConvergence as error:
        raise TrainingError(f"the {k} largest eigenvalues did not settle to {tolerance:g}; ask for fewer") from error
    except ArpackError:  # its first product was zero, as in a layer whose inputs are all dead
        return torch.zeros(k, dtype=hessian.dtype), torch.eye(k, hessian.size, dtype=hessian.dtype)
    except FloatingPointError:
        return torch.full((k,), math.nan, dtype=hessian.dtype), torch.eye(k, hessian.size, dtype=hessian.dtype)
    order = np.argsort(values)[::-1]
    return torch.from_numpy(values[order].copy()), torch.from_numpy(columns.T[order].copy())


@dataclass(frozen=True)
class Trace:
    """An estimate of tr H with its standard error."""

    mean: float
    error: float
    products: int


def signs(operator: Operator, chance: torch.Generator) -> Tensor:
    """A probe of independent ±1."""
    return torch.randint(0, 2, (operator.size,), generator=chance).to(operator.dtype).mul_(2).sub_(1)


def trace(hessian: Operator, probes: int = 30, seed: int = 0) -> Trace:
    """Hutchinson's estimate: the mean of zᵀ H z over probes z with independent signs."""
    chance = torch.Generator().manual_seed(seed)
    samples = []
    for _ in range(probes):
        z = signs(hessian, chance)
        samples.append(float(z @ (hessian @ z).cpu()))
    spread = float(np.std(samples, ddof=1)) if probes > 1 else math.nan
    return Trace(float(np.mean(samples)), spread / math.sqrt(probes), probes)
