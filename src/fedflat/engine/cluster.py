"""Runs local rounds as tasks on a Ray cluster: a local one, or one that already exists."""

from __future__ import annotations

import gc
import os
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor

from fedflat.engine.heap import keep_freed_memory, settled_worker
from fedflat.engine.in_process import InProcess
from fedflat.engine.shared import Failure, sure
from fedflat.engine.store import FREED
from fedflat.engine.wire_format import Arrays, arrays, numbers, vectors
from fedflat.errors import FedflatError, RecipeError, TrainingError
from fedflat.federation import Samples
from fedflat.methods import Upload
from fedflat.rounds import (
    About,
    Broadcast,
    Problem,
    Questions,
    Refusal,
    Score,
    ServerState,
    Worker,
    chunks,
    failure,
    groups,
    one_thread,
    unless_seen,
)
from fedflat.trusted import refuse_untrusted

RETRIES = 3  # of a task whose node or process was lost, before it counts as the client's failure
POLL = 0.5  # seconds between checks of the deadlines
Job = tuple[Any, ...]


class Cluster(InProcess):
    """The Ray engine.

    The problem and each round's vectors go into the object store once, and from there once to every node, whose
    processes read the samples in place. A task names clients and carries their memory. If a node is lost, Ray runs its
    tasks elsewhere. The tasks are the same, so the run ends with the same weights.

    Args:
        problem: what the recipe describes.
        question: what the clients can be asked.
        deadline: the seconds that a task may take; 0 means no limit.
        address: the cluster to join; by default, a local one is started.
        workers: the number of cores of a local cluster; 0 means all.
    """

    def __init__(
        self,
        problem: Problem,
        question: Questions | None = None,
        deadline: float = 0.0,
        address: str | None = None,
        workers: int = 0,
    ) -> None:
        keep_freed_memory(below=FREED)
        self._ray, self._own = _connect(address, workers)
        self._deadline = deadline
        with ExitStack() as begun:  # undone if there is no room for the clients' memory or for the problem
            begun.callback(self._leave)
            super().__init__(problem)
            begun.callback(super().close)
            self._store = self._ray.put(_packed(problem, question))
            begun.pop_all()
        self._task = self._ray.remote(num_cpus=1, max_retries=RETRIES)(_task)

    def local_rounds(self, broadcast: Broadcast, cohort: Sequence[int]) -> Iterator[Upload | Refusal]:
        board = self._ray.put((broadcast.round, broadcast.lr, arrays(broadcast.sent)))
        left = deque(groups(self._problem, cohort))
        self._kept = {}

        def job(clients: list[int]) -> Job:
            kept = [None if (row := self.memory[client]) is None else arrays(row) for client in clients]
            return "local_rounds", board, clients, kept

        for clients, answer in self._each(left, job):
            if isinstance(answer, Failure) and len(clients) > 1:
                self._apart.add(clients, answer.detail)
                left.extend([client] for client in clients)
            elif isinstance(answer, Failure):
                yield self._apart.ended(Refusal(clients[0], answer.reason, answer.detail))
            else:
                for each in answer:
                    kept = vectors(each.pop("kept"))
                    yield self._apart.ended(self._received(_completed(each), kept))

    @unless_seen
    def score(self, state: ServerState, part: str, chunk: int) -> Score:
        board = self._ray.put(arrays({"weights": state.weights, "buffers": state.buffers}))
        spans = deque(chunks(self._problem.federation.size(part), chunk))
        order, scores = list(spans), dict[tuple[int, int], Score]()
        for span, answer in self._each(spans, lambda span: ("score", board, part, *span)):
            scores[span] = sure(answer, f"evaluation of {part} samples {span[0]} to {span[1]}")
        return reduce(add, (scores[span] for span in order))

    def ask(
        self, state: ServerState, vector: Tensor, clients: Sequence[int], about: About = "hessian"
    ) -> Iterator[tuple[int, Tensor]]:
        board = self._ray.put(arrays({"weights": state.weights, "buffers": state.buffers, "vector": vector}))
        told: dict[int, Tensor] = {}
        for client, answer in self._each(deque(clients), lambda client: ("tell", board, client, about)):
            told[client] = vectors(sure(answer, f"client {client}"))["answer"]
        yield from ((client, told[client]) for client in clients)

    def _each(self, left: deque[Any], job: Callable[[Any], Job]) -> Iterator[tuple[Any, Any]]:
        """Keep the cluster busy with the remaining tasks, and yield their results: an answer or a failure."""
        running: dict[Any, tuple[Any, float]] = {}
        while left or running:
            while left and len(running) < self._most():
                running[self._sent(*job(left[0]))] = (left[0], time.monotonic())
                left.popleft()
            done, _ = self._ray.wait(list(running), timeout=POLL if self._deadline else None)
            for task in done:
                yield running.pop(task)[0], self._fetched(task)
            for task, (what, since) in [*running.items()] if self._deadline else []:
                if time.monotonic() - since > self._deadline:
                    self._ray.cancel(task, force=True)
                    del running[task]
                    yield what, Failure("hung", f"no answer after {self._deadline:g} s")

    def _sent(self, name: str, board: Any, *rest: Any) -> Any:
        """Submit a task. Object references in a list are passed as references and fetched once per process."""
        return self._task.remote(name, [self._store], [board], *rest)

    def _most(self) -> int:
        """The number of tasks in flight: two per core, so that no core is idle; one per core if there is a deadline."""
        cores = int(self._ray.cluster_resources().get("CPU", 1))
        return max(1, cores if self._deadline else 2 * cores)

    def _fetched(self, task: Any) -> Any:
        try:
            answer = self._ray.get(task)
        except self._ray.exceptions.RayError as error:
            return Failure("died", f"its process or node was lost {RETRIES + 1} times ({type(error).__name__})")
        if isinstance(answer, FedflatError):
            raise answer
        return answer

    def close(self) -> None:
        del self._store
        self._leave()
        super().close()

    def _leave(self) -> None:
        if self._own:
            self._ray.shutdown()


def _connect(address: str | None, workers: int) -> tuple[Any, bool]:
    """Connect to Ray; return the module, and whether this call connected to it, so that `close` must disconnect."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # otherwise Ray warns of an upcoming change
    try:
        import ray
    except ImportError:
        raise RecipeError("engine.name = \"ray\" needs Ray: pip install 'fedflat[ray]'") from None
    if ray.is_initialized():
        return ray, False
    before = signal.getsignal(signal.SIGTERM)
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": True}
    try:
        if address:
            refuse_untrusted("ray", f"engine.address = {address!r}: who joins a Ray cluster runs what it sends")
            _knock(address)
            ray.init(address=address, **quiet)
        else:  # without "local" Ray would join whatever cluster another user of this machine has announced in /tmp
            ray.init(address="local", num_cpus=workers or None, include_dashboard=False, **quiet)
    except (ConnectionError, ValueError, RuntimeError, OSError) as error:
        where = f"engine.address = {address!r}: no Ray cluster answers there" if address else "Ray does not start here"
        raise TrainingError(f"{where} ({str(error).splitlines()[0]})") from None
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)  # Ray's own handler would end a run in the middle of a round
    return ray, True


def _knock(address: str) -> None:
    """Check that the address answers; Ray itself would retry for minutes."""
    host, _, port = address.rpartition(":")
    if port.isdigit() and "/" not in host:
        socket.create_connection((host, int(port)), timeout=5).close()


def _packed(problem: Problem, question: Questions | None) -> tuple[Problem, Questions | None, Arrays]:
    """The problem with one sample, and all samples as arrays, which the processes of a node can read in place."""
    data, samples = problem.federation.dataset, dict[str, Tensor]()
    bare: dict[str, Any] = {}
    for part in ("train", "test"):
        held: Samples = getattr(data, part)
        samples |= {f"{part}.inputs": held.inputs, f"{part}.labels": held.labels}
        bare[part] = Samples(held.inputs[:1].clone(), held.labels[:1].clone())
    federation = replace(problem.federation, dataset=replace(data, **bare))
    shell = object.__new__(Problem)
    vars(shell).update(vars(problem) | {"federation": federation})
    return shell, question, arrays(samples)


_resident: dict[Any, Worker] = {}


def _worker(store: Any) -> Worker:
    """This process's worker for a problem, created at the problem's first task."""
    import ray

    if store not in _resident:
        _resident.clear()
        gc.unfreeze()
        torch.set_num_threads(1)
        problem, question, samples = ray.get(store)
        tensors = vectors(samples)
        train, test = (Samples(tensors[f"{part}.inputs"], tensors[f"{part}.labels"]) for part in ("train", "test"))
        dataset = replace(problem.federation.dataset, train=train, test=test)
        problem.federation = replace(problem.federation, dataset=dataset)
        _resident[store] = settled_worker(problem, question)
        gc.freeze()  # the collector would go through all objects of torch and Ray again and again
    return _resident[store]


def _task(name: str, stores: list[Any], boards: list[Any], *rest: Any) -> Any:
    """Run any task in a process of the cluster."""
    import ray

    with one_thread():
        worker = _worker(stores[0])
        try:
            work: dict[str, Callable[..., Any]] = {"local_rounds": _local_rounds, "score": _score, "tell": _tell}
            return work[name](worker, ray.get(boards[0]), *rest)
        except FedflatError as error:
            return error
        except Exception as error:
            return Failure("raised", failure(error, worker.stage))


def _local_rounds(worker: Worker, board: Any, clients: list[int], kept: list[Arrays | None]) -> list[dict[str, Any]]:
    round, lr, sent = board
    memories = [None if row is None else vectors(row) for row in kept]
    trained = worker.local_rounds(Broadcast(round, lr, vectors(sent)), clients, memories)
    return [
        {
            **numbers(u),
            "norm": u.norm,
            "delta": arrays({"delta": u.delta}),
            "up": arrays(u.vectors),
            "kept": arrays(kept),
        }
        for u, kept in trained
    ]


def _completed(answer: dict[str, Any]) -> Upload:
    norm, delta = answer.pop("norm"), vectors(answer.pop("delta"))["delta"]
    return Upload(delta=delta, vectors=vectors(answer.pop("up")), **answer).with_norm(norm)


def _score(worker: Worker, board: Arrays, part: str, start: int, stop: int) -> Score:
    model = vectors(board)
    return worker.score(model["weights"], model["buffers"], part, start, stop)


def _tell(worker: Worker, board: Arrays, client: int, about: About) -> Arrays:
    model = vectors(board)
    return arrays({"answer": worker.answer(model["weights"], model["buffers"], client, model["vector"], about)})
