"""Runs the rounds of a recipe with clients that are reached through Flower's messages.

Flower's own round loop cannot resume, may wait forever and samples with the global generator. fedflat therefore has its
own loop, and uses Flower only for the messages.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from flwr.app import Message, MessageType
from flwr.serverapp import Grid
from torch import Tensor

from fedflat.engine import settled_worker
from fedflat.errors import AwayError, RecipeError, printable, shown
from fedflat.files import private_directory, written_to
from fedflat.flower import messages
from fedflat.flower.identity import has_keys, read_agreed, read_table
from fedflat.flower.journal import Journal
from fedflat.flower.monitor import monitored, say
from fedflat.flower.nodes import Attendance, Nodes
from fedflat.flower.own import NOBODY, DataHook, OwnData, own_problem, with_sizes
from fedflat.flower.policy import client_side, measured_questions
from fedflat.flower.shelf import Mark
from fedflat.local import Vectors
from fedflat.methods import Privacy, Upload, Uploads
from fedflat.recipe import Checkpoint, Recipe, load, overridden
from fedflat.rounds import About, Broadcast, Problem, Refusal, Score, ServerState, chunks, one_thread, unless_seen
from fedflat.runs import CAUGHT, RunLock, execute

CURVATURE = 1e6  # the largest ‖Hv‖/‖v‖ accepted from a client
BEYOND = 1e3  # and relative to the clients' median


def changed(source: str | Path | Recipe, changes: str) -> Recipe:
    """Return the app's recipe with changes for one run. Only server fields may change: clients use their own copy.

    Args:
        source: the app's recipe.
        changes: overrides `section.field=value`, separated by spaces.

    Raises:
        RecipeError: if a change concerns the clients.
    """
    plain = source if isinstance(source, Recipe) else load(source)
    chosen = overridden(source, changes.split()) if isinstance(source, Recipe) else load(source, changes.split())
    before, after = client_side(plain), client_side(chosen)
    for name in before:
        if before[name] != after[name]:
            raise RecipeError(
                f"set: {name} affects the clients, which have agreed to the app's recipe; change it in recipe.toml and "
                "let them agree to the new recipe"
            )
    return chosen


def serve(grid: Grid, recipe: Recipe, out: Path, data: DataHook | None = None, keys: Path | None = None) -> None:
    """Run the remaining rounds of a deployment.

    Every round is saved: clients only keep what a server at most one round behind needs.

    Args:
        grid: Flower's connection to the nodes.
        recipe: the recipe of the deployment.
        out: the directory of the run.
        data: provides what the server may see of the data.
        keys: the folder with the clients' public keys.
    """
    _check(recipe)
    recipe = recipe.model_copy(update={"checkpoint": Checkpoint(every=1)})
    with written_to(out, "choose another `out`"):
        private_directory(out)
        lock = RunLock(out)  # before the journal is read: a second server must not overwrite it
    with lock, monitored(recipe.deployment) as callbacks:
        _serve(grid, recipe, out, data, keys, lock, callbacks)


def _serve(
    grid: Grid,
    recipe: Recipe,
    out: Path,
    data: DataHook | None,
    keys: Path | None,
    lock: RunLock,
    callbacks: Sequence[Callable[..., None]],
) -> None:
    journal = Journal(out)
    table: dict[str, int] | None = None
    agreed: dict[int, int] | None = None
    if keys and has_keys(grid):
        table, agreed = read_table(keys, recipe.split.clients), read_agreed(keys, recipe.split.clients)
    else:
        say("nodes are not identified by keys: each is trusted to be the client it claims", recipe.deployment)
    if agreed:  # no client can claim more than was agreed, so that every sample counts
        recipe = recipe.model_copy(update={"admission": recipe.admission.model_copy(update={"max_share": 0.0})})
    problem = own_problem(recipe, NOBODY, 1, data)
    _check_questions(problem)
    nodes = Nodes(grid, recipe, table, problem.network.base_digest, agreed)
    connected = nodes.gather()
    if not journal.sizes:
        journal.begin(connected)
    secret = journal.seed() if recipe.deployment.draws == "secret" else None
    problem = replace(with_sizes(problem, journal.sizes, secret), discarded=journal.discarded)

    before = {number: signal.getsignal(number) for number in CAUGHT}

    def start(problem: Problem, state: ServerState) -> Deployment:
        journal.start(state.round)
        # A round cannot finish without its SuperLink, so a ServerApp stops at once when it is told to.
        for number in CAUGHT if threading.current_thread() is threading.main_thread() else ():
            signal.signal(number, before[number])
        return Deployment(problem, nodes, journal)

    warn = partial(say, settings=recipe.deployment)
    told = [partial(each, metrics=[metric.name for metric in problem.task.metrics]) for each in callbacks]
    execute(problem, out, told, resume=True, warn=warn, start=start, lock=lock)


def _check(recipe: Recipe) -> None:
    """Refuse recipes that a deployment cannot run."""
    if recipe.split.clients < 1:
        raise RecipeError("split.clients: a deployment needs the number of clients")
    if recipe.server.stop_loss is not None:
        raise RecipeError("server.stop_loss: the server of a deployment has no training samples to compute the loss on")
    if recipe.evaluation.on == "validation":
        raise RecipeError('evaluation.on = "validation": the clients of a deployment keep their samples; use "test"')
    if recipe.server.draws != "fedflat" and recipe.deployment.draws == "secret":
        raise RecipeError(
            f"server.draws = {recipe.server.draws!r}: anyone can compute these cohorts; set 'fedflat', or "
            "deployment.draws = 'recipe' to rehearse"
        )


def _check_questions(problem: Problem) -> None:
    """Refuse questions that clients with a private method would not answer."""
    asked = measured_questions(problem.recipe)
    if isinstance(problem.method.protection, Privacy) and asked:
        field, change = ("sharpness", "set it to 0") if "hessian" in asked else ("measures", "remove local_curvature")
        raise RecipeError(
            f"evaluation.{field}: clients with a private method answer no question that its noise does not protect; "
            f"{change}"
        )


Asked = dict[int, tuple[Vectors, dict[str, Any]]]


class Deployment:
    """The engine for remote clients. Their memory stays with them."""

    memory = None

    def __init__(self, problem: Problem, nodes: Nodes, journal: Journal) -> None:
        self._problem, self._recipe, self._nodes, self._journal = problem, problem.recipe, nodes, journal
        self._worker = settled_worker(problem)
        self._offered: dict[int, Mark] = {}
        self._attendance = Attendance(problem.recipe.deployment.misses)

    def local_rounds(self, broadcast: Broadcast, cohort: Sequence[int]) -> Iterator[Upload | Refusal]:
        self._offered = {}
        quorum = min(self._recipe.admission.quorum, len(cohort))
        online = self._nodes.awaited(lambda found: len(found.keys() & {*cohort}) >= quorum)
        yield from (Refusal(c, "absent", "its node is not connected") for c in cohort if c not in online)
        clients = {client: online[client] for client in cohort if client in online}
        silent = {client for client in clients if self._attendance.due(client) > broadcast.round}
        if len(silent) < len(clients):  # if all are silent, all are asked
            clients = {client: node for client, node in clients.items() if client not in silent}
            for client in silent:
                again = f"it is asked again from round {self._attendance.due(client)} on"
                yield Refusal(client, "silent", f"no reply in its last rounds; {again}")
        facts = {"run": self._journal.run, "round": broadcast.round, "lr": broadcast.lr}
        asked = {
            node: (broadcast.sent, facts | self._everyone(node) | self._kept(client, broadcast.round))
            for client, node in clients.items()
        }
        yield from self._replies(asked, {node: client for client, node in clients.items()}, broadcast.round)

    def _replies(self, asked: Asked, who: dict[int, int], round: int) -> Iterator[Upload | Refusal]:
        limit, heard = self._recipe.admission.deadline or self._recipe.deployment.timeout, set[int]()
        for node, reply in self._nodes.exchange(asked, MessageType.TRAIN, limit, str(round)):
            again = Refusal(who[node], "doubled", "a second reply to one message")
            yield again if node in heard else self._received(reply, who[node], node, round)
            heard.add(node)
            self._attendance.replied(who[node])
        for node, client in who.items():
            if node not in heard:
                self._attendance.missed(client, round)
                yield Refusal(client, "hung", f"no reply after {limit:g} s")

    def _everyone(self, node: int) -> dict[str, Any]:
        federation = self._problem.federation
        assert isinstance(federation, OwnData)
        return {"everyone": federation.told(self._nodes.samples(node))}

    def _kept(self, client: int, round: int) -> dict[str, Any]:
        mark = self._journal.mark(client, round)
        return {"kept_round": mark.round if mark else -1, "kept_digest": mark.digest if mark else ""}

    def _received(self, reply: Message, client: int, node: int, round: int) -> Upload | Refusal:
        """Return the upload in a reply, or a refusal that says why there is none."""
        if reply.has_error():
            return Refusal(client, "raised", f"error {reply.error.code}: {printable(reply.error.reason)}")
        try:
            facts = messages.read_facts(reply.content)
            if refused := messages.read_refusal(facts):
                raise messages.UnfitError(*refused)
            if facts.get("run") != self._journal.run or facts.get("client") != client:
                raise messages.UnfitError("foreign", "it belongs to another run or client")
            if facts.get("round") != round:
                raise messages.UnfitError("stale", f"it belongs to round {shown(facts.get('round'), 40)}")
            upload = messages.read_upload(reply.content, self._problem, client, self._nodes.samples(node))
            if facts.get("digest"):
                self._offered[client] = Mark(round, messages.word(facts, "digest", "[0-9a-f]{64}"))
        except messages.UnfitError as unfit:
            return Refusal(client, *unfit.args)
        if facts.get("forgiven"):
            forgiven = f"client {client} in round {round}: {printable(facts['forgiven'])}"
            say(forgiven, self._recipe.deployment)
        return upload

    def kept(self, client: int) -> Vectors:
        return {}  # the client keeps it

    def remember(self, uploads: Uploads) -> None:
        self._journal.merged({u.client: self._offered[u.client] for u in uploads if u.client in self._offered})

    @unless_seen
    @one_thread()
    def score(self, state: ServerState, part: str, chunk: int) -> Score:
        spans = chunks(self._problem.federation.size(part), chunk)
        scores = [self._worker.score(state.weights, state.buffers, part, *span) for span in spans]
        return sum(scores[1:], scores[0])

    def ask(
        self, state: ServerState, vector: Tensor, clients: Sequence[int], about: About = "hessian"
    ) -> Iterator[tuple[int, Tensor]]:
        if about not in ("hessian", "curvature"):
            raise AwayError(f"{about}: clients of a deployment are asked only for Hessian products and λ₁")
        online = self._nodes.online()
        if missing := [client for client in clients if client not in online or self._attendance.due(client)]:
            raise AwayError(f"sharpness: clients {missing} are not connected")
        probe = vector if about == "hessian" else vector.new_ones(1)
        sent = {"weights": state.weights} | ({"vector": vector} if about == "hessian" else {})
        if state.buffers.numel():
            sent["buffers"] = state.buffers
        facts = {"run": self._journal.run, "round": state.round}
        asked = {online[c]: (sent, facts | self._everyone(online[c])) for c in clients}
        who = {online[c]: c for c in clients}
        told: dict[int, Tensor] = {}
        for node, reply in self._nodes.exchange(asked, f"query.{about}", self._recipe.deployment.timeout):
            told.setdefault(who[node], _answer(reply, who[node], probe))
        for client in clients:
            if client not in told:
                self._attendance.missed(client, state.round)
                raise AwayError(f"sharpness: client {client} did not answer")
        _refuse_outliers(told, probe)
        yield from ((client, told[client]) for client in clients)

    def close(self) -> None: ...


def _answer(reply: Message, client: int, vector: Tensor) -> Tensor:
    """The vector in a reply, which must have the size and dtype of this one."""
    if reply.has_error():
        raise AwayError(f"sharpness: client {client}: {printable(reply.error.reason)}")
    if refused := messages.read_refusal(messages.read_facts(reply.content)):
        raise AwayError(f"sharpness: client {client} refuses: {refused[1]}")
    try:
        return messages.read_exactly(reply.content, {"answer": vector.numel()}, vector.dtype)["answer"]
    except messages.UnfitError as unfit:
        raise AwayError(f"sharpness: client {client}: {unfit.args[1]}") from None


def _refuse_outliers(told: dict[int, Tensor], vector: Tensor) -> None:
    """Limit the influence of one client: ‖Hᵢv‖/‖v‖ is bounded, also relative to the clients' median.

    For λ₁, which each client computes itself, v is the number 1.
    """
    length = float(torch.linalg.vector_norm(vector.double()))
    ratios = {c: float(torch.linalg.vector_norm(a.double())) / length for c, a in told.items()} if length else {}
    usual = BEYOND * median(ratios.values()) if len(ratios) > 2 else CURVATURE
    for client, ratio in ratios.items():
        if ratio > CURVATURE or (usual and ratio > usual):
            raise AwayError(f"sharpness: client {client} reports a curvature of {ratio:.3g}, which is not plausible")
