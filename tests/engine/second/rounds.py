"""Runs rounds on the second device in a process of its own, and prints what became of each as a line of JSON.

python rounds.py DEVICE.so

Autograd starts threads for a device, after which a process can no longer fork workers; hence a process of its own.
"""

import json
import sys
import traceback
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from torch import nn

from fedflat import Augment, Federation, federate
from fedflat.engine.inline import Inline
from fedflat.flatness import look
from fedflat.local.kernels import definition_only, sgd
from fedflat.local.kernels.head import HeadPass
from fedflat.local.kernels.linear import ChainGradient, ChainStep, Rows
from fedflat.local.kernels.sgd import DirectStep, FusedUpdate
from fedflat.methods.catalogue import CATALOGUE
from fedflat.methods.parser import parse
from fedflat.models import lora
from fedflat.models.vector import Network
from fedflat.recipe import Local, Server, validated
from fedflat.rounds import client
from fedflat.rounds.server import conduct, first_state
from fedflat.rounds.setup import Problem
from fedflat.runs import build, load_run
from fedflat.runs.build import assemble
from fedflat.runs.experiment import execute
from fedflat.runs.personal import personalise


def register(library: str) -> None:
    """Make the device known to torch as "second"."""
    torch.ops.load_library(library)
    torch.utils.rename_privateuse1_backend("second")
    own = torch.ops.second
    module = types.ModuleType("torch.second")
    functions = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "_is_in_bad_fork": lambda: False,
        "manual_seed_all": own.seed,
        "get_rng_state": lambda device=None: own.state(),
        "set_rng_state": lambda state, device=None: own.set_state(state),
        "get_amp_supported_dtype": lambda: [torch.bfloat16],
    }
    for name, function in functions.items():
        setattr(module, name, function)
    torch._register_device_module("second", module)


def net(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    body = nn.Conv2d(1, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
    masks = [nn.Dropout(dropout)] if dropout else []  # a network with dropout trains its clients one by one
    return nn.Sequential(*body, *masks, nn.Linear(72, 10))


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))


def problem(federation: Federation, method: str, device: str, steps: int = 2, **settings) -> Problem:
    tuned = {name: settings.pop(name, usual) for name, usual in (("momentum", 0.5), ("clip", 1.0))}
    local = Local(steps=steps, batch=6, lr=0.1, weight_decay=1e-3, **tuned)
    dropout = settings.pop("dropout", 0.0)
    network = Network(settings.pop("build", lambda: net(dropout))(), torch.float64, device)
    return Problem.of(federation.to(torch.float64, device), network, parse(method), local, **settings)


def two_rounds(task: Problem) -> list[torch.Tensor]:
    """The weights and the accuracy after two rounds."""
    with closing(Inline(task)) as engine:
        state = first_state(task)
        for _ in range(2):
            state, report = conduct(task, state, engine, [0, 1, 2], Server(cohort=3, rounds=9))
            assert not report.refused, report.refused[0].detail
        score = engine.score(state, "test", 100)
    assert state.weights.device.type == task.network.weights.device.type
    return [state.weights.cpu(), torch.tensor([score.loss, score.values["accuracy"]])]


def compared(federation: Federation, method: str, **settings) -> None:
    """The same numbers on both devices."""
    ours = two_rounds(problem(federation, method, "second", **settings))
    with definition_only():
        usual = two_rounds(problem(federation, method, "cpu", **settings))
    for there, here in zip(ours, usual, strict=True):
        torch.testing.assert_close(there, here, rtol=1e-9, atol=1e-9)


@contextmanager
def shared_steps() -> Iterator[list[int]]:
    """The sizes of the groups of clients that went together."""
    sizes: list[int] = []
    together = client.train_together
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client, "train_together", lambda *a: sizes.append(len(a[2])) or together(*a))
        yield sizes


def grouped(federation: Federation) -> None:
    """Several clients at a time through the batched kernel."""
    with shared_steps() as sizes:
        compared(federation, "fedsmoo", group=3)
    assert sizes == [3, 3], "on the device; the CPU took the definition"


@contextmanager
def called(owner: type, name: str) -> Iterator[list[bool]]:
    """One entry for each call of a class's function."""
    calls: list[bool] = []
    function = getattr(owner, name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, lambda *a: calls.append(True) or function(*a))
        yield calls


def kernel(federation: Federation, owner: type, function: str, method: str, **settings) -> None:
    """A kernel that CUDA takes runs on the device, computes the definition, and does not wait."""
    with called(owner, function) as calls:
        compared(federation, method, **settings)
        assert calls
        waits(federation, method, **settings)


def personal(federation: Federation, how: str) -> None:
    """Clients adapt on the device, in this process however many are asked for."""
    found = []
    for device, workers in (("second", 2), ("cpu", 1)):
        task = problem(federation, "fedavg", device)
        found.append(personalise(task, task.network.weights, (1,), how, size=20, workers=workers))
    assert found[0] == found[1]


def resumed(federation: Federation) -> None:
    """A run that continues from a checkpoint on the device ends as the whole one, and is loaded on the CPU."""
    recipe = validated({"split": {"name": "given", "clients": 3}, "server": {"cohort": 3, "rounds": 3},
                        "checkpoint": {"every": 1}, "engine": {"device": "cuda"}, "precision": "float64",
                        "evaluation": {"measures": ["gradient", "lambda", "margin", "local_sharpness"]}})  # fmt: skip
    method = parse("fedsmoo + man(0.1)")

    def run(folder: Path, *callbacks, **settings) -> torch.Tensor:
        recorded = execute(assemble(recipe, federation, net(), method), folder, callbacks, **settings)
        return torch.cat([p.detach().cpu().flatten() for p in recorded.model.parameters()])

    def stop(record) -> None:
        if record["round"] == 2:
            raise InterruptedError

    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as folder:
        patch.setattr(build, "device_of", lambda recipe: "second" if recipe.engine.device == "cuda" else "cpu")
        whole = run(Path(folder, "whole"))
        with pytest.raises(InterruptedError):
            run(Path(folder, "parts"), stop)
        assert torch.equal(run(Path(folder, "parts"), resume=True), whole)
        loaded = load_run(Path(folder, "whole"), federation, module=net())
        assert torch.equal(loaded.network.weights, whole)


def adapters(federation: Federation) -> None:
    """LoRA, whose frozen weights are on the device too."""
    compared(federation, "fedsam", build=lambda: lora(net(), rank=2, targets="all"))


def flat(federation: Federation) -> None:
    """The flatness of a model on the device is that on the CPU."""
    data = federation.to(torch.float64).batch(torch.arange(30), None)
    there, here = (look(net().double().to(device), data) for device in ("second", "cpu"))
    assert str(there) == str(here)


def waits(federation: Federation, method: str, group: int = 1, **settings) -> None:
    """More local steps do not make the host wait more often."""
    counts = []
    for steps in (2, 5):
        task = problem(federation, method, "second", steps=steps, group=group, **settings)
        before = torch.ops.second.waits()
        with shared_steps() as sizes:
            two_rounds(task)
        assert sizes == ([] if group == 1 else [3, 3])
        counts.append(torch.ops.second.waits() - before)
    assert counts[0] == counts[1], f"{counts[0]} waits with 2 steps and {counts[1]} with 5"


def dropout(federation: Federation) -> None:
    """Masks come from the device's own generator, depend on the seed alone, and leave all generators as they were."""
    task = problem(federation, "fedavg", "second", dropout=0.5)
    states = torch.get_rng_state(), torch.ops.second.state()
    first = two_rounds(task)
    for state, now in zip(states, (torch.get_rng_state(), torch.ops.second.state()), strict=True):
        assert torch.equal(state, now), "a generator was left in another state"
    again = problem(federation, "fedavg", "second", dropout=0.5)  # seeds the device's generator for its weights
    torch.ops.second.seed(99)
    assert torch.equal(first[0], two_rounds(again)[0])
    assert not torch.equal(first[0], two_rounds(problem(federation, "fedavg", "second"))[0])


def waits_of(function: Callable[[], object]) -> int:
    """How often the host waits for the device in a call."""
    before = torch.ops.second.waits()
    function()
    return torch.ops.second.waits() - before


def refusals() -> None:
    """The device itself: it refuses what a real one refuses."""
    here, there = torch.ones(3), torch.ones(3, device="second")
    for wrong in (
        lambda: there + here,
        lambda: there.add_(here),
        lambda: torch.cat([there, here]),
        lambda: there.index_select(0, torch.zeros(1).long()),
        lambda: there.normal_(generator=torch.Generator()),
    ):
        with pytest.raises(RuntimeError, match="device"):
            wrong()
    assert waits_of(lambda: float((there * 2 + there.sum()).sum())) == 1
    some, places = there > 0, there.long() - 1
    for waiting in (
        there.nonzero,
        there.unique,
        lambda: there[some],
        lambda: there.masked_select(some),
        lambda: there.index_put((some,), there),
    ):
        assert waits_of(waiting) == 1, "the size of the result is a number"
    assert not waits_of(lambda: there[places].where(some, there).masked_fill(some, 0.0).index_put((places,), there))


# One for each kind of local step; those that decide by a number in every step (fedgf, top_eigenvalue, …) must wait.
STEPS = ["fedavg", "fedsam", "looksam", "fedasam", "fedsmoo", "fedsol", "man", "moon", "scaffold", "fedadamw", "muon"]

TOGETHER = ["fedavg", "fedsam", "fedsmoo", "fedavg + man(0.0)"]  # the last one only watches its term

# For each function of a kernel a local step that CUDA takes by it.
KERNELS = {
    (ChainStep, "__call__"): {"method": "fedavg", "build": mlp, "momentum": 0.0, "clip": 0.0},
    (ChainGradient, "__call__"): {"method": "fedsam", "build": mlp},
    (Rows, "descend"): {"method": "fedavg", "build": mlp, "momentum": 0.0, "clip": 0.0, "group": 3},
    (Rows, "gradient"): {"method": "fedsam", "build": mlp, "group": 3},
    (HeadPass, "at_head"): {"method": "fedsol(scope='head')"},
    (DirectStep, "__call__"): {"method": "fedavg", "clip": 0.0},
    (FusedUpdate, "__call__"): {"method": "fedsam"},
}
PERSONAL = ["finetune", "perfedavg", "knn", "local"]


def main() -> None:
    warnings.simplefilter("error", UserWarning)  # clients whose common steps fail train one by one
    register(sys.argv[1])
    sgd.DEVICES += ("second",)  # as CUDA: torch has the fused kernel
    torch.set_num_threads(1)
    federation = federate("digits", "iid", 3, seed=1, limit=60)
    shaken = replace(federation, augment=Augment(crop=1, flip=0.5, cutout=2))
    cases = {"device": refusals, "dropout": lambda: dropout(federation), "grouped": lambda: grouped(federation)}
    cases |= {method: lambda method=method: compared(federation, method) for method in CATALOGUE}
    cases |= {f"personal {how}": lambda how=how: personal(federation, how) for how in PERSONAL}
    cases |= {"resumed": lambda: resumed(federation), "adapters": lambda: adapters(federation)}
    cases["flat"] = lambda: flat(federation)
    cases["augmented"] = lambda: compared(shaken, "fedavg")
    cases |= {f"waits {m}": lambda m=m: waits(federation, m) for m in STEPS}
    cases |= {f"waits together {m}": lambda m=m: waits(federation, m, 3) for m in TOGETHER}
    for (owner, function), how in KERNELS.items():
        cases[f"{owner.__name__}.{function}"] = lambda o=owner, f=function, how=how: kernel(federation, o, f, **how)
    for name, case in cases.items():
        try:
            case()
            told = ""
        except Exception:
            told = traceback.format_exc()[-1500:]
        print(json.dumps({"case": name, "told": told}), flush=True)


if __name__ == "__main__":
    main()
