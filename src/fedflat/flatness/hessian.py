"""The Hessian of the mean loss over fixed samples, at fixed weights, in evaluation mode: products, spectrum, trace."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator, eigsh
from torch import Tensor, nn

from fedflat.local import Batch, Loss


class Hessian:
    """H = ∇² (1/N) Σ ℓ(w; x), as an operator: `hessian @ v` by two backward passes, batch by batch.

    With `names` it is the diagonal block of these parameters (a layer's). The samples are fixed and in a fixed order,
    and nothing is drawn, so the operator is the same one at every product.

    >>> module = nn.Linear(1, 1, bias=False)
    >>> x = torch.tensor([[1.0], [3.0]])
    >>> hessian = Hessian(module, lambda z, y: 0.5 * (z - y).square().mean(), [(x, x)])   # mean of x² is 5
    >>> float(hessian @ torch.tensor([2.0]))
    10.0
    """

    def __init__(
        self, module: nn.Module, loss: Loss, batches: Sequence[Batch], names: Sequence[str] | None = None
    ) -> None:
        self._module, self._loss, self._batches = module.eval(), loss, batches
        chosen = [p for name, p in module.named_parameters() if names is None or name in names]
        self._parameters = [p for p in chosen if p.requires_grad]
        self._samples = sum(len(labels) for _, labels in batches)
        self.size = sum(p.numel() for p in self._parameters)
        self.dtype = self._parameters[0].dtype
        self.products = 0

    def __matmul__(self, vector: Tensor) -> Tensor:
        self.products += 1
        total = torch.zeros(self.size, dtype=self.dtype)
        for inputs, labels in self._batches:
            mean = self._loss(self._module(inputs), labels)
            slopes = torch.autograd.grad(mean, self._parameters, create_graph=True)
            along = _flat(slopes) @ vector.to(self.dtype)
            total.add_(_flat(torch.autograd.grad(along, self._parameters)), alpha=len(labels) / self._samples)
        return total


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


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


def top_eigenvalues(hessian: Hessian, k: int = 5, tolerance: float = 1e-3, seed: int = 0) -> Eigen:
    """The k algebraically largest eigenvalues by SciPy's Lanczos; the start vector comes from the seed."""

    def product(vector: Any) -> Any:
        return (hessian @ torch.from_numpy(np.ascontiguousarray(vector)).reshape(-1)).numpy()

    before = hessian.products
    dtype = np.float64 if hessian.dtype == torch.float64 else np.float32
    operator = LinearOperator((hessian.size, hessian.size), matvec=product, dtype=dtype)
    start = np.random.default_rng(seed).standard_normal(hessian.size).astype(dtype)
    subspace = min(hessian.size, max(4 * k, 20))
    values, columns = eigsh(operator, k=min(k, hessian.size - 1), which="LA", tol=tolerance, v0=start, ncv=subspace)
    order = np.argsort(values)[::-1]
    top = torch.from_numpy(values[order].copy())
    vectors = torch.from_numpy(columns.T[order].copy())
    spent = hessian.products - before
    residuals = torch.stack([(hessian @ v - value * v).norm() for value, v in zip(top, vectors, strict=True)])
    return Eigen(top, vectors, residuals, spent)


@dataclass(frozen=True)
class Trace:
    """An estimate of tr H with its standard error."""

    mean: float
    error: float
    products: int


def trace(hessian: Hessian, probes: int = 30, seed: int = 0) -> Trace:
    """Hutchinson's estimate: the mean of zᵀ H z over probes z with independent signs."""
    chance = torch.Generator().manual_seed(seed)
    samples = []
    for _ in range(probes):
        z = torch.randint(0, 2, (hessian.size,), generator=chance).to(hessian.dtype).mul_(2).sub_(1)
        samples.append(float(z @ (hessian @ z)))
    spread = float(np.std(samples, ddof=1)) if probes > 1 else math.nan
    return Trace(float(np.mean(samples)), spread / math.sqrt(probes), probes)
