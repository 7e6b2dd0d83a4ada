"""MAN's theory in numbers: what bounds the curvature of a layer, of the network, and of the federation's loss.

λ₁(H_l) ≤ E[λ⁺(∇²_Z ℓ) ‖A‖²]       a layer's block by what enters the layer (layers.py)
λ₁(G)   ≤ Σ_l λ₁(G_l)              the network by its blocks, for the Gauss–Newton matrix, which is PSD
λ₁(H)   ≤ Σᵢ pᵢ λ₁(Hᵢ)             the federation by its clients, H = Σ pᵢ Hᵢ; the same holds block by block
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fedflat.client import Problem
from fedflat.flatness.federated import Portion
from fedflat.flatness.hessian import GaussNewton, Hessian, top_eigenvalues
from fedflat.flatness.layers import blocks
from fedflat.flatness.objective import Objective

REST = "other parameters"


@dataclass(frozen=True)
class BlockCurvature:
    """One block of the parameters: λ₁ of its Hessian H_l and of its Gauss–Newton matrix G_l, and MAN's bound on H_l.

    The block of the parameters that belong to no layer (norms, and biases if they are left out) has no bound.
    """

    name: str
    parameters: int
    hessian: float
    gauss_newton: float
    bound: float | None
    norm: float | None  # E‖a‖² of what enters the layer

    @property
    def looseness(self) -> float | None:
        """The bound in units of what it bounds; None without a bound or without curvature."""
        return None if self.bound is None else over(self.bound, self.hessian)


@dataclass(frozen=True)
class Curvature:
    """One mean loss: λ₁(H) and λ₁(G) in all parameters, and block by block; the blocks share out the parameters."""

    samples: int
    hessian: float
    gauss_newton: float
    blocks: list[BlockCurvature]

    @property
    def blocks_sum(self) -> float:
        """Σ_l λ₁(G_l) ≥ λ₁(G)."""
        return sum(block.gauss_newton for block in self.blocks)


@dataclass(frozen=True)
class Theory:
    """The loss of all samples, and each client's own on its share of them."""

    pooled: Curvature
    clients: list[Curvature]

    @property
    def clients_sum(self) -> float:
        """Σ pᵢ λ₁(Hᵢ) ≥ λ₁(H), pᵢ = nᵢ/N."""
        return mean_over(self.clients, lambda client: client.hessian)


def theory(problem: Problem, portion: Portion, seed: int = 0, bias: bool = True) -> Theory:
    """All of it, for the model that stands in the problem's network, on the portion's samples.

    Per loss and block two Lanczos runs of some twenty products and the bound's backward passes: about the cost of
    `layers`, once for all samples together and once for the clients.
    """
    return Theory(curvature(portion.pooled(problem), seed, bias), client_curvatures(problem, portion, seed, bias))


def client_curvatures(problem: Problem, portion: Portion, seed: int = 0, bias: bool = True) -> list[Curvature]:
    """Each client's, from its own samples and the model alone: only these few numbers would leave it."""
    clients = range(problem.federation.clients)
    return [curvature(portion.own(problem, client), seed, bias) for client in clients]


def curvature(objective: Objective, seed: int = 0, bias: bool = True, tolerance: float = 1e-3) -> Curvature:
    """λ₁ of an objective's Hessian and Gauss–Newton matrix, of each layer's blocks of them, and MAN's bounds."""

    def top(of: Objective) -> tuple[float, float]:
        found = (top_eigenvalues(matrix(of), 1, tolerance, seed).values[0] for matrix in (Hessian, GaussNewton))
        hessian, gauss_newton = map(float, found)
        return hessian, gauss_newton

    found = blocks(objective, seed=seed, bias=bias)
    parts = [
        BlockCurvature(b.name, b.objective.size, *top(b.objective), b.activity.bound, b.activity.norm) for b in found
    ]
    covered = {name for block in found for name in block.objective.layout.shapes}
    rest = [name for name in objective.layout.shapes if name not in covered]
    if rest:
        others = objective.of(rest)
        parts.append(BlockCurvature(REST, others.size, *top(others), None, None))
    return Curvature(objective.samples, *top(objective), parts)


def mean_over(clients: Sequence[Curvature], number: Callable[[Curvature], float | None]) -> float:
    """Σ pᵢ xᵢ with pᵢ = nᵢ/N; NaN if a client has none."""
    values = [math.nan if (x := number(client)) is None else x for client in clients]
    total = sum(client.samples for client in clients)
    return sum(client.samples / total * x for client, x in zip(clients, values, strict=True))


def over(bound: float, value: float) -> float | None:
    """By what factor a bound is loose; None where there is nothing to bound."""
    return bound / value if value > 0 else None
