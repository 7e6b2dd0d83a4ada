"""Builds what a recipe describes: federation, network and method, together a problem."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from torch import nn

from fedflat import models
from fedflat.engine import require_bf16
from fedflat.errors import RecipeError
from fedflat.federation import Augment, Dataset, Federation, Subwords, federate, read_subwords, take_normalised
from fedflat.local import group_size
from fedflat.methods import ActiveModel, AllModels, Method, Part, ProductAverage, parse, spell
from fedflat.models import Network
from fedflat.randomness import generator
from fedflat.recipe import Recipe
from fedflat.rounds import Problem, cohort_size
from fedflat.runs.base import load_base
from fedflat.runs.defaults import in_full, judged_by
from fedflat.runs.first_pass import first_pass
from fedflat.runs.folder import Record
from fedflat.runs.given import kept_federation
from fedflat.runs.launch import device_of
from fedflat.runs.own_classes import open_code
from fedflat.tasks import Accuracy, Task, find_task

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bf16": torch.float32}


def prepare(recipe: Recipe, task: Task | None = None, run: Path | None = None) -> Problem:
    """Build the problem of a recipe; the problem's own recipe has every default filled in.

    Args:
        recipe: the recipe.
        task: the task, in place of the recipe's.
        run: the directory of a run that was begun with this recipe, which may hold the data or the split.
    """
    if run is not None:
        open_code(recipe, run)
    method = parse(recipe.method)
    recipe = recipe.model_copy(update={"method": spell(recipe.method)})
    return beginning(assemble(recipe, gather(recipe, run), None, method, task))


def gather(recipe: Recipe, run: Path | None = None) -> Federation:
    """Load the data set of a recipe and split it.

    If a run in Python has data or a split without a name, they are read from the directory of the run.
    """
    kept = None if run is None else kept_federation(recipe, run, _federated)
    return kept or _federated(recipe)


def _federated(recipe: Recipe, dataset: Dataset | None = None, split: str | None = None) -> Federation:
    """The federation of a recipe, optionally with another data set or split."""
    data, section = recipe.data, recipe.split
    names = ("limit", "window", "stride", "predict", "words", "tokenizer", "shortest", "half", "normalise", "by_length")
    limits = {name: getattr(data, name) for name in (names[-2:] if dataset else names)}
    return federate(
        dataset or data.name,
        split or section.name,
        section.clients,
        seed=recipe.split_seed,
        draws="fedflat" if split else section.draws,
        directory=data.dir,
        augment=augmentation(recipe),
        mean=tuple(data.mean or ()),
        std=tuple(data.std or ()),
        **limits,
        **({} if split else section.options()),
    )


def augmentation(recipe: Recipe) -> Augment:
    """Return how batches of the recipe's samples are augmented."""
    data = recipe.data
    return Augment(data.crop, data.crop_probability, data.crop_fill, data.flip, data.cutout)


def assemble(
    recipe: Recipe, federation: Federation, module: nn.Module | None, method: Method, task: Task | None = None
) -> Problem:
    """Combine federation, model, method and the full recipe into a problem.

    Args:
        recipe: the recipe; the problem gets a copy with every default filled in.
        federation: the clients and their samples.
        module: the network, which is copied; None builds the recipe's model.
        method: the method.
        task: the task; None takes the recipe's, or else the data set's.
    """
    data, task = federation.dataset, task or find_task(recipe.task or federation.dataset.task)
    task.check(data.name, data.train.labels)
    if recipe.evaluation.on == "validation":
        federation = federation.validating(recipe.evaluation.validation, recipe.split_seed)
        data = federation.dataset
    dtype = DTYPES[recipe.precision]
    device = device_of(recipe)
    if recipe.precision == "bf16" and device == "cpu":
        require_bf16()
    federation = federation.to(dtype, device)
    if module is not None:
        # The caller's module stays unchanged, so that the next run can start from it again.
        module = take_normalised(copy.deepcopy(module))
        if any(each.is_meta for each in (*module.parameters(), *module.buffers())):
            raise RecipeError("model: it is on torch's meta device and has no weights yet; load them first")
    else:
        chance = generator(recipe.seed, "weights")
        kind: Record = {"vocabulary": data.vocabulary, "per_token": task.output == "tokens"}
        models.refuse_offered(recipe.model.name, recipe.model.options())
        module = models.build(recipe.model.name, data.shape, data.classes, chance, **kind, **recipe.model.options())
    module, recipe = _founded(module, recipe)
    if recipe.model.lora and recipe.model.lora.average == "product":
        method = _with(ProductAverage(), method)
    network = Network(module, dtype, device, autocast=recipe.precision == "bf16")
    first_pass(network, task, federation)
    alone = 1 if recipe.engine.graph else 0  # a graph is of one client's step
    group = recipe.engine.group or alone or group_size(network, cohort_size(recipe.server, federation.clients))
    recipe = judged_by(task, recipe)
    return Problem(federation, network, _evaluating(method, recipe), in_full(recipe, federation, group), task)


def beginning(problem: Problem) -> Problem:
    """Return the problem of a run that begins. Runs of earlier versions may not pass these checks, and are still read.

    Raises:
        RecipeError: the recipe asks for the accuracy of each class, and the task has none; or the texts have other
            token ids than the model.
    """
    _refuse_other_ids(problem)
    task, data = problem.task, problem.federation.dataset
    per_class = Accuracy in task.metrics and not data.train.labels.is_floating_point()
    if "classes" in problem.recipe.evaluation.measures and not per_class:
        raise RecipeError(
            "evaluation.measures: classes is the accuracy of each class, which there is not for the task "
            f"{task.name} on {data.name}"
        )
    return problem


def _refuse_other_ids(problem: Problem) -> None:
    """Refuse texts whose ids are not those of the tokenizer in the folder of the model."""
    model, data = problem.recipe.model, problem.federation.dataset
    folder = model.options().get("folder") if model.name == "transformers" else None
    if folder is None or data.tokenizer is None or not (Path(folder) / "tokenizer.json").is_file():
        return
    if not isinstance(data.tokenizer, Subwords):
        raise RecipeError(
            f"data.tokenizer: the {data.tokenizer.unit}s of {data.name} have ids of their own, and model.folder has a "
            f"tokenizer.json; set data.tokenizer = {folder!r}"
        )
    ours, theirs = data.tokenizer.tokens, read_subwords(folder).tokens
    if any(one and other and one != other for one, other in zip(ours, theirs, strict=False)):
        raise RecipeError(
            f"data.tokenizer: its ids stand for other tokens than in model.folder; set data.tokenizer = {folder!r}"
        )


def _founded(module: nn.Module, recipe: Recipe) -> tuple[nn.Module, Recipe]:
    """The module with the weights of `model.base` and the adapters of `model.lora`, and the recipe with its digest."""
    model = recipe.model
    if model.base is not None:
        digest = load_base(module, model.base, model.base_sha256)
        recipe = recipe.model_copy(update={"model": model.model_copy(update={"base_sha256": digest})})
    if model.lora is not None:
        module = models.lora(module, **model.lora.options(), generator=generator(recipe.seed, "lora"))
    return module, recipe


def _evaluating(method: Method, recipe: Recipe) -> Method:
    """The method, with a part that keeps the model to evaluate if that is not the server's own."""
    if recipe.evaluation.model == "server":
        return method
    return _with(ActiveModel() if recipe.evaluation.model == "active" else AllModels(recipe.server.average), method)


def _with(part: Part, method: Method) -> Method:
    """The method with a part that the recipe asks for; a method that was assembled before has it already."""
    return method if any(isinstance(each, type(part)) for each in method.parts) else method + part
