"""Curvature without pooling the data: the clients compute Hessian products and the server runs Lanczos."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedflat.errors import RecipeError, nearest
from fedflat.federation import Federation
from fedflat.flatness.hessian import Hessian, Matrix, matrix_of, top_eigenvalues
from fedflat.flatness.objective import Objective, batch_layer
from fedflat.flatness.sharpness import rises
from fedflat.local import Batch
from fedflat.randomness import generator
from fedflat.rounds import Engine, Problem, ServerState, bytes_of, one_thread

Weights = Literal["samples", "uniform"]


@dataclass(frozen=True)
class Portion:
    """The fixed training samples on which flatness is measured: the same fraction of each client's data.

    Attributes:
        samples: total over all clients, up to rounding and with at least one sample from each; 0 uses all.
        seed: seed that draws the samples.
        batch: samples per forward pass.
    """

    samples: int = 2000
    seed: int = 0
    batch: int = 100

    def of(self, federation: Federation, client: int) -> Tensor:
        """The indices of one client's samples."""
        shard = federation.shard(client)
        order = torch.randperm(len(shard), generator=generator(self.seed, "flatness", client=client))
        return shard[order[: self.count(federation, client)].sort().values]

    def count(self, federation: Federation, client: int) -> int:
        """The number of one client's samples. The server can compute this without the data."""
        there = federation.samples(client)
        wanted = round(federation.share(client) * self.samples / federation.clients) if self.samples else there
        return min(max(1, wanted), there)

    def batches(self, federation: Federation, clients: Sequence[int]) -> list[Batch]:
        """The samples of some clients as network inputs and labels, without augmentation."""
        indices = torch.cat([self.of(federation, client) for client in clients])
        return [federation.batch(some, None) for some in indices.split(self.batch)]

    def own(self, problem: Problem, client: int) -> Objective:
        """The mean loss over one client's samples."""
        return Objective(problem.network.module, problem.loss, self.batches(problem.federation, [client]))

    def pooled(self, problem: Problem) -> Objective:
        """The mean loss over the pooled samples of all clients.

        If a layer normalises with the statistics of each batch, no batch holds samples of two clients. So this is
        the mean of the clients' losses for such models too, although each of them depends on the batch size.
        """
        clients = range(problem.federation.clients)
        together = [[client] for client in clients] if batch_layer(problem.network.module) else [clients]
        batches = [batch for some in together for batch in self.batches(problem.federation, some)]
        return Objective(problem.network.module, problem.loss, batches)


ALL = Portion(0)


@dataclass(frozen=True)
class HessianProduct:
    """A query that the server sends to a client: Hᵢ v on the client's samples, or the product of another matrix."""

    portion: Portion = Portion()
    matrix: Matrix = "hessian"

    def __call__(self, problem: Problem, client: int, vector: Tensor) -> Tensor:
        return matrix_of(self.portion.own(problem, client), self.matrix) @ vector


@dataclass(frozen=True)
class TopEigenvalue:
    """A query for λ₁(Hᵢ), which the client computes by itself. The answer is in the first entry."""

    portion: Portion = Portion()
    tolerance: float = 1e-2

    def __call__(self, problem: Problem, client: int, vector: Tensor) -> Tensor:
        top = top_eigenvalues(Hessian(self.portion.own(problem, client)), 1, self.tolerance, self.portion.seed)
        return _number(float(top.values[0]), vector)


@dataclass(frozen=True)
class Gradient:
    """A query for ∇fᵢ(w). It ignores the vector."""

    portion: Portion = ALL

    def __call__(self, problem: Problem, client: int, vector: Tensor) -> Tensor:
        return self.portion.own(problem, client).gradient()


@dataclass(frozen=True)
class Rise:
    """A query for fᵢ(w + v) − fᵢ(w). The answer is in the first entry; the others are 0."""

    portion: Portion = ALL

    def __call__(self, problem: Problem, client: int, vector: Tensor) -> Tensor:
        (rise,) = rises(self.portion.own(problem, client), [vector])
        return _number(rise, vector)


@dataclass(frozen=True)
class Margin:
    """A query for the number of samples with margin z_y − max_{j≠y} z_j ≤ γ. The answer is in the first entry."""

    margin: float
    portion: Portion = ALL

    @torch.no_grad()
    def __call__(self, problem: Problem, client: int, vector: Tensor) -> Tensor:
        module = problem.network.module.eval()
        batches = self.portion.batches(problem.federation, [client])
        return _number(sum(_within(module(inputs), labels, self.margin) for inputs, labels in batches), vector)


def _within(logits: Tensor, labels: Tensor, margin: float) -> float:
    """The number of samples within the margin; NaN if the labels are not class indices."""
    if labels.is_floating_point():
        return math.nan
    true = logits.gather(1, labels[:, None])
    others = logits.scatter(1, labels[:, None], -math.inf).amax(dim=1, keepdim=True)
    return float((true - others <= margin).sum())


def _number(value: float, like: Tensor) -> Tensor:
    answer = torch.zeros_like(like)
    answer[0] = value
    return answer


class FederatedHessian:
    """The Hessian of the global objective, H = Σ pᵢ Hᵢ. Client i computes Hᵢ v on its own samples.

    The weights are pᵢ = nᵢ/N ("samples") or 1/m for m clients ("uniform"). With the former H is that of the pooled
    samples. The latter is the loss that a server minimises if it averages its clients uniformly.

    The engine must have been started with `HessianProduct` as its query. A product sends v to every client and
    receives a vector of the same size from each; `bytes` counts both.

    Args:
        engine: the engine that runs the clients.
        state: the server state with the weights at which H is evaluated.
        problem: the network, the loss and the federation.
        portion: the samples of each client. It must be the portion of the engine's `HessianProduct`.
        weights: "samples" or "uniform"; by default those of the recipe's `server.average`.
        matrix: the matrix of the engine's `HessianProduct`.

    Raises:
        RecipeError: there are no such weights.
    """

    def __init__(
        self,
        engine: Engine,
        state: ServerState,
        problem: Problem,
        portion: Portion,
        weights: Weights | None = None,
        matrix: Matrix = "hessian",
    ) -> None:
        self._engine, self._state, self.matrix = engine, state, matrix
        federation = problem.federation
        counts = [portion.count(federation, client) for client in range(federation.clients)]
        self.samples, self.products = sum(counts), 0
        self.weights: Weights = weights or problem.recipe.server.average
        if self.weights not in ("samples", "uniform"):
            raise RecipeError(f"weights = {weights!r} is unknown; {nearest(str(weights), ('samples', 'uniform'))}")
        self.shares = [
            count / self.samples if self.weights == "samples" else 1 / federation.clients for count in counts
        ]

    @property
    def size(self) -> int:
        return self._state.weights.numel()

    @property
    def dtype(self) -> torch.dtype:
        return self._state.weights.dtype

    @property
    def bytes(self) -> int:
        """Bytes exchanged so far in both directions, not counting the weights."""
        return self.products * 2 * len(self.shares) * bytes_of(self._state.weights)

    @one_thread()
    def __matmul__(self, vector: Tensor) -> Tensor:
        self.products += 1
        total = torch.zeros_like(self._state.weights)
        asked = vector.to(total)
        for client, answer in self._engine.ask(self._state, asked, range(len(self.shares))):
            total.add_(answer, alpha=self.shares[client])
        return total
