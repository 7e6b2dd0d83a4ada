"""Memory shared by the server and its workers, and the tasks that refer to it by numbers."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedflat.engine.store import ADVICE, FREED, Memory, Scratch, Table, Tables
from fedflat.engine.wire_format import numbers
from fedflat.errors import FedflatError, RunError, TrainingError
from fedflat.local import Batch, Vectors
from fedflat.methods import Upload
from fedflat.rounds import Problem, ServerState, Worker

Numbers = dict[str, Any]


class Task(NamedTuple):
    """Local rounds ("lo") or answers ("as") of clients, or scores on test ("te") or training ("tr") samples.

    Task numbers are unique within a pool. Clients are named by their place in the round's order, which is in shared
    memory. For an answer, the round is the index of its question in `ABOUT`.
    """

    kind: bytes
    number: int
    round: int
    lr: float
    start: int
    stop: int


@dataclass(frozen=True)
class Failure:
    """The failure of a task or a local round, with the type of the error if it is one of fedflat's own."""

    reason: str
    detail: str
    error: type[FedflatError] | None = None


def sure(answer: Any, about: str) -> Any:
    """Return an answer, or raise if the task failed."""
    if isinstance(answer, Failure):
        raise (answer.error or TrainingError)(f"{about}: {answer.detail}" if answer.error is None else answer.detail)
    return answer


@dataclass(frozen=True)
class SlotUpload(Upload):
    """An upload whose vectors are in a slot of the shared memory. The memory of a spent Δ is freed."""

    shared: Shared | None = field(default=None, repr=False)
    slot: int = 0

    def spent(self) -> Upload:
        left = super().spent()
        if self.shared:
            self.shared.slots.free(self.slot, "delta")
        return left

    def put_down(self) -> None:
        if self.shared:
            self.shared.release()


RECORD = struct.Struct("<2sqqdqq")


class Shared:
    """The vectors shared by the server and its workers.

    Args:
        scratch: the directory of what a round writes.
        memory: the directory of the clients' memory.
        problem: what the recipe describes.
        state: the server's first state, for the type of the weights.
        slots: the largest number of uploads in a round.
        workers: the number of worker processes.
    """

    def __init__(
        self, scratch: Scratch, memory: Scratch, problem: Problem, state: ServerState, slots: int, workers: int
    ) -> None:
        size, statistics, dtype = problem.network.size, problem.network.buffers.numel(), state.weights.dtype
        shared = 0 if "buffers" in problem.memory else statistics
        sent = problem.method.sent_sizes(problem.network.layout)
        uploads = dict.fromkeys(("delta", *problem.method.uploads), size)
        self.board = Tables(scratch.path / "sent", 1, {**sent, "buffers": shared}, dtype)
        evaluated = {"weights": size, "buffers": statistics, "vector": size}
        self.model = Tables(scratch.path / "model", 1, evaluated, dtype, sparse=True)
        self.slots = Tables(scratch.path / "upload", slots, {**uploads, "buffers": shared}, dtype, sparse=True)
        self.kept = Tables(scratch.path / "kept", slots, problem.memory, dtype, sparse=True)
        self.first = Tables(scratch.path / "first", 1, problem.memory, dtype)
        self.memory = Memory(memory.path, problem.federation.clients, problem.memory, dtype)
        self.order = Table(scratch.path / "order", 1, slots, torch.int64)
        # Each process releases what it has finished with, if that is large or a round does not fit into memory.
        self._frugal = not scratch.in_memory or state.weights.nbytes >= FREED
        self._leave(self.first, 0, problem.first_memory())
        # For each worker the number of its current task, its start time and its stage; 0 if it is waiting.
        self.busy = Table(scratch.path / "busy", 1, workers, torch.int64)
        self.since = Table(scratch.path / "since", 1, workers, torch.float64)
        self.stage = Table(scratch.path / "stage", workers, 1, torch.int64)

    def lay(self, clients: Sequence[int]) -> None:
        """Set the clients of a round, in order. A client's place in the order is also its upload's slot."""
        self.order[0][: len(clients)] = torch.tensor(clients)

    def who(self, start: int, stop: int) -> list[int]:
        """The clients of a task."""
        return [int(client) for client in self.order[0][start:stop]]

    def send(self, vectors: Vectors) -> None:
        """Server side: write what the clients of a round receive."""
        self._leave(self.board, 0, vectors)

    def _leave(self, tables: Tables, row: int, vectors: Vectors) -> None:
        """Write vectors for another process, and hold the pages of one of them at a time."""
        for name, vector in vectors.items():
            tables.write(row, {name: vector})
            if self._frugal:
                tables.release()

    def fed(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Worker side: pass a client's batches on, and before its first step drop the pages from which it planned.

        What the steps and the report read again comes back; the rest, such as the client's memory, would be held in
        every step.
        """
        self.forget_given()
        yield from batches

    def forget_given(self) -> None:
        """Worker side: drop the pages of what a client is given, the broadcast and its memory."""
        if self._frugal:
            self.board.release()
            self.first.release()
            self.memory.release()

    def show(self, state: ServerState, **more: Tensor) -> None:
        """Server side: set the model to evaluate and any vector that is asked about."""
        try:
            self.model.write(0, {"weights": state.weights, "buffers": state.buffers, **more})
        except OSError as error:
            raise RunError(f"no room for the model to evaluate ({error.strerror}); {ADVICE}") from None

    def evaluated(self, worker: Worker) -> tuple[Tensor, Tensor]:
        """Weights and buffers of the model to evaluate."""
        model = self.model[0]
        return model["weights"], model.get("buffers", worker.problem.network.buffers)

    def stripped(self, upload: Upload, kept: Vectors, slot: int) -> Numbers:
        """Worker side: move the vectors into the slot and return the numbers for the message.

        A vector that the client both uploads and keeps (FedSMOO's dual) is stored once.
        """
        pairs = ((name, v, other, w) for name, v in upload.vectors.items() for other, w in kept.items())
        same = {name: other for name, v, other, w in pairs if v.shape == w.shape and v.data_ptr() == w.data_ptr() != 0}
        own = {name: vector for name, vector in upload.vectors.items() if name not in same}
        try:
            self._leave(self.slots, slot, {"delta": upload.delta, **own})
            self._leave(self.kept, slot, kept)
        except OSError as error:
            raise RunError(f"client {upload.client}: no room for its upload ({error.strerror}); {ADVICE}") from None
        small = {name: vector.tolist() for name, vector in own.items() if name not in self.slots}
        return {**numbers(upload), "vectors": small, "same": same, "norm": upload.norm}

    def release(self) -> None:
        """Drop the pages of the uploads from this process."""
        if self._frugal:
            self.slots.release()
            self.kept.release()

    def completed(self, message: Numbers, slot: int) -> Upload:
        """Server side: combine the numbers of the message with the vectors of the slot."""
        vectors = self.slots[slot]
        delta = vectors.pop("delta")
        vectors |= {name: delta.new_tensor(values) for name, values in message.pop("vectors").items()}
        vectors |= {name: self.kept[slot][other] for name, other in message.pop("same").items()}
        norm = message.pop("norm")
        return SlotUpload(**message, delta=delta, vectors=vectors, shared=self, slot=slot).with_norm(norm)
