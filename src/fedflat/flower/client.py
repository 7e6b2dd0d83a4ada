"""The client's side of a deployment: a process that is started for every message, does it, and is gone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

if TYPE_CHECKING:
    from fedflat.client import Problem
    from fedflat.flower.own import DataHook
    from fedflat.flower.shelf import Shelf
    from fedflat.recipe import Recipe


def client_app(recipe: str | Path | Recipe, data: DataHook | None = None) -> ClientApp:
    """A ClientApp for a recipe: `data(client)` gives the client's own samples; without it, those of the recipe's split.

    The node's config names the client (`client=3`, or Flower's own `partition-id`) and the directory in which its
    memory outlives the node (`memory="/var/lib/fedflat"`). What takes long to import waits for the first message.
    """
    app = ClientApp()

    @app.query()
    def hello(message: Message, context: Context) -> Message:
        from fedflat.flower.own import own_problem

        client = client_of(context)
        problem = own_problem(_recipe(recipe, message), client, 1, data)
        return _reply({"client": client, "samples": problem.federation.samples(client)}, message)

    @app.train()
    def turn(message: Message, context: Context) -> Message:
        from fedflat.flower import wire

        facts = wire.read_facts(message.content)
        chosen = _recipe(recipe, message)
        problem = _problem(chosen, facts, client_of(context), data)
        return Message(_turn(problem, chosen, facts, message, context), reply_to=message)

    @app.query("hessian")
    def hessian(message: Message, context: Context) -> Message:
        from fedflat.flower import wire

        problem = _problem(_recipe(recipe, message), wire.read_facts(message.content), client_of(context), data)
        return Message(_product(problem, message, client_of(context)), reply_to=message)

    return app


def client_of(context: Context) -> int:
    """Which client this node is, by its config."""
    from fedflat.errors import RecipeError

    found = context.node_config.get("client", context.node_config.get("partition-id"))
    if not isinstance(found, int) or isinstance(found, bool) or found < 0:
        raise RecipeError(f"node config: client = {found!r} must be a whole number from 0 on, as in `client=3`")
    return found


def _recipe(source: str | Path | Recipe, message: Message) -> Recipe:
    """The app's recipe, with what `flwr run -c set=…` changed on the server."""
    from fedflat.flower import wire
    from fedflat.recipe import Recipe, load, overridden

    changes = str(wire.read_facts(message.content).get("set", "")).split()
    return overridden(source, changes) if isinstance(source, Recipe) else load(source, changes)


def _problem(recipe: Recipe, facts: dict[str, Any], client: int, data: DataHook | None) -> Problem:
    from fedflat.flower.own import own_problem

    return own_problem(recipe, client, int(facts["everyone"]), data)


def _turn(problem: Problem, recipe: Recipe, facts: dict[str, Any], message: Message, context: Context) -> RecordDict:
    """One round of this client: recall, train, keep, upload."""
    from fedflat.client import Brief, Worker
    from fedflat.engine.engine import one_thread
    from fedflat.flower import wire
    from fedflat.flower.shelf import Mark, keep, recall

    client, run, round = client_of(context), str(facts["run"]), int(facts["round"])
    sent = wire.read_vectors(message.content, int(facts["bytes"]))
    memory, forgiven, answer = None, "", {"run": run, "round": round}
    shelf = _shelf(context, run, client) if problem.memory else None
    if shelf:
        mark = Mark(int(facts["kept_round"]), str(facts["kept_digest"])) if facts["kept_digest"] else None
        memory, forgiven = recall(shelf, mark, anew=recipe.deployment.memory == "anew")
    with one_thread():
        upload = Worker(problem).turn(Brief(round, float(facts["lr"]), sent), client, memory)
    if shelf:
        answer["digest"] = keep(shelf, round, upload.memory, {"run": run, "client": str(client)}).digest
    facts_up = {**wire.upload_facts(upload), **answer, "forgiven": forgiven}
    return wire.content({"delta": upload.delta, **upload.vectors}, facts_up, upload.notes)


def _product(problem: Problem, message: Message, client: int) -> RecordDict:
    """This client's Hessian times a vector, for the sharpness of the global objective."""
    from fedflat.client import Worker
    from fedflat.engine.engine import one_thread
    from fedflat.flatness.federated import HessianProduct, Portion
    from fedflat.flower import wire

    facts = wire.read_facts(message.content)
    sent = wire.read_vectors(message.content, int(facts["bytes"]))
    question = HessianProduct(Portion(int(facts["samples"]), int(facts["seed"])))
    buffers = sent.get("buffers", problem.network.buffers.clone())
    with one_thread():
        answer = Worker(problem, question).answer(sent["weights"], buffers, client, sent["vector"])
    return wire.content({"answer": answer}, {"run": str(facts["run"]), "round": int(facts["round"])})


def _shelf(context: Context, run: str, client: int) -> Shelf:
    from fedflat.flower.shelf import DiskShelf, StateShelf

    if directory := context.node_config.get("memory"):
        return DiskShelf(Path(str(directory)), run, client)
    name = f"fedflat.{run}"
    if name not in context.state:
        context.state[name] = ConfigRecord()
    return StateShelf(context.state[name])  # type: ignore[arg-type]


def _reply(facts: dict[str, Any], message: Message) -> Message:
    from fedflat.flower import wire

    return Message(wire.content({}, facts), reply_to=message)
