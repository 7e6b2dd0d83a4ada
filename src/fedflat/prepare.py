"""From a recipe to what it describes: federation, network, method, engine; and back from a run's directory."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from fedflat import models
from fedflat.checkpoint import DamagedError, verified
from fedflat.client import About, Problem, Question, Questions
from fedflat.cohort import cohort_size
from fedflat.engine.cluster import Cluster
from fedflat.engine.engine import Engine
from fedflat.engine.inline import Inline
from fedflat.engine.pool import Pool, cores
from fedflat.errors import FedflatError, RecipeError, RunError
from fedflat.federation.augment import Augment
from fedflat.federation.authors import splits_by
from fedflat.federation.datasets import load
from fedflat.federation.federation import Federation, federate
from fedflat.folder import Record, read_model, read_recipe
from fedflat.heap import keep_freed_memory
from fedflat.kernels.rows import group_size
from fedflat.method import Method
from fedflat.methods import parse, spell
from fedflat.parts import ActiveModel, AllModels
from fedflat.processor import require_bf16
from fedflat.randomness import generator
from fedflat.recipe import Recipe, validated
from fedflat.rule import Loss
from fedflat.server import first_state, view
from fedflat.state import ServerState
from fedflat.store import FREED
from fedflat.vector import Network

if TYPE_CHECKING:
    from fedflat.flatness.federated import Portion

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bf16": torch.float32}


def prepare(recipe: Recipe, loss: Loss = F.cross_entropy) -> tuple[Problem, Recipe]:
    """What a recipe describes, and the recipe with every default filled in."""
    method = parse(recipe.method)
    recipe = recipe.model_copy(update={"method": spell(recipe.method)})
    federation = gather(recipe)
    problem = assemble(recipe, federation, None, method, loss)
    return problem, in_full(recipe, problem)


def gather(recipe: Recipe) -> Federation:
    """The data set and split of a recipe."""
    data, split = recipe.data, recipe.split
    return federate(
        load(data.name, data.dir).limited(data.limit, _split_seed(recipe)) if data.limit else data.name,
        split.name,
        split.clients,
        seed=_split_seed(recipe),
        draws=split.draws,
        directory=data.dir,
        augment=augmentation(recipe),
        mean=tuple(data.mean or ()),
        std=tuple(data.std or ()),
        normalise=data.normalise,
        **split.options(),
    )


def augmentation(recipe: Recipe) -> Augment:
    """How a batch of the recipe's samples is augmented."""
    data = recipe.data
    return Augment(data.crop, data.crop_probability, data.crop_fill, data.flip, data.cutout)


def _split_seed(recipe: Recipe) -> int:
    return recipe.seed if recipe.split.seed is None else recipe.split.seed


def assemble(recipe: Recipe, federation: Federation, module: nn.Module | None, method: Method, loss: Loss) -> Problem:
    """Federation, model and method as one problem."""
    keep_freed_memory(below=FREED)  # a large model's vectors leave nothing behind on the server
    dtype = DTYPES[recipe.precision]
    device = _device(recipe)
    if recipe.precision == "bf16" and device == "cpu":
        require_bf16()
    federation = federation.to(dtype, device)
    if module is not None:
        # The caller's module stays as it is, so that the next run can begin with it again.
        module = copy.deepcopy(module)
    else:
        shape, classes = federation.dataset.shape, federation.dataset.classes
        chance = generator(recipe.seed, "weights")
        module = models.build(recipe.model.name, shape, classes, chance, **recipe.model.options())
    network = Network(module, dtype, device, autocast=recipe.precision == "bf16")
    network.choose_head(federation.held_out("train", 0, 1)[0])
    group = recipe.engine.group or group_size(network, cohort_size(recipe.server, federation.clients))
    return Problem(
        federation,
        network,
        _evaluating(method, recipe),
        recipe.local,
        recipe.seed,
        loss,
        buffers=recipe.model.buffers,
        group=group,
        measures=recipe.evaluation.measures,
    )


def _evaluating(method: Method, recipe: Recipe) -> Method:
    """The method, with the part that keeps the model to evaluate where that is not the server's own."""
    if recipe.evaluation.model == "server":
        return method
    return method + (ActiveModel() if recipe.evaluation.model == "active" else AllModels(recipe.server.average))


def in_full(recipe: Recipe, problem: Problem) -> Recipe:
    """The recipe with the defaults of its split, data set, model and engine written out."""
    split = recipe.split.options()
    if known := splits_by(recipe.split.draws).get(recipe.split.name):
        split = _defaults(known, split)
    split |= {"clients": problem.federation.clients, "seed": _split_seed(recipe)}
    own = recipe.model.name not in models.MODELS
    model = recipe.model.options() if own else _defaults(models.MODELS[recipe.model.name], recipe.model.options())
    data = {"mean": list(problem.federation.dataset.mean), "std": list(problem.federation.dataset.std)}
    kind, workers = _engine(recipe)
    table = recipe.model_dump(exclude_none=True)
    for section, filled in ("data", data), ("split", split), ("model", model):
        table[section] |= filled
    engine = table["engine"] | {"name": kind, "workers": workers, "group": problem.group}
    return validated(table | {"engine": engine})


def _defaults(function: Callable[..., Any], given: Record) -> Record:
    parameters = inspect.signature(function).parameters.values()
    known = {p.name: p.default for p in parameters if p.default not in (p.empty, None)}
    return {k: list(v) if isinstance(v, tuple) else v for k, v in {**known, **given}.items()}


def _device(recipe: Recipe) -> str:
    device = recipe.engine.device
    if device != "cpu" and not (torch.cuda.is_available() if device == "cuda" else torch.backends.mps.is_available()):
        raise RecipeError(f'engine.device = "{device}": this machine has none that torch can use; set it to "cpu"')
    return device


def _engine(recipe: Recipe) -> tuple[str, int]:
    """Processes cannot share an accelerator's memory, so there all clients train in this one."""
    workers = recipe.engine.workers or cores()
    kind = recipe.engine.name
    if recipe.engine.device != "cpu":
        if kind in ("pool", "ray"):
            raise RecipeError(f'engine.name = "{kind}" works on cpu only; with {recipe.engine.device} leave it out')
        return "inline", 1
    return ("pool" if workers > 1 else "inline") if kind == "auto" else kind, workers


def start_engine(problem: Problem, recipe: Recipe, state: ServerState, question: Questions | None = None) -> Engine:
    """The engine that the recipe asks for; its clients can be asked the question, or else what the recipe measures."""
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
    """What the clients are asked for the measures of the recipe."""
    wanted: set[str] = {*recipe.evaluation.measures}
    if not recipe.evaluation.sharpness and not wanted & {"gradient", "margin", "local_sharpness"}:
        return None
    from fedflat.flatness import federated  # it loads SciPy, which plain runs do without

    asked: dict[About, Question] = {}
    if recipe.evaluation.sharpness:
        asked["hessian"] = federated.HessianProduct(sharpness_portion(recipe))
    if wanted & {"gradient", "local_sharpness"}:
        asked["gradient"] = federated.Gradient()
    if "local_sharpness" in wanted:
        asked["rise"] = federated.Rise()
    if "margin" in wanted:
        asked["margin"] = federated.Margin(recipe.evaluation.margin)
    return asked


def sharpness_portion(recipe: Recipe) -> Portion:
    """The training samples that `evaluation.sharpness` is measured on."""
    from fedflat.flatness.federated import Portion

    return Portion(recipe.evaluation.sharpness_samples, recipe.seed)


def last_lr(recipe: Recipe, rounds: int | None = None) -> float:
    """η of the last round, decayed as the rounds before have left it; `rounds` of a run that stopped earlier."""
    return recipe.local.lr * recipe.local.lr_decay ** ((rounds or recipe.server.rounds) - 1)


def load_run(directory: Path, federation: Federation | None = None) -> tuple[Problem, Recipe]:
    """A finished run as it stood at its end: its problem, with the global model in the network, and its recipe.

    The manifest of a checkpoint in place of the directory stands for the run as it was then.

    A run whose federation was made in Python needs it here again.
    """
    checkpoint = directory if directory.suffix == ".json" else None
    recipe = read_recipe(directory)
    if federation is None and recipe.split.name == "given":
        raise RunError(f"{directory}: its federation was made in Python; give it to load_run(directory, federation)")
    try:
        near = recipe.model_copy(update={"engine": recipe.engine.model_copy(update={"device": "cpu"})})
        problem = assemble(near, federation or gather(recipe), None, parse(recipe.method), F.cross_entropy)
    except FedflatError as error:
        raise type(error)(f"{directory}: {error}") from None
    if checkpoint:
        _load_checkpoint(checkpoint, problem)
    else:
        _load_model(directory, problem, recipe)
    problem.network.module.eval()
    return problem, recipe


def _load_checkpoint(path: Path, problem: Problem) -> None:
    try:
        state = verified(path).state(first_state(problem))
    except DamagedError as damage:
        raise RunError(f"{damage}; give another checkpoint") from None
    show(problem, state)


def show(problem: Problem, state: ServerState) -> None:
    """Put the model that a state stands for into the problem's network."""
    problem.network.weights.copy_(problem.method.evaluated(view(problem, state)))
    problem.network.buffers.copy_(state.buffers)
    problem.network.reset_counters()
    problem.network.module.eval()


def _load_model(directory: Path, problem: Problem, recipe: Recipe) -> None:
    module, tensors = problem.network.module, read_model(directory)
    expected = {name: tensor.shape for name, tensor in module.state_dict().items()}
    found = {name: tensor.shape for name, tensor in tensors.items()}
    for name in expected | found:
        if expected.get(name) != found.get(name):
            there, here = (tuple(s[name]) if name in s else "nothing" for s in (found, expected))
            raise RunError(
                f"{directory}: model.safetensors does not fit the recipe's model {recipe.model.name}: "
                f"{name} is {there}, but should be {here}"
            )
    module.load_state_dict(tensors)
