"""An experiment: recipe in, rounds, metrics and a model out."""

from __future__ import annotations

import copy
import inspect
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fedflat import models
from fedflat.client import Problem, Question
from fedflat.engine.engine import Engine
from fedflat.engine.inline import Inline
from fedflat.engine.pool import Pool, cores
from fedflat.errors import FedflatError, RecipeError, RunError, nearest
from fedflat.federation.augment import Augment
from fedflat.federation.federation import Federation, federate
from fedflat.federation.splits import SPLITS
from fedflat.folder import Record, RunFolder, read_run
from fedflat.group import group_size
from fedflat.local import Loss
from fedflat.method import Method
from fedflat.methods import Written, parse, spell
from fedflat.parts import Part, ServerState
from fedflat.randomness import generator
from fedflat.recipe import Recipe, validated
from fedflat.server import RoundReport, cohort_size, conduct, draw_cohort, first_state
from fedflat.vector import Network

Callback = Callable[[Record], None]
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bf16": torch.float32}


@dataclass(frozen=True)
class Result:
    """A finished run: its recipe, one record for each round, and the global model."""

    recipe: Recipe
    history: list[Record]
    model: nn.Module
    directory: Path | None = None

    def curve(self, name: str) -> list[tuple[int, float]]:
        """(round, value) of a metric, for the rounds that have it."""
        return [(record["round"], record[name]) for record in self.history if record.get(name) is not None]

    @property
    def accuracy(self) -> float:
        """The accuracy after the last evaluated round; NaN where labels are no classes."""
        return self.curve("accuracy")[-1][1] if self.curve("accuracy") else math.nan

    @property
    def summary(self) -> Record:
        return summary(self.history, self.recipe)


def train(
    federation: Federation,
    model: str | nn.Module = "mlp",
    method: Method | Part | Written = "fedavg",
    *,
    loss: Loss = F.cross_entropy,
    out: str | Path | None = None,
    callbacks: Sequence[Callback] = (),
    **settings: Any,
) -> Result:
    """Train a federated model; settings are the recipe's fields by name (`rounds=30, lr=0.1, workers=2`).

    A name that two sections have means the local one; `server_lr` is the server's. `model_hidden=[64]` is an option of
    the model.

    >>> federation = federate("digits", clients=10, alpha=0.5)
    >>> result = train(federation, model="mlp", method="fedsam(0.05)", rounds=2, lr=0.1, engine="inline")
    >>> len(result.history), 0.0 < result.accuracy <= 1.0
    (2, True)
    """
    named = model if isinstance(model, str) else f"{type(model).__module__}:{type(model).__qualname__}"
    table = _sections(settings) | {"method": spell(method), "data": federation.dataset.name}
    table["model"] = {**table.get("model", {}), "name": named}
    table["split"] = {"name": "given", "clients": federation.clients}
    recipe = validated(table)
    problem = assemble(recipe, federation, model if isinstance(model, nn.Module) else None, parse(method), loss)
    return execute(problem, _in_full(recipe, problem), Path(out) if out else None, callbacks)


def _sections(settings: dict[str, Any]) -> Record:
    table: Record = {}
    places = {name: s for s in ("engine", "evaluation", "server", "local") for name in _fields(s) if name != "name"}
    places |= {f"{s}_{name}": s for s in ("engine", "evaluation", "server", "local") for name in _fields(s)}
    for name, value in settings.items():
        if name in Recipe.model_fields:
            table[name] = {**table.get(name, {}), "name": value} if name == "engine" else value
        elif name.startswith("model_"):
            table.setdefault("model", {})[name.removeprefix("model_")] = value
        elif name in places:
            table.setdefault(places[name], {})[name.removeprefix(f"{places[name]}_")] = value
        else:
            raise RecipeError(f"train: there is no setting {name!r}; {nearest(name, places)}")
    return table


def _fields(section: str) -> list[str]:
    return list(type(Recipe.model_fields[section].default).model_fields)


def prepare(recipe: Recipe, loss: Loss = F.cross_entropy) -> tuple[Problem, Recipe]:
    """What a recipe describes, and the recipe with every default filled in."""
    method = parse(recipe.method)
    recipe = recipe.model_copy(update={"method": spell(recipe.method)})
    federation = gather(recipe)
    problem = assemble(recipe, federation, None, method, loss)
    return problem, _in_full(recipe, problem)


def gather(recipe: Recipe) -> Federation:
    """The data set and split of a recipe."""
    data, split = recipe.data, recipe.split
    return federate(
        data.name,
        split.name,
        split.clients,
        seed=_split_seed(recipe),
        directory=data.dir,
        augment=Augment(data.crop, data.crop_probability, data.crop_fill, data.flip, data.cutout),
        mean=tuple(data.mean or ()),
        std=tuple(data.std or ()),
        **split.options(),
    )


def _split_seed(recipe: Recipe) -> int:
    return recipe.seed if recipe.split.seed is None else recipe.split.seed


def assemble(recipe: Recipe, federation: Federation, module: nn.Module | None, method: Method, loss: Loss) -> Problem:
    """Federation, model and method as one problem."""
    dtype = DTYPES[recipe.precision]
    device = _device(recipe)
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
        method,
        recipe.local,
        recipe.seed,
        loss,
        buffers=recipe.model.buffers,
        group=group,
        measures=recipe.evaluation.measures,
    )


def _in_full(recipe: Recipe, problem: Problem) -> Recipe:
    """The recipe with the defaults of its split, data set, model and engine written out."""
    split = recipe.split.options()
    if recipe.split.name in SPLITS:
        split = _defaults(SPLITS[recipe.split.name], split)
    split |= {"clients": problem.federation.clients, "seed": _split_seed(recipe)}
    own = recipe.model.name not in models.MODELS
    model = recipe.model.options() if own else _defaults(models.MODELS[recipe.model.name], recipe.model.options())
    data = {"mean": list(problem.federation.dataset.mean), "std": list(problem.federation.dataset.std)}
    kind, workers = _engine(recipe)
    table = recipe.model_dump(exclude_none=True)
    for section, filled in ("data", data), ("split", split), ("model", model):
        table[section] |= filled
    engine = {"name": kind, "workers": workers, "device": recipe.engine.device, "group": problem.group}
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
        if kind == "pool":
            raise RecipeError(f'engine.name = "pool" works on cpu only; with {recipe.engine.device} leave it out')
        return "inline", 1
    return ("pool" if workers > 1 else "inline") if kind == "auto" else kind, workers


def start_engine(problem: Problem, recipe: Recipe, state: ServerState, question: Question | None = None) -> Engine:
    """The engine that the recipe asks for; with a question, its clients can be asked that too."""
    kind, workers = _engine(recipe)
    if kind == "inline":
        return Inline(problem, question)
    clients = problem.federation.clients
    slots = clients if recipe.server.sampling == "bernoulli" else cohort_size(recipe.server, clients)
    return Pool(problem, state, slots, min(workers, slots), question)


def last_lr(recipe: Recipe) -> float:
    """η of the last round, decayed as the rounds before have left it."""
    return recipe.local.lr * recipe.local.lr_decay ** (recipe.server.rounds - 1)


def load_run(directory: Path, federation: Federation | None = None) -> tuple[Problem, Recipe]:
    """A finished run as it stood at its end: its problem, with the global model in the network, and its recipe.

    A run whose federation was made in Python needs it here again.
    """
    recipe, tensors = read_run(directory)
    if federation is None and recipe.split.name == "given":
        raise RunError(f"{directory}: its federation was made in Python; give it to load_run(directory, federation)")
    try:
        near = recipe.model_copy(update={"engine": recipe.engine.model_copy(update={"device": "cpu"})})
        problem = assemble(near, federation or gather(recipe), None, parse(recipe.method), F.cross_entropy)
    except FedflatError as error:
        raise type(error)(f"{directory}: {error}") from None
    module = problem.network.module
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
    module.eval()
    return problem, recipe


def execute(
    problem: Problem, recipe: Recipe, directory: Path | None = None, callbacks: Sequence[Callback] = ()
) -> Result:
    """All rounds of the recipe; with a directory, everything is also written there as it comes."""
    folder = RunFolder(directory, recipe) if directory else None
    state, history = first_state(problem), list[Record]()
    with closing(start_engine(problem, recipe, state)) as engine:
        for now, record in rounds(problem, recipe, state, engine):
            state = now
            history.append(record)
            if folder:
                folder.append(record)
            for callback in callbacks:
                callback(record)
    problem.network.weights.copy_(problem.method.shown(state))
    problem.network.buffers.copy_(state.buffers)
    problem.network.reset_counters()
    problem.network.module.eval()
    if folder:
        folder.finish(problem.network, summary(history, recipe))
    return Result(recipe, history, problem.network.module, directory)


def rounds(
    problem: Problem, recipe: Recipe, state: ServerState, engine: Engine
) -> Iterator[tuple[ServerState, Record]]:
    """Round after round: the state after it and its record."""
    while state.round < recipe.server.rounds:
        begun = time.perf_counter()
        cohort = draw_cohort(recipe.server, problem.federation.clients, recipe.seed, state.round)
        state, report = conduct(problem, recipe.server, state, engine, cohort, recipe.evaluation)
        record = _record(state, report)
        every, last = recipe.evaluation.every, state.round == recipe.server.rounds
        if last or (every and state.round % every == 0):
            shown = replace(state, weights=problem.method.shown(state))
            score = engine.score(shown, recipe.evaluation.on, recipe.evaluation.batch)
            record |= {"accuracy": _number(score.accuracy), "loss": _number(score.loss)}
            if "classes" in recipe.evaluation.measures:
                record["class_accuracy"] = [_number(accuracy) for accuracy in score.per_class]
        record["seconds"] = round(time.perf_counter() - begun, 4)
        yield state, record


def _record(state: ServerState, report: RoundReport) -> Record:
    notes = {name: _number(value) for name, value in report.notes.items()}
    return {
        "round": state.round,
        "local_loss": _number(report.local_loss),
        **{name: _number(value) for name, value in report.measures.items()},
        "cohort": report.cohort,
        "bytes_down": report.bytes_down,
        "bytes_up": report.bytes_up,
        **notes,
    }


def _number(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None


def summary(history: Sequence[Record], recipe: Recipe) -> Record:
    """What remains of a run in a few numbers, each under a name that says which accuracy it is."""
    accuracies = [(r["accuracy"], r["round"]) for r in history if r.get("accuracy") is not None]
    result: Record = {"method": recipe.method, "rounds": len(history), "seed": recipe.seed}
    if accuracies:
        values = [accuracy for accuracy, _ in accuracies]
        best = max(accuracies, key=lambda entry: (entry[0], -entry[1]))
        result |= {
            "accuracy_last": values[-1],
            "accuracy_best": best[0],
            "accuracy_best_round": best[1],
            "accuracy_mean_of_last_10": sum(values[-10:]) / len(values[-10:]),
            "loss_last": next(r["loss"] for r in reversed(history) if "loss" in r),
        }
        if recipe.evaluation.target is not None:
            reached = (round for accuracy, round in accuracies if accuracy >= recipe.evaluation.target)
            result |= {"target": recipe.evaluation.target, "rounds_to_target": next(reached, None)}
    totals = {name: sum(record[name] for record in history) for name in ("bytes_down", "bytes_up", "seconds")}
    return result | totals
