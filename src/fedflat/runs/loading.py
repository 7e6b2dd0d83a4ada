"""Runs that were trained before: a run's directory or one of its checkpoints, as a problem with that model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

from torch import nn

from fedflat import models
from fedflat.errors import FedflatError, RunError
from fedflat.federation import Federation
from fedflat.methods import Method, parse
from fedflat.models import Network
from fedflat.recipe import Recipe
from fedflat.rounds import Problem, ServerState, first_state, view
from fedflat.runs.base import refuse_misfit
from fedflat.runs.build import assemble, gather
from fedflat.runs.folder import read_model, read_recipe, refuse_other_base
from fedflat.runs.manifest import Checkpoint, DamagedError, verified
from fedflat.runs.own_classes import open_code
from fedflat.runs.record import read_summary
from fedflat.tasks import Task

Parameters = Literal["trained", "all"]


def on_cpu(recipe: Recipe) -> Recipe:
    """The recipe without its accelerator, for work on a finished run."""
    return recipe.model_copy(update={"engine": recipe.engine.model_copy(update={"device": "cpu", "graph": False})})


def last_lr(recipe: Recipe, rounds: int | None = None) -> float:
    """Return η of the last round, with decay; `rounds` is the length of a run that stopped earlier."""
    return recipe.local.lr * recipe.local.lr_decay ** ((rounds or recipe.server.rounds) - 1)


def load_run(
    directory: Path,
    federation: Federation | None = None,
    task: Task | None = None,
    parameters: Parameters = "trained",
    module: nn.Module | None = None,
) -> Problem:
    """Load a finished run: its problem, with the global model in the network, and its recorded recipe.

    Args:
        directory: the run's directory, or the manifest of a checkpoint to load the run as it was then.
        federation: the run's federation, required if neither recipe nor directory hold it.
        task: the run's task, required if it was made in Python.
        parameters: what counts as the model's weights: those that the run has trained, or all. With "all", adapters
            are merged and nothing is frozen, so that the model can be measured beside one that was trained in full.
        module: a module of the run's class, required if the recipe cannot build it.

    Raises:
        RunError: if the run cannot be read, or its federation is missing.
    """
    checkpoint = directory if directory.suffix == ".json" else None
    recipe = read_recipe(directory)
    home = directory.parent.parent if checkpoint else directory
    try:
        open_code(recipe, home)
        near = on_cpu(recipe)
        if not checkpoint:  # a finished run holds the whole model, so its base may be missing
            near = near.model_copy(update={"model": near.model.model_copy(update={"base": None})})
        problem = assemble(near, federation or gather(recipe, home), module, parse(recipe.method), task)
    except FedflatError as error:
        told = str(error).removeprefix(f"{home}: ")
        raise type(error)(f"{directory}: {told}") from None
    if checkpoint:
        load_checkpoint(checkpoint, problem)
    else:
        _load_model(directory, problem)
    problem.network.module.eval()
    problem.recipe = recipe  # as recorded, with the device of that run
    return problem if parameters == "trained" else _unfrozen(problem)


def _unfrozen(problem: Problem) -> Problem:
    """The problem with all weights of its model, for measurements."""
    network = problem.network
    whole = Network(models.merged(network.module), network.weights.dtype, autocast=network.autocast)
    whole.choose_head(problem.federation.held_out("train", 0, 1)[0])
    return replace(problem, network=whole, method=Method())  # the method belongs to the trained weights


def load_checkpoint(path: Path, problem: Problem) -> Checkpoint:
    """Load the model of a checkpoint, given by its manifest, into the problem's network."""
    try:
        checkpoint = verified(path)
    except DamagedError as damage:
        raise RunError(f"{damage}; give another checkpoint") from None
    checkpoint.check_base(problem.network.base_digest)
    show(problem, checkpoint.state(first_state(problem)))
    return checkpoint


def show(problem: Problem, state: ServerState) -> None:
    """Load the model of a state into the problem's network."""
    problem.network.load(problem.method.evaluated(view(problem, state)))
    problem.network.buffers.copy_(state.buffers)
    problem.network.reset_counters()
    problem.network.module.eval()


def _load_model(directory: Path, problem: Problem) -> None:
    module, tensors = problem.network.module, read_model(directory)
    refuse_misfit(module, tensors, f"{directory}: model.safetensors", problem.recipe.model.name)
    if not all(bool(tensors[name].isfinite().all()) for name, _ in module.named_parameters()):
        raise RunError(f"{directory}: model.safetensors holds weights that are not finite; give one of its checkpoints")
    module.load_state_dict(tensors)
    if (recorded := read_summary(directory).get("base_sha256")) is not None:
        refuse_other_base(directory, recorded, problem.network.base_digest)
