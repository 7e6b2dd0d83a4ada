"""Where a recipe runs: its device, its engine, and the questions that the clients answer there."""

from __future__ import annotations

import torch

from fedflat.engine import Cluster, Inline, Pool, cores
from fedflat.errors import RecipeError
from fedflat.flatness import Portion, federated
from fedflat.recipe import Recipe
from fedflat.rounds import About, Engine, Problem, Question, Questions, ServerState, cohort_size


def device_of(recipe: Recipe) -> str:
    """Return the device of a recipe.

    Raises:
        RecipeError: this machine does not have it, or it cannot do what the recipe asks of it.
    """
    device = recipe.engine.device
    if device != "cpu" and not (torch.cuda.is_available() if device == "cuda" else torch.backends.mps.is_available()):
        raise RecipeError(f'engine.device = "{device}": this machine has none that torch can use; set it to "cpu"')
    if recipe.engine.graph and device != "cuda":
        raise RecipeError(f'engine.graph = true works on cuda only; leave it out with engine.device = "{device}"')
    return device


def engine_of(recipe: Recipe) -> tuple[str, int]:
    """Return the name of the engine and its number of workers.

    On an accelerator all clients train in this process, because processes cannot share its memory.
    """
    workers = recipe.engine.workers or cores()
    kind = recipe.engine.name
    if recipe.engine.device != "cpu":
        if kind in ("pool", "ray"):
            raise RecipeError(f'engine.name = "{kind}" works on cpu only; with {recipe.engine.device} leave it out')
        return "inline", 1
    return ("pool" if workers > 1 else "inline") if kind == "auto" else kind, workers


def start_engine(problem: Problem, state: ServerState, question: Questions | None = None) -> Engine:
    """Start the recipe's engine; its clients answer the given question, or else those of the recipe's measures."""
    recipe = problem.recipe
    kind, workers = engine_of(recipe)
    question = question or _questions(recipe)
    if kind == "inline":
        return Inline(problem, question)
    if kind == "ray":
        return Cluster(problem, question, recipe.admission.deadline, recipe.engine.address, recipe.engine.workers)
    clients = problem.federation.clients
    slots = clients if recipe.server.sampling == "bernoulli" else cohort_size(recipe.server, clients)
    return Pool(problem, state, slots, min(workers, slots), question, recipe.admission.deadline)


def _questions(recipe: Recipe) -> Questions | None:
    """The questions that the recipe's measures ask the clients."""
    wanted: set[str] = {*recipe.evaluation.measures}
    asking = {"gradient", "margin", "local_sharpness", "local_curvature"}
    if not recipe.evaluation.sharpness and not wanted & asking:
        return None
    asked: dict[About, Question] = {}
    if recipe.evaluation.sharpness:
        asked["hessian"] = federated.HessianProduct(sharpness_portion(recipe))
    if wanted & {"gradient", "local_sharpness"}:
        asked["gradient"] = federated.Gradient()
    if "local_sharpness" in wanted:
        asked["rise"] = federated.Rise()
    if "local_curvature" in wanted:
        asked["curvature"] = federated.TopEigenvalue(sharpness_portion(recipe))
    if "margin" in wanted:
        asked["margin"] = federated.Margin(recipe.evaluation.margin)
    return asked


def sharpness_portion(recipe: Recipe) -> Portion:
    """Return the training samples that `evaluation.sharpness` is measured on."""
    return Portion(recipe.evaluation.sharpness_samples, recipe.seed)
