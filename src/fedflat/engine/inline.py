"""All turns in this process, one after the other: a failing client's traceback points into the user's code."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from operator import add

from torch import Tensor

from fedflat.client import About, Brief, Problem, Questions, Refusal, Worker, mishap
from fedflat.engine.engine import chunks, groups, one_thread
from fedflat.metrics import Score
from fedflat.parts import Upload, Uploads
from fedflat.state import ServerState
from fedflat.store import Memory, Scratch


class Inline:
    """The engine without processes."""

    def __init__(self, problem: Problem, question: Questions | None = None) -> None:
        self._problem = problem
        self._worker = Worker(problem, question)
        self._scratch = Scratch(problem.room())
        self.memory = Memory(
            self._scratch.path, problem.federation.clients, problem.memory, problem.network.weights.dtype
        )

    def turns(self, brief: Brief, cohort: Sequence[int]) -> Iterator[Upload | Refusal]:
        for clients in groups(self._problem, cohort):
            yield from self._turns(brief, clients)
            self.memory.release(clients)

    def _turns(self, brief: Brief, clients: Sequence[int]) -> list[Upload | Refusal]:
        """The turns of clients that share steps; if one of them fails, each for itself."""
        try:
            with one_thread():
                memories = [self.memory[client] for client in clients]
                return [*self._worker.turns(brief, clients, memories)]
        except Exception as error:
            if len(clients) == 1:
                return [Refusal(clients[0], "raised", mishap(error, self._worker.stage), error)]
            return [outcome for client in clients for outcome in self._turns(brief, [client])]

    def release(self, client: int) -> None:
        pass  # it goes with the upload

    def remember(self, uploads: Uploads) -> None:
        for upload in uploads:
            self.memory.keep(upload.client, upload.memory)
        self.memory.release(upload.client for upload in uploads)

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
