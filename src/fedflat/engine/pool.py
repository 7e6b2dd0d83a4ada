"""Worker processes of one thread each, started once; vectors cross in shared memory, and a task is a few numbers."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import reduce
from multiprocessing.connection import Connection, wait
from operator import add
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing import get_context

from fedflat.client import Brief, Problem, Worker
from fedflat.engine.engine import chunks, groups
from fedflat.errors import FedflatError, TrainingError
from fedflat.metrics import Score
from fedflat.parts import ServerState, Upload, Uploads
from fedflat.store import Memory, Scratch, Tables

Task = tuple[Any, ...]
Numbers = dict[str, Any]
# Forked workers begin at once with torch and the data in place; where forking is not safe they import and map them.
START = "fork" if sys.platform == "linux" else "spawn"
CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")


def cores() -> int:
    """The cores that this process may use, also inside a container's limit."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = CPU_LIMIT.read_text().split()
        return allowed if quota == "max" else max(1, min(allowed, int(quota) // int(period)))
    except (OSError, ValueError):
        return allowed


class Pool:
    """The engine of worker processes."""

    def __init__(self, problem: Problem, state: ServerState, slots: int, workers: int, start: str = START) -> None:
        self._problem = problem
        self._scratch = Scratch(problem.room(slots))
        self._shared = Shared(self._scratch, problem, state, slots)
        context: Any = get_context(start)
        self._workers: list[tuple[Any, Any]] = []
        for _ in range(workers):
            ours, theirs = context.Pipe()
            # A forked worker inherits the server's ends; unless it closes them no worker would see the server go.
            inherited = [pipe for _, pipe in self._workers] + [ours] if start == "fork" else []
            process = context.Process(target=_serve, args=(problem, self._shared, theirs, inherited), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    def turns(self, brief: Brief, cohort: Sequence[int]) -> Iterator[Upload]:
        self._shared.board.write(0, brief.sent)
        tasks = [
            ("turns", brief.round, brief.lr, tuple(cohort[slot] for slot in group), tuple(group))
            for group in groups(self._problem, cohort)
        ]
        for (*_, slots), answers in self._each(tasks, lambda task: _named(task[3], brief.round)):
            for slot, numbers in zip(slots, answers, strict=True):
                yield self._shared.completed(numbers, slot)

    def remember(self, uploads: Uploads) -> None:
        for upload in uploads:
            self._shared.memory.keep(upload.client, upload.memory)

    def score(self, state: ServerState, part: str, chunk: int) -> Score:
        self._shared.model.write(0, {"weights": state.weights, "buffers": state.buffers})
        spans = chunks(self._problem.federation.size(part), chunk)
        tasks = [("score", part, *span) for span in spans]
        scores: dict[Task, Score] = dict(
            self._each(tasks, lambda task: f"evaluation of {part} samples {task[2]} to {task[3]}")
        )
        return reduce(add, (scores[task] for task in tasks))

    def _each(self, tasks: Sequence[Task], what: Any) -> Iterator[tuple[Task, Any]]:
        """Hand the tasks out in order, one at a time to each worker, and give back what they make of them."""
        left, idle = list(reversed(tasks)), list(self._workers)
        busy: dict[Any, tuple[Any, Task]] = {}
        while left or busy:
            while left and idle:
                process, end = idle.pop()
                busy[end] = (process, task := left.pop())
                end.send(task)
            for pipe in wait(list(busy)):
                process, task = busy.pop(pipe)
                idle.append((process, pipe))
                yield task, _received(pipe, process, what(task))

    def close(self) -> None:
        for process, pipe in self._workers:
            pipe.close()
            process.join(0.5)
            if process.is_alive():
                process.terminate()
                process.join()
        self._scratch.close()


def _received(pipe: Any, process: Any, what: str) -> Any:
    try:
        good, value = pipe.recv()
    except (EOFError, ConnectionResetError):
        process.join(1)
        raise TrainingError(f"{what}: its worker process died with exit code {process.exitcode}") from None
    if not good:
        kind, message = value
        raise kind(message) if kind else TrainingError(f'{what}: {message} (engine = "inline" shows where)')
    return value


class Shared:
    """The vectors that the server and its workers see at the same time."""

    def __init__(self, scratch: Scratch, problem: Problem, state: ServerState, slots: int) -> None:
        size, statistics, dtype = problem.network.size, problem.network.buffers.numel(), state.weights.dtype
        shared = 0 if "buffers" in problem.memory else statistics
        sent = {name: vector.numel() for name, vector in problem.method.send(state).items()}
        uploads = dict.fromkeys(("delta", *problem.method.uploads), size)
        self.board = Tables(scratch.path, "sent", 1, {**sent, "buffers": shared}, dtype)
        self.model = Tables(scratch.path, "model", 1, {"weights": size, "buffers": statistics}, dtype)
        self.slots = Tables(scratch.path, "upload", slots, {**uploads, "buffers": shared}, dtype)
        self.kept = Tables(scratch.path, "kept", slots, problem.memory, dtype)
        self.memory = Memory(scratch.path, problem.federation.clients, problem.memory, dtype)

    def stripped(self, upload: Upload, slot: int) -> Numbers:
        """The worker's side: the vectors into the slot, the numbers into the message."""
        self.slots.write(slot, {"delta": upload.delta, **upload.vectors})
        self.kept.write(slot, upload.memory)
        small = {name: vector.tolist() for name, vector in upload.vectors.items() if name not in self.slots}
        numbers = {name: getattr(upload, name) for name in ("client", "samples", "steps", "lr", "loss", "notes")}
        return {**numbers, "vectors": small}

    def completed(self, numbers: Numbers, slot: int) -> Upload:
        """The server's side: the numbers of the message with the vectors of the slot."""
        vectors = self.slots[slot]
        delta = vectors.pop("delta")
        vectors |= {name: delta.new_tensor(values) for name, values in numbers.pop("vectors").items()}
        return Upload(**numbers, delta=delta, vectors=vectors, memory=self.kept[slot])


def _serve(problem: Problem, shared: Shared, pipe: Connection, inherited: Sequence[Connection]) -> None:
    """A worker's life: take a task, do it, answer; end when the server closes the pipe."""
    for end in inherited:
        end.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    worker = Worker(problem)
    with suppress(EOFError, ConnectionError):
        while True:
            kind, *task = pipe.recv()
            pipe.send(_answer(worker, shared, kind, task))


def _answer(worker: Worker, shared: Shared, kind: str, task: list[Any]) -> tuple[bool, Any]:
    """What came of a task, or the error that it ended in: its class if it is ours, and what it says."""
    try:
        return True, _turns(worker, shared, *task) if kind == "turns" else _score(worker, shared, *task)
    except FedflatError as error:
        return False, (type(error), str(error))
    except Exception as error:
        return False, (None, f"{type(error).__name__}: {error}")


def _named(clients: Sequence[int], round: int) -> str:
    one = len(clients) == 1
    return f"client{'' if one else 's'} {', '.join(map(str, clients))} in round {round}"


def _turns(
    worker: Worker, shared: Shared, round: int, lr: float, clients: Sequence[int], slots: Sequence[int]
) -> list[Numbers]:
    brief = Brief(round, lr, shared.board[0])
    uploads = worker.turns(brief, clients, [shared.memory[client] for client in clients])
    return [shared.stripped(upload, slot) for upload, slot in zip(uploads, slots, strict=True)]


def _score(worker: Worker, shared: Shared, part: str, start: int, stop: int) -> Score:
    model = shared.model[0]
    return worker.score(model["weights"], model.get("buffers", worker.problem.network.buffers), part, start, stop)
