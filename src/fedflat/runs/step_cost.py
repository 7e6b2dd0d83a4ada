"""The cost of a method's local step, relative to a plain one."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from fedflat.engine import settled_worker
from fedflat.methods import Method
from fedflat.rounds import Broadcast, Problem, first_state, one_thread, view


def step_cost(problem: Problem, repeats: int = 9, steps: int = 6) -> float:
    """The median ratio of the processor time of local steps with the problem's method to that of plain SGD steps.

    Both are timed in turns on one thread, so that other load on the machine affects both equally. The client is the
    one with the most samples, and has taken part before.

    Args:
        problem: the problem, at the weights of its network.
        repeats: number of ratios, after one unmeasured turn.
        steps: local steps of a measurement.
    """
    local = problem.recipe.local.model_copy(update={"steps": steps})
    evaluation = problem.recipe.evaluation.model_copy(update={"measures": []})
    problem = replace(problem, recipe=problem.recipe.model_copy(update={"local": local, "evaluation": evaluation}))
    with one_thread():
        jobs = _local_round(problem), _local_round(replace(problem, method=Method()))
        times = [[_seconds(job) for job in jobs] for _ in range(repeats + 1)]
    return statistics.median(mine / plain for mine, plain in times[1:])


def _local_round(problem: Problem) -> Callable[[], object]:
    """A local round of the largest client, as a job to be timed."""
    worker, state = settled_worker(problem), first_state(problem)  # as in an engine
    memory = {name: torch.full((problem.network.size,), 1e-3) for name in problem.memory}
    sent = {name: vector.clone() for name, vector in problem.method.broadcast(view(problem, state)).items()}
    client = problem.federation.largest_first(range(problem.federation.clients))[0]
    return lambda: worker.local_round(Broadcast(1, problem.recipe.local.lr, sent), client, memory)


def _seconds(job: Callable[[], object]) -> float:
    begun = time.process_time()
    job()
    return time.process_time() - begun
