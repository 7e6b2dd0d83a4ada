"""Worker processes of one thread each, started once; vectors cross in shared memory, and a task is a few numbers.

A worker that is lost, or that is past its deadline, is replaced: the client that it was at is refused in this round,
and nobody else notices.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from functools import reduce
from itertools import accumulate, count, pairwise
from operator import add
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from typing import Any

from torch import Tensor
from torch.multiprocessing import get_context

from fedflat.client import ABOUT, STAGES, About, Brief, Problem, Questions, Refusal
from fedflat.engine.engine import chunks, groups
from fedflat.engine.shared import RECORD, Mishap, Shared, Task
from fedflat.engine.worker import serve
from fedflat.errors import TrainingError
from fedflat.metrics import Score
from fedflat.parts import Upload, Uploads
from fedflat.state import ServerState
from fedflat.store import Memory, Scratch

# Forked workers begin at once with torch and the data in place; where forking is not safe they import and map them.
START = "fork" if sys.platform == "linux" else "spawn"
CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")
RETRIES = 2  # of a task whose worker was lost, after which it is the task's fault
POLL = 0.25  # seconds between two looks at the deadlines


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
    A client's turn may take `deadline` seconds, or for ever if that is 0.

    Nothing is trained in the server's process. Its network lives in the vector that was last sent, and is to be left
    alone until the pool is closed; a forked worker writes to its own copy of those pages.
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
        self._problem, self._slots, self._question, self._deadline = problem, slots, question, deadline
        self._scratch = Scratch(problem.room(slots))
        self._shared = Shared(self._scratch, problem, state, slots, workers)
        self._context: Any = get_context(start)
        self._numbers = count(1)
        self._given_up = False
        self._places: dict[int, int] = {}
        self._workers: dict[Any, tuple[int, Any]] = {}
        self._answers = DefaultSelector()
        if start == "fork":
            gc.freeze()  # the collector would write to all objects, and each worker would get its own copy of them
        problem.network.bind(state.weights)
        self._hire_all(workers)
        atexit.register(self.close)  # multiprocessing itself would wait at exit for workers that heed no signal

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
        # A forked worker inherits the server's ends; unless it closes them no worker would see the server go.
        forked = self._context.get_start_method() == "fork"
        inherited = [*self._workers, answers, self._tasks] if forked else []
        self._shared.busy[0][number] = 0
        arguments = (number, self._problem, self._question, self._shared, self._theirs, answer, inherited)
        process = self._context.Process(target=serve, args=arguments, daemon=True)
        process.start()
        answer.close()
        self._workers[answers] = (number, process)
        self._answers.register(answers, EVENT_READ)

    def _dismiss(self, pipe: Any, patience: float = 0.0) -> tuple[int | None, list[tuple[int, Any]]]:
        """End a worker, if it does not end by itself in `patience` seconds; its exit code, and what it still said."""
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

    def turns(self, brief: Brief, cohort: Sequence[int]) -> Iterator[Upload | Refusal]:
        self._problem.network.bind(brief.sent["weights"])
        sharing = groups(self._problem, cohort)
        order = [client for clients in sharing for client in clients]
        self._places = {client: place for place, client in enumerate(order)}
        self._shared.board.write(0, brief.sent)
        self._shared.lay(order)
        ends = accumulate(map(len, sharing), initial=0)
        tasks = [Task(b"tu", next(self._numbers), brief.round, brief.lr, *span) for span in pairwise(ends)]
        for task, answer in self._each(tasks):
            slots = range(task.start, task.stop)
            answers = [answer] * len(slots) if isinstance(answer, Mishap) else answer
            for slot, each in zip(slots, answers, strict=True):
                lost = isinstance(each, Mishap)
                yield _refusal(order[slot], each) if lost else self._shared.completed(each, slot)

    def release(self, client: int) -> None:
        self._shared.free(self._places[client])

    def remember(self, uploads: Uploads) -> None:
        for upload in uploads:
            self.memory.keep(upload.client, upload.memory)
        self._shared.release()

    def score(self, state: ServerState, part: str, chunk: int) -> Score:
        self._shared.show(state)
        spans = chunks(self._problem.federation.size(part), chunk)
        tasks = [Task(part[:2].encode(), next(self._numbers), 0, 0.0, *span) for span in spans]
        scores: dict[int, Score] = {}
        for task, score in self._each(tasks):
            scores[task.start] = _sure(score, f"evaluation of {part} samples {task.start} to {task.stop}")
        return reduce(add, (scores[start] for start, _ in spans))

    def ask(
        self, state: ServerState, vector: Tensor, clients: Sequence[int], about: About = "hessian"
    ) -> Iterator[tuple[int, Tensor]]:
        self._shared.show(state, vector=vector)
        for start in range(0, len(clients), self._slots):
            some = clients[start : start + self._slots]
            self._shared.lay(some)
            tasks = [Task(b"as", next(self._numbers), ABOUT.index(about), 0.0, i, i + 1) for i in range(len(some))]
            told, due = set[int](), 0
            for task, answer in self._each(tasks):
                _sure(answer, f"client {some[task.start]}")
                told.add(task.start)
                while due in told:
                    yield some[due], self._shared.slots[due]["delta"]
                    due += 1

    def _each(self, tasks: Sequence[Task]) -> Iterator[tuple[Task, Any]]:
        """Lay the tasks out in order, and give back what the workers make of them: an answer or a mishap."""
        if self._given_up:
            raise TrainingError("an earlier round of this pool was given up half-way; start a new engine")
        self._given_up = True
        left, due, lost = deque(tasks), {task.number: task for task in tasks}, Counter[tuple[int, int]]()
        while due:
            self._lay(left)
            # What was answered comes first: only the rest may be laid out once more.
            for number, answer in sorted(self._told(due), key=lambda told: told[0] == 0):
                if number == 0:  # lost between two tasks; it may have had one in its hands
                    self._start_over()
                    left = deque(due.values())
                elif number in due:
                    task = due.pop(number)
                    again = self._again(task, answer, lost) if isinstance(answer, Mishap) else []
                    due |= {each.number: each for each in again}
                    left.extend(again)
                    if not again:
                        yield task, answer
        self._given_up = False

    def _again(self, task: Task, answer: Mishap, lost: Counter[tuple[int, int]]) -> list[Task]:
        """What to lay out once more: what a worker was lost at, but for a single turn; then a group's clients alone."""
        turn, size = task.kind == b"tu", task.stop - task.start
        lost[task.start, task.stop] += 1
        if answer.reason == "died" and (size > 1 or not turn) and lost[task.start, task.stop] <= RETRIES:
            return [task._replace(number=next(self._numbers))]
        alone = range(task.start, task.stop) if turn and size > 1 and answer.error is None else ()
        return [task._replace(number=next(self._numbers), start=i, stop=i + 1) for i in alone]

    def _lay(self, left: deque[Task]) -> None:
        """As many records as the pipe takes without waiting."""
        with suppress(BlockingIOError):
            while left:
                os.write(self._tasks.fileno(), RECORD.pack(*left[0]))
                left.popleft()

    def _told(self, due: dict[int, Task]) -> list[tuple[int, Any]]:
        """What the workers have answered by now, each with the task's number: 0 if a worker was lost without one."""
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
        return task.kind == b"tu" and time.monotonic() - float(self._shared.since[0][worker]) > allowed

    def _replaced(self, pipe: Any, hung: int = 0) -> list[tuple[int, Any]]:
        """Another worker in the place of one that died, or hung at a task; what it still said, and what was lost."""
        worker = self._workers[pipe][0]
        code, told = self._dismiss(pipe, 0.0 if hung else 0.2)
        # Only now that it is gone do its numbers stand still.
        number, stage = int(self._shared.busy[0][worker]), STAGES[int(self._shared.stage[worker])]
        self._hire(worker)
        if not hung:
            return [*told, (number, Mishap("died", f"its worker process died with exit code {code}, while {stage}"))]
        late = Mishap("hung", f"no answer after {self._deadline:g} s, while {stage}")
        return [*told, (number if number == hung else 0, late)]

    def _start_over(self) -> None:
        """New workers with an empty pipe: what the old ones had not answered must be laid out again."""
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
        self._scratch.close()
        self._problem.network.bind(self._problem.network.weights.clone())
        gc.unfreeze()


def _sure(answer: Any, about: str) -> Any:
    """An answer that nothing can go on without."""
    if isinstance(answer, Mishap):
        raise (answer.error or TrainingError)(f"{about}: {answer.detail}" if answer.error is None else answer.detail)
    return answer


def _refusal(client: int, mishap: Mishap) -> Refusal:
    return Refusal(client, mishap.reason, mishap.detail, mishap.error(mishap.detail) if mishap.error else None)
