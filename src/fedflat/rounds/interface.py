"""The interface of all engines: train a cohort, store the clients' memory, score a model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Protocol, TypeVar, cast
from weakref import ref

import torch
from torch import Tensor

from fedflat.local import Vectors
from fedflat.methods import Upload, Uploads
from fedflat.rounds.client import About
from fedflat.rounds.metrics import Score
from fedflat.rounds.setup import Broadcast, Problem, Refusal
from fedflat.rounds.state import ServerState

S = TypeVar("S", bound=Callable[..., Score])


class ClientMemory(Protocol):
    """The vectors that each client keeps between rounds; `changed` are the clients since the last checkpoint."""

    changed: set[int]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the vectors."""
        ...

    def __getitem__(self, client: int) -> Vectors | None:
        """The client's vectors, or None before its first round."""
        ...

    def reading(self, clients: Sequence[int]) -> AbstractContextManager[dict[int, Vectors]]:
        """The vectors of several clients, valid within the context."""
        ...

    def restore(self, kept: Iterable[tuple[int, Vectors]]) -> None:
        """Load the memory from a checkpoint."""
        ...


class Engine(Protocol):
    """Runs the clients' local rounds. Every engine gives bit-identical results."""

    @property
    def memory(self) -> ClientMemory | None:
        """The memory that clients keep between rounds, if the server can see it."""
        ...

    def local_rounds(self, broadcast: Broadcast, cohort: Sequence[int]) -> Iterator[Upload | Refusal]:
        """Yield the cohort's uploads in any order, and a refusal for each client that fails.

        An upload's vectors are valid until the next call; its Δ only until it is spent.
        """
        ...

    def kept(self, client: int) -> Vectors:
        """The memory that a client of this round wants to keep, if the server can see it."""
        ...

    def remember(self, uploads: Uploads) -> None:
        """Store the new memory of clients whose uploads were merged."""
        ...

    def score(self, state: ServerState, part: str, chunk: int) -> Score:
        """Score the global model on the test or training samples."""
        ...

    def ask(
        self, state: ServerState, vector: Tensor, clients: Sequence[int], about: About = "hessian"
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield each client's answer to the engine's question about a vector, in the order of the clients.

        An answer is valid until the next one is taken. The Δ of the round's uploads are lost.
        """
        ...

    def close(self) -> None: ...


def unless_seen(score: S) -> S:
    """Decorate an engine's `score` to reuse the last score if the model is the same, as after a skipped round.

    The model is the same if its vectors are the same objects and have not changed. No vector is kept alive for this.
    """

    @wraps(score)
    def answer(engine: Engine, state: ServerState, part: str, chunk: int) -> Score:
        seen: dict[tuple[str, int], tuple[list[tuple[ref[Tensor], int]], Score]] = vars(engine).setdefault("_seen", {})
        model = (state.weights, state.buffers)
        before, known = seen.get((part, chunk), ([], None))
        same = all(was() is now and version == now._version for (was, version), now in zip(before, model, strict=False))
        if known is None or not same:
            known = score(engine, state, part, chunk)
            seen[part, chunk] = [(ref(vector), vector._version) for vector in model], known
        return known

    return cast(S, answer)


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread: more threads would sum in another order and change the last bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def groups(problem: Problem, cohort: Sequence[int]) -> list[list[int]]:
    """Group the clients that share steps, the largest first.

    The groups depend only on the recipe and the cohort, never on the number of workers. The order keeps a long local
    round from starting last, and puts clients of similar size together.
    """
    order = problem.federation.largest_first(cohort)
    return [order[i : i + problem.group] for i in range(0, len(order), problem.group)]


class Apart:
    """Clients that share steps and whose group failed, so that they train one by one instead.

    If one of them fails on its own too, its refusal says why. If none does, the common steps themselves are at fault: a
    warning says why, since the clients' results would not show it. Each reason is told once in a run.
    """

    def __init__(self) -> None:
        self._groups: dict[int, _Group] = {}
        self._told: set[str] = set()

    def add(self, clients: Sequence[int], why: str) -> None:
        """Note that the common steps of these clients failed."""
        self._groups |= dict.fromkeys(clients, _Group(why, len(clients)))

    def ended(self, outcome: Upload | Refusal) -> Upload | Refusal:
        """Return a client's outcome; warn if it was the last of a failed group of which nobody failed on its own."""
        group = self._groups.pop(outcome.client, None)
        if group is None:
            return outcome
        group.left -= isinstance(outcome, Upload)  # never reaches 0 if one failed
        if not group.left and group.why not in self._told:
            self._told.add(group.why)
            warnings.warn(
                "clients train one by one because their common steps failed, which they do not on their own: "
                f"{group.why}; engine.group = 1 does not try common steps",
                stacklevel=2,
            )
        return outcome


@dataclass
class _Group:
    """Why a group failed, and how many of its clients have not yet trained well on their own."""

    why: str
    left: int


def chunks(samples: int, size: int) -> list[tuple[int, int]]:
    """Split samples into the chunks in which they are scored; the same on every engine.

    >>> chunks(5, 2)
    [(0, 2), (2, 4), (4, 5)]
    """
    return [(start, min(start + size, samples)) for start in range(0, samples, size)]
