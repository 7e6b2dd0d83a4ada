"""The spectrum of a symmetric operator from a few products: its trace by Hutch++ and its density by Lanczos."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedflat.errors import RecipeError
from fedflat.flatness.hessian import Operator, Trace, signs
from fedflat.progress import track


def hutch_plus_plus(operator: Operator, products: int = 30, seed: int = 0) -> Trace:
    """Estimates tr H with Hutch++ (Meyer, Musco, Musco and Woodruff, 2021).

    A third of the products compute H S for random signs S. With Q an orthonormal basis of H S and P = I − QQᵀ,

        tr H = tr QᵀHQ + tr PHP .

    The first term is exact, the second is Hutchinson's mean of zᵀPHPz. So the part of the trace in a few large
    eigenvalues has no variance; the Hessian of a trained network has this shape. Memory: 2/3 · products · d floats.

    Args:
        operator: the matrix H.
        products: total number of products with H; at least 3, better 12 or more.
        seed: seed of the random signs.

    Returns:
        The estimate, with the standard error of its random part.

    Raises:
        RecipeError: `products` is less than 3.
    """
    if products < 3:
        raise RecipeError(f"hutch_plus_plus: products = {products} is too few; give at least 3 (better 12 or more)")
    chance = torch.Generator().manual_seed(seed)
    third = min(products // 3, operator.size)
    sketch = torch.stack([operator @ signs(operator, chance) for _ in range(third)], dim=1)
    basis = torch.linalg.qr(sketch).Q
    exact = sum(float(q @ (operator @ q)) for q in basis.T)
    rest = []
    for _ in range(products - 2 * third):
        z = signs(operator, chance)
        z -= basis @ (basis.T @ z)
        rest.append(float(z @ (operator @ z)))
    mean, error = _mean(rest)
    return Trace(exact + mean, error, products)


@dataclass(frozen=True)
class Density:
    """The eigenvalue density φ(t) = (1/d) Σ δ(t − λᵢ), as a sum of peaks.

    Each probe has nodes t and weights w that sum to 1. Means over the probes are unbiased: E Σ w g(t) = (1/d) tr g(H)
    for every g that the quadrature integrates exactly.
    """

    nodes: tuple[Tensor, ...]
    weights: tuple[Tensor, ...]
    size: int
    products: int

    def moment(self, power: int) -> float:
        """∫ tᵖ φ(t) dt, an estimate of (1/d) tr Hᵖ."""
        return _mean(self._moments(power))[0]

    @property
    def trace(self) -> Trace:
        """d times the first moment, with the standard error over the probes."""
        mean, error = _mean(self._moments(1))
        return Trace(self.size * mean, self.size * error, self.products)

    def on(self, grid: Tensor, width: float) -> Tensor:
        """φ on a grid of points, with each peak replaced by a normal density of standard deviation `width`."""
        nodes, weights = torch.cat(self.nodes), torch.cat(self.weights) / len(self.nodes)
        distance = (grid.double()[:, None] - nodes) / width
        return (-distance.square() / 2).exp() @ weights / (width * math.sqrt(2 * math.pi))

    def _moments(self, power: int) -> list[float]:
        return [float(w @ t.pow(power)) for t, w in zip(self.nodes, self.weights, strict=True)]


def density(operator: Operator, steps: int = 100, probes: int = 3, seed: int = 0) -> Density:
    """Estimates the eigenvalue density by stochastic Lanczos quadrature (Ubaru, Chen and Saad, 2017).

    Memory: steps · d floats, for the basis of one probe at a time.

    Args:
        operator: the matrix.
        steps: Lanczos steps, and so products, for each probe.
        probes: number of random start vectors.
        seed: seed of the start vectors.

    Raises:
        RecipeError: `steps` or `probes` is less than 1.
    """
    if min(steps, probes) < 1:
        raise RecipeError(f"density: steps = {steps} and probes = {probes} must be at least 1")
    chance = torch.Generator().manual_seed(seed)
    before = operator.products
    rules = []
    for _ in range(probes):
        start = torch.randn(operator.size, generator=chance, dtype=operator.dtype)
        rules.append(quadrature(operator, start, steps))
    nodes, weights = zip(*rules, strict=True)
    return Density(nodes, weights, operator.size, operator.products - before)


def quadrature(operator: Operator, start: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """The Gauss quadrature of a start vector, from the tridiagonal matrix of Lanczos.

    The nodes t and weights w satisfy Σ w p(t) = vᵀp(H)v, v = start/‖start‖, for each polynomial p of degree < 2·steps.
    The basis is fully orthogonalised, twice; otherwise spurious copies of eigenvalues ("ghosts") appear. If the Krylov
    space ends early there are fewer nodes, and the rule is exact for all functions.

    Args:
        operator: the matrix H.
        start: the start vector.
        steps: maximum number of Lanczos steps.

    Returns:
        The nodes and the weights.

    >>> class Diagonal:
    ...     size, dtype, products = 3, torch.float64, 0
    ...     def __matmul__(self, v: Tensor) -> Tensor:
    ...         return torch.tensor([1.0, 2.0, 5.0], dtype=v.dtype) * v
    >>> t, w = quadrature(Diagonal(), torch.ones(3, dtype=torch.float64), steps=10)
    >>> [round(x, 6) for x in t.tolist()], [round(x, 6) for x in w.tolist()]
    ([1.0, 2.0, 5.0], [0.333333, 0.333333, 0.333333])
    """
    steps = min(steps, operator.size)
    basis = torch.empty(steps, operator.size, dtype=operator.dtype)
    basis[0] = start / start.norm()
    alphas: list[float] = []
    betas: list[float] = []
    for step in track(range(steps), "Lanczos steps"):
        w = operator @ basis[step]
        alphas.append(float(w @ basis[step]))
        for _ in range(2):
            w = w - basis[: step + 1].T @ (basis[: step + 1] @ w)
        beta = float(w.norm())
        scale = max(map(abs, alphas + betas))
        if step + 1 == steps or beta <= 10 * torch.finfo(operator.dtype).eps * scale:
            break
        betas.append(beta)
        basis[step + 1] = w / beta
    nodes, vectors = ritz(torch.tensor(alphas, dtype=torch.float64), torch.tensor(betas, dtype=torch.float64))
    return nodes, vectors[0].square()


def ritz(alphas: Tensor, betas: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues in ascending order and eigenvectors (columns) of one tridiagonal matrix or a batch of them.

    >>> ritz(torch.tensor([2.0, 2.0]), torch.tensor([1.0]))[0].tolist()
    [1.0, 3.0]
    """
    values, vectors = torch.linalg.eigh(torch.diag_embed(alphas) + torch.diag_embed(betas, offset=-1))
    return values, vectors


def _mean(samples: list[float]) -> tuple[float, float]:
    """The mean and its standard error, which is NaN for a single sample."""
    values = torch.tensor(samples, dtype=torch.float64)
    error = float(values.std()) / math.sqrt(len(samples)) if len(samples) > 1 else math.nan
    return float(values.mean()), error
