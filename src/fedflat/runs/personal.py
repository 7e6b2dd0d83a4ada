"""Personalisation: every client adapts the global model of a finished run and tests it on its own label distribution.

A client's test samples have the label distribution q of its training samples: ⌊size · q_c⌋ of each class c, or all if
there are fewer (so a size much larger than the test set flattens q). The ways to adapt are

    finetune   e epochs of plain SGD on all parameters, also those that the method froze (FedAvg-FT, FedSoL-FT, FedBABU)
    perfedavg  the meta steps of e epochs, with the settings of the method, or the defaults of `perfedavg`
    knn        like finetune; then the outputs are mixed with those of the nearest training samples (kNN-Per)
    local      e epochs of each client alone, from the initial weights of the federation, at the rate η · 0.99^epoch
    none       no adaptation: the global model itself

The learning rate is constant (except for `local`), and the momentum buffer is kept over all epochs. A client adapts in
one thread, and every draw depends on the seed and the client alone, so the numbers are the same for any number of
workers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from torch import Tensor

from fedflat.engine import Pool
from fedflat.errors import RecipeError, RunError, nearest
from fedflat.federation import Federation
from fedflat.files import write_whole
from fedflat.rounds import Problem, first_state, one_thread
from fedflat.runs.adaptation import ALONE, Adaptation, Personal, Walk
from fedflat.runs.folder import beside
from fedflat.runs.neighbours import Neighbours

EPOCHS: dict[str, tuple[int, ...]] = {
    "finetune": (1, 5),
    "perfedavg": (1, 5),
    "knn": (1, 5),
    "local": (200,),
    "none": (0,),
}
AHEAD = 64  # clients whose results may wait for that of an earlier one


def personalise(
    problem: Problem,
    weights: Tensor,
    epochs: Sequence[int] | None = None,
    how: str = "finetune",
    *,
    lr: float | None = None,
    lr_decay: float = ALONE,
    size: int = 1000,
    neighbours: Neighbours | None = None,
    watch: Callable[[Sequence[int]], Iterable[int]] = iter,
    workers: int = 1,
) -> list[Personal]:
    """Adapts `weights` to each client and tests the result after each of the given numbers of epochs.

    A client trains once for all of them: its result after 5 epochs continues from that after 1 epoch, including the
    momentum. The network of the problem is restored at the end.

    Args:
        problem: the federation, the network and the method of the run.
        weights: the weights of the global model, or the initial weights for "local".
        epochs: the numbers of epochs after which each client is tested; those of `EPOCHS` by default.
        how: "finetune", "perfedavg", "knn", "local" or "none".
        lr: the learning rate; for "perfedavg", that of the inner step. The η of the recipe by default.
        lr_decay: for "local", the factor of the learning rate after every epoch.
        size: the number of test samples of a client.
        neighbours: the settings of "knn".
        watch: wraps the sequence of clients, for example to show progress.
        workers: the number of processes in which clients adapt; 1 means this process, as does an accelerator.

    Returns:
        One result for each client and number of epochs.

    Raises:
        RecipeError: an argument is invalid, or the labels are not class indices.
        TrainingError: the model of a client diverged.

    >>> from fedflat.recipe import load
    >>> from fedflat.runs.build import prepare
    >>> problem = prepare(load())
    >>> results = personalise(problem, problem.network.weights, epochs=(0, 1))
    >>> [(row["epochs"], row["clients"]) for row in summary(results)]
    [(0, 20), (1, 20)]
    """
    network, start = problem.network, weights.clone()
    if start.shape != network.weights.shape:
        raise RecipeError(f"weights: {start.numel()} numbers, but the model has {network.size} trained parameters")
    rate = problem.recipe.local.lr if lr is None else lr
    walk = Walk(problem, how, epoch_marks(how, epochs), rate, lr_decay)
    labels = problem.federation.dataset.train.labels
    if how == "knn" and (problem.task.output != "classes" or labels.is_floating_point()):
        raise RecipeError(
            f'how = "knn": mixes the classes of neighbours, and samples of {problem.federation.dataset.name} have no '
            f"class in the task {problem.task.name}"
        )
    home, buffers, results = network.weights.clone(), network.buffers.clone(), list[Personal]()
    adaptation = Adaptation(walk, _exam(problem, size), neighbours or Neighbours(), buffers)
    clients = range(problem.federation.clients)
    try:
        with closing(_adapted(adaptation, clients, start, workers)) as adapted:
            for _ in watch(clients):
                results += next(adapted)
    finally:
        network.load(home)
        network.buffers.copy_(buffers)
        network.module.eval()
    return sorted(results, key=lambda result: result.client)


def _adapted(
    adaptation: Adaptation, clients: Sequence[int], start: Tensor, workers: int
) -> Generator[list[Personal], None, None]:
    """The results of each client, computed in order by this process, or by several with the largest clients first."""
    workers = min(workers, len(clients))
    if workers == 1 or start.device.type != "cpu":  # processes cannot share the memory of an accelerator
        for client in clients:
            with one_thread():
                yield adaptation.of(client, start)
        return
    problem = adaptation.walk.problem
    state = replace(first_state(problem), weights=start)
    with closing(Pool(problem, state, min(AHEAD, len(clients)), workers, adaptation)) as pool:
        for _, results in pool.ask(state, start, problem.federation.largest_first(clients)):
            yield results


def epoch_marks(how: str, epochs: Sequence[int] | None) -> tuple[int, ...]:
    """The sorted numbers of epochs without repetition; those of `EPOCHS` by default."""
    if how not in EPOCHS:
        raise RecipeError(f"how = {how!r}: there is no such way to personalise; {nearest(how, EPOCHS)}")
    marks = tuple(sorted(set(EPOCHS[how] if epochs is None else epochs)))
    if not marks or marks[0] < 0:
        raise RecipeError(f"epochs = {', '.join(map(str, marks)) or 'nothing'}: must be whole numbers, 0 or more")
    if how == "none" and marks != (0,):
        raise RecipeError(f'epochs = {marks[-1]}: how = "none" does not train; leave epochs out')
    return marks


def _exam(problem: Problem, size: int) -> Federation:
    """The federation of test samples, in which each shard has the label distribution of the client's training data."""
    federation = problem.federation
    if size < 1:
        raise RecipeError(f"size = {size}: a client's test set must have at least 1 sample")
    labels = federation.dataset.train.labels
    if federation.tests is None and (labels.is_floating_point() or labels.ndim > 1):
        raise RecipeError(
            f"{federation.dataset.name}: its labels are not class indices, so there are no matching test sets; "
            "give each client test samples of its own, as the split natural does"
        )
    shards = federation.local_tests(problem.seed, size)
    return replace(federation, dataset=replace(federation.dataset, train=federation.dataset.test), shards=shards)


def summary(results: Iterable[Personal]) -> list[dict[str, Any]]:
    """Mean and standard deviation over the clients whose metric is known, for each number of epochs."""
    rows, results = [], list(results)
    for epochs in sorted({result.epochs for result in results}):
        here = [result for result in results if result.epochs == epochs]
        row: dict[str, Any] = {"epochs": epochs, "clients": sum(r.accuracy_after is not None for r in here)}
        row["left_out"] = len(here) - row["clients"]
        for name in ("accuracy_before", "accuracy_after"):
            values = [value for r in here if (value := getattr(r, name)) is not None]
            row |= {name: fmean(values) if values else None, f"{name}_std": pstdev(values) if values else None}
        rows.append(row)
    return rows


def by_name(row: dict[str, Any], metric: str) -> dict[str, Any]:
    """The row, with the values of another metric than the accuracy under its own name too.

    The fields `accuracy_…` stay, because earlier versions wrote only these, for every metric.

    >>> by_name({"client": 3, "accuracy_after": 0.5}, "r2")
    {'client': 3, 'accuracy_after': 0.5, 'metric': 'r2', 'r2_after': 0.5}
    """
    if metric == "accuracy":
        return row
    named = {key.replace("accuracy", metric, 1): value for key, value in row.items() if key.startswith("accuracy_")}
    return {**row, "metric": metric, **named}


def save(directory: Path, how: str, results: Iterable[Personal], metric: str = "accuracy") -> Path:
    """Writes personal-HOW.jsonl to a run's directory atomically, with one line for each client and number of epochs."""
    lines = [f"{json.dumps(by_name(asdict(result), metric))}\n" for result in results]
    path = beside(directory, f"personal-{how}.jsonl")
    try:
        write_whole(path, "".join(lines).encode())
    except OSError as error:
        raise RunError(f"{path}: cannot be written ({error.strerror})") from None
    return path
