"""A worker process: it takes a task, does it, and answers, until the server is gone."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import torch

from fedflat.admission import misfit
from fedflat.client import ABOUT, Brief, Problem, Questions, Worker, mishap
from fedflat.engine.shared import RECORD, Mishap, Numbers, Shared, Task
from fedflat.errors import FedflatError
from fedflat.heap import give_freed_memory_back
from fedflat.metrics import Score
from fedflat.parts import Upload
from fedflat.store import FREED


def serve(
    number: int,
    problem: Problem,
    question: Questions | None,
    shared: Shared,
    tasks: Connection,
    answer: Connection,
    inherited: Sequence[Connection],
) -> None:
    """A worker's life: take a task, do it, answer; end when the server closes the pipe."""
    for end in inherited:
        end.close()
    # Ctrl-C and a batch system's SIGTERM reach the whole group; when to end is for the server to say.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.set_num_threads(1)
    worker = Worker(problem, question, shared.stage[number], shared.first[0])
    busy, since = shared.busy[0].numpy(), shared.since[0].numpy()
    with suppress(ConnectionError):
        while record := os.read(tasks.fileno(), RECORD.size):
            task = Task(*RECORD.unpack(record))
            since[number] = time.monotonic()
            busy[number] = task.number
            answer.send((task.number, _answer(worker, shared, task)))
            busy[number] = 0


def _answer(worker: Worker, shared: Shared, task: Task) -> Any:
    """What came of a task, or the mishap that it ended in."""
    try:
        return {b"tu": _turns, b"as": _tell}.get(task.kind, _score)(worker, shared, task)
    except FedflatError as error:
        return Mishap("raised", str(error), type(error))
    except Exception as error:
        return Mishap("raised", mishap(error, worker.stage))


def _turns(worker: Worker, shared: Shared, task: Task) -> list[Numbers | Mishap]:
    slots, clients = range(task.start, task.stop), shared.who(task.start, task.stop)
    brief = Brief(task.round, task.lr, shared.board[0])
    uploads = worker.turns(brief, clients, [shared.memory[client] for client in clients])
    answers = [_left(worker, shared, upload, slot) for upload, slot in zip(uploads, slots, strict=True)]
    shared.memory.release(clients)
    del uploads
    if worker.problem.network.weights.nbytes >= FREED:
        give_freed_memory_back()  # or the heap grows over the first clients, whose blocks do not fit into old holes
    return answers


def _left(worker: Worker, shared: Shared, upload: Upload, slot: int) -> Numbers | Mishap:
    """An upload left in its slot; one that does not fit would be stretched or converted there without a word."""
    fault = misfit(upload, worker.problem)
    return Mishap(*fault) if fault else shared.stripped(upload, slot)


def _tell(worker: Worker, shared: Shared, task: Task) -> None:
    (client,) = shared.who(task.start, task.stop)
    vector, about = shared.model[0]["vector"], ABOUT[task.round]
    shared.slots.write(task.start, {"delta": worker.answer(*shared.shown(worker), client, vector, about)})


def _score(worker: Worker, shared: Shared, task: Task) -> Score:
    part = "test" if task.kind == b"te" else "train"
    return worker.score(*shared.shown(worker), part, task.start, task.stop)
