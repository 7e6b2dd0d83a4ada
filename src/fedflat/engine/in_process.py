"""What the engines share whose uploads, and the memory that clients want to keep, are objects of this process."""

from __future__ import annotations

from contextlib import ExitStack, closing

from fedflat.engine.store import Memory, Scratch
from fedflat.local import Vectors
from fedflat.methods import Upload, Uploads
from fedflat.rounds import Apart, Problem, Refusal, misfit_memory


class InProcess:
    """The clients' memory between rounds, and what the clients of the current round want to add to it."""

    def __init__(self, problem: Problem) -> None:
        self._problem, self._apart = problem, Apart()
        self._kept: dict[int, Vectors] = {}
        dtype = problem.network.weights.dtype
        with ExitStack() as files:  # removed at once if there is no room for the memory
            self._scratch = files.enter_context(closing(Scratch(problem.memory_room())))
            self.memory = Memory(self._scratch.path, problem.federation.clients, problem.memory, dtype)
            files.pop_all()

    def _received(self, upload: Upload, kept: Vectors) -> Upload | Refusal:
        """Hold back what a client wants to keep until its upload is merged; refuse what does not fit its memory."""
        self._kept[upload.client] = kept
        fault = misfit_memory(kept, self._problem)
        return Refusal(upload.client, *fault) if fault else upload

    def kept(self, client: int) -> Vectors:
        return self._kept[client]

    def remember(self, uploads: Uploads) -> None:
        for upload in uploads:
            self.memory.keep(upload.client, self._kept[upload.client])
        self.memory.release(upload.client for upload in uploads)

    def close(self) -> None:
        self._scratch.close()
