"""Replay recorded trajectories of the methods' authors in float64 and measure how far ours deviates."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedflat.client import Problem
from fedflat.engine.inline import Inline
from fedflat.errors import DataError, FedflatError, RecipeError
from fedflat.federation.datasets import Dataset, Samples
from fedflat.federation.federation import Federation
from fedflat.methods import parse
from fedflat.recipe import Evaluation, Server, validated
from fedflat.server import conduct, first_state
from fedflat.vector import Network

Arrays = dict[str, Any]

LAYERS: dict[str, Callable[..., nn.Module]] = {
    "linear": lambda i, o: nn.Linear(int(i), int(o)),
    "conv": lambda i, o, k, pad="pad=0": nn.Conv2d(int(i), int(o), int(k), padding=int(pad.removeprefix("pad="))),
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "maxpool": lambda k: nn.MaxPool2d(int(k)),
    "flatten": nn.Flatten,
}


@dataclass(frozen=True)
class Verdict:
    """The largest deviation of one file, in weights and, if recorded, in consistency."""

    path: Path
    method: str
    rounds: int
    deviation: float
    tolerance: float

    @property
    def good(self) -> bool:
        return self.deviation <= self.tolerance


def verify(path: Path) -> Verdict:
    """Replay one file: the same start, samples and participants must give the recorded weights after every round."""
    arrays = _read(path)
    try:
        recipe = json.loads(str(arrays["recipe"]))
        method, problem, server = _problem(recipe, arrays)
        deviation = _replay(problem, server, arrays)
        return Verdict(path, method, len(arrays["weights"]), deviation, float(recipe["tolerance"]))
    except FedflatError as error:
        raise type(error)(f"{path}: {error}") from None
    except (KeyError, ValueError, TypeError, RuntimeError, IndexError) as error:
        raise DataError(f"{path}: not a trajectory that can be replayed ({type(error).__name__}: {error})") from None


def _read(path: Path) -> Arrays:
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except Exception as error:
        raise DataError(f"{path}: not a readable .npz file ({error})") from None


def _problem(recipe: Arrays, arrays: Arrays) -> tuple[str, Problem, Server]:
    written = [{"name": recipe["method"], **recipe["options"]}]
    written += [
        {"name": part["part"], **{k: v for k, v in part.items() if k != "part"}} for part in recipe.get("with") or []
    ]
    local = dict(recipe["local"])
    local |= {"clip": local.get("clip") or 0.0, "clip_mode": "official"}
    checked = validated({"local": local, "server": {"average": recipe["average"]}})
    network = Network(_model(recipe["model"]), torch.float64)
    _check_shapes(arrays, network.size)
    network.weights.copy_(torch.from_numpy(arrays["initial"]))
    federation = _federation(arrays)
    name = " + ".join(part["name"] for part in written)
    return name, Problem(federation, network, parse(written), checked.local, shuffle=False), checked.server


def _model(layers: Sequence[str]) -> nn.Sequential:
    modules = []
    for layer in layers:
        kind, *arguments = layer.split()
        if kind not in LAYERS:
            raise RecipeError(f"model: there is no layer {layer!r}; known: {', '.join(LAYERS)}")
        modules.append(LAYERS[kind](*arguments))
    return nn.Sequential(*modules)


def _federation(arrays: Arrays) -> Federation:
    clients = arrays["participants"].shape[1]
    inputs = [torch.from_numpy(np.asarray(arrays[f"inputs_{i}"], np.float64)) for i in range(clients)]
    labels = [torch.from_numpy(np.asarray(arrays[f"labels_{i}"], np.int64)) for i in range(clients)]
    samples = Samples(torch.cat(inputs), torch.cat(labels))
    dataset = Dataset("trajectory", samples, samples, int(samples.labels.max()) + 1, (), ())
    owners = torch.arange(len(samples.labels)).split([len(part) for part in labels])
    return Federation(dataset, tuple(owners), dtype=torch.float64)


CONSISTENCY = Evaluation(measures=["consistency"])


def _replay(problem: Problem, server: Server, arrays: Arrays) -> float:
    deviations, state = [0.0], first_state(problem)
    with closing(Inline(problem)) as engine:
        for round, active in enumerate(arrays["participants"]):
            if not active.any():
                state = replace(state, round=state.round + 1)
                continue
            cohort = np.flatnonzero(active).tolist()
            state, report = conduct(problem, server, state, engine, cohort, CONSISTENCY)
            deviations.append(_largest(state.weights, torch.from_numpy(arrays["weights"][round])))
            if "consistency" in arrays:
                recorded = torch.tensor(float(arrays["consistency"][round]))
                deviations.append(_largest(torch.tensor(report.measures["consistency"]), recorded))
    return max(deviations)


def _largest(ours: Tensor, theirs: Tensor) -> float:
    difference = (ours - theirs).abs().max()
    return float(difference) if torch.isfinite(difference) else float("inf")


def _check_shapes(arrays: Arrays, size: int) -> None:
    rounds, clients = arrays["participants"].shape
    wanted = {"initial": (size,), "weights": (rounds, size), "consistency": (rounds,)}
    for name, shape in wanted.items():
        if name in arrays and arrays[name].shape != shape:
            raise RecipeError(
                f"{name} has shape {arrays[name].shape}, but {rounds} rounds of a model with {size} parameters "
                f"make it {shape}"
            )
    for i in range(clients):
        if not len(arrays[f"labels_{i}"]) or len(arrays[f"labels_{i}"]) != len(arrays[f"inputs_{i}"]):
            raise RecipeError(
                f"client {i} has {len(arrays[f'inputs_{i}'])} inputs and {len(arrays[f'labels_{i}'])} labels"
            )
