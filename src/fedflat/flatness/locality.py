"""Local against global flatness: each client's loss at the global model and at the client's own local model."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass

from torch import Tensor

from fedflat.engine import Inline
from fedflat.errors import TrainingError
from fedflat.flatness.federated import FederatedHessian, HessianProduct, Portion, Weights
from fedflat.flatness.hessian import Hessian, top_eigenvalues
from fedflat.flatness.sharpness import ascent_sharpness
from fedflat.methods import Upload
from fedflat.rounds import Broadcast, Engine, Problem, ServerState, first_state, one_thread, view


@dataclass(frozen=True)
class Place:
    """One client's loss at one model: its value, λ₁ of its Hessian, and its rise after SAM's ascent step."""

    loss: float
    lambda1: float
    sharpness: float


@dataclass(frozen=True)
class ClientFlatness:
    """One client's loss fᵢ at the global model w and at its own model wᵢ.

    Attributes:
        client: the client's number.
        samples: the samples that fᵢ was measured on.
        weight: pᵢ, the client's weight in the global loss.
        at_global: fᵢ at w.
        at_local: fᵢ at wᵢ.
        distance: ‖wᵢ − w‖.
        part: pᵢ uᵀHᵢu with u the top eigenvector of the global Hessian; the parts of all clients add up to λ₁(H).
    """

    client: int
    samples: int
    weight: float
    at_global: Place
    at_local: Place
    distance: float
    part: float


@dataclass(frozen=True)
class Locality:
    """Local against global flatness of one global model w, with H = Σ pᵢ Hᵢ the Hessian of the global loss there."""

    lambda1: float
    clients: list[ClientFlatness]

    @property
    def clients_sum(self) -> float:
        """Σ pᵢ λ₁(Hᵢ) ≥ λ₁(H), each client's own curvature at the global model."""
        return sum(each.weight * each.at_global.lambda1 for each in self.clients)

    @property
    def explained(self) -> float | None:
        """λ₁(H) / Σ pᵢ λ₁(Hᵢ), the share of the clients' own curvature that is curvature of the global loss.

        At most 1, and 1 if all clients curve most in the same direction; None if the sum is not positive.
        """
        return self.lambda1 / self.clients_sum if self.clients_sum > 0 else None

    @property
    def distance(self) -> float:
        """Σ pᵢ ‖wᵢ − w‖, the mean distance of the clients' local models from the global model."""
        return sum(each.weight * each.distance for each in self.clients)

    @property
    def gap(self) -> float:
        """Σ pᵢ (λ₁(fᵢ; w) − λ₁(fᵢ; wᵢ)), how much flatter the clients' losses are at their local models than at w."""
        return sum(each.weight * (each.at_global.lambda1 - each.at_local.lambda1) for each in self.clients)


@one_thread()
def locality(
    problem: Problem,
    portion: Portion,
    rho: float = 0.05,
    lr: float | None = None,
    weights: Weights | None = None,
    tolerance: float = 1e-3,
    seed: int = 0,
) -> Locality:
    """Measures each client's loss at the global model and after one local round from it with the problem's method.

    The method's parts start with the state that they have before the first round. The network keeps its weights.

    Args:
        problem: the network, whose weights are the global model, the loss, the method and the federation.
        portion: the samples of each client.
        rho: radius of the sharpness.
        lr: learning rate of the local round; the recipe's by default.
        weights: the clients' weights pᵢ, "samples" or "uniform"; those of the recipe's average by default.
        tolerance: relative accuracy of λ₁.
        seed: seed of the start vectors.

    Raises:
        TrainingError: a client's local round fails.
    """
    network, state = problem.network, first_state(problem)

    def place(client: int, model: Tensor, buffers: Tensor) -> Place:
        network.load(model)
        network.buffers.copy_(buffers)
        objective = portion.own(problem, client)
        top = float(top_eigenvalues(Hessian(objective), 1, tolerance, seed).values[0])
        return Place(objective.value(), top, ascent_sharpness(objective, rho))

    with closing(Inline(problem, HessianProduct(portion))) as engine:
        local = _local_models(problem, engine, state, lr or problem.recipe.local.lr)
        hessian = FederatedHessian(engine, state, problem, portion, weights)
        eigen = top_eigenvalues(hessian, 1, tolerance, seed)
        answers = engine.ask(state, eigen.vectors[0], range(problem.federation.clients))
        bends = [float(answer @ eigen.vectors[0].to(answer)) for _, answer in answers]
    try:
        found = [
            ClientFlatness(
                client,
                portion.count(problem.federation, client),
                share,
                place(client, state.weights, state.buffers),
                place(client, *local[client]),
                float((local[client][0] - state.weights).norm()),
                share * bend,
            )
            for client, (share, bend) in enumerate(zip(hessian.shares, bends, strict=True))
        ]
    finally:
        network.load(state.weights)
        network.buffers.copy_(state.buffers)
    return Locality(float(eigen.values[0]), found)


def _local_models(problem: Problem, engine: Engine, state: ServerState, lr: float) -> dict[int, tuple[Tensor, Tensor]]:
    """Each client's weights and batch statistics after one local round."""
    sent = problem.method.broadcast(view(problem, state))
    sent["buffers"] = state.buffers  # a client that keeps its own statistics does not look at these
    found = {}
    for each in engine.local_rounds(Broadcast(state.round, lr, sent), range(problem.federation.clients)):
        if not isinstance(each, Upload):
            raise TrainingError(f"client {each.client}: its local round failed ({each.detail})")
        buffers = {**each.vectors, **engine.kept(each.client)}.get("buffers", state.buffers)
        found[each.client] = sent["weights"] + each.delta, buffers.clone()
    return found
