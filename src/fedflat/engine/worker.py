"""A worker process: takes a task, runs it and answers, until the server is gone."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from fedflat.engine.heap import Trim, settled_worker
from fedflat.engine.shared import RECORD, Failure, Numbers, Shared, Task
from fedflat.engine.store import FREED
from fedflat.errors import FedflatError
from fedflat.local import Vectors
from fedflat.methods import Upload
from fedflat.rounds import ABOUT, Broadcast, Problem, Questions, Score, Worker, failure, misfit, misfit_memory

WATCH = 0.2  # seconds between checks that the server is alive
give_freed_memory_back = Trim()  # there is one heap in a process


def serve(
    number: int,
    problem: Problem,
    question: Questions | None,
    shared: Shared,
    tasks: Connection,
    answer: Connection,
    inherited: Sequence[Connection],
    parent: int,
) -> None:
    """Run tasks and answer them until the server closes the pipe or is killed.

    Args:
        number: this worker's number.
        problem: what the recipe describes.
        question: what the clients can be asked.
        shared: the vectors shared with the server.
        tasks: the pipe from which all workers take tasks.
        answer: the pipe for this worker's answers.
        inherited: ends of pipes that belong to the server and are closed here.
        parent: the server's process ID.
    """
    for end in inherited:
        end.close()
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    # Ctrl-C and a batch system's SIGTERM reach the whole process group. The server decides when workers end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.set_num_threads(1)
    worker = settled_worker(problem, question, shared.stage[number], shared.first[0], shared.fed)
    busy, since = shared.busy[0].numpy(), shared.since[0].numpy()
    with suppress(ConnectionError):
        while record := os.read(tasks.fileno(), RECORD.size):
            task = Task(*RECORD.unpack(record))
            since[number] = time.monotonic()
            busy[number] = task.number
            answer.send((task.number, _answer(worker, shared, task)))
            busy[number] = 0


def _end_with(parent: int) -> None:
    """Exit when the server is gone, even during a local round: an orphaned process gets another parent."""
    while os.getppid() == parent:
        time.sleep(WATCH)
    os._exit(1)


def _answer(worker: Worker, shared: Shared, task: Task) -> Any:
    """Run a task and return its result, or the failure it ended in."""
    try:
        return {b"lo": _local_rounds, b"as": _tell}.get(task.kind, _score)(worker, shared, task)
    except FedflatError as error:
        return Failure("raised", str(error), type(error))
    except Exception as error:
        return Failure("raised", failure(error, worker.stage))


def _local_rounds(worker: Worker, shared: Shared, task: Task) -> list[Numbers | Failure]:
    slots, clients = range(task.start, task.stop), shared.who(task.start, task.stop)
    broadcast = Broadcast(task.round, task.lr, shared.board[0])
    trained = worker.local_rounds(broadcast, clients, [shared.memory[client] for client in clients])
    answers = [_left(worker, shared, *each, slot) for each, slot in zip(trained, slots, strict=True)]
    shared.memory.release(clients)
    shared.forget_given()
    del trained
    if worker.problem.network.weights.nbytes >= FREED:
        give_freed_memory_back()
    return answers


def _left(worker: Worker, shared: Shared, upload: Upload, kept: Vectors, slot: int) -> Numbers | Failure:
    """Check an upload and copy it into its slot; the copy would silently broadcast or convert a wrong size or dtype."""
    fault = misfit(upload, worker.problem) or misfit_memory(kept, worker.problem)
    return Failure(*fault) if fault else shared.stripped(upload, kept, slot)


def _tell(worker: Worker, shared: Shared, task: Task) -> Any:
    """Answer a question: a vector goes into the slot, anything else into the message."""
    (client,) = shared.who(task.start, task.stop)
    vector, about = shared.model[0]["vector"], ABOUT[task.round]
    answer = worker.answer(*shared.evaluated(worker), client, vector, about)
    if not isinstance(answer, Tensor):
        return answer
    shared.slots.write(task.start, {"delta": answer})
    return None


def _score(worker: Worker, shared: Shared, task: Task) -> Score:
    part = "test" if task.kind == b"te" else "train"
    return worker.score(*shared.evaluated(worker), part, task.start, task.stop)
