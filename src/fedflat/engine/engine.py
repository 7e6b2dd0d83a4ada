"""What every engine can do: give a cohort its turns, keep the clients' memory, score a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from fedflat.client import About, Brief, Problem, Refusal
from fedflat.metrics import Score
from fedflat.parts import Upload, Uploads
from fedflat.state import ServerState
from fedflat.store import Memory


class Engine(Protocol):
    """Where the clients' turns run. The results are the same to the bit on every engine."""

    @property
    def memory(self) -> Memory | None:
        """What the clients keep between rounds, where the server can see it."""
        ...

    def turns(self, brief: Brief, cohort: Sequence[int]) -> Iterator[Upload | Refusal]:
        """The cohort's uploads in any order, and a refusal for each client that fails.

        An upload's vectors hold until the next call, its Δ no longer than until it is released.
        """
        ...

    def release(self, client: int) -> None:
        """Nobody will look at this client's Δ again in this round."""
        ...

    def remember(self, uploads: Uploads) -> None:
        """The uploads were merged: the clients keep what they want to keep."""
        ...

    def score(self, state: ServerState, part: str, chunk: int) -> Score:
        """The global model's score on the test or training samples."""
        ...

    def ask(
        self, state: ServerState, vector: Tensor, clients: Sequence[int], about: About = "hessian"
    ) -> Iterator[tuple[int, Tensor]]:
        """Each client's answer to the engine's question about a vector, in the order of the clients.

        An answer holds until the next one is taken; the Δ of a round's uploads are lost.
        """
        ...

    def close(self) -> None: ...


@contextmanager
def one_thread() -> Iterator[None]:
    """One client's round is computed by one thread: more would sum in another order and change the last bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def groups(problem: Problem, cohort: Sequence[int]) -> list[list[int]]:
    """The clients that share a step, the largest first.

    They follow from the recipe and the cohort alone, never from the number of workers. Largest first, so that no worker
    is left with a long turn at the end of the round, and clients of like size stand together.
    """
    order = problem.federation.largest_first(cohort)
    return [order[i : i + problem.group] for i in range(0, len(order), problem.group)]


def chunks(samples: int, size: int) -> list[tuple[int, int]]:
    """The chunks that samples are scored in; the same ones on every engine.

    >>> chunks(5, 2)
    [(0, 2), (2, 4), (4, 5)]
    """
    return [(start, min(start + size, samples)) for start in range(0, samples, size)]
