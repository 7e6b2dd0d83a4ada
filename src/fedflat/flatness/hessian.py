"""The Hessian of the mean loss over fixed samples in evaluation mode: products, top eigenvalues and trace."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fedflat.flatness.graphs import KEPT_BYTES, Graphs
from fedflat.flatness.lanczos import NotFiniteError, largest
from fedflat.flatness.objective import Objective
from fedflat.progress import track


class Operator(Protocol):
    """A symmetric matrix that is accessed only through matrix–vector products, which it counts in `products`."""

    @property
    def size(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype: ...

    products: int

    def __matmul__(self, vector: Tensor) -> Tensor: ...


class Hessian:
    """The Hessian H = ∇²f(w) of an objective as an operator: `hessian @ v` is the derivative of ∇f along v.

    The samples and their order are fixed and nothing is random, so every product uses the same matrix. The operator
    keeps the graphs of the gradients while the weights stay, which saves a third of the time of each further product.

    Args:
        objective: the mean loss f. Its module holds the weights w.
        memory: bytes that the graphs may hold. With 0 none are kept.

    >>> x = torch.tensor([[1.0], [3.0]])
    >>> f = Objective(torch.nn.Linear(1, 1, bias=False), lambda z, y: 0.5 * (z - y).square().mean(), [(x, x)])
    >>> float(Hessian(f) @ torch.tensor([2.0]))   # the mean of x² is 5
    10.0
    """

    def __init__(self, objective: Objective, memory: int = KEPT_BYTES) -> None:
        self.objective = objective
        self.products = 0
        self._graphs = Graphs(memory)

    @property
    def size(self) -> int:
        return self.objective.size

    @property
    def dtype(self) -> torch.dtype:
        return self.objective.dtype

    def __matmul__(self, vector: Tensor) -> Tensor:
        self.products += 1
        return self.objective.product(vector, self._graphs)


class GaussNewton(Hessian):
    """The Gauss–Newton matrix G = E[Jᵀ ∇²_z ℓ J], with J = ∂z/∂w and z the outputs of the network.

    G is the Hessian without the curvature of the network itself: H = G + E Σ_c (∂ℓ/∂z_c) ∇²z_c. For a loss that is
    convex in z, such as cross-entropy, G is positive semidefinite.
    """

    def __matmul__(self, vector: Tensor) -> Tensor:
        self.products += 1
        return self.objective.gauss_newton(vector, self._graphs)


@dataclass(frozen=True)
class Eigen:
    """The k largest eigenvalues in descending order, the eigenvectors as rows, and the residuals ‖H v − λ v‖."""

    values: Tensor
    vectors: Tensor
    residuals: Tensor
    products: int

    @property
    def ratio(self) -> float:
        """λ₁/λ_k."""
        return float(self.values[0] / self.values[-1])


def top_eigenvalues(hessian: Operator, k: int = 5, tolerance: float = 1e-3, seed: int = 0) -> Eigen:
    """Computes the k algebraically largest eigenvalues with the Lanczos method.

    Only the products run on the operator's device.

    Args:
        hessian: the operator.
        k: number of eigenvalues.
        tolerance: largest residual ‖H v − λ v‖ in units of |λ|.
        seed: seed of the start vector.

    Returns:
        The eigenvalues, eigenvectors and residuals. The eigenvalues are NaN if a product is not finite.

    Raises:
        TrainingError: Lanczos did not converge.
    """
    before = hessian.products
    try:
        values, vectors, residuals = largest(hessian, k, tolerance, seed)
    except NotFiniteError:
        values = torch.full((k,), math.nan, dtype=hessian.dtype)
        vectors, residuals = torch.eye(k, hessian.size, dtype=hessian.dtype), values
    return Eigen(values, vectors, residuals, hessian.products - before)


@dataclass(frozen=True)
class Trace:
    """An estimate of tr H with its standard error."""

    mean: float
    error: float
    products: int


def signs(operator: Operator, chance: torch.Generator) -> Tensor:
    """A probe vector of independent random signs ±1."""
    return torch.randint(0, 2, (operator.size,), generator=chance).to(operator.dtype).mul_(2).sub_(1)


def trace(hessian: Operator, probes: int = 30, seed: int = 0) -> Trace:
    """Hutchinson's estimate of tr H: the mean of zᵀ H z over `probes` vectors z of independent random signs.

    Returns:
        The estimate. Its standard error is NaN for a single probe.
    """
    chance = torch.Generator().manual_seed(seed)
    samples = []
    for _ in track(range(probes), "trace"):
        z = signs(hessian, chance)
        samples.append(float(z @ (hessian @ z).cpu()))
    spread = float(np.std(samples, ddof=1)) if probes > 1 else math.nan
    return Trace(float(np.mean(samples)), spread / math.sqrt(probes), probes)
