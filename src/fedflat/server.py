"""The server's side of a round: brief the cohort, merge what comes back."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import torch
from torch import Tensor

from fedflat.admission import Gate
from fedflat.client import Brief, Problem, Refusal
from fedflat.cohort import expected_cohort
from fedflat.engine.engine import Engine, one_thread
from fedflat.errors import AwayError
from fedflat.metrics import MEASURES, bytes_of
from fedflat.parts import ServerView, Upload, Uploads, collect
from fedflat.recipe import Admission, Evaluation, Server
from fedflat.state import ServerState

SINGLE = {*MEASURES, "local", "local_sharpness"}  # measures that look at each client's Δ


@dataclass(frozen=True)
class RoundReport:
    """What is known of a round once its uploads are merged: the cohort are the clients that were."""

    cohort: list[int]
    local_loss: float
    bytes_down: int
    bytes_up: int
    measures: dict[str, float] = field(default_factory=dict)
    notes: dict[str, float] = field(default_factory=dict)
    refused: list[Refusal] = field(default_factory=list)
    skipped: str = ""


def first_state(problem: Problem) -> ServerState:
    """The state before round 0: the network's initial weights, and zeros for what the parts keep."""
    network = problem.network
    weights, buffers = network.weights.clone(), network.buffers.clone()
    return ServerState(weights, buffers, problem.method.first_state(weights))


def view(problem: Problem, state: ServerState, server: Server | None = None) -> ServerView:
    """The state as the method's parts see it, with the facts of the round."""
    clients, server = problem.federation.clients, server or Server()
    return ServerView(
        state.weights,
        state.weights,
        state.round,
        clients,
        state.vectors,
        lr=server.lr,
        seed=problem.seed,
        cohort=expected_cohort(server, clients),
    )


@one_thread()
def conduct(
    problem: Problem,
    server: Server,
    state: ServerState,
    engine: Engine,
    cohort: Sequence[int],
    watch: Evaluation | None = None,
    limits: Admission | None = None,
) -> tuple[ServerState, RoundReport]:
    """One round: brief the cohort, let the engine train it, merge the uploads that are admitted into the next state.

    With fewer than the quorum of them the round is skipped: nothing changes but its number, unless the method moves the
    model in every round. The server's sums are made by one thread too, or their last bits would depend on the machine;
    and idle threads that spin would take the workers' cores.
    """
    sent = problem.method.broadcast(view(problem, state, server))
    if state.buffers.numel() and problem.buffers == "average":
        sent["buffers"] = state.buffers
    brief = Brief(state.round, problem.local.lr * problem.local.lr_decay**state.round, sent)
    limits = limits or Admission()
    single = bool(watch and SINGLE & {*watch.measures}) or not problem.method.only_averages
    uploads, gate = _heard(problem, server, engine, brief, cohort, limits, single)
    report = RoundReport(
        cohort=sorted(_same(upload.client) for upload in uploads),
        local_loss=sum(w * u.loss for w, u in zip(uploads.weights, uploads, strict=True)) if uploads else math.nan,
        bytes_down=len(cohort) * bytes_of(*sent.values()),
        bytes_up=len(uploads) * sum(problem.uploads.values()) * state.weights.element_size(),
        notes=_mean_notes(uploads),
        refused=gate.refused,
    )
    if len(uploads) < limits.quorum and not problem.method.always_moves:
        skipped = _skipped(gate, limits, uploads)
        return replace(state, round=state.round + 1), replace(report, cohort=[], skipped=skipped)
    merged = merge(problem, server, state, uploads, sent["weights"])
    if watch and uploads:
        round = state.round + 1
        due = round == server.rounds or bool(watch.every and round % watch.every == 0)
        report = replace(report, measures=_measured(engine, state, merged, uploads, sent["weights"], watch, due))
    engine.remember(uploads)
    return replace(merged, round=state.round + 1), report


@cache
def _same(client: int) -> int:
    """The one object for a client's number: a history of many rounds would hold it as often as they name it."""
    return client


def _heard(
    problem: Problem,
    server: Server,
    engine: Engine,
    brief: Brief,
    cohort: Sequence[int],
    limits: Admission,
    single: bool,
) -> tuple[Uploads, Gate]:
    """The admitted uploads; unless they are wanted singly, each Δ goes once it is in the sum.

    Where clients share steps, a round in which one fails is begun again without it: the last bits of a client's numbers
    depend on who shares its steps, and nobody shall notice who was not there.
    """
    gate = Gate(problem, limits, brief.round)
    release = None if single else engine.release
    while True:
        before = len(gate.failed)
        arriving = engine.turns(brief, cohort) if cohort else ()
        order = problem.federation.largest_first(cohort)
        uploads = collect(gate.admitted(arriving), server.average, order, gate.away, release)
        if problem.group == 1 or len(gate.failed) == before:
            return uploads, gate
        gate = Gate(problem, limits, brief.round, gate.failed)
        cohort = [client for client in cohort if client not in {refusal.client for refusal in gate.failed}]


def merge(problem: Problem, server: Server, state: ServerState, uploads: Uploads, start: Tensor) -> ServerState:
    """w ← w + η_g · move, where the move is the average Δ from the clients' start as the parts have changed it."""
    average = uploads.average("delta") if uploads else torch.zeros_like(state.weights)
    before = replace(view(problem, state, server), start=start)
    move, vectors = problem.method.merge(average, before, uploads)
    averaged = uploads.average("buffers") if uploads and "buffers" in uploads[0].vectors else state.buffers
    return replace(state, weights=before.arrival(move), buffers=averaged, vectors=vectors)


def _skipped(gate: Gate, limits: Admission, uploads: Uploads) -> str:
    """Why a round was skipped, with the first client of the most frequent reason as the example."""
    reasons = Counter(refusal.reason for refusal in gate.refused)
    example = next((r for r in gate.refused if r.reason == reasons.most_common(1)[0][0]), None)
    why = f"; {gate.sentence(example)}" if example else ""
    return f"{len(uploads)} accepted, admission.quorum = {limits.quorum}{why}"


def _measured(
    engine: Engine,
    before: ServerState,
    after: ServerState,
    uploads: Uploads,
    sent: Tensor,
    watch: Evaluation,
    evaluated: bool,
) -> dict[str, float]:
    """What the recipe wants to know of the round's local models; what is expensive, where the round is evaluated."""
    wanted: list[str] = [name for name in watch.measures if name in MEASURES]
    moved = after.weights - sent
    found = {name: MEASURES[name](uploads, moved) for name in wanted}
    if "local" in watch.measures:
        found |= _local_accuracy(engine, before, uploads, sent, watch)
    if "local_sharpness" in watch.measures and evaluated:  # the last, since the clients' answers take the place of Δᵢ
        found |= _local_sharpness(engine, before, after, uploads, sent, watch)
    return found


def _local_model(before: ServerState, upload: Upload, sent: Tensor) -> ServerState:
    """The state with a client's weights, and its batch statistics if it has some."""
    buffers = {**upload.vectors, **upload.memory}.get("buffers", before.buffers)
    return replace(before, weights=sent + upload.delta, buffers=buffers)


def _local_accuracy(
    engine: Engine, before: ServerState, uploads: Uploads, sent: Tensor, watch: Evaluation
) -> dict[str, float]:
    """What the clients' models know of everybody's samples, before and after local training (FedSoL, Fig. 3)."""
    start = engine.score(replace(before, weights=sent), watch.on, watch.batch).accuracy
    models = (_local_model(before, upload, sent) for upload in uploads)
    ends = [engine.score(model, watch.on, watch.batch).accuracy for model in models]
    mean = sum(ends) / len(ends)
    spread = math.sqrt(sum((end - mean) ** 2 for end in ends) / len(ends))
    return {"local_accuracy_before": start, "local_accuracy": mean, "local_accuracy_std": spread}


def _local_sharpness(
    engine: Engine, before: ServerState, after: ServerState, uploads: Uploads, sent: Tensor, watch: Evaluation
) -> dict[str, float]:
    """How sharp the clients' losses are at their own models and at the new global one (FedSMOO's question)."""
    from fedflat.flatness.federated import local_sharpness  # it loads SciPy, which plain runs do without

    models = {upload.client: _local_model(before, upload, sent) for upload in uploads}
    try:
        return local_sharpness(engine, models, after, watch.radius)
    except AwayError:
        return {"local_sharpness": math.nan}


def _mean_notes(uploads: Uploads) -> dict[str, float]:
    """The mean of each note over the clients that have it."""
    found: dict[str, list[tuple[float, float]]] = {}
    for weight, upload in zip(uploads.weights, uploads, strict=True):
        for name, value in upload.notes.items():
            found.setdefault(name, []).append((weight, value))
    return {
        name: sum(w * v for w, v in pairs) / (1.0 if len(pairs) == len(uploads) else sum(w for w, _ in pairs))
        for name, pairs in found.items()
    }
