"""Curvature without pooling the data: the clients compute the products, the server runs Lanczos."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedflat.client import Problem
from fedflat.engine.engine import Engine, one_thread
from fedflat.federation.federation import Federation
from fedflat.flatness.objective import Objective
from fedflat.local import Batch
from fedflat.metrics import bytes_of
from fedflat.randomness import generator
from fedflat.state import ServerState


@dataclass(frozen=True)
class Portion:
    """The fixed training samples that flatness is measured on: the same share of every client's, drawn by the seed.

    `samples` of all clients together, to rounding and at least one of each; 0 means all there are.
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
        """How many they are, which also a server knows that does not have them."""
        there = federation.samples(client)
        wanted = round(federation.share(client) * self.samples / federation.clients) if self.samples else there
        return min(max(1, wanted), there)

    def batches(self, federation: Federation, clients: Sequence[int]) -> list[Batch]:
        """The samples of some clients as the network takes them, never augmented."""
        indices = torch.cat([self.of(federation, client) for client in clients])
        return [federation.batch(some, None) for some in indices.split(self.batch)]

    def pooled(self, problem: Problem) -> Objective:
        """The mean loss of all clients' samples, in one place."""
        batches = self.batches(problem.federation, range(problem.federation.clients))
        return Objective(problem.network.module, problem.loss, batches)


@dataclass(frozen=True)
class HessianProduct:
    """The question that the server asks a client: what is Hᵢ v on your samples?"""

    portion: Portion = Portion()

    def __call__(self, problem: Problem, client: int, vector: Tensor) -> Tensor:
        batches, trained = self.portion.batches(problem.federation, [client]), _trained(problem)
        product = torch.zeros_like(vector)
        product[trained] = Objective(problem.network.module, problem.loss, batches).product(vector[trained])
        return product


def _trained(problem: Problem) -> Tensor | slice:
    """Where the trained parameters stand among all weights."""
    fixed = problem.network.fixed
    return slice(None) if fixed is None else ~fixed


class FederatedHessian:
    """H = Σ pᵢ Hᵢ with pᵢ = nᵢ/N, the Hessian of the global objective. Client i makes Hᵢ v; no sample leaves it.

    The engine must have been started with `HessianProduct` as its question. A product sends v to every client and
    brings a vector of the same size back: `bytes` counts both.
    """

    def __init__(self, engine: Engine, state: ServerState, problem: Problem, portion: Portion) -> None:
        self._engine, self._state, self._trained = engine, state, _trained(problem)
        federation = problem.federation
        counts = [portion.count(federation, client) for client in range(federation.clients)]
        self.samples, self.products = sum(counts), 0
        self._shares = [count / self.samples for count in counts]

    @property
    def size(self) -> int:
        return self._state.weights[self._trained].numel()

    @property
    def dtype(self) -> torch.dtype:
        return self._state.weights.dtype

    @property
    def bytes(self) -> int:
        """What has crossed so far, both ways, beside the weights themselves."""
        return self.products * 2 * len(self._shares) * bytes_of(self._state.weights)

    @one_thread()
    def __matmul__(self, vector: Tensor) -> Tensor:
        self.products += 1
        total, asked = torch.zeros_like(self._state.weights), torch.zeros_like(self._state.weights)
        asked[self._trained] = vector.to(asked)
        for client, answer in self._engine.ask(self._state, asked, range(len(self._shares))):
            total.add_(answer, alpha=self._shares[client])
        return total[self._trained]
