"""All turns in this process, one after the other: a failing client's traceback points into the user's code."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from operator import add

from torch import Tensor

from fedflat.client import Brief, Problem, Question, Worker
from fedflat.engine.engine import chunks, groups, one_thread
from fedflat.metrics import Score
from fedflat.parts import ServerState, Upload, Uploads
from fedflat.store import Memory, Scratch


class Inline:
    """The engine without processes."""

    def __init__(self, problem: Problem, question: Question | None = None) -> None:
        self._problem = problem
        self._worker = Worker(problem, question)
        self._scratch = Scratch(problem.room())
        self._memory = Memory(
            self._scratch.path, problem.federation.clients, problem.memory, problem.network.weights.dtype
        )

    def turns(self, brief: Brief, cohort: Sequence[int]) -> Iterator[Upload]:
        for group in groups(self._problem, cohort):
            clients = [cohort[position] for position in group]
            with one_thread():
                uploads = self._worker.turns(brief, clients, [self._memory[client] for client in clients])
            yield from uploads

    def remember(self, uploads: Uploads) -> None:
        for upload in uploads:
            self._memory.keep(upload.client, upload.memory)

    def score(self, state: ServerState, part: str, chunk: int) -> Score:
        samples = self._problem.federation.size(part)
        with one_thread():
            scores = [self._worker.score(state.weights, state.buffers, part, *span) for span in chunks(samples, chunk)]
        return reduce(add, scores)

    def ask(self, state: ServerState, vector: Tensor, clients: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        for client in clients:
            with one_thread():
                answer = self._worker.answer(state.weights, state.buffers, client, vector)
            yield client, answer

    def close(self) -> None:
        self._scratch.close()
