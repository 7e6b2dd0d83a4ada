"""The Hessian of the mean loss over fixed samples in evaluation mode, its relatives, and their top eigenvalues."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from fedflat.errors import RecipeError, nearest
from fedflat.flatness.graphs import KEPT_BYTES, Graphs
from fedflat.flatness.lanczos import NotFiniteError, largest
from fedflat.flatness.objective import Objective

Matrix = Literal["hessian", "ggn", "fisher"]
MATRICES: tuple[Matrix, ...] = get_args(Matrix)


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
    keeps the graphs of the gradients until the weights change, which saves a third of the time of each further product.

    Args:
        objective: the mean loss f. Its module holds the weights w.
        memory: bytes that the graphs may hold. With 0 none are kept.

    >>> x = torch.tensor([[1.0], [3.0]])
    >>> f = Objective(torch.nn.Linear(1, 1, bias=False), lambda z, y: 0.5 * (z - y).square().mean(), [(x, x)])
    >>> float(Hessian(f) @ torch.tensor([2.0]))   # the mean of x² is 5
    10.0
    """

    matrix: Matrix = "hessian"

    def __init__(self, objective: Objective, memory: int = KEPT_BYTES) -> None:
        self.objective = objective
        self.products = 0
        self._graphs = Graphs(memory)

    @property
    def size(self) -> int:
        """d, the number of rows and columns."""
        return self.objective.size

    @property
    def dtype(self) -> torch.dtype:
        """The floating-point type of the products."""
        return self.objective.dtype

    def __matmul__(self, vector: Tensor) -> Tensor:
        self.products += 1
        return self.objective.product(vector, self._graphs)


class GaussNewton(Hessian):
    """The Gauss–Newton matrix G = E[Jᵀ ∇²_z ℓ J], with J = ∂z/∂w and z the outputs of the network.

    G is the Hessian without the curvature of the network itself: H = G + E Σ_c (∂ℓ/∂z_c) ∇²z_c. For a loss that is
    convex in z, such as cross-entropy, G is positive semidefinite.
    """

    matrix: Matrix = "ggn"

    def __matmul__(self, vector: Tensor) -> Tensor:
        self.products += 1
        return self.objective.gauss_newton(vector, self._graphs)


class Fisher(GaussNewton):
    """The Fisher matrix F = E_x E_{y∼p(·|x)}[∇log p(y|x) ∇log p(y|x)ᵀ], over the model's own labels y.

    p is softmax(z) for class labels and a normal distribution of mean z and unit variance for real ones. Then
    E_y[∇_z log p ∇_z log pᵀ] = −E_y[∇²_z log p] is diag(p) − ppᵀ or I. This does not depend on y, so the expectation
    over the labels is exact: F is the Gauss–Newton matrix of the negative log-likelihood, for any training loss.
    For cross-entropy F = G.
    """

    matrix: Matrix = "fisher"

    def __init__(self, objective: Objective, memory: int = KEPT_BYTES) -> None:
        names = list(objective.layout.shapes)
        super().__init__(Objective(objective.module, _likelihood, objective.batches, names), memory)


def _likelihood(outputs: Tensor, labels: Tensor) -> Tensor:
    """The mean of −log p over the predictions, up to a constant."""
    if labels.is_floating_point():
        return 0.5 * (outputs - labels).square().sum() / len(labels)
    return F.cross_entropy(outputs, labels)


def matrix_of(objective: Objective, matrix: Matrix = "hessian") -> Hessian:
    """The Hessian ("hessian"), the Gauss–Newton matrix ("ggn") or the Fisher matrix ("fisher") of an objective.

    Raises:
        RecipeError: there is no such matrix.
    """
    if matrix not in MATRICES:
        raise RecipeError(f"matrix = {matrix!r} is unknown; {nearest(str(matrix), MATRICES)}")
    return {"hessian": Hessian, "ggn": GaussNewton, "fisher": Fisher}[matrix](objective)


@dataclass(frozen=True)
class Eigen:
    """The k largest eigenvalues in descending order, the eigenvectors as rows, and the residuals ‖H v − λ v‖."""

    values: Tensor
    vectors: Tensor
    residuals: Tensor
    products: int

    @property
    def ratio(self) -> float | None:
        """λ₁/λ_k; None unless both are positive."""
        return ratio(self.values.tolist())[0]


def ratio(values: Sequence[float]) -> tuple[float | None, str]:
    """λ₁/λ_k of eigenvalues in descending order, or None and the reason why there is no such ratio.

    >>> ratio([6.0, 3.0]), ratio([6.0, -2.0])
    ((2.0, ''), (None, 'λ2 = -2 is not positive'))
    """
    for place in (1, len(values)):
        value = values[place - 1]
        if not math.isfinite(value):
            return None, f"λ{place} is not finite"
        if value <= 0:
            return None, f"λ{place} = {value:.3g} is not positive"
    return values[0] / values[-1], ""


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
        RecipeError: k is not a whole number of at least 1.
        TrainingError: Lanczos did not converge.
    """
    if not isinstance(k, int) or k < 1:
        raise RecipeError(f"k = {k}: ask for at least one eigenvalue, by a whole number")
    before = hessian.products
    try:
        values, vectors, residuals = largest(hessian, k, tolerance, seed)
    except NotFiniteError:
        values = torch.full((k,), math.nan, dtype=hessian.dtype)
        vectors, residuals = torch.eye(k, hessian.size, dtype=hessian.dtype), values
    return Eigen(values, vectors, residuals, hessian.products - before)
