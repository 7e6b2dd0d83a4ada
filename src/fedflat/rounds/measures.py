"""Optional measures of a round: the distances between clients, and the flatness of their losses."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from fedflat.errors import AwayError
from fedflat.methods import Upload, Uploads
from fedflat.models import unit
from fedflat.recipe import Evaluation
from fedflat.rounds.interface import Engine, one_thread
from fedflat.rounds.metrics import MEASURES
from fedflat.rounds.setup import Problem
from fedflat.rounds.state import ServerState

SINGLE = {*MEASURES, "local", "local_sharpness", "local_curvature"}  # measures that look at each client's Δ


def measured(
    engine: Engine,
    before: ServerState,
    after: ServerState,
    uploads: Uploads,
    sent: Tensor,
    watch: Evaluation,
    evaluated: bool,
) -> dict[str, float]:
    """Compute the recipe's measures of the round's local models; expensive ones only in evaluated rounds.

    Args:
        engine: the engine that ran the round.
        before: the server's state before the round.
        after: the merged state.
        uploads: the merged uploads.
        sent: the weights that the clients received.
        watch: the recipe's section `evaluation`.
        evaluated: whether the model is evaluated after this round.
    """
    found: dict[str, float] = {}
    if wanted := [name for name in watch.measures if name in MEASURES]:
        moved = after.weights - sent
        found = {name: MEASURES[name](uploads, moved) for name in wanted}
    if "local" in watch.measures:
        found |= _local_metric(engine, before, uploads, sent, watch)
    if evaluated and {"local_sharpness", "local_curvature"} & {*watch.measures}:  # last: answers overwrite Δᵢ
        models = {upload.client: _local_model(engine, before, upload, sent) for upload in uploads}
        if "local_sharpness" in watch.measures:
            found |= _asked("local_sharpness", partial(local_sharpness, engine, models, after, watch.radius))
        if "local_curvature" in watch.measures:
            found |= _asked("local_lambda1", partial(local_curvature, engine, models, after))
    return found


def _local_model(engine: Engine, before: ServerState, upload: Upload, sent: Tensor) -> ServerState:
    """The state with a client's weights, and its batch statistics if it has any."""
    buffers = {**upload.vectors, **engine.kept(upload.client)}.get("buffers", before.buffers)
    return replace(before, weights=sent + upload.delta, buffers=buffers)


def _local_metric(
    engine: Engine, before: ServerState, uploads: Uploads, sent: Tensor, watch: Evaluation
) -> dict[str, float]:
    """The metric of the clients' models on all clients' samples, before and after local training (FedSoL, Fig. 3)."""
    name = watch.metric or "accuracy"
    start = engine.score(replace(before, weights=sent), watch.part, watch.batch).values[name]
    models = (_local_model(engine, before, upload, sent) for upload in uploads)
    ends = [engine.score(model, watch.part, watch.batch).values[name] for model in models]
    mean = sum(ends) / len(ends)
    spread = math.sqrt(sum((end - mean) ** 2 for end in ends) / len(ends))
    return {f"local_{name}_before": start, f"local_{name}": mean, f"local_{name}_std": spread}


def _asked(name: str, question: Callable[[], dict[str, float]]) -> dict[str, float]:
    """The answer, or NaN under this name if a client cannot be asked."""
    try:
        return question()
    except AwayError:
        return {name: math.nan}


@one_thread()
def gradient_norm(engine: Engine, state: ServerState, problem: Problem) -> float:
    """Return ‖∇f(w)‖² of the global objective f = Σ pᵢ fᵢ, pᵢ = nᵢ/N, over all training samples."""
    federation, total = problem.federation, torch.zeros_like(state.weights, dtype=torch.float64)
    sizes = [federation.samples(client) for client in range(federation.clients)]
    for client, gradient in engine.ask(state, state.weights, range(federation.clients), "gradient"):
        total.add_(gradient, alpha=sizes[client] / sum(sizes))
    return float(total @ total)


def margin_loss(engine: Engine, state: ServerState, problem: Problem) -> float:
    """Return the empirical margin loss of FedSMOO's generalisation bound: the share of training samples within γ."""
    federation = problem.federation
    answers = engine.ask(state, state.weights, range(federation.clients), "margin")
    within = sum(float(answer[0]) for _, answer in answers)
    return within / sum(federation.samples(client) for client in range(federation.clients))


@one_thread()
def local_sharpness(
    engine: Engine, local: Mapping[int, ServerState], averaged: ServerState, rho: float
) -> dict[str, float]:
    """Return SAM's sharpness S_g(w) = g(w + ρ ∇g/‖∇g‖) − g(w) over a round's clients, each on its own samples:

    local     (1/n) Σ S_{fᵢ}(wᵢ)      of each client's loss at its own model
    averaged  (1/n) Σ S_{fᵢ}(w)       of each client's loss at the averaged model, with a perturbation of its own
    global    S_f(w), f = (1/n) Σ fᵢ   of the common loss there, with one perturbation for all

    Args:
        engine: asks the clients.
        local: each client's own model.
        averaged: the averaged model.
        rho: radius ρ of the perturbation.
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


@one_thread()
def local_curvature(engine: Engine, local: Mapping[int, ServerState], averaged: ServerState) -> dict[str, float]:
    """Return the mean λ₁ of the Hessians of a round's clients, each computed by the client on its own samples:

    local     (1/n) Σ λ₁(fᵢ; wᵢ)      of each client's loss at its own model
    averaged  (1/n) Σ λ₁(fᵢ; w)       of each client's loss at the averaged model
    distance  (1/n) Σ ‖wᵢ − w‖        between the two
    """
    clients, zero = list(local), torch.zeros_like(averaged.weights)

    def top(state: ServerState, some: Sequence[int]) -> list[float]:
        return [float(answer[0]) for _, answer in engine.ask(state, zero, some, "curvature")]

    own = [top(state, [client])[0] for client, state in local.items()]
    gaps = [float((state.weights - averaged.weights).norm()) for state in local.values()]
    there = top(averaged, clients)
    return {
        "local_lambda1": sum(own) / len(own),
        "averaged_lambda1": sum(there) / len(there),
        "flatness_distance": sum(gaps) / len(gaps),
    }


def _ascent(engine: Engine, state: ServerState, client: int, rho: float) -> tuple[float, Tensor]:
    """The sharpness of one client's loss at a model, and the gradient there."""
    ((_, told),) = engine.ask(state, state.weights, [client], "gradient")
    gradient = told.clone()
    ((_, rise),) = engine.ask(state, rho * unit(gradient), [client], "rise")
    return float(rise[0]), gradient
