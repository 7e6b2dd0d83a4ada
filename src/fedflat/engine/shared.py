"""What the server and its workers see at the same time, and the tasks that name it by numbers."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedflat.client import Problem, Worker
from fedflat.engine.wire import numbers
from fedflat.errors import FedflatError, RunError
from fedflat.parts import Upload
from fedflat.state import ServerState
from fedflat.store import ADVICE, Memory, Scratch, Table, Tables

Numbers = dict[str, Any]


class Task(NamedTuple):
    """From start to stop: turns ("tu") or answers ("as") of clients, scores on test ("te") or training ("tr") samples.

    No two tasks of a pool have the same number. Clients are named by their place in the round's order, which lies in
    shared memory. The round of an answer is the place of its question in `ABOUT`.
    """

    kind: bytes
    number: int
    round: int
    lr: float
    start: int
    stop: int


@dataclass(frozen=True)
class Mishap:
    """What became of a task or a turn instead of an answer; if one of our own errors was raised, which."""

    reason: str
    detail: str
    error: type[FedflatError] | None = None


RECORD = struct.Struct("<2sqqdqq")


class Shared:
    """The vectors that the server and its workers see at the same time."""

    def __init__(self, scratch: Scratch, problem: Problem, state: ServerState, slots: int, workers: int) -> None:
        size, statistics, dtype = problem.network.size, problem.network.buffers.numel(), state.weights.dtype
        shared = 0 if "buffers" in problem.memory else statistics
        found = problem.method.found.sent
        sent = {"weights": size} | {name: size if n is None else n for name, n in found.items()}
        uploads = dict.fromkeys(("delta", *problem.method.uploads), size)
        self.board = Tables(scratch.path / "sent", 1, {**sent, "buffers": shared}, dtype)
        shown = {"weights": size, "buffers": statistics, "vector": size}
        self.model = Tables(scratch.path / "model", 1, shown, dtype, sparse=True)
        self.slots = Tables(scratch.path / "upload", slots, {**uploads, "buffers": shared}, dtype, sparse=True)
        self.kept = Tables(scratch.path / "kept", slots, problem.memory, dtype, sparse=True)
        self.first = Tables(scratch.path / "first", 1, problem.memory, dtype)
        self.first.write(0, problem.first_memory())
        self.memory = Memory(scratch.path, problem.federation.clients, problem.memory, dtype)
        self.order = Table(scratch.path / "order", 1, slots, torch.int64)
        # Where all of it does not fit into memory, no process shall hold what it has done with.
        self._frugal = not scratch.in_memory
        # The number of the task that each worker is at, since when, and at which stage of it; 0 if it waits for one.
        self.busy = Table(scratch.path / "busy", 1, workers, torch.int64)
        self.since = Table(scratch.path / "since", 1, workers, torch.float64)
        self.stage = Table(scratch.path / "stage", workers, 1, torch.int64)

    def lay(self, clients: Sequence[int]) -> None:
        """The order of a round: who takes part. A client's place in it is also its upload's slot."""
        self.order[0][: len(clients)] = torch.tensor(clients)

    def who(self, start: int, stop: int) -> list[int]:
        """The clients of a task."""
        return [int(client) for client in self.order[0][start:stop]]

    def show(self, state: ServerState, **more: Tensor) -> None:
        """The server's side: the model to look at, and what else is asked about it."""
        try:
            self.model.write(0, {"weights": state.weights, "buffers": state.buffers, **more})
        except OSError as error:
            raise RunError(f"no room for the model to evaluate ({error.strerror}); {ADVICE}") from None

    def shown(self, worker: Worker) -> tuple[Tensor, Tensor]:
        """Weights and buffers of the model to look at."""
        model = self.model[0]
        return model["weights"], model.get("buffers", worker.problem.network.buffers)

    def stripped(self, upload: Upload, slot: int) -> Numbers:
        """The worker's side: the vectors into the slot, the numbers into the message."""
        try:
            self.slots.write(slot, {"delta": upload.delta, **upload.vectors})
            self.kept.write(slot, upload.memory)
        except OSError as error:
            raise RunError(f"client {upload.client}: no room for its upload ({error.strerror}); {ADVICE}") from None
        self.release()
        small = {name: vector.tolist() for name, vector in upload.vectors.items() if name not in self.slots}
        return {**numbers(upload), "vectors": small, "norm": upload.norm}

    def release(self) -> None:
        """This process is done with the uploads, written or read."""
        if self._frugal:
            self.slots.release()
            self.kept.release()

    def free(self, slot: int) -> None:
        """The server has no more use for the Δ in this slot."""
        self.slots.free(slot, "delta")

    def completed(self, message: Numbers, slot: int) -> Upload:
        """The server's side: the numbers of the message with the vectors of the slot."""
        vectors = self.slots[slot]
        delta = vectors.pop("delta")
        vectors |= {name: delta.new_tensor(values) for name, values in message.pop("vectors").items()}
        norm = message.pop("norm")
        upload = Upload(**message, delta=delta, vectors=vectors, memory=self.kept[slot])
        vars(upload)["norm"] = norm
        return upload
