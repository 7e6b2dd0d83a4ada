"""The server's side of a round: broadcast to the cohort and merge the uploads."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import torch
from torch import Tensor

from fedflat.methods import ServerView, Uploads, collect
from fedflat.recipe import Admission, Evaluation, Server
from fedflat.rounds.admission import Gate
from fedflat.rounds.cohort import expected_cohort
from fedflat.rounds.interface import Engine, one_thread
from fedflat.rounds.measures import SINGLE, measured
from fedflat.rounds.medians import first_medians, next_medians, running_medians
from fedflat.rounds.metrics import bytes_of
from fedflat.rounds.setup import Broadcast, Problem, Refusal
from fedflat.rounds.state import ServerState


@dataclass(frozen=True)
class RoundReport:
    """The outcome of a round after merging; `cohort` holds the clients whose uploads were merged."""

    cohort: list[int]
    local_loss: float
    bytes_down: int
    bytes_up: int
    measures: dict[str, float] = field(default_factory=dict)
    notes: dict[str, float] = field(default_factory=dict)
    refused: list[Refusal] = field(default_factory=list)
    skipped: str = ""


def first_state(problem: Problem) -> ServerState:
    """Return the state before round 0: the network's initial weights, and zeros for the state of the parts."""
    network = problem.network
    weights, buffers = network.weights.clone(), network.buffers.clone()
    return ServerState(weights, buffers, {**problem.method.first_state(weights), **first_medians(problem)})


def view(problem: Problem, state: ServerState, server: Server | None = None) -> ServerView:
    """Return the state as the method's parts see it; `server` replaces the recipe's section of that name."""
    clients, server = problem.federation.clients, server or problem.recipe.server
    return ServerView(
        state.weights,
        state.weights,
        state.round,
        clients,
        state.vectors,
        lr=server.lr,
        seed=problem.seed,
        cohort=expected_cohort(server, clients),
        layout=problem.network.layout,
    )


@one_thread()
def conduct(
    problem: Problem,
    state: ServerState,
    engine: Engine,
    cohort: Sequence[int],
    server: Server | None = None,
    watch: Evaluation | None = None,
    limits: Admission | None = None,
) -> tuple[ServerState, RoundReport]:
    """Run one round: broadcast to the cohort, train it on the engine, merge the admitted uploads.

    A round is skipped, so that only its number changes, if the merged state would not be finite, or if there are fewer
    uploads than the quorum and the method does not move the model in every round. The server computes its sums with one
    thread too, because their last bits would otherwise depend on the machine and idle spinning threads would take the
    workers' cores.

    Args:
        problem: what the recipe describes.
        state: the server's state before the round.
        engine: runs the local rounds.
        cohort: the clients of the round.
        server: replaces the recipe's section `server`.
        watch: replaces the recipe's section `evaluation`.
        limits: replaces the recipe's section `admission`.

    Returns:
        The state after the round, and the report of the round.
    """
    recipe, local = problem.recipe, problem.recipe.local
    server, watch, limits = server or recipe.server, watch or recipe.evaluation, limits or recipe.admission
    sent = problem.method.broadcast(view(problem, state, server))
    if state.buffers.numel() and recipe.model.buffers == "average":
        sent["buffers"] = state.buffers
    broadcast = Broadcast(state.round, local.lr * local.lr_decay**state.round, sent)
    single = bool(SINGLE & {*watch.measures}) or not problem.method.only_averages
    scales = running_medians(problem, state.vectors)
    uploads, gate = _heard(problem, server, engine, broadcast, cohort, limits, single, scales)
    report = RoundReport(
        cohort=sorted(_same(upload.client) for upload in uploads),
        local_loss=sum(w * u.loss for w, u in zip(uploads.weights, uploads, strict=True)) if uploads else math.nan,
        bytes_down=len(cohort) * bytes_of(*sent.values()),
        bytes_up=len(uploads) * sum(problem.uploads.values()) * state.weights.element_size(),
        notes=_mean_notes(uploads),
        refused=gate.refused,
    )
    skipped, merged = "", state
    if len(uploads) < max(limits.quorum, problem.method.quorum) and not problem.method.always_moves:
        skipped = _skipped(problem, gate, limits, uploads)
    else:
        merged = merge(problem, server, state, uploads, sent["weights"])
        skipped = _not_finite(state, merged)
    if skipped:
        return replace(state, round=state.round + 1), replace(report, cohort=[], skipped=skipped)
    if uploads:
        round = state.round + 1
        due = round == server.rounds or bool(watch.every and round % watch.every == 0)
        report = replace(report, measures=measured(engine, state, merged, uploads, sent["weights"], watch, due))
    engine.remember(uploads)
    vectors = {**merged.vectors, **next_medians(problem, state.vectors, uploads, scales)}
    return replace(merged, round=state.round + 1, vectors=vectors), report


def _not_finite(before: ServerState, after: ServerState) -> str:
    """Why a state cannot replace the previous one; empty if it can. A part may keep NaN in its own state."""
    named = {"weights": after.weights, "buffers": after.buffers, **after.vectors}
    old = {"weights": before.weights, "buffers": before.buffers, **before.vectors}
    for name, vector in named.items():
        # A finite sum has only finite terms, and needs one pass; a sum may overflow although all terms are finite.
        if math.isfinite(float(vector.sum())):
            continue
        if not bool((torch.isfinite(vector) | ~torch.isfinite(old[name])).all()):
            return f"the merged {name} would not be finite, so the state stays as it was; lower admission.max_norm"
    return ""


@cache
def _same(client: int) -> int:
    """Return one shared object per client number, so that a long history does not hold many copies."""
    return client


def _heard(
    problem: Problem,
    server: Server,
    engine: Engine,
    broadcast: Broadcast,
    cohort: Sequence[int],
    limits: Admission,
    single: bool,
    scales: Mapping[str, float],
) -> tuple[Uploads, Gate]:
    """Collect the admitted uploads. Each Δ is freed once it is in the sum, unless single uploads are needed.

    In a deployment, and if all uploads are kept anyway, the uploads of a round are compared with each other.

    If clients share steps and one of them fails, the round starts again without it: the last bits of a client's numbers
    depend on which clients share its steps, and an absent client must not affect the others.
    """
    hold = not problem.method.always_moves and (single or problem.deployed)
    gate = Gate(problem, limits, broadcast, scales=scales, hold=hold)
    release = None if single else engine.release
    while True:
        before = len(gate.failed)
        arriving = engine.local_rounds(broadcast, cohort) if cohort else ()
        order = problem.federation.largest_first(cohort)
        uploads = collect(gate.admitted(arriving), server.average, order, gate.away, release, gate.most)
        if problem.group == 1 or len(gate.failed) == before:
            return uploads, gate
        gate = Gate(problem, limits, broadcast, gate.failed, scales, hold)
        cohort = [client for client in cohort if client not in {refusal.client for refusal in gate.failed}]


def merge(problem: Problem, server: Server, state: ServerState, uploads: Uploads, start: Tensor) -> ServerState:
    """Return the state after w ← w + η_g · move, where the move is the clients' average Δ as modified by the parts.

    Args:
        problem: what the recipe describes.
        server: the recipe's section `server`.
        state: the server's state before the round.
        uploads: the admitted uploads.
        start: the weights that the clients received.
    """
    before = replace(view(problem, state, server), start=start)
    uploads = problem.method.guarded(before, uploads)
    average = uploads.average("delta") if uploads else torch.zeros_like(state.weights)
    move, vectors = problem.method.merge(average, before, uploads)
    averaged = uploads.average("buffers") if uploads and "buffers" in uploads[0].vectors else state.buffers
    return replace(state, weights=before.arrival(move), buffers=averaged, vectors=vectors)


def _skipped(problem: Problem, gate: Gate, limits: Admission, uploads: Uploads) -> str:
    """Why a round was skipped, with the first client of the most frequent reason as an example."""
    if len(uploads) >= limits.quorum:
        return f"{len(uploads)} accepted, and the method's robust average needs {problem.method.quorum}"
    reasons = Counter(refusal.reason for refusal in gate.refused)
    example = next((r for r in gate.refused if r.reason == reasons.most_common(1)[0][0]), None)
    why = f"; {gate.sentence(example)}" if example else ""
    return f"{len(uploads)} accepted, admission.quorum = {limits.quorum}{why}"


def _mean_notes(uploads: Uploads) -> dict[str, float]:
    """The mean of each note over the clients that report it."""
    found: dict[str, list[tuple[float, float]]] = {}
    for weight, upload in zip(uploads.weights, uploads, strict=True):
        for name, value in upload.notes.items():
            found.setdefault(name, []).append((weight, value))
    return {
        name: sum(w * v for w, v in pairs) / (1.0 if len(pairs) == len(uploads) else sum(w for w, _ in pairs))
        for name, pairs in found.items()
    }
