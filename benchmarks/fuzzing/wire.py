"""Messages between the real client and server code of a deployment, with one field, vector or record of one spoilt."""

import copy
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from math import isfinite
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from loopback import InProcess

from fedflat import Samples
from fedflat.flower import client_app, messages
from fedflat.flower.identity import fingerprint
from fedflat.flower.journal import Journal
from fedflat.flower.nodes import Nodes
from fedflat.flower.own import NOBODY, DataHook, own_problem, with_sizes
from fedflat.flower.service import Deployment
from fedflat.recipe import Recipe, load
from fedflat.rounds import About, ServerState, conduct, first_state
from fedflat.rounds.faults import misfit, misnoted
from fedflat.runs import gather
from fedflat.runs.round_record import round_record
from fuzzing.mutators import TEXTS, odd_array, odd_field, odd_header, spoilt_bytes
from fuzzing.targets import Target

CLIENTS = 3
SMALL = ["model.hidden=[4]", f"split.clients={CLIENTS}", f"server.cohort={CLIENTS}", "local.steps=1",
         "engine.name=inline", "deployment.draws=recipe", "admission.deadline=0.01", "deployment.wait=0.01",
         "deployment.timeout=0.01", "evaluation.sharpness=1", "evaluation.sharpness_samples=60",
         'evaluation.measures=["consistency", "local_curvature"]']  # fmt: skip
METHODS = ("scaffold + fednova", "feddyn + man(0.1)")
POLICY = "ledger = 'ledger'\n[answers]\ntrain = 1000000\nhessian = 1000000\ncurvature = 1000000\nmin_samples = 1\n"
ABOUT: tuple[About, ...] = ("hessian", "curvature")
Spoil = Callable[[Message, RecordDict], list[Message]]


def spoilt_content(chance: Random, content: RecordDict) -> RecordDict:
    """A message's content with one to three changes."""
    content = copy.deepcopy(content)
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        how = chance.random()
        with suppress(Exception):  # what Flower refuses to make, or an array that is spoilt already
            if how < 0.03:
                del content[chance.choice([*content])]
            elif how < 0.06:
                other = chance.choice([MetricRecord({"x": 1.0}), ConfigRecord(), ArrayRecord()])
                content[chance.choice([*content])] = other
            elif how < 0.45:
                _spoil_vector(chance, content[messages.VECTORS])
            else:
                _spoil_field(chance, content[chance.choice([messages.FACTS, messages.FACTS, messages.NOTES])])
    return content


def _spoil_field(chance: Random, record: Any) -> None:
    names = [*record] or ["x"]
    how = chance.randrange(6)
    if how == 0:
        del record[chance.choice(names)]
    elif how == 1:
        record[chance.choice(TEXTS)] = odd_field(chance)
    elif how == 2:
        for k in range(chance.choice([3, 100, 2000])):
            record[f"note{k}"] = 0.5
    else:
        record[chance.choice(names)] = odd_field(chance)


def _spoil_vector(chance: Random, record: Any) -> None:
    name, how = chance.choice([*record]), chance.randrange(8)
    array = record[name]
    if how == 0:
        del record[name]
    elif how == 1:
        record[chance.choice([*TEXTS, "buffers", "delta"])] = array
    elif how == 2:
        for k in range(chance.choice([2, 70])):
            record[f"more{k}"] = array
    elif how == 3:
        data = spoilt_bytes(chance, array.data)
        record[name] = Array(array.dtype, array.shape, chance.choice([array.stype, array.stype, "pickle", ""]), data)
    elif how == 4:
        record[name] = Array(array.dtype, array.shape, array.stype, odd_header(chance))
    else:
        record[name] = Array(odd_array(chance, array.numpy()))


def owned(recipe: Recipe) -> DataHook:
    """Each client's own samples, read once: a client that reads them for every message takes most of a case's time."""
    federation = gather(recipe)
    whole, train = federation.dataset, federation.dataset.train
    parts = [replace(whole, train=Samples(train.inputs[s], train.labels[s])) for s in federation.shards]
    return lambda client: parts[client]


class Replay(InProcess):
    """A grid whose nodes give recorded replies; `spoil` decides what comes from the bad node."""

    bad = 100

    def __init__(self, recipe: Recipe, policy: Path) -> None:
        super().__init__(client_app(recipe, owned(recipe)), CLIENTS, policy=str(policy))
        self.asked: dict[str, RecordDict] = {}
        self.recorded: dict[tuple[int, str], RecordDict] = {}
        self.spoil: Spoil | None = None
        self.keys = [ec.generate_private_key(ec.SECP384R1()).public_key() for _ in range(CLIENTS)]

    def answers(self, message: Message) -> list[Message]:
        node, kind = message.metadata.dst_node_id, message.metadata.message_type
        if (node, kind) not in self.recorded:
            self.asked.setdefault(kind, copy.deepcopy(message.content))
            (reply,) = super().answers(message)
            assert not reply.has_error() and not messages.read_facts(reply.content).get("refused"), reply
            self.recorded[node, kind] = reply.content
        content = self.recorded[node, kind]
        if self.spoil and node == self.bad:
            return self.spoil(message, content)
        return [Message(copy.deepcopy(content), reply_to=message)]

    def get_nodes(self) -> list[Any]:
        form = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        return [SimpleNamespace(node_id=100 + i, public_key=key.public_bytes(*form)) for i, key in enumerate(self.keys)]

    def table(self) -> dict[str, int]:
        return {fingerprint(node.public_key): node.node_id - 100 for node in self.get_nodes()}


class Federation:
    """A deployment of three clients in this process, with what is said in its first round, and the outcome of that."""

    def __init__(self, folder: Path, method: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "policy.toml").write_text(POLICY)
        self.recipe = load(None, [*SMALL, f"method={method}"])
        self.grid = Replay(self.recipe, folder / "policy.toml")
        self.nodes = Nodes(self.grid, self.recipe)
        self.journal = Journal(folder)
        self.journal.begin(self.nodes.gather())
        self.problem = with_sizes(own_problem(self.recipe, NOBODY, 1, None), self.journal.sizes)
        self.state = first_state(self.problem)
        self.whole, _ = self.round()
        self.vector = torch.ones_like(self.state.weights)
        for about in ABOUT:
            self.ask(about)
        self.grid.spoil = lambda *_: []
        self.without = {client: self._without(client) for client in range(CLIENTS)}
        self.grid.spoil = None

    def round(self) -> tuple[ServerState, Any]:
        return conduct(self.problem, self.state, self.engine(), range(CLIENTS))

    def ask(self, about: About) -> list[tuple[int, torch.Tensor]]:
        return [*self.engine().ask(self.state, self.vector, range(CLIENTS), about)]

    def size(self, about: About) -> int:
        """The numbers in an answer: a Hessian product, or λ₁ alone."""
        return self.problem.network.size if about == "hessian" else 1

    def engine(self) -> Deployment:
        return Deployment(self.problem, self.nodes, self.journal)

    def _without(self, client: int) -> ServerState:
        self.grid.bad = 100 + client
        return self.round()[0]


class Wire:
    """Two federations, one of which is drawn for each case."""

    def __init__(self, folder: Path) -> None:
        self.federations = [Federation(folder / str(i), method) for i, method in enumerate(METHODS)]

    def drawn(self, chance: Random) -> Federation:
        found = chance.choice(self.federations)
        found.grid.bad = 100 + chance.randrange(CLIENTS)
        found.grid.spoil = lambda message, content: spoilt_replies(chance, message, content)
        return found


def spoilt_replies(chance: Random, message: Message, content: RecordDict) -> list[Message]:
    """What a bad node replies: mostly one message with a spoilt content."""
    how = chance.random()
    if how < 0.01:
        return []
    if how < 0.03:
        with suppress(ValueError, TypeError):
            return [Message(Error(code=chance.choice([0, 2, 10**9]), reason=chance.choice(TEXTS)), reply_to=message)]
    many = 2 if how < 0.05 else 1
    return [Message(spoilt_content(chance, content), reply_to=message) for _ in range(many)]


class Hello(Wire):
    """A node says who it is and how many samples it has."""

    share = 0.04

    def case(self, chance: Random) -> str:
        found = self.drawn(chance)
        keys = chance.random() < 0.5
        nodes = Nodes(found.grid, found.recipe, found.grid.table() if keys else None)
        online = nodes.online()
        bad = found.grid.bad
        for client, node in online.items():
            assert 0 <= client < CLIENTS and 1 <= nodes.samples(node) <= found.recipe.admission.max_samples
            assert not keys or node == 100 + client
        if keys:
            assert {100, 101, 102} - {bad} <= {*online.values()}
        return "result" if bad in online.values() else "refused"


class Uploaded(Wire):
    """A client's upload: facts, notes and vectors."""

    share = 0.03

    def case(self, chance: Random) -> str:
        found = self.drawn(chance)
        bad = found.grid.bad - 100
        after, report = found.round()
        for vector in (after.weights, after.buffers, *after.vectors.values()):
            assert bool(vector.isfinite().all()), "the state is no longer finite"
        written = json.dumps(round_record(after, report), allow_nan=False)
        assert len(written) < 20_000 and written.isprintable()
        assert {*report.cohort} >= {*range(CLIENTS)} - {bad} or report.skipped, "an honest client was refused"
        reasons = [refusal.reason for refusal in report.refused if refusal.client == bad]
        if bad not in report.cohort and not report.skipped:
            assert torch.equal(after.weights, found.without[bad].weights), "a refused upload changed the model"
        if chance.random() < 0.1:
            found.grid.spoil = None
            after, report = found.round()
            assert torch.equal(after.weights, found.whole.weights) and report.refused == [], "the run does not go on"
        return f"refused: {reasons[0]}" if reasons else "skipped" if report.skipped else "result"


class Answered(Wire):
    """A client's answer to a question about its curvature."""

    share = 0.03

    def case(self, chance: Random) -> str:
        found, about = self.drawn(chance), chance.choice(ABOUT)
        told, size = found.ask(about), found.size(about)
        assert all(bool(answer.isfinite().all()) and answer.shape == (size,) for _, answer in told)
        return "result"


class FromServer(Wire):
    """A message from the server to a client, which answers it or refuses by its policy."""

    share = 0.03
    kind = "train"

    def case(self, chance: Random) -> str:
        found = chance.choice(self.federations)
        client = chance.randrange(CLIENTS)
        old = found.grid.contexts[100 + client]
        content = spoilt_content(chance, found.grid.asked[self.kind])
        message = Message(content, dst_node_id=100 + client, message_type=self.kind, group_id="0")
        message.metadata.__dict__["_message_id"] = "1"
        context = Context(1, 100 + client, old.node_config, RecordDict(), run_config={})
        reply = found.grid.app(message, context)
        facts = messages.read_facts(reply.content)
        if refused := facts.get("refused"):
            assert refused.isprintable() and len(refused) <= 300
            return "refused"
        self.check(found, client, reply.content)
        return "result"

    def check(self, found: Federation, client: int, content: RecordDict) -> None:
        upload = messages.read_upload(content, found.problem, client, found.journal.sizes[client])
        assert misfit(upload, found.problem) is None
        # At spoilt weights a true activation may be beyond what admission takes; its name may not.
        assert misnoted(dict.fromkeys(upload.notes, 0.0), found.problem) is None
        assert all(map(isfinite, (upload.loss, *upload.notes.values())))
        assert all(bool(v.isfinite().all()) for v in (upload.delta, *upload.vectors.values()))


class Question(FromServer):
    """A question of the server's about a client's curvature."""

    share = 0.03
    about: About = "hessian"

    def case(self, chance: Random) -> str:
        self.about = chance.choice(ABOUT)
        self.kind = f"query.{self.about}"
        return super().case(chance)

    def check(self, found: Federation, client: int, content: RecordDict) -> None:
        messages.read_exactly(content, {"answer": found.size(self.about)}, found.state.weights.dtype)


class Asked(FromServer):
    """The server asks a node who it is."""

    share = 0.03
    kind = "query"

    def check(self, found: Federation, client: int, content: RecordDict) -> None:
        assert messages.read_facts(content)["samples"] == found.journal.sizes[client]


WIRE: dict[str, type[Target]] = {
    "hello": Hello,
    "upload": Uploaded,
    "answer": Answered,
    "broadcast": FromServer,
    "question": Question,
    "query": Asked,
}
