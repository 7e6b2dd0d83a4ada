"""Curvature without pooling the data: the clients compute the products, the server runs Lanczos."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedflat.client import Problem
from fedflat.engine.engine import Engine, one_thread
from fedflat.federation.federation import Federation
from fedflat.flatness.objective import Objective
from fedflat.flatness.sharpness import rises, unit
from fedflat.metrics import bytes_of
from fedflat.randomness import generator
from fedflat.rule import Batch
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

    def own(self, problem: Problem, client: int) -> Objective:
        """The mean loss of one client's samples."""
        return Objective(problem.network.module, problem.loss, self.batches(problem.federation, [client]))

    def pooled(self, problem: Problem) -> Objective:
        """The mean loss of all clients' samples, in one place."""
        batches = self.batches(problem.federation, range(problem.federation.clients))
        return Objective(problem.network.module, problem.loss, batches)


ALL = Portion(0)


@dataclass(frozen=True)
class HessianProduct:
    """The question that the server asks a client: what is Hᵢ v on your samples?"""

    portion: Portion = Portion()

    def __call__(self, problem: Problem, client: int, vector: Tensor) -> Tensor:
        trained, product = _trained(problem), torch.zeros_like(vector)
        product[trained] = self.portion.own(problem, client).product(vector[trained])
        return product


@dataclass(frozen=True)
class Gradient:
    """… what is ∇fᵢ(w)? The vector does not matter."""

    portion: Portion = ALL

    def __call__(self, problem: Problem, client: int, vector: Tensor) -> Tensor:
        answer = torch.zeros_like(vector)
        answer[_trained(problem)] = self.portion.own(problem, client).gradient()
        return answer


@dataclass(frozen=True)
class Rise:
    """… what is fᵢ(w + v) − fᵢ(w)? The answer is the first entry, the others are 0."""

    portion: Portion = ALL

    def __call__(self, problem: Problem, client: int, vector: Tensor) -> Tensor:
        (rise,) = rises(self.portion.own(problem, client), [vector[_trained(problem)]])
        return _number(rise, vector)


@dataclass(frozen=True)
class Margin:
    """… how many of your samples have a margin z_y − max_{j≠y} z_j of at most γ? The answer is the first entry."""

    margin: float
    portion: Portion = ALL

    @torch.no_grad()
    def __call__(self, problem: Problem, client: int, vector: Tensor) -> Tensor:
        module = problem.network.module.eval()
        batches = self.portion.batches(problem.federation, [client])
        return _number(sum(_within(module(inputs), labels, self.margin) for inputs, labels in batches), vector)


def _within(logits: Tensor, labels: Tensor, margin: float) -> float:
    """The number of samples within the margin; NaN where labels are not classes."""
    if labels.is_floating_point():
        return math.nan
    true = logits.gather(1, labels[:, None])
    others = logits.scatter(1, labels[:, None], -math.inf).amax(dim=1, keepdim=True)
    return float((true - others <= margin).sum())


def _number(value: float, like: Tensor) -> Tensor:
    answer = torch.zeros_like(like)
    answer[0] = value
    return answer


@one_thread()
def gradient_norm(engine: Engine, state: ServerState, problem: Problem) -> float:
    """‖∇f(w)‖² of the global objective f = Σ pᵢ fᵢ, pᵢ = nᵢ/N, over all training samples."""
    federation, total = problem.federation, torch.zeros_like(state.weights, dtype=torch.float64)
    sizes = [federation.samples(client) for client in range(federation.clients)]
    for client, gradient in engine.ask(state, state.weights, range(federation.clients), "gradient"):
        total.add_(gradient, alpha=sizes[client] / sum(sizes))
    return float(total @ total)


def margin_loss(engine: Engine, state: ServerState, problem: Problem) -> float:
    """The empirical margin loss of FedSMOO's generalisation bound: the share of training samples within γ."""
    federation = problem.federation
    answers = engine.ask(state, state.weights, range(federation.clients), "margin")
    within = sum(float(answer[0]) for _, answer in answers)
    return within / sum(federation.samples(client) for client in range(federation.clients))


@one_thread()
def local_sharpness(
    engine: Engine, local: Mapping[int, ServerState], averaged: ServerState, rho: float
) -> dict[str, float]:
    """SAM's sharpness S_g(w) = g(w + ρ ∇g/‖∇g‖) − g(w), over the clients of a round, each on its own samples:

    local     (1/n) Σ S_{fᵢ}(wᵢ)      of each client's loss at its own model
    averaged  (1/n) Σ S_{fᵢ}(w)       of each client's loss at the averaged model, with a perturbation of its own
    global    S_f(w), f = (1/n) Σ fᵢ   of the common loss there, with one perturbation for all
    """
    clients = list(local)
    own = [_ascent(engine, state, client, rho)[0] for client, state in local.items()]
    there = [_ascent(engine, averaged, client, rho) for client in clients]
    mean = torch.stack([gradient for _, gradient in there]).mean(dim=0)
    common = [float(a[0]) for _, a in engine.ask(averaged, rho * unit(mean), clients, "rise")]
    return {
        "local_sharpness": sum(own) / len(own),
        "averaged_sharpness": sum(rise for rise, _ in there) / len(there),
        "global_sharpness": sum(common) / len(common),
    }


def _ascent(engine: Engine, state: ServerState, client: int, rho: float) -> tuple[float, Tensor]:
    """The sharpness of one client's loss at a model, and the gradient there."""
    ((_, told),) = engine.ask(state, state.weights, [client], "gradient")
    gradient = told.clone()
    ((_, rise),) = engine.ask(state, rho * unit(gradient), [client], "rise")
    return float(rise[0]), gradient


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
