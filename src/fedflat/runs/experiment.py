"""Runs an experiment: from a recipe to rounds, metrics and a model."""

from __future__ import annotations

import logging
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, Unpack

from torch import nn

from fedflat.errors import StoppedError, TrainingError
from fedflat.federation import Federation
from fedflat.local import Loss
from fedflat.methods import Method, Part, Written, parse, spell
from fedflat.progress import progress
from fedflat.recipe import Recipe
from fedflat.rounds import (
    Engine,
    Problem,
    ServerState,
    cohort_seed,
    conduct,
    draw_cohort,
    first_state,
    ledger_of,
    view,
)
from fedflat.runs.arguments import check_arguments
from fedflat.runs.build import assemble, beginning
from fedflat.runs.checkpoint import Checkpoints
from fedflat.runs.defaults import in_full
from fedflat.runs.folder import Record, RunFolder
from fedflat.runs.given import beyond_a_recipe, described, keep, model_table
from fedflat.runs.keywords import Settings, on_default, sections, with_settings
from fedflat.runs.launch import start_engine
from fedflat.runs.loading import show
from fedflat.runs.lock import RunLock
from fedflat.runs.own_classes import with_own_code
from fedflat.runs.result import Result, stopped, summary
from fedflat.runs.rewind import recalled
from fedflat.runs.round_record import evaluation_record, round_record, sharpness_record
from fedflat.runs.signals import LastRound
from fedflat.runs.trackers import Trackers, check_trackers
from fedflat.tasks import Task, find_task

log = logging.getLogger("fedflat")
Callback = Callable[[Record], None]
StartEngine = Callable[[Problem, ServerState], Engine]


def train(
    federation: Federation,
    model: str | nn.Module = "mlp",
    method: Method | Part | Written = "fedavg",
    *,
    task: str | Task | None = None,
    loss: Loss | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
    verbose: bool | None = None,
    model_options: Mapping[str, Any] | None = None,
    **settings: Unpack[Settings],
) -> Result:
    """Train a federated model; settings are the recipe's fields by name (`rounds=30, lr=0.1, workers=2`).

    All other settings are those of the default recipe, as with `fedflat run` (`fedflat recipe` prints it).

    Args:
        federation: the clients and their samples.
        model: the name or import path of a network, or a module, which stays unchanged.
        method: the method, or its name with options.
        task: the name of a task or your own; by default that of the data set.
        loss: a loss of outputs and labels that replaces the task's.
        out: the directory of the run; without it nothing is written.
        resume: whether to continue an interrupted run in `out`.
        callbacks: called with the record of each round.
        verbose: True prints a line for each evaluated round, False nothing. By default a terminal or notebook shows a
            progress bar after two seconds.
        model_options: options of the network, such as `{"hidden": [64]}`; `model_hidden=[64]` is the same. For a
            module of your own class: the arguments that the command line builds it with.
        settings: fields of the recipe. A name that occurs in two sections means the local one; `server_lr` is the
            server's.

    Returns:
        The recipe, one record per round, and the trained model.

    Raises:
        RecipeError: if a setting is unknown or invalid.
        DataError: if the model or the loss does not fit the data.
        TrainingError: if no client could be accepted.
        StoppedError: if a signal stopped a run with a directory.

    Warns:
        UserWarning: if a client is refused in all of its rounds.

    >>> from fedflat import federate
    >>> federation = federate("digits", clients=10, alpha=0.5)
    >>> result = train(federation, model="mlp", method="fedsam(0.05)", rounds=2, lr=0.1, engine="inline")
    >>> len(result.history), 0.0 < result.accuracy <= 1.0
    (2, True)
    """
    check_arguments(federation, model, task, callbacks, out)
    module = model if isinstance(model, nn.Module) else None
    directory = None if out is None else Path(out)
    begun = directory if resume else None
    table = sections(settings, model_options) | {"method": spell(method), **described(federation, begun)}
    network = {"name": model} if module is None else model_table(module, begun)
    table["model"] = {**table.get("model", {}), **network}
    table, own = with_own_code(table, directory, resume)
    recipe = on_default(table)
    task = task if isinstance(task, Task) else find_task(task or federation.dataset.task)
    task = task.with_loss(loss) if loss else task
    problem = beginning(assemble(recipe, federation, module, parse(method), task))
    if directory is not None:
        for reason in beyond_a_recipe(problem, federation, module):
            log.warning("%s: %s", directory, reason)
    told = [*callbacks, *([_printed(problem.recipe.metric)] if verbose else [])]
    begin = partial(keep, federation=federation, own=own)
    if verbose is not None:
        return execute(problem, directory, told, resume, begin=begin)
    with progress("training", recipe.server.rounds) as bar:
        told.append(lambda record: bar.reach(record["round"], _note(record, problem.recipe.metric)))
        return execute(problem, directory, told, resume, begin=begin)


with_settings(train)


def _note(record: Record, metric: str) -> str:
    return f"{metric} {record[metric]:.4f}" if record.get(metric) is not None else ""


def _printed(metric: str) -> Callback:
    """A callback that prints the rounds in which the model was evaluated."""

    def tell(record: Record) -> None:
        if note := _note(record, metric):
            refused = f", {len(record['refused'])} refused" if record.get("refused") else ""
            print(f"round {record['round']}: {note}, local loss {record['local_loss'] or math.nan:.4f}{refused}")

    return tell


def execute(
    problem: Problem,
    directory: Path | None = None,
    callbacks: Sequence[Callback] = (),
    resume: bool = False,
    warn: Callable[[str], None] = warnings.warn,
    start: StartEngine = start_engine,
    back_to: int | None = None,
    lock: RunLock | None = None,
    begin: Callable[[Path], None] = lambda directory: None,
) -> Result:
    """Run all rounds of the recipe; with a directory, results are written as they come and can be resumed.

    A run that continues from a checkpoint gives the same result as one without interruption.

    Args:
        problem: what the recipe describes.
        directory: the directory of the run, if it has one.
        callbacks: called with the record of each round.
        resume: whether to continue the run in the directory.
        warn: called with each warning.
        start: starts the engine.
        back_to: the round of a kept checkpoint to return to; later rounds are discarded.
        lock: the directory's lock, if the caller already holds it.
        begin: called with the directory before the first round, to write what the recipe cannot hold.

    Returns:
        The recipe, one record per round, and the trained model.

    Raises:
        StoppedError: after the first SIGINT or SIGTERM in a run with a directory, once the round is finished and saved.
    """
    recipe = problem.recipe
    ledger_of(problem)  # it may refuse the recipe before any file is written
    check_trackers(recipe, directory)
    if directory is None:
        state, history = first_state(problem), list[Record]()
        with closing(start(problem, state)) as engine:
            problem.network.put_away()  # the state holds the model until the last round
            for now, record in rounds(problem, state, engine):
                state = now
                _tell(record, history, callbacks)
        show(problem, state)
        _tell_refused(history, warn)
        return Result.of(problem, history)
    completed = partial(in_full, federation=problem.federation, group=problem.group)
    with RunFolder(directory, recipe, resume, completed, lock, back_to) as folder, LastRound() as signals:
        begin(directory)
        state, history = _train_in(folder, problem, callbacks, signals, warn, start, back_to)
        show(problem, state)
        folder.finish(problem.network, {**summary(history, recipe), "rounds": state.round})
        if signals.came:  # in the last round: this run is complete, but others may be waiting
            raise StoppedError(f"stopped; the run in {directory} is complete", signals.came)
    _tell_refused(history, warn)
    return Result.of(problem, history, directory)


def _tell_refused(history: Sequence[Record], warn: Callable[[str], None]) -> None:
    """Warn about clients that were refused in all of their rounds: the model has learnt nothing from them."""
    accepted = {client for record in history for client in record["cohort"]}
    refusals = [each for record in history for each in record.get("refused", ())]
    if never := sorted({each["client"] for each in refusals} - accepted):
        last = next(each for each in reversed(refusals) if each["client"] == never[0])
        names = ", ".join(map(str, never[:5])) + (f" and {len(never) - 5} more" if len(never) > 5 else "")
        who, was = ("client", "was") if len(never) == 1 else ("clients", "were")
        warn(
            f"{who} {names} {was} refused in all of their rounds, so the model has learnt nothing from them; "
            f"client {never[0]}: {last['reason']}: {last['detail']}"
        )


def _train_in(
    folder: RunFolder,
    problem: Problem,
    callbacks: Sequence[Callback],
    signals: LastRound,
    warn: Callable[[str], None],
    start: StartEngine,
    back_to: int | None,
) -> tuple[ServerState, list[Record]]:
    """Run the remaining rounds; write each to the metrics and, when due, to a checkpoint."""
    recipe = problem.recipe
    checkpoints = Checkpoints(folder.path, recipe, problem.network.base_digest)
    found = checkpoints.newest(folder.agrees, warn, back_to)
    state = found.state(first_state(problem)) if found else first_state(problem)
    if back_to is not None:
        checkpoints.forget_after(back_to)
    history = recalled(folder, found, warn)
    with closing(start(problem, state)) as engine, Trackers(recipe, folder.path, warn) as trackers:
        problem.network.put_away()  # the state holds the model until the last round
        if found and engine.memory:
            engine.memory.restore(found.memory())
        if not found and recipe.checkpoint.keep:
            checkpoints.save(state, engine.memory, folder.mark(), None)
        for record in history:
            trackers(record)
        for now, record in rounds(problem, state, engine, history):
            state = now
            folder.append(record)
            _tell(record, history, [*callbacks, trackers])
            last = complete(recipe, state.round, history)
            if last or signals.came or checkpoints.due(state.round):
                checkpoints.save(state, engine.memory, folder.mark(), record.get(recipe.metric))
            if signals.came and not last:
                so_far = f"stopped after round {state.round} of {recipe.server.rounds}"
                raise StoppedError(f"{so_far}; continue with: fedflat resume {folder.path}", signals.came)
        trackers.conclude(summary(history, recipe))
    return state, history


def _tell(record: Record, history: list[Record], callbacks: Sequence[Callback]) -> None:
    history.append(record)
    for callback in callbacks:
        callback(record)


def rounds(
    problem: Problem, state: ServerState, engine: Engine, history: Sequence[Record] = ()
) -> Iterator[tuple[ServerState, Record]]:
    """Yield the state and the record after each round; `history` holds the rounds before the first one."""
    recipe, spent, empty = problem.recipe, ledger_of(problem), problem.method.always_moves
    seed = cohort_seed(recipe, problem.seed)
    skipped = sum(1 for _ in takewhile(lambda record: "skipped" in record, reversed(history)))
    moved = any("skipped" not in record for record in history)
    while not complete(recipe, state.round, history):
        begun = time.perf_counter()
        cohort = draw_cohort(recipe.server, problem.federation.clients, seed, state.round, empty)
        state, report = conduct(problem, state, engine, cohort)
        record = round_record(state, report)
        if spent:
            record |= spent.reported(state.round)
        skipped = skipped + 1 if report.skipped else 0
        moved = moved or not report.skipped
        every, last = recipe.evaluation.every, state.round == recipe.server.rounds
        evaluated = replace(state, weights=problem.method.evaluated(view(problem, state)))
        if last or (every and state.round % every == 0):
            record |= evaluation_record(problem, evaluated, engine)
        if recipe.evaluation.sharpness and state.round % recipe.evaluation.sharpness == 0:
            record |= sharpness_record(problem, evaluated, engine)
        record["seconds"] = round(time.perf_counter() - begun, 4)
        yield state, record
        if skipped >= recipe.admission.patience:
            raise TrainingError(f"{skipped} rounds in a row were skipped; in the last one: {report.skipped}")
        history = [record]
    if skipped and not moved:
        why = history[-1]["skipped"]
        raise TrainingError(f"all {skipped} rounds were skipped, so nothing was trained; in the last one: {why}")


def complete(recipe: Recipe, round: int, history: Sequence[Record]) -> bool:
    """Return whether a run ends after this round, by the number of rounds or by `server.stop_loss`."""
    return round >= recipe.server.rounds or stopped(recipe, history)
