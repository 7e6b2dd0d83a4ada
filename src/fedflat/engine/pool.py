"""Worker processes of one thread each, started once; vectors cross in shared memory, and a task is a few numbers."""

from __future__ import annotations

import os
import signal
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial, reduce
from itertools import accumulate, pairwise
from multiprocessing.connection import Connection
from operator import add
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing import get_context

from fedflat.client import Brief, Problem, Question, Worker, keep_freed_memory
from fedflat.engine.engine import chunks, groups
from fedflat.errors import FedflatError, TrainingError
from fedflat.metrics import Score
from fedflat.parts import ServerState, Upload, Uploads
from fedflat.store import Memory, Scratch, Table, Tables

Numbers = dict[str, Any]
# Forked workers begin at once with torch and the data in place; where forking is not safe they import and map them.
START = "fork" if sys.platform == "linux" else "spawn"
CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")


class Task(NamedTuple):
    """From start to stop: turns ("tu") or answers ("as") of clients, scores on test ("te") or training ("tr") samples.

    `place` is the task's own in the round; the clients are named by theirs in the round's order, in shared memory.
    """

    kind: bytes
    place: int
    round: int
    lr: float
    start: int
    stop: int


RECORD = struct.Struct("<2sqqdqq")


def cores() -> int:
    """The cores that this process may use, also inside a container's limit."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = CPU_LIMIT.read_text().split()
        return allowed if quota == "max" else max(1, min(allowed, int(quota) // int(period)))
    except (OSError, ValueError):
        return allowed


class Pool:
    """The engine of worker processes.

    All tasks of a round lie in one pipe, as records of one size: a worker takes the next one as soon as it is done with
    its last, without asking anybody, and a worker that is killed holds no lock. Each has a pipe of its own to answer.
    """

    def __init__(
        self,
        problem: Problem,
        state: ServerState,
        slots: int,
        workers: int,
        question: Question | None = None,
        start: str = START,
    ) -> None:
        keep_freed_memory()
        self._problem, self._slots = problem, slots
        self._scratch = Scratch(problem.room(slots))
        self._shared = Shared(self._scratch, problem, state, slots, workers)
        context: Any = get_context(start)
        theirs, self._tasks = context.Pipe(duplex=False)
        os.set_blocking(self._tasks.fileno(), False)
        self._given_up = False
        self._workers: dict[Any, tuple[int, Any]] = {}
        self._answers = DefaultSelector()
        for number in range(workers):
            answers, answer = context.Pipe(duplex=False)
            # A forked worker inherits the server's ends; unless it closes them no worker would see the server go.
            inherited = [*self._workers, answers, self._tasks] if start == "fork" else []
            arguments = (number, problem, question, self._shared, theirs, answer, inherited)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            answer.close()
            self._workers[answers] = (number, process)
            self._answers.register(answers, EVENT_READ)
        theirs.close()

    def turns(self, brief: Brief, cohort: Sequence[int]) -> Iterator[Upload]:
        order = groups(self._problem, cohort)
        positions = [position for group in order for position in group]
        self._shared.board.write(0, brief.sent)
        self._shared.lay(positions, [cohort[position] for position in positions])
        ends = list(accumulate(map(len, order), initial=0))
        tasks = [Task(b"tu", i, brief.round, brief.lr, *span) for i, span in enumerate(pairwise(ends))]

        def named(task: Task) -> str:
            return _named([cohort[position] for position in positions[task.start : task.stop]], brief.round)

        for task, answers in self._each(tasks, named):
            for slot, numbers in zip(positions[task.start : task.stop], answers, strict=True):
                yield self._shared.completed(numbers, slot)

    def remember(self, uploads: Uploads) -> None:
        for upload in uploads:
            self._shared.memory.keep(upload.client, upload.memory)

    def score(self, state: ServerState, part: str, chunk: int) -> Score:
        self._shared.model.write(0, {"weights": state.weights, "buffers": state.buffers})
        spans = chunks(self._problem.federation.size(part), chunk)
        tasks = [Task(part[:2].encode(), i, 0, 0.0, *span) for i, span in enumerate(spans)]
        scores: dict[Task, Score] = dict(
            self._each(tasks, lambda task: f"evaluation of {part} samples {task.start} to {task.stop}")
        )
        return reduce(add, (scores[task] for task in tasks))

    def ask(self, state: ServerState, vector: Tensor, clients: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        self._shared.model.write(0, {"weights": state.weights, "buffers": state.buffers})
        self._shared.vector[0].copy_(vector)
        for start in range(0, len(clients), self._slots):
            some = clients[start : start + self._slots]
            self._shared.lay(range(len(some)), some)
            tasks = [Task(b"as", i, 0, 0.0, i, i + 1) for i in range(len(some))]
            told, due = set[int](), 0
            for task, _ in self._each(tasks, partial(_asked, some)):
                told.add(task.place)
                while due in told:
                    yield some[due], self._shared.slots[due]["delta"]
                    due += 1

    def _each(self, tasks: Sequence[Task], what: Callable[[Task], str]) -> Iterator[tuple[Task, Any]]:
        """Lay the tasks out in order, and give back what the workers make of them."""
        if self._given_up:
            raise TrainingError("an earlier round of this pool was given up half-way; start a new engine")
        self._given_up = True
        left, done = deque(tasks), 0
        while done < len(tasks):
            self._lay(left)
            for (pipe, *_), _ in self._answers.select():
                place, good, value = self._received(pipe, tasks, what)
                if not good:
                    raise _error(value, what(tasks[place]))
                done += 1
                yield tasks[place], value
        self._given_up = False

    def _lay(self, left: deque[Task]) -> None:
        """As many records as the pipe takes without waiting."""
        with suppress(BlockingIOError, BrokenPipeError):  # full; or all workers are gone, as their answers will tell
            while left:
                os.write(self._tasks.fileno(), RECORD.pack(*left[0]))
                left.popleft()

    def _received(self, pipe: Any, tasks: Sequence[Task], what: Callable[[Task], str]) -> tuple[int, bool, Any]:
        try:
            answer: tuple[int, bool, Any] = pipe.recv()
            return answer
        except (EOFError, OSError):
            number, process = self._workers[pipe]
            process.join(1)
            place = int(self._shared.busy[0][number]) - 1
            about = what(tasks[place]) if place >= 0 else "between two tasks"
            raise TrainingError(f"{about}: its worker process died with exit code {process.exitcode}") from None

    def close(self) -> None:
        self._tasks.close()
        self._answers.close()
        for pipe in self._workers:
            pipe.close()
        processes = [process for _, process in self._workers.values()]
        patience = time.monotonic() + 0.5
        for process in processes:
            process.join(max(0.0, patience - time.monotonic()))
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()
        self._scratch.close()


class Shared:
    """The vectors that the server and its workers see at the same time."""

    def __init__(self, scratch: Scratch, problem: Problem, state: ServerState, slots: int, workers: int) -> None:
        size, statistics, dtype = problem.network.size, problem.network.buffers.numel(), state.weights.dtype
        shared = 0 if "buffers" in problem.memory else statistics
        sent = {name: vector.numel() for name, vector in problem.method.send(state).items()}
        uploads = dict.fromkeys(("delta", *problem.method.uploads), size)
        self.board = Tables(scratch.path, "sent", 1, {**sent, "buffers": shared}, dtype)
        self.model = Tables(scratch.path, "model", 1, {"weights": size, "buffers": statistics}, dtype)
        self.vector = Table(scratch.path / "vector", 1, size, dtype)
        self.slots = Tables(scratch.path, "upload", slots, {**uploads, "buffers": shared}, dtype)
        self.kept = Tables(scratch.path, "kept", slots, problem.memory, dtype)
        self.memory = Memory(scratch.path, problem.federation.clients, problem.memory, dtype)
        self.order = Tables(scratch.path, "order", 1, {"slots": slots, "clients": slots}, torch.int64)
        self.busy = Table(scratch.path / "busy", 1, workers, torch.int64)

    def lay(self, slots: Sequence[int], clients: Sequence[int]) -> None:
        """The order of a round: who takes part, and in which slot the upload is left."""
        for name, numbers in ("slots", slots), ("clients", clients):
            self.order[0][name][: len(numbers)] = torch.tensor(numbers)

    def who(self, start: int, stop: int) -> tuple[list[int], list[int]]:
        """Slots and clients of a task."""
        order = self.order[0]
        return order["slots"][start:stop].tolist(), order["clients"][start:stop].tolist()

    def shown(self, worker: Worker) -> tuple[Tensor, Tensor]:
        """Weights and buffers of the model to look at."""
        model = self.model[0]
        return model["weights"], model.get("buffers", worker.problem.network.buffers)

    def stripped(self, upload: Upload, slot: int) -> Numbers:
        """The worker's side: the vectors into the slot, the numbers into the message."""
        self.slots.write(slot, {"delta": upload.delta, **upload.vectors})
        self.kept.write(slot, upload.memory)
        small = {name: vector.tolist() for name, vector in upload.vectors.items() if name not in self.slots}
        numbers = {name: getattr(upload, name) for name in ("client", "samples", "steps", "lr", "loss", "notes")}
        return {**numbers, "vectors": small, "norm": upload.norm}

    def completed(self, numbers: Numbers, slot: int) -> Upload:
        """The server's side: the numbers of the message with the vectors of the slot."""
        vectors = self.slots[slot]
        delta = vectors.pop("delta")
        vectors |= {name: delta.new_tensor(values) for name, values in numbers.pop("vectors").items()}
        norm = numbers.pop("norm")
        upload = Upload(**numbers, delta=delta, vectors=vectors, memory=self.kept[slot])
        vars(upload)["norm"] = norm
        return upload


def _serve(
    number: int,
    problem: Problem,
    question: Question | None,
    shared: Shared,
    tasks: Connection,
    answer: Connection,
    inherited: Sequence[Connection],
) -> None:
    """A worker's life: take a task, do it, answer; end when the server closes the pipe."""
    for end in inherited:
        end.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    worker, busy = Worker(problem, question), shared.busy[0]
    with suppress(ConnectionError):
        while record := os.read(tasks.fileno(), RECORD.size):
            task = Task(*RECORD.unpack(record))
            busy[number] = task.place + 1
            answer.send((task.place, *_answer(worker, shared, task)))
            busy[number] = 0


def _answer(worker: Worker, shared: Shared, task: Task) -> tuple[bool, Any]:
    """What came of a task, or the error that it ended in: its class if it is ours, and what it says."""
    try:
        return True, {b"tu": _turns, b"as": _tell}.get(task.kind, _score)(worker, shared, task)
    except FedflatError as error:
        return False, (type(error), str(error))
    except Exception as error:
        return False, (None, f"{type(error).__name__}: {error}")


def _turns(worker: Worker, shared: Shared, task: Task) -> list[Numbers]:
    slots, clients = shared.who(task.start, task.stop)
    brief = Brief(task.round, task.lr, shared.board[0])
    uploads = worker.turns(brief, clients, [shared.memory[client] for client in clients])
    return [shared.stripped(upload, slot) for upload, slot in zip(uploads, slots, strict=True)]


def _tell(worker: Worker, shared: Shared, task: Task) -> None:
    (slot,), (client,) = shared.who(task.start, task.stop)
    shared.slots[slot]["delta"].copy_(worker.answer(*shared.shown(worker), client, shared.vector[0]))


def _score(worker: Worker, shared: Shared, task: Task) -> Score:
    part = "test" if task.kind == b"te" else "train"
    return worker.score(*shared.shown(worker), part, task.start, task.stop)


def _asked(clients: Sequence[int], task: Task) -> str:
    return f"client {clients[task.place]}"


def _error(value: tuple[type[FedflatError] | None, str], about: str) -> FedflatError:
    kind, message = value
    return kind(message) if kind else TrainingError(f'{about}: {message} (engine = "inline" shows where)')


def _named(clients: Sequence[int], round: int) -> str:
    one = len(clients) == 1
    return f"client{'' if one else 's'} {', '.join(map(str, clients))} in round {round}"
