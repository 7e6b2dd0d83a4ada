"""Single-threaded worker processes, started once. Vectors are in shared memory, and a task is a few numbers.

A worker that dies or passes its deadline is replaced. The client it was training is refused in this round; other
clients are not affected.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from functools import reduce
from itertools import accumulate, count, pairwise
from operator import add
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from typing import Any

from torch import Tensor
from torch.multiprocessing import get_context

from fedflat.engine.heap import keep_freed_memory
from fedflat.engine.shared import RECORD, Failure, Shared, Task, sure
from fedflat.engine.store import FREED, Memory, Scratch
from fedflat.engine.worker import serve
from fedflat.errors import TrainingError
from fedflat.local import Vectors, prepare
from fedflat.methods import Upload, Uploads
from fedflat.rounds import (
    ABOUT,
    STAGES,
    About,
    Apart,
    Broadcast,
    Problem,
    Questions,
    Refusal,
    Score,
    ServerState,
    chunks,
    groups,
    unless_seen,
)

# Forked workers start at once with torch and the data in place. Where forking is not safe they import and map them.
START = "fork" if sys.platform == "linux" else "spawn"
CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")
RETRIES = 2  # of a task whose worker was lost, before it counts as the task's failure
POLL = 0.25  # seconds between checks of the deadlines


def cores() -> int:
    """Return the number of cores that this process may use, within a container's limit."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = CPU_LIMIT.read_text().split()
        return allowed if quota == "max" else max(1, min(allowed, int(quota) // int(period)))
    except (OSError, ValueError):
        return allowed


class Pool:
    """The engine of worker processes.

    All tasks of a round are in one pipe, as records of fixed size. A worker takes the next task as soon as it has
    finished its last, without coordination, and a killed worker holds no lock. Each worker answers through its own
    pipe.

    Args:
        problem: what the recipe describes.
        state: the server's first state, for the type of the weights.
        slots: the largest number of uploads in a round.
        workers: the number of worker processes.
        question: what the clients can be asked.
        deadline: the seconds that a client's local round may take; 0 means no limit.
        start: how processes are started: "fork" or "spawn".
    """

    def __init__(
        self,
        problem: Problem,
        state: ServerState,
        slots: int,
        workers: int,
        question: Questions | None = None,
        deadline: float = 0.0,
        start: str = START,
    ) -> None:
        keep_freed_memory(below=FREED)  # the server returns the memory of a large model's vectors
        self._problem, self._slots, self._question, self._deadline = problem, slots, question, deadline
        # What a round writes stays in memory if it fits, even if the memory of a large federation's clients does not.
        round = problem.upload_room(slots)
        with ExitStack() as files:  # removed at once if there is no room for all of them
            self._scratch = files.enter_context(closing(Scratch(round)))
            self._kept = files.enter_context(closing(Scratch(round + problem.memory_room())))
            self._shared = Shared(self._scratch, self._kept, problem, state, slots, workers)
            self._files = files.pop_all()
        self._context: Any = get_context(start)
        self._numbers = count(1)
        self._apart = Apart()
        self._given_up = False
        self._places: dict[int, int] = {}
        self._workers: dict[Any, tuple[int, Any]] = {}
        self._answers = DefaultSelector()
        prepare(problem.network)
        if start == "fork":
            gc.freeze()  # the collector would write to all objects, and each worker would copy them
        with ExitStack() as hired:  # none is left if another cannot be started
            hired.callback(self.close)
            self._hire_all(workers)
            hired.pop_all()
        atexit.register(self.close)  # multiprocessing would wait at exit for workers that ignore signals

    @property
    def memory(self) -> Memory:
        return self._shared.memory

    def _hire_all(self, workers: int) -> None:
        self._theirs, self._tasks = self._context.Pipe(duplex=False)
        os.set_blocking(self._tasks.fileno(), False)
        for number in range(workers):
            self._hire(number)

    def _hire(self, number: int) -> None:
        answers, answer = self._context.Pipe(duplex=False)
        # A forked worker inherits the server's ends. Unless it closes them, workers would not see the server exit.
        forked = self._context.get_start_method() == "fork"
        inherited = [*self._workers, answers, self._tasks] if forked else []
        self._shared.busy[0][number] = 0
        arguments = (number, self._problem, self._question, self._shared, self._theirs, answer, inherited, os.getpid())
        process = self._context.Process(target=serve, args=arguments, daemon=True)
        process.start()
        answer.close()
        self._workers[answers] = (number, process)
        self._answers.register(answers, EVENT_READ)

    def _dismiss(self, pipe: Any, patience: float = 0.0) -> tuple[int | None, list[tuple[int, Any]]]:
        """End a worker, by force after `patience` seconds; return its exit code and its last answers."""
        _, process = self._workers.pop(pipe)
        self._answers.unregister(pipe)
        process.join(patience)
        process.kill()
        process.join()
        told = []
        with closing(pipe), suppress(EOFError, OSError):
            while pipe.poll():
                told.append(pipe.recv())
        return process.exitcode, told

    def local_rounds(self, broadcast: Broadcast, cohort: Sequence[int]) -> Iterator[Upload | Refusal]:
        sharing = groups(self._problem, cohort)
        order = [client for clients in sharing for client in clients]
        self._places = {client: place for place, client in enumerate(order)}
        self._shared.send(broadcast.sent)
        self._shared.lay(order)
        ends = accumulate(map(len, sharing), initial=0)
        tasks = [Task(b"lo", next(self._numbers), broadcast.round, broadcast.lr, *span) for span in pairwise(ends)]
        for task, answer in self._each(tasks):
            slots = range(task.start, task.stop)
            answers = [answer] * len(slots) if isinstance(answer, Failure) else answer
            for slot, each in zip(slots, answers, strict=True):
                lost = isinstance(each, Failure)
                yield self._apart.ended(_refusal(order[slot], each) if lost else self._shared.completed(each, slot))
                self._shared.release()

    def kept(self, client: int) -> Vectors:
        return self._shared.kept[self._places[client]]

    def remember(self, uploads: Uploads) -> None:
        for upload in uploads:
            self.memory.keep(upload.client, self.kept(upload.client))
            self._shared.release()

    @unless_seen
    def score(self, state: ServerState, part: str, chunk: int) -> Score:
        self._shared.show(state)
        spans = chunks(self._problem.federation.size(part), chunk)
        tasks = [Task(part[:2].encode(), next(self._numbers), 0, 0.0, *span) for span in spans]
        scores: dict[int, Score] = {}
        for task, score in self._each(tasks):
            scores[task.start] = sure(score, f"evaluation of {part} samples {task.start} to {task.stop}")
        return reduce(add, (scores[start] for start, _ in spans))

    def ask(
        self, state: ServerState, vector: Tensor, clients: Sequence[int], about: About = "hessian"
    ) -> Iterator[tuple[int, Any]]:
        self._shared.show(state, vector=vector)
        for start in range(0, len(clients), self._slots):
            some = clients[start : start + self._slots]
            self._shared.lay(some)
            tasks = [Task(b"as", next(self._numbers), ABOUT.index(about), 0.0, i, i + 1) for i in range(len(some))]
            told, due = dict[int, Any](), 0
            for task, answer in self._each(tasks):
                told[task.start] = sure(answer, f"client {some[task.start]}")
                while due in told:
                    answer = told.pop(due)
                    yield some[due], self._shared.slots[due]["delta"] if answer is None else answer
                    due += 1

    def _each(self, tasks: Sequence[Task]) -> Iterator[tuple[Task, Any]]:
        """Send the tasks in order, and yield the workers' results: an answer or a failure."""
        if self._given_up:
            raise TrainingError("an earlier round of this pool was given up half-way; start a new engine")
        self._given_up = True
        left, due, lost = deque(tasks), {task.number: task for task in tasks}, Counter[tuple[int, int]]()
        while due:
            self._lay(left)
            # Read the answers first: only the remaining tasks may be sent again.
            for number, answer in sorted(self._told(due), key=lambda told: told[0] == 0):
                if number == 0:  # a worker was lost between two tasks; it may have taken one
                    self._start_over()
                    left = deque(due.values())
                elif number in due:
                    task = due.pop(number)
                    again = self._again(task, answer, lost) if isinstance(answer, Failure) else []
                    due |= {each.number: each for each in again}
                    left.extend(again)
                    if not again:
                        yield task, answer
        self._given_up = False

    def _again(self, task: Task, answer: Failure, lost: Counter[tuple[int, int]]) -> list[Task]:
        """The tasks to retry: a lost worker's task unless it was a single local round; a group's clients one by one."""
        trains, size = task.kind == b"lo", task.stop - task.start
        lost[task.start, task.stop] += 1
        if answer.reason == "died" and (size > 1 or not trains) and lost[task.start, task.stop] <= RETRIES:
            return [task._replace(number=next(self._numbers))]
        if not trains or size == 1 or answer.error:
            return []
        self._apart.add(self._shared.who(task.start, task.stop), answer.detail)
        alone = range(task.start, task.stop)
        return [task._replace(number=next(self._numbers), start=i, stop=i + 1) for i in alone]

    def _lay(self, left: deque[Task]) -> None:
        """Write as many records as the pipe takes without blocking."""
        with suppress(BlockingIOError):
            while left:
                os.write(self._tasks.fileno(), RECORD.pack(*left[0]))
                left.popleft()

    def _told(self, due: dict[int, Task]) -> list[tuple[int, Any]]:
        """The answers available now, each with its task's number; 0 if a worker was lost without a task."""
        told: list[tuple[int, Any]] = []
        ready: list[Any] = [key.fileobj for key, _ in self._answers.select(POLL if self._deadline else None)]
        for pipe in ready:
            try:
                told.append(pipe.recv())
            except (EOFError, OSError):
                told += self._replaced(pipe)
        answered = {number for number, _ in told}
        for pipe, (worker, _) in [*self._workers.items()] if self._deadline else []:
            task = due.get(int(self._shared.busy[0][worker]))
            if task and task.number not in answered and self._late(task, worker):
                told += self._replaced(pipe, hung=task.number)
        return told

    def _late(self, task: Task, worker: int) -> bool:
        allowed = self._deadline * (task.stop - task.start)
        return task.kind == b"lo" and time.monotonic() - float(self._shared.since[0][worker]) > allowed

    def _replaced(self, pipe: Any, hung: int = 0) -> list[tuple[int, Any]]:
        """Replace a worker that died or hung at a task; return its last answers and what was lost."""
        worker = self._workers[pipe][0]
        code, told = self._dismiss(pipe, 0.0 if hung else 0.2)
        # A worker's shared numbers are final only once it has exited.
        number, stage = int(self._shared.busy[0][worker]), STAGES[int(self._shared.stage[worker])]
        self._hire(worker)
        if not hung:
            return [*told, (number, Failure("died", f"its worker process died with exit code {code}, while {stage}"))]
        late = Failure("hung", f"no answer after {self._deadline:g} s, while {stage}")
        return [*told, (number if number == hung else 0, late)]

    def _start_over(self) -> None:
        """Start new workers with an empty pipe; tasks without an answer must be sent again."""
        workers = len(self._workers)
        for pipe in [*self._workers]:
            self._dismiss(pipe)
        self._tasks.close()
        self._theirs.close()
        self._hire_all(workers)

    def close(self) -> None:
        atexit.unregister(self.close)
        self._tasks.close()
        self._theirs.close()
        self._answers.close()
        for pipe in self._workers:
            pipe.close()
        processes = [process for _, process in self._workers.values()]
        patience = time.monotonic() + 0.5
        for process in processes:
            process.join(max(0.0, patience - time.monotonic()))
        for process in processes:
            process.kill()
        for process in processes:
            process.join()
        self._files.close()
        gc.unfreeze()


def _refusal(client: int, failure: Failure) -> Refusal:
    return Refusal(client, failure.reason, failure.detail, failure.error(failure.detail) if failure.error else None)
