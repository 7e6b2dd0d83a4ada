"""A client's answers to the messages of a deployment: its size, a local round, or a measure of its loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Context, Message, RecordDict

from fedflat.engine import settled_worker
from fedflat.errors import RecipeError, printable
from fedflat.flatness import HessianProduct, Portion, TopEigenvalue
from fedflat.flower import messages
from fedflat.flower.messages import Ask
from fedflat.flower.own import DataHook, own_problem
from fedflat.flower.policy import (
    Policy,
    PolicyError,
    Question,
    behind,
    check_question,
    check_recipe,
    digest,
    read_policy,
)
from fedflat.flower.shelf import DiskShelf, MemoryLostError, Shelf, StateShelf, keep, recall
from fedflat.flower.tally import Book, DiskBook, StateBook, salt_of, seed_of
from fedflat.methods import Method, Upload
from fedflat.recipe import Recipe, load
from fedflat.rounds import Broadcast, Problem, one_thread


class ClientError(Exception):
    """A failure on the client; the server is told only its type."""


def client_of(context: Context) -> int:
    """Return which client this node is, from its config."""
    found = context.node_config.get("client", context.node_config.get("partition-id"))
    if not isinstance(found, int) or isinstance(found, bool) or found < 0:
        raise RecipeError(f"node config: client = {found!r} must be a whole number from 0 on, as in `client=3`")
    return found


@dataclass(frozen=True)
class Desk:
    """What a client needs to handle a message: its own recipe, policy, ledger and data."""

    client: int
    recipe: Recipe
    policy: Policy
    book: Book
    data: DataHook | None
    message: Message
    context: Context

    @property
    def facts(self) -> dict[str, Any]:
        return messages.read_facts(self.message.content)

    def agreed_method(self) -> Method:
        """The recipe's method, after the policy has approved it."""
        return check_recipe(self.policy, self.recipe, self.facts.get("recipe"))

    def problem(self, everyone: int, run: str = "") -> Problem:
        """The recipe's problem with this client's samples. Within a run the client draws with its own secret."""
        secret = seed_of(self.book.secret(), run) if self.recipe.deployment.draws == "secret" else None
        return own_problem(self.recipe, self.client, everyone, self.data, secret=secret)

    def ask(self) -> Ask:
        return Ask.read(self.facts)

    def spend(self, question: Question, run: str, method: Method) -> None:
        """Record the answer in the ledger before it is sent."""
        with self.book.opened() as tally:
            tally.agree(run, digest(self.recipe))
            tally.spend(self.policy, question, method, self.book.lasting)


def answered(
    question: Question, message: Message, context: Context, source: str | Path | Recipe, data: DataHook | None
) -> Message:
    """Return the answer to a message, or one sentence if the client's policy does not allow it.

    Args:
        question: what the message asks.
        message: the message.
        context: the node's config and state.
        source: the client's own recipe, or its path.
        data: provides the client's own samples; None takes those of the recipe's split.

    Raises:
        RecipeError: the client's recipe or the node's config is wrong.
        MemoryLostError: the client's memory is not the one that the server has merged.
        ClientError: the client failed.
    """
    client, book = client_of(context), None
    try:
        path = context.node_config.get("policy")
        policy = read_policy(Path(str(path)) if path else None)
        book = _book(context, policy, client)
        recipe = source if isinstance(source, Recipe) else load(source)
        desk = Desk(client, recipe, policy, book, data, message, context)
        try:
            return Message(ANSWERS.get(question, _hello)(question, desk), reply_to=message)
        except messages.UnfitError as unfit:
            raise PolicyError(f"{question}: {unfit.args[1]}", unfit.args[0]) from None
    except PolicyError as refused:
        sentence = printable(refused)
        _note_refusal(book, question, sentence)
        return Message(messages.refusal(sentence, refused.reason), reply_to=message)
    except (RecipeError, MemoryLostError):  # fedflat's own messages, about files and not about samples
        raise
    except Exception as error:  # Flower sends its text to the server, and it may quote a sample or a label
        raise ClientError(f"{type(error).__name__}; its message is in the client's log") from error


def _note_refusal(book: Book | None, question: Question, sentence: str) -> None:
    """Record a refusal in the node's log and, if possible, in the ledger."""
    print(f"refused: {sentence}", flush=True)
    try:
        if book:
            with book.opened() as tally:
                tally.refuse(question, sentence)
    except PolicyError:
        pass  # the ledger itself is damaged


def _hello(question: Question, desk: Desk) -> RecordDict:
    """Return which client this is and how many samples it has; refuse other questions."""
    method = desk.agreed_method()
    problem = desk.problem(1)
    samples = problem.federation.samples(desk.client)
    check_question(desk.policy, question, desk.recipe, method, samples)
    return messages.content({}, {"client": desk.client, "samples": samples, "base": problem.network.base_digest})


def _local_round(question: Question, desk: Desk) -> RecordDict:
    """Run one round of this client: recall, train, keep, upload."""
    method, ask, recipe, client = desk.agreed_method(), desk.ask(), desk.recipe, desk.client
    problem = desk.problem(ask.everyone, ask.run)
    samples = problem.federation.samples(client)
    messages.whole(desk.facts, "everyone", samples, messages.SAMPLES)
    check_question(desk.policy, question, recipe, method, behind(recipe.local, samples))
    lr = messages.read_lr(desk.facts, recipe.local, ask.round)
    sizes, dtype = messages.sent_sizes(problem), problem.network.weights.dtype
    sent = messages.read_exactly(desk.message.content, sizes, dtype)
    memory, forgiven, answer = None, "", {"run": ask.run, "round": ask.round}
    shelf = _shelf(desk.context, ask.run, client) if problem.memory else None
    if shelf and shelf.full:
        raise PolicyError(f"{question}: {shelf.full}")
    if shelf:
        memory, forgiven = recall(shelf, ask.mark, anew=recipe.deployment.memory == "anew")
    desk.spend(question, ask.run, method)
    with one_thread():
        upload, kept = settled_worker(problem).local_round(Broadcast(ask.round, lr, sent), client, memory)
    upload = _guarded(upload, method)
    named = {"delta": upload.delta, **upload.vectors}
    messages.refuse_not_finite({"loss": upload.loss, **upload.notes}, named)
    if shelf:
        about = {"run": ask.run, "client": str(client), "salt": salt_of(desk.book.secret(), ask.run)}
        answer["digest"] = keep(shelf, ask.round, kept, about, ask.mark).digest
    facts_up = {**messages.upload_facts(upload), **answer, "forgiven": forgiven}
    return messages.content(named, facts_up, upload.notes)


def _guarded(upload: Upload, method: Method) -> Upload:
    """If noise protects an upload, remove its loss and notes, which would bypass the noise."""
    guard = method.protection
    return replace(upload, loss=0.0, notes={}) if guard and guard.protects == "upload" else upload


def _measured(question: Question, desk: Desk) -> RecordDict:
    """Return a Hessian–vector product of this client's loss, or the largest eigenvalue λ₁ of its Hessian.

    The recipe sets the number of samples; this client chooses them.
    """
    method, ask = desk.agreed_method(), desk.ask()
    check_question(desk.policy, question, desk.recipe, method, desk.policy.answers.min_samples)
    problem = desk.problem(ask.everyone, ask.run)
    messages.whole(desk.facts, "everyone", problem.federation.samples(desk.client), messages.SAMPLES)
    portion = Portion(desk.recipe.evaluation.sharpness_samples, problem.seed)
    check_question(desk.policy, question, desk.recipe, method, portion.count(problem.federation, desk.client))
    product, statistics = question == "hessian", problem.network.buffers.numel()
    sizes = {"weights": problem.network.size}
    sizes |= {"vector": problem.network.size} if product else {}
    sizes |= {"buffers": statistics} if statistics else {}
    sent = messages.read_exactly(desk.message.content, sizes, problem.network.weights.dtype)
    buffers = sent.get("buffers", problem.network.buffers.clone())
    desk.spend(question, ask.run, method)
    with one_thread():
        worker = settled_worker(problem, HessianProduct(portion) if product else TopEigenvalue(portion))
        answer = worker.answer(sent["weights"], buffers, desk.client, sent["vector" if product else "weights"])
    answer = answer if product else answer[:1]
    messages.refuse_not_finite({}, {"the product" if product else "λ₁": answer})
    return messages.content({"answer": answer}, {"run": ask.run, "round": ask.round})


ANSWERS: dict[str, Callable[[Question, Desk], RecordDict]] = {
    "train": _local_round,
    "hessian": _measured,
    "curvature": _measured,
}


def _shelf(context: Context, run: str, client: int) -> Shelf:
    if directory := context.node_config.get("memory"):
        return DiskShelf(Path(str(directory)), run, client)
    return StateShelf(_state(context, f"fedflat.{run}"))


def _book(context: Context, policy: Policy, client: int) -> Book:
    """The client's ledger: where its policy says, else with its memory, else only as long as the node runs."""
    config = context.node_config
    if policy.ledger and config.get("policy"):
        return DiskBook(Path(str(config["policy"])).parent / policy.ledger, client)
    if directory := config.get("memory"):
        return DiskBook(Path(str(directory)), client)
    return StateBook(_state(context, "fedflat.ledger"))


def _state(context: Context, name: str) -> Any:
    if name not in context.state:
        context.state[name] = ConfigRecord()
    return context.state[name]
