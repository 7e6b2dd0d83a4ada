"""Runs all local rounds in this process, one by one: a failing client's traceback points into the user's code."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from operator import add

from torch import Tensor

from fedflat.engine.heap import settled_worker
from fedflat.local import Vectors
from fedflat.methods import Upload, Uploads
from fedflat.rounds import (
    About,
    Broadcast,
    Memory,
    Problem,
    Questions,
    Refusal,
    Score,
    Scratch,
    ServerState,
    chunks,
    failure,
    groups,
    misfit_memory,
    one_thread,
    unless_seen,
)


class Inline:
    """The engine without worker processes."""

    def __init__(self, problem: Problem, question: Questions | None = None) -> None:
        self._problem = problem
        self._worker = settled_worker(problem, question)
        self._scratch = Scratch(problem.room())
        self._kept: dict[int, Vectors] = {}
        self.memory = Memory(
            self._scratch.path, problem.federation.clients, problem.memory, problem.network.weights.dtype
        )

    def local_rounds(self, broadcast: Broadcast, cohort: Sequence[int]) -> Iterator[Upload | Refusal]:
        self._kept = {}
        for clients in groups(self._problem, cohort):
            yield from self._local_rounds(broadcast, clients)
            self.memory.release(clients)

    def _local_rounds(self, broadcast: Broadcast, clients: Sequence[int]) -> list[Upload | Refusal]:
        """Run the local rounds of clients that share steps; if one of them fails, run each on its own."""
        try:
            with one_thread():
                memories = [self.memory[client] for client in clients]
                trained = self._worker.local_rounds(broadcast, clients, memories)
        except Exception as error:
            if len(clients) == 1:
                return [Refusal(clients[0], "raised", failure(error, self._worker.stage), error)]
            return [outcome for client in clients for outcome in self._local_rounds(broadcast, [client])]
        self._kept |= {upload.client: kept for upload, kept in trained}
        faults = [misfit_memory(kept, self._problem) for _, kept in trained]
        return [
            Refusal(upload.client, *fault) if fault else upload
            for (upload, _), fault in zip(trained, faults, strict=True)
        ]

    def release(self, client: int) -> None:
        pass  # it is freed with the upload

    def kept(self, client: int) -> Vectors:
        return self._kept[client]

    def remember(self, uploads: Uploads) -> None:
        for upload in uploads:
            self.memory.keep(upload.client, self._kept[upload.client])
        self.memory.release(upload.client for upload in uploads)

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

    def close(self) -> None:
        self._scratch.close()
