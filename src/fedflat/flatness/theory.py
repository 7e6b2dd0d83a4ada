"""The bounds of MAN's theory, evaluated: on the curvature of a layer, of the network and of the global loss.

λ₁(H_l) ≤ E[λ⁺(∇²_Z ℓ) ‖A‖²]       a layer's block, bounded by the layer's inputs (layers.py)
λ₁(G)   ≤ Σ_l λ₁(G_l)              the network, bounded by its blocks, for the Gauss–Newton matrix, which is PSD
λ₁(H)   ≤ Σᵢ pᵢ λ₁(Hᵢ)             the global loss, bounded by the clients, H = Σ pᵢ Hᵢ; this also holds per block
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fedflat.flatness.federated import Portion
from fedflat.flatness.hessian import GaussNewton, Hessian, top_eigenvalues
from fedflat.flatness.layers import blocks
from fedflat.flatness.objective import Objective
from fedflat.rounds import Problem

REST = "other parameters"


@dataclass(frozen=True)
class BlockCurvature:
    """One block of the parameters: λ₁ of its Hessian H_l and of its Gauss–Newton matrix G_l, and MAN's bound on H_l.

    The block of all remaining parameters (normalisation layers, and biases if they are left out) has no bound.
    """

    name: str
    parameters: int
    hessian: float
    gauss_newton: float
    bound: float | None
    norm: float | None  # E‖a‖² of the layer's inputs

    @property
    def looseness(self) -> float | None:
        """The ratio of the bound to the bounded value; None without a bound or without positive curvature."""
        return None if self.bound is None else over(self.bound, self.hessian)


@dataclass(frozen=True)
class Curvature:
    """λ₁(H) and λ₁(G) of one mean loss, in all parameters and by block. The blocks partition the parameters."""

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
    """The curvature of the loss over all samples, and of each client's loss over its own samples."""

    pooled: Curvature
    clients: list[Curvature]

    @property
    def clients_sum(self) -> float:
        """Σ pᵢ λ₁(Hᵢ) ≥ λ₁(H), pᵢ = nᵢ/N."""
        return mean_over(self.clients, lambda client: client.hessian)


def theory(problem: Problem, portion: Portion, seed: int = 0, bias: bool = True) -> Theory:
    """Evaluates all bounds for the current weights of the problem's network.

    Each loss and block takes two Lanczos runs of about twenty products and the backward passes of the bound. In total
    this is about the cost of `layers`, once for the pooled samples and once for the clients.

    Args:
        problem: the network, the loss and the federation.
        portion: the samples of each client.
        seed: seed of the start vectors.
        bias: include the bias in a layer's block.
    """
    return Theory(curvature(portion.pooled(problem), seed, bias), client_curvatures(problem, portion, seed, bias))


def client_curvatures(problem: Problem, portion: Portion, seed: int = 0, bias: bool = True) -> list[Curvature]:
    """The curvature of each client's loss, computed from its own samples and the model.

    A client would have to send only these few numbers. The arguments are those of `theory`.
    """
    clients = range(problem.federation.clients)
    return [curvature(portion.own(problem, client), seed, bias) for client in clients]


def curvature(objective: Objective, seed: int = 0, bias: bool = True, tolerance: float = 1e-3) -> Curvature:
    """Computes λ₁ of an objective's Hessian and Gauss–Newton matrix, in full and by block, and MAN's bounds.

    Args:
        objective: the mean loss.
        seed: seed of the start vectors.
        bias: include the bias in a layer's block.
        tolerance: relative accuracy of the eigenvalues.
    """

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
    """The weighted mean Σ pᵢ xᵢ with pᵢ = nᵢ/N and xᵢ = number(client i); NaN if some xᵢ is None."""
    values = [math.nan if (x := number(client)) is None else x for client in clients]
    total = sum(client.samples for client in clients)
    return sum(client.samples / total * x for client, x in zip(clients, values, strict=True))


def over(bound: float, value: float) -> float | None:
    """The factor bound/value by which a bound is loose; None if the value is not positive."""
    return bound / value if value > 0 else None
