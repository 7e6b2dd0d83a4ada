"""The models that a run has kept: those of its checkpoints, and the local models of one round, computed again."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import torch
from torch import Tensor

from fedflat.engine import Inline
from fedflat.errors import RunError
from fedflat.flatness import LocalRound
from fedflat.methods import Upload
from fedflat.rounds import (
    Broadcast,
    Problem,
    Refusal,
    cohort_seed,
    conduct,
    draw_cohort,
    first_state,
    view,
)
from fedflat.runs.loading import load_checkpoint
from fedflat.runs.manifest import Checkpoint, manifests

_AT = re.compile(r"(.*)@(\d+)")
KEEP = "keep more of them by checkpoint.keep = n, the model of every n-th round"


def located(name: str | Path) -> Path:
    """The path of a model: a run's directory, or for RUN@ROUND the manifest of that round's checkpoint.

    Raises:
        RunError: no checkpoint of that round was kept.
    """
    found = _AT.fullmatch(str(name))
    if found is None or Path(name).exists():
        return Path(name)
    directory, round = Path(found[1]), int(found[2])
    kept = {int(path.stem): path for path in kept_checkpoints(directory)}
    if round not in kept:
        known = f"there are those of {', '.join(map(str, kept))}" if kept else "there are none"
        raise RunError(f"{name}: no checkpoint of that round is kept; {known}; {KEEP}")
    return kept[round]


def kept_checkpoints(directory: Path) -> list[Path]:
    """The manifests of a run's checkpoints, in the order of their rounds."""
    if not (directory / "recipe.toml").is_file():
        raise RunError(f"{directory}: no run is here (no recipe.toml); give a directory that `fedflat run` wrote")
    return sorted(manifests(directory / "checkpoints"))


def kept_models(directory: Path, problem: Problem) -> tuple[list[int], Tensor]:
    """The rounds of a run's checkpoints, and the global model of each as a row.

    Afterwards the problem's network holds the last of these models.

    If the recipe keeps every n-th round, these are its rounds and the last one, so that runs of one recipe show the
    same rounds. The second checkpoint from the end and the best one come at rounds that depend on the machine.

    Raises:
        RunError: a checkpoint is damaged, or there is none.
    """
    paths, keep = kept_checkpoints(directory), problem.recipe.checkpoint.keep
    if not paths:
        raise RunError(f"{directory}: it has no checkpoints; {KEEP}")
    if keep:
        paths = [path for path in paths if int(path.stem) % keep == 0 or path == paths[-1]]
    rounds, rows = [], []
    for path in paths:
        rounds.append(load_checkpoint(path, problem).round)
        rows.append(problem.network.weights.clone())
    return rounds, torch.stack(rows)


class _Recording(Inline):
    """Runs local rounds in this process and keeps the model that each client uploads."""

    models: dict[int, Tensor]

    def local_rounds(self, broadcast: Broadcast, cohort: Sequence[int]) -> Iterator[Upload | Refusal]:
        self.models = {}
        for each in super().local_rounds(broadcast, cohort):
            if isinstance(each, Upload):
                self.models[each.client] = broadcast.sent["weights"] + each.delta
            yield each


def local_round(problem: Problem, path: Path) -> LocalRound:
    """Computes the round after a checkpoint again, with the models that its clients upload.

    Every draw depends only on the seed, the round and the client, so these are the models of the run itself, bit for
    bit, on the same kind of machine.

    Args:
        problem: the problem of the run.
        path: the checkpoint's manifest.

    Raises:
        RunError: the checkpoint is damaged, or its clients were elsewhere.
    """
    if (path.parent.parent / "deployment.json").exists():
        raise RunError(f"{path}: the clients of this deployment are elsewhere, so their models cannot be shown")
    checkpoint: Checkpoint = load_checkpoint(path, problem)
    state = checkpoint.state(first_state(problem))
    recipe, clients = problem.recipe, problem.federation.clients
    seed, moves = cohort_seed(recipe, problem.seed), problem.method.always_moves
    cohort = draw_cohort(recipe.server, clients, seed, state.round, moves)
    with closing(_Recording(problem)) as engine:
        engine.memory.restore(checkpoint.memory())
        after, report = conduct(problem, state, engine, cohort)
    merged = {client: engine.models[client] for client in report.cohort}
    start = problem.method.broadcast(view(problem, state))["weights"]
    return LocalRound(after.round, start, merged, after.weights)
