"""The format of recorded trajectories: reads and checks a file's arrays and builds the problem they describe."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedflat.errors import DataError, RecipeError, nearest
from fedflat.federation import Dataset, Federation, Samples, load_npz
from fedflat.methods import parse
from fedflat.models import Network
from fedflat.recipe import validated
from fedflat.rounds import Problem

Arrays = dict[str, Any]
Shapes = dict[str, tuple[int, ...]]
KINDS = {"f": "floating-point numbers", "iu": "whole numbers", "bui": "zeros and ones", "fiu": "numbers", "U": "text"}
ADAPTED = ("personal_e", "accuracy_e", "neighbours_e", "scores_e", "predictions_e")  # scores of personal models

NAMES = {  # names of the arrays, and the kinds of their entries
    "recipe": "U",
    "participants": "bui",
    "initial|weights|consistency|active|all": "f",
    r"(test_)?inputs_\d+": "fiu",
    r"(test_)?labels_\d+|predictions_e\d+_\d+": "iu",
    r"(personal|accuracy)_e\d+|(neighbours|scores)_e\d+_\d+": "f",
}

EXAMPLES = ("recipe", "participants", "initial", "weights", "consistency", "active", "all", "inputs_0", "labels_0")

LAYERS: dict[str, Callable[..., nn.Module]] = {
    "linear": lambda i, o: nn.Linear(int(i), int(o)),
    "conv": lambda i, o, k, pad="pad=0": nn.Conv2d(int(i), int(o), int(k), padding=int(pad.removeprefix("pad="))),
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "maxpool": lambda k: nn.MaxPool2d(int(k)),
    "flatten": nn.Flatten,
}


def read(path: Path) -> Arrays:
    """Read all arrays of one file."""
    try:
        return load_npz(path)
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except Exception as error:
        raise DataError(f"{path}: not a readable .npz file ({error})") from None


def problem_of(recipe: Arrays, arrays: Arrays) -> tuple[str, Problem]:
    """Check the arrays; return the method's name, and the problem with its initial weights."""
    alone = recipe["method"] == "local"
    written = [] if alone else [{"name": recipe["method"], **recipe["options"]}]
    written += [
        {"name": part["part"], **{k: v for k, v in part.items() if k != "part"}} for part in recipe.get("with") or []
    ]
    local = dict(recipe["local"])
    local |= {"clip": local.get("clip") or 0.0, "clip_mode": "official"}
    measures = {"measures": ["consistency"]}
    checked = validated({"local": local, "server": {"average": recipe["average"]}, "evaluation": measures})
    network = Network(_model(recipe["model"]), torch.float64)
    check_arrays(arrays, network.size)
    if alone and len(arrays["participants"]):
        raise RecipeError(f'method = "local" has no rounds, but {len(arrays["participants"])} are recorded')
    network.weights.copy_(torch.from_numpy(arrays["initial"]))
    if not len(arrays["participants"]) and not recipe.get("personal"):
        raise RecipeError("there is nothing to compare: neither rounds nor personal models are recorded")
    name = " + ".join(part["name"] for part in written) or "local"
    return name, Problem(_federation(arrays), network, parse(written), checked, shuffle=False)


def _model(layers: Sequence[str]) -> nn.Sequential:
    modules = []
    for layer in layers:
        kind, *arguments = layer.split()
        if kind not in LAYERS:
            raise RecipeError(f"model: there is no layer {layer!r}; known: {', '.join(LAYERS)}")
        modules.append(LAYERS[kind](*arguments))
    return nn.Sequential(*modules)


def _federation(arrays: Arrays) -> Federation:
    pairs = [samples_of(arrays, i) for i in range(arrays["participants"].shape[1])]
    inputs, labels = zip(*pairs, strict=True)
    samples = Samples(torch.cat(inputs), torch.cat(labels))
    dataset = Dataset("trajectory", samples, samples, int(samples.labels.max()) + 1, (), ())
    owners = torch.arange(len(samples.labels)).split([len(part) for part in labels])
    return Federation(dataset, tuple(owners), dtype=torch.float64)


def samples_of(arrays: Arrays, client: int, kind: str = "") -> tuple[Tensor, Tensor]:
    """Return a client's inputs and labels, for training or, if the kind is "test_", for testing."""
    inputs = torch.from_numpy(np.asarray(arrays[f"{kind}inputs_{client}"], np.float64))
    return inputs, torch.from_numpy(np.asarray(arrays[f"{kind}labels_{client}"], np.int64))


def check_arrays(arrays: Arrays, size: int) -> None:
    """Refuse a file whose rounds lack an array, or have one of another shape or one that is not used."""
    check_kinds(arrays)
    shape = shape_of(arrays, "participants")
    if len(shape) != 2:
        raise RecipeError(f"participants has shape {shape}, but must have a row for each round")
    rounds, clients = shape
    refuse_strangers(arrays, clients)
    required: Shapes = {"initial": (size,), "weights": (rounds, size)}
    optional: Shapes = {"consistency": (rounds,), "active": (rounds, size), "all": (rounds, size)}
    for name, wanted in (required | {name: optional[name] for name in optional if name in arrays}).items():
        if shape_of(arrays, name) != wanted:
            raise RecipeError(
                f"{name} has shape {arrays[name].shape}, but {rounds} rounds of a model with {size} parameters "
                f"make it {wanted}"
            )
    for i in range(clients):
        check_samples(arrays, i, "")


def check_kinds(arrays: Arrays) -> None:
    """Refuse an array with an unknown name, or whose entries are not of the kind that its name requires."""
    for name, array in arrays.items():
        kind = kind_of(name)
        if kind is None:
            raise RecipeError(f"{name} is not an array of a trajectory; {nearest(name, EXAMPLES)}")
        if array.dtype.kind not in kind:
            raise RecipeError(f"{name} holds {array.dtype}, but must hold {KINDS[kind]}")
        if kind == "bui" and not np.isin(array, (0, 1)).all():
            raise RecipeError(f"{name} must hold {KINDS[kind]} only")


def kind_of(name: str) -> str | None:
    """Return the NumPy kinds (letters) that an array of this name may have; None for an unknown name.

    >>> kind_of("weights"), kind_of("test_labels_3"), kind_of("weight")
    ('f', 'iu', None)
    """
    return next((kind for pattern, kind in NAMES.items() if re.fullmatch(pattern, name)), None)


def check_samples(arrays: Arrays, client: int, kind: str) -> None:
    """Refuse a client without samples, or without exactly one label per input."""
    inputs, labels = (shape_of(arrays, f"{kind}{name}_{client}") for name in ("inputs", "labels"))
    if len(labels) != 1 or not inputs or inputs[0] != labels[0] or not labels[0]:
        raise RecipeError(f"{kind}inputs_{client} has shape {inputs} and {kind}labels_{client} has shape {labels}")


def refuse_strangers(arrays: Arrays, clients: int) -> None:
    """Refuse samples of clients that do not exist."""
    for name in arrays:
        if re.fullmatch(r"(test_)?(inputs|labels)_\d+", name) and int(name.rpartition("_")[2]) >= clients:
            raise RecipeError(f"{name} is of a client that participants does not have; it has {clients}")


def refuse_others(arrays: Arrays, known: Shapes, why: str) -> None:
    """Refuse arrays of personal models that are not compared with anything."""
    for name in arrays:
        if name.startswith(ADAPTED) and name not in known:
            raise RecipeError(f"{name} cannot be compared: {why}")


def shape_of(arrays: Arrays, name: str) -> tuple[int, ...]:
    """Return the shape of a required array."""
    if name not in arrays:
        raise RecipeError(f"{name} is missing")
    shape: tuple[int, ...] = arrays[name].shape
    return shape
