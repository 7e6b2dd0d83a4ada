"""Tracks which node is which client, and waits for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from flwr.app import Message, MessageType
from flwr.serverapp import Grid
from torch import Tensor

from fedflat.errors import TrainingError, printable
from fedflat.flower import messages
from fedflat.flower.identity import AGREED, known_nodes
from fedflat.flower.monitor import say
from fedflat.flower.own import NOBODY
from fedflat.flower.policy import digest
from fedflat.recipe import Recipe

POLL = 0.2  # seconds between polls for replies; Flower's own loop sleeps for three
AGAIN, LATEST = 60.0, 3600.0  # seconds until a node that did not identify itself is asked again: initial and maximum


class Hello(NamedTuple):
    """What a node reports about itself."""

    client: int
    samples: int


class Nodes:
    """Asks every node once, when it first appears, which client it is.

    The server does not wait for a node that does not identify itself, and asks it again after increasing intervals.

    Args:
        grid: Flower's connection to the nodes.
        recipe: the server's recipe.
        table: maps fingerprints to clients. With it, a node is only accepted as the client that its key belongs to.
        base: digest of the server's frozen weights.
        agreed: the largest number of samples that each client may claim.
    """

    def __init__(
        self,
        grid: Grid,
        recipe: Recipe,
        table: Mapping[str, int] | None = None,
        base: str = "",
        agreed: Mapping[int, int] | None = None,
    ) -> None:
        self._base, self._agreed = base, agreed or {}
        self._grid, self._recipe, self._digest = grid, recipe, digest(recipe)
        self._table = table
        self._hello: dict[int, Hello] = {}
        self._clients: dict[int, int] = {}  # by their keys
        self._strange: dict[int, str] = {}
        self._pending: dict[str, int] = {}
        self._next: dict[int, tuple[float, float]] = {}

    def online(self) -> dict[int, int]:
        """The node of each connected client; if two nodes claim one client, the first one stays."""
        ids = self._listed()
        self._ask([node for node in ids if node not in self._hello])
        replies: dict[int, Message] = {}
        for name, reply in self._pulled(self._pending):
            replies.setdefault(self._pending.get(name, NOBODY), reply)
            self._pending.pop(name, None)
        for node in ids:  # in the order of the list, not of arrival
            if node in replies:
                self._introduced(node, replies[node])
        clients: dict[int, int] = {}
        for node, hello in self._hello.items():
            if node in ids:
                clients.setdefault(hello.client, node)
        return clients

    def samples(self, node: int) -> int:
        """The number of samples that a node's client claims."""
        return self._hello[node].samples

    def _listed(self) -> list[int]:
        """The connected nodes; with a table, only those whose key belongs to a client."""
        if self._table is None:
            return [*self._grid.get_node_ids()]
        nodes = known_nodes(self._grid.get_nodes(), self._table)
        for node, (client, key) in nodes.items():
            if client is None:
                self._say(node, f"its key {key or 'of unknown kind'} does not belong to a client")
        self._clients = {node: client for node, (client, _) in nodes.items() if client is not None}
        return [*self._clients]

    def _ask(self, nodes: list[int]) -> None:
        now = time.monotonic()
        for node in nodes:
            due, interval = self._next.get(node, (now, AGAIN))
            if now >= due:
                self._next[node] = (now + interval, min(2 * interval, LATEST))
                self._pending |= dict.fromkeys(self._pushed(node, {}, {}, MessageType.QUERY), node)

    def _introduced(self, node: int, reply: Message) -> None:
        """Record which client a node is, or report once why it is not a client."""
        try:
            self._hello[node] = self._read(node, reply)
        except messages.UnfitError as unfit:
            self._say(node, unfit.args[1])

    def _read(self, node: int, reply: Message) -> Hello:
        if reply.has_error():
            raise messages.UnfitError("raised", printable(reply.error.reason))
        facts = messages.read_facts(reply.content)
        if refused := messages.read_refusal(facts):
            raise messages.UnfitError(refused[0], f"it refuses: {refused[1]}")
        client = messages.whole(facts, "client", 0, self._recipe.split.clients - 1)
        samples = messages.whole(facts, "samples", 1, self._recipe.admission.max_samples)
        if self._table is not None and self._clients[node] != client:
            whose = f"its key is client {self._clients[node]}'s, but it claims to be client {client}"
            raise messages.UnfitError("foreign", whose)
        if samples > (most := self._agreed.get(client, samples)):
            raise messages.UnfitError("claim", f"client {client} claims {samples} samples, and {AGREED} allows {most}")
        if (base := printable(facts.get("base", ""))) != self._base:
            theirs, ours = (f"the base {each[:12]}…" if each else "none" for each in (base, self._base))
            other = f"the frozen weights of client {client} ({theirs}) and of the server ({ours}) differ"
            raise messages.UnfitError("base", f"{other}; give both the same model")
        return Hello(client, samples)

    def _say(self, node: int, why: str) -> None:
        if self._strange.get(node) != why:
            self._strange[node] = why
            say(f"node {node} is not one of the {self._recipe.split.clients} clients: {why}", self._recipe.deployment)

    def awaited(self, enough: Callable[[dict[int, int]], bool]) -> dict[int, int]:
        """The node of each connected client, once there are enough or `deployment.wait` has passed."""
        end = time.monotonic() + self._recipe.deployment.wait
        while not enough(found := self.online()):
            if time.monotonic() > end:
                break
            time.sleep(POLL)
        return found

    def gather(self) -> dict[int, int]:
        """Wait for the clients of the deployment, and return their numbers of samples.

        Raises:
            TrainingError: if too few clients are connected after `deployment.wait` seconds.
        """
        clients, limits = self._recipe.split.clients, self._recipe.deployment
        needed = limits.nodes or clients
        found = self.awaited(lambda found: len(found) >= needed)
        if len(found) < needed:
            strange = next((f"; node {node}: {why}" for node, why in self._strange.items()), "")
            raise TrainingError(
                f"only {len(found)} of {needed} clients are connected after {limits.wait:g} s "
                f"(missing: {', '.join(str(c) for c in range(clients) if c not in found)}); "
                f"start their nodes, or lower deployment.nodes{strange}"
            )
        return {client: self._hello[node].samples for client, node in found.items()}

    def exchange(
        self, asked: Mapping[int, tuple[dict[str, Tensor], dict[str, Any]]], kind: str, timeout: float, group: str = ""
    ) -> Iterator[tuple[int, Message]]:
        """Send each node its vectors and facts, and yield the replies as they arrive, until the timeout.

        Args:
            asked: the vectors and facts for each node.
            kind: Flower's type of the message.
            timeout: the seconds to wait for replies.
            group: Flower's group ID of the messages.
        """
        sent: dict[str, int] = {}
        for node, (vectors, facts) in asked.items():
            sent |= dict.fromkeys(self._pushed(node, vectors, facts, kind, group), node)
        waiting, end = dict(sent), time.monotonic() + timeout
        while waiting and time.monotonic() < end:
            for name, reply in self._pulled(waiting):
                waiting.pop(name, None)
                yield sent[name], reply
            if waiting:
                time.sleep(POLL)

    def _pushed(
        self, node: int, vectors: dict[str, Tensor], facts: dict[str, Any], kind: str, group: str = ""
    ) -> list[str]:
        """Send a message and return its ID. Flower returns no ID for a node that has just disconnected."""
        content = messages.content(vectors, {**facts, "recipe": self._digest})
        message = Message(content=content, dst_node_id=node, message_type=kind, group_id=group)
        return [name for name in self._grid.push_messages([message]) if name]

    def _pulled(self, waiting: Mapping[str, int]) -> list[tuple[str, Message]]:
        """The replies received to these messages, each from the node that was asked."""
        found = [(reply.metadata, reply) for reply in self._grid.pull_messages([*waiting])] if waiting else []
        return [(m.reply_to_message_id, r) for m, r in found if waiting.get(m.reply_to_message_id) == m.src_node_id]


class Attendance:
    """Tracks missing replies: after `misses` rounds in a row a client is asked less and less often."""

    def __init__(self, misses: int) -> None:
        self._misses = misses
        self._missed: dict[int, int] = {}
        self._next: dict[int, int] = {}

    def due(self, client: int) -> int:
        """The first round in which the client is asked again; 0 if it has replied."""
        return self._next.get(client, 0)

    def missed(self, client: int, round: int) -> None:
        self._missed[client] = self._missed.get(client, 0) + 1
        beyond = self._missed[client] - self._misses
        if beyond >= 0:
            self._next[client] = round + 1 + 2 ** min(beyond + 1, 20)

    def replied(self, client: int) -> None:
        self._missed.pop(client, None)
        self._next.pop(client, None)
