"""Builds what a recipe describes (federation, network, method, engine), also from a run's directory."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from fedflat import models
from fedflat.engine import Cluster, Inline, Pool, cores, require_bf16
from fedflat.errors import FedflatError, RecipeError, RunError
from fedflat.federation import (
    Augment,
    Dataset,
    Federation,
    Subwords,
    federate,
    read_subwords,
    splits_by,
    take_normalised,
)
from fedflat.flatness import Portion, federated
from fedflat.local import group_size
from fedflat.methods import ActiveModel, AllModels, Method, Part, ProductAverage, parse, spell
from fedflat.models import Network
from fedflat.randomness import generator
from fedflat.recipe import Recipe, validated
from fedflat.rounds import (
    About,
    Engine,
    Problem,
    Question,
    Questions,
    ServerState,
    cohort_size,
    first_state,
    view,
)
from fedflat.runs.base import load_base, refuse_misfit
from fedflat.runs.first_pass import first_pass
from fedflat.runs.folder import Record, read_model, read_recipe, refuse_other_base
from fedflat.runs.given import kept_federation
from fedflat.runs.manifest import Checkpoint, DamagedError, verified
from fedflat.runs.own_classes import open_code
from fedflat.runs.record import read_summary
from fedflat.tasks import Accuracy, Task, find_task

Parameters = Literal["trained", "all"]
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
        seed=_split_seed(recipe),
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


def _split_seed(recipe: Recipe) -> int:
    return recipe.seed if recipe.split.seed is None else recipe.split.seed


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
        federation = federation.validating(recipe.evaluation.validation, _split_seed(recipe))
        data = federation.dataset
    dtype = DTYPES[recipe.precision]
    device = _device(recipe)
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


def judged_by(task: Task, recipe: Recipe) -> Recipe:
    """Return the recipe with the task's name, the metric to follow, and whether its highest or lowest value is best."""
    metric = task.metric(recipe.evaluation.metric)
    best = "highest" if metric.higher else "lowest"
    if metric is Accuracy and recipe.evaluation.target is not None and not 0 < recipe.evaluation.target <= 1:
        raise RecipeError(f"evaluation.target = {recipe.evaluation.target}: an accuracy is above 0 and at most 1")
    evaluation = recipe.evaluation.model_copy(update={"metric": metric.name, "best": best})
    return recipe.model_copy(update={"task": task.name, "evaluation": evaluation})


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


def in_full(recipe: Recipe, federation: Federation, group: int) -> Recipe:
    """Return the recipe with the defaults of its split, data set, model and engine filled in."""
    split = recipe.split.options()
    if known := splits_by(recipe.split.draws).get(recipe.split.name):
        split = _defaults(known, split)
    split |= {"clients": federation.clients, "seed": _split_seed(recipe)}
    own = recipe.model.name not in models.MODELS
    model = recipe.model.options() if own else _defaults(models.MODELS[recipe.model.name], recipe.model.options())
    data = {"mean": list(federation.dataset.mean), "std": list(federation.dataset.std)}
    kind, workers = _engine(recipe)
    table = recipe.model_dump(exclude_none=True)
    for section, filled in ("data", data), ("split", split), ("model", model):
        table[section] |= filled
    engine = table["engine"] | {"name": kind, "workers": workers, "group": group}
    return validated(table | {"engine": engine})


def _defaults(function: Callable[..., Any], given: Record) -> Record:
    parameters = inspect.signature(function).parameters.values()
    own = [p for p in parameters if p.name not in models.OFFERED]
    known = {p.name: p.default for p in own if p.default not in (p.empty, None)}
    return {k: list(v) if isinstance(v, tuple) else v for k, v in {**known, **given}.items()}


def _device(recipe: Recipe) -> str:
    device = recipe.engine.device
    if device != "cpu" and not (torch.cuda.is_available() if device == "cuda" else torch.backends.mps.is_available()):
        raise RecipeError(f'engine.device = "{device}": this machine has none that torch can use; set it to "cpu"')
    if recipe.engine.graph and device != "cuda":
        raise RecipeError(f'engine.graph = true works on cuda only; leave it out with engine.device = "{device}"')
    return device


def on_cpu(recipe: Recipe) -> Recipe:
    """The recipe without its accelerator, for work on a finished run."""
    return recipe.model_copy(update={"engine": recipe.engine.model_copy(update={"device": "cpu", "graph": False})})


def _engine(recipe: Recipe) -> tuple[str, int]:
    """The engine and its number of workers.

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
    kind, workers = _engine(recipe)
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
