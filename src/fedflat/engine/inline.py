"""Runs all local rounds in this process, one by one: a failing client's traceback points into the user's code."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from operator import add

from torch import Tensor

from fedflat.engine.heap import settled_worker
from fedflat.engine.in_process import InProcess
from fedflat.methods import Upload
from fedflat.rounds import (
    About,
    Broadcast,
    Problem,
    Questions,
    Refusal,
    Score,
    ServerState,
    chunks,
    failure,
    groups,
    one_thread,
    unless_seen,
)


class Inline(InProcess):
    """The engine without worker processes."""

    def __init__(self, problem: Problem, question: Questions | None = None) -> None:
        self._worker = settled_worker(problem, question)
        super().__init__(problem)

    def local_rounds(self, broadcast: Broadcast, cohort: Sequence[int]) -> Iterator[Upload | Refusal]:
        self._kept = {}
        for clients in groups(self._problem, cohort):
            yield from map(self._apart.ended, self._local_rounds(broadcast, clients))
            self.memory.release(clients)

    def _local_rounds(self, broadcast: Broadcast, clients: Sequence[int]) -> list[Upload | Refusal]:
        """Run the local rounds of clients that share steps; if one of them fails, run each on its own."""
        try:
            with one_thread():
                memories = [self.memory[client] for client in clients]
                trained = self._worker.local_rounds(broadcast, clients, memories)
        except Exception as error:
            why = failure(error, self._worker.stage)
            if len(clients) == 1:
                return [Refusal(clients[0], "raised", why, error)]
            self._apart.add(clients, why)
            return [outcome for client in clients for outcome in self._local_rounds(broadcast, [client])]
        return [self._received(upload, kept) for upload, kept in trained]

    @unless_seen
    def score(self, state: ServerState, part: str, chunk: int) -> Score:
        samples = self._problem.federation.size(part)
        with one_thread():
            scores = [self._worker.score(state.weights, state.buffers, part, *span) for span in chunks(samples, chunk)]
        return reduce(add, scores)

    def ask(
        self, state: ServerState, vector: Tensor, clients: Sequence[int], about: About = "hessian"
    ) -> Iterator[tuple[int, Tensor]]:
        for client in clients:
            with one_thread():
                answer = self._worker.answer(state.weights, state.buffers, client, vector, about)
            yield client, answer
