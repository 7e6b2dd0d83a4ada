"""The server's side of a deployment: the rounds of a recipe, with clients that are reached by Flower's messages.

Flower's own round loop cannot resume, may wait for ever and samples with the global generator; this one is fedflat's,
and Flower carries the messages.
"""

from __future__ import annotations

import json
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flwr.app import Context, Message, MessageType
from flwr.serverapp import Grid, ServerApp
from torch import Tensor

from fedflat.client import About, Brief, Problem, Refusal, Worker
from fedflat.engine.engine import chunks, one_thread
from fedflat.errors import AwayError, RecipeError, RunError, TrainingError
from fedflat.flower import wire
from fedflat.flower.own import NOBODY, DataHook, own_problem
from fedflat.flower.shelf import Mark
from fedflat.folder import write_whole, written_to
from fedflat.metrics import Score, bytes_of
from fedflat.parts import Upload, Uploads
from fedflat.prepare import in_full, sharpness_portion
from fedflat.recipe import Checkpoint, Recipe, load, overridden
from fedflat.run import execute
from fedflat.signals import CAUGHT
from fedflat.state import ServerState

POLL = 0.2  # seconds between two looks for replies; Flower's own loop naps for three
HELLO = 120.0  # seconds that a new node may take to say which client it is
VERSIONS = 3  # marks of a client's memory that are kept: as far back as a damaged checkpoint can send us
JOURNAL = "deployment.json"


def server_app(recipe: str | Path | Recipe, data: DataHook | None = None) -> ServerApp:
    """A ServerApp for a recipe. `flwr run` starts it, or goes on with what it finds in the run's directory.

    The run config has `out` (the directory, which also `fedflat watch` reads) and `set` (`section.field=value …`).
    `data(-1)` gives what the server may look at: the shape of the samples, and a test part to score the model on.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        changes = str(context.run_config.get("set", ""))
        words = changes.split()
        chosen = overridden(recipe, words) if isinstance(recipe, Recipe) else load(recipe, words)
        serve(grid, chosen, Path(str(context.run_config.get("out", "run"))), data, changes)

    return app


def serve(grid: Grid, recipe: Recipe, out: Path, data: DataHook | None = None, changes: str = "") -> None:
    """All rounds that are left of the deployment in `out`.

    Every round is saved: clients keep what a server one round back needs, and no more.
    """
    if recipe.split.clients < 1:
        raise RecipeError("split.clients: a deployment must say how many clients there are")
    if recipe.server.stop_loss is not None:
        raise RecipeError("server.stop_loss: the server of a deployment has no training samples to take the loss of")
    recipe = recipe.model_copy(update={"checkpoint": Checkpoint(every=1)})
    journal = Journal(out)
    nodes = Nodes(grid, recipe, changes)
    connected = nodes.gather()
    if not journal.sizes:
        journal.begin(connected)
    problem = own_problem(recipe, NOBODY, sum(journal.sizes.values()), data, journal.sizes)

    before = {number: signal.getsignal(number) for number in CAUGHT}

    def start(problem: Problem, recipe: Recipe, _: ServerState) -> Deployment:
        # A round without its SuperLink would never finish: a ServerApp that is told to end does so at once.
        for number in CAUGHT if threading.current_thread() is threading.main_thread() else ():
            signal.signal(number, before[number])
        return Deployment(problem, recipe, nodes, journal)

    execute(problem, in_full(recipe, problem), out, resume=True, warn=print, start=start)


class Journal:
    """What a deployment must keep beside its checkpoints: its name, the clients' sizes, the marks of their memory."""

    def __init__(self, out: Path) -> None:
        self._path = out / JOURNAL
        found: dict[str, Any] = {}
        if self._path.exists():
            try:
                found = json.loads(self._path.read_text("utf-8"))
            except (OSError, ValueError) as error:
                raise RunError(f"{self._path}: cannot be read ({error}); begin anew in another `out`") from None
        elif (out / "checkpoints").exists():
            raise RunError(f"{out}: holds a run, but no {JOURNAL} of a deployment; choose another `out`")
        self.run: str = found.get("run", "")
        self.sizes: dict[int, int] = {int(client): n for client, n in found.get("sizes", {}).items()}
        self._marks = {int(client): [Mark(*m) for m in marks] for client, marks in found.get("marks", {}).items()}

    def begin(self, sizes: Mapping[int, int]) -> None:
        self.run, self.sizes = secrets.token_hex(8), dict(sorted(sizes.items()))
        self._write()

    def mark(self, client: int, before: int) -> Mark | None:
        """The version of a client's memory that counts at the start of a round."""
        return next((mark for mark in reversed(self._marks.get(client, [])) if mark.round < before), None)

    def merged(self, marks: Mapping[int, Mark]) -> None:
        """Uploads were merged: from now on these versions count."""
        for client, mark in marks.items():
            older = [m for m in self._marks.get(client, []) if m.round < mark.round]
            self._marks[client] = [*older, mark][-VERSIONS:]
        if marks:
            self._write()

    def _write(self) -> None:
        facts = {"run": self.run, "sizes": self.sizes, "marks": self._marks}
        with written_to(self._path, "make room, then start the run again"):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._path, json.dumps(facts).encode() + b"\n")


class Nodes:
    """Which node is which client: every node is asked once, when it first appears."""

    def __init__(self, grid: Grid, recipe: Recipe, changes: str) -> None:
        self._grid, self._recipe, self._changes = grid, recipe, changes
        self._hello: dict[int, tuple[int, int]] = {}
        self._strange: dict[int, str] = {}

    def online(self, patience: float = HELLO) -> dict[int, int]:
        """The node of each client that is connected; where two nodes claim one client, the first stays."""
        ids = [*self._grid.get_node_ids()]
        new = [node for node in ids if node not in self._hello]
        replies = dict(self.exchange(dict.fromkeys(new, ({}, {})), MessageType.QUERY, patience))
        for node in new:  # in the order of the list, not of arrival
            if node in replies:
                self._introduced(node, replies[node])
        clients: dict[int, int] = {}
        for node in self._hello:
            if node in ids:
                clients.setdefault(self._hello[node][0], node)
        return clients

    def _introduced(self, node: int, reply: Message) -> None:
        """Note which client a node is, or say once why it is none."""
        facts = wire.read_facts(reply.content) if not reply.has_error() else {}
        match said := (facts.get("client"), facts.get("samples")):
            case int(client), int(samples) if 0 <= client < self._recipe.split.clients and samples > 0:
                self._hello[node] = (client, samples)
                return
        why = str(reply.error.reason) if reply.has_error() else f"it says that (client, samples) = {said}"
        if self._strange.get(node) != why:
            self._strange[node] = why
            print(f"node {node} is none of the {self._recipe.split.clients} clients: {why}", flush=True)

    def awaited(self, enough: Callable[[dict[int, int]], bool]) -> dict[int, int]:
        """The node of each connected client, once these are enough or `deployment.wait` is over."""
        end = time.monotonic() + self._recipe.deployment.wait
        while not enough(found := self.online(min(HELLO, max(end - time.monotonic(), POLL)))):
            if time.monotonic() > end:
                break
            time.sleep(POLL)
        return found

    def gather(self) -> dict[int, int]:
        """Wait for the clients of the deployment, and give their numbers of samples."""
        clients, limits = self._recipe.split.clients, self._recipe.deployment
        needed = limits.nodes or clients
        found = self.awaited(lambda found: len(found) >= needed)
        if len(found) < needed:
            raise TrainingError(
                f"only {len(found)} of {needed} clients are connected after {limits.wait:g} s "
                f"(missing: {', '.join(str(c) for c in range(clients) if c not in found)}); "
                "start their nodes, or lower deployment.nodes"
            )
        return {client: self._hello[node][1] for client, node in found.items()}

    def exchange(
        self, asked: Mapping[int, tuple[dict[str, Tensor], dict[str, Any]]], kind: str, timeout: float, group: str = ""
    ) -> Iterator[tuple[int, Message]]:
        """Send to each node its vectors and facts, and give back the replies as they come, until the time is up."""
        sent: dict[str, int] = {}
        for node, (vectors, facts) in asked.items():
            content = wire.content(vectors, {**facts, "set": self._changes})
            message = Message(content=content, dst_node_id=node, message_type=kind, group_id=group)
            # A node that has just gone takes none: Flower then gives no name for it.
            sent |= dict.fromkeys((name for name in self._grid.push_messages([message]) if name), node)
        waiting, end = {*sent}, time.monotonic() + timeout
        while waiting and time.monotonic() < end:
            for reply in self._grid.pull_messages([*waiting]):
                identity = reply.metadata.reply_to_message_id
                if identity in sent:
                    waiting.discard(identity)
                    yield sent[identity], reply
            if waiting:
                time.sleep(POLL)


class Deployment:
    """The engine whose clients are somewhere else. Their memory stays with them."""

    memory = None

    def __init__(self, problem: Problem, recipe: Recipe, nodes: Nodes, journal: Journal) -> None:
        self._problem, self._recipe, self._nodes, self._journal = problem, recipe, nodes, journal
        self._worker = Worker(problem)
        self._offered: dict[int, Mark] = {}

    def turns(self, brief: Brief, cohort: Sequence[int]) -> Iterator[Upload | Refusal]:
        self._offered = {}
        quorum = min(self._recipe.admission.quorum, len(cohort))
        online = self._nodes.awaited(lambda found: len(found.keys() & {*cohort}) >= quorum)
        clients = {client: node for client, node in online.items() if client in cohort}
        for client in cohort:
            if client not in clients:
                yield Refusal(client, "absent", "its node is not connected")
        facts = {"run": self._journal.run, "round": brief.round, "lr": brief.lr}
        facts |= {"bytes": bytes_of(*brief.sent.values()), "everyone": sum(self._journal.sizes.values())}
        asked = {node: (brief.sent, facts | self._kept(client, brief.round)) for client, node in clients.items()}
        limit = self._recipe.admission.deadline or self._recipe.deployment.timeout
        who, heard = {node: client for client, node in clients.items()}, set[int]()
        for node, reply in self._nodes.exchange(asked, MessageType.TRAIN, limit, str(brief.round)):
            again = Refusal(who[node], "doubled", "a second reply to one message")
            yield again if node in heard else self._received(reply, who[node], brief.round)
            heard.add(node)
        yield from (Refusal(who[node], "hung", f"no reply after {limit:g} s") for node in who if node not in heard)

    def _kept(self, client: int, round: int) -> dict[str, Any]:
        mark = self._journal.mark(client, round)
        return {"kept_round": mark.round if mark else -1, "kept_digest": mark.digest if mark else ""}

    def _received(self, reply: Message, client: int, round: int) -> Upload | Refusal:
        """An upload, or why the reply is none."""
        if reply.has_error():
            return Refusal(client, "raised", f"error {reply.error.code}: {reply.error.reason}")
        try:
            facts = wire.read_facts(reply.content)
            if facts.get("run") != self._journal.run or facts.get("client") != client:
                raise wire.UnfitError("foreign", "it is of another run or another client")
            if facts.get("round") != round:
                raise wire.UnfitError("stale", f"it is of round {facts.get('round')!r}")
            upload = wire.read_upload(reply.content, self._problem, client)
        except wire.UnfitError as unfit:
            return Refusal(client, *unfit.args)
        if digest := facts.get("digest"):
            self._offered[client] = Mark(round, str(digest))
        if facts.get("forgiven"):
            print(f"client {client} in round {round}: {facts['forgiven']}", flush=True)
        return upload

    def release(self, client: int) -> None:
        pass  # it goes with the upload

    def remember(self, uploads: Uploads) -> None:
        self._journal.merged({u.client: self._offered[u.client] for u in uploads if u.client in self._offered})

    @one_thread()
    def score(self, state: ServerState, part: str, chunk: int) -> Score:
        spans = chunks(self._problem.federation.size(part), chunk)
        scores = [self._worker.score(state.weights, state.buffers, part, *span) for span in spans]
        return sum(scores[1:], scores[0])

    def ask(
        self, state: ServerState, vector: Tensor, clients: Sequence[int], about: About = "hessian"
    ) -> Iterator[tuple[int, Tensor]]:
        if about != "hessian":
            raise AwayError(f"{about}: clients of a deployment are asked for Hessian products alone")
        online, portion = self._nodes.online(), sharpness_portion(self._recipe)
        if missing := [client for client in clients if client not in online]:
            raise AwayError(f"sharpness: clients {missing} are not connected")
        sent = {"weights": state.weights, "vector": vector}
        if state.buffers.numel():
            sent["buffers"] = state.buffers
        facts = {"run": self._journal.run, "round": state.round, "bytes": bytes_of(*sent.values())}
        facts |= {"everyone": sum(self._journal.sizes.values()), "samples": portion.samples, "seed": portion.seed}
        asked, who = {online[c]: (sent, facts) for c in clients}, {online[c]: c for c in clients}
        told: dict[int, Tensor] = {}
        for node, reply in self._nodes.exchange(asked, "query.hessian", self._recipe.deployment.timeout):
            told[who[node]] = _answer(reply, who[node], vector)
        for client in clients:
            if client not in told:
                raise AwayError(f"sharpness: client {client} did not answer")
            yield client, told[client]

    def close(self) -> None: ...


def _answer(reply: Message, client: int, vector: Tensor) -> Tensor:
    if reply.has_error():
        raise AwayError(f"sharpness: client {client}: {reply.error.reason}")
    try:
        answer = wire.read_vectors(reply.content, bytes_of(vector)).get("answer")
    except wire.UnfitError as unfit:
        raise AwayError(f"sharpness: client {client}: {unfit.args[1]}") from None
    if answer is None or answer.shape != vector.shape or answer.dtype != vector.dtype:
        raise AwayError(f"sharpness: client {client} answered with something else than a vector like the one asked")
    return answer
