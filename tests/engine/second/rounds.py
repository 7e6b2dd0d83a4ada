"""Runs rounds on the second device in a process of its own, and prints what became of each as a line of JSON.

python rounds.py DEVICE.so

Autograd starts threads for a device, after which a process can no longer fork workers; hence a process of its own.
"""

import json
import sys
import traceback
import types
from contextlib import closing
from dataclasses import replace

import pytest
import torch
from torch import nn

from fedflat import Augment, Federation, federate
from fedflat.engine.inline import Inline
from fedflat.local.kernels import definition_only
from fedflat.methods.catalogue import CATALOGUE
from fedflat.methods.parser import parse
from fedflat.models.vector import Network
from fedflat.recipe import Local, Server
from fedflat.rounds.server import conduct, first_state
from fedflat.rounds.setup import Problem


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
    head = nn.Linear(72, 10)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(dropout), head
    )


def problem(federation: Federation, method: str, device: str, steps: int = 2, **settings) -> Problem:
    local = Local(steps=steps, batch=6, lr=0.1, momentum=0.5, weight_decay=1e-3, clip=1.0)
    dropout = settings.pop("dropout", 0.0)
    network = Network(net(dropout), torch.float64, device)
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


def grouped(federation: Federation) -> None:
    """Several clients at a time through the batched kernel."""
    compared(federation, "fedavg", group=3)


def waits(federation: Federation, method: str) -> None:
    """More local steps do not make the host wait more often."""
    counts = []
    for steps in (2, 5):
        task = problem(federation, method, "second", steps=steps, group=1)
        before = torch.ops.second.waits()
        two_rounds(task)
        counts.append(torch.ops.second.waits() - before)
    assert counts[0] == counts[1], f"{counts[0]} waits with 2 steps and {counts[1]} with 5"


def dropout(federation: Federation) -> None:
    """Masks come from the device's own generator, depend on the seed alone, and leave all generators as they were."""
    task = problem(federation, "fedavg", "second", dropout=0.5)
    states = torch.get_rng_state(), torch.ops.second.state()
    first = two_rounds(task)
    for state, now in zip(states, (torch.get_rng_state(), torch.ops.second.state()), strict=True):
        assert torch.equal(state, now), "a generator was left in another state"
    torch.ops.second.seed(99)
    assert torch.equal(first[0], two_rounds(problem(federation, "fedavg", "second", dropout=0.5))[0])
    assert not torch.equal(first[0], two_rounds(problem(federation, "fedavg", "second"))[0])


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
    before = torch.ops.second.waits()
    assert float((there * 2 + there.sum()).sum()) == 15.0 and torch.ops.second.waits() == before + 1


# One for each kind of local step; those that decide by a number in every step (fedgf, top_eigenvalue, …) must wait.
STEPS = ["fedavg", "fedsam", "looksam", "fedasam", "fedsmoo", "fedsol", "man", "moon", "scaffold", "fedadamw", "muon"]


def main() -> None:
    register(sys.argv[1])
    torch.set_num_threads(1)
    federation = federate("digits", "iid", 3, seed=1, limit=60)
    shaken = replace(federation, augment=Augment(crop=1, flip=0.5, cutout=2))
    cases = {"device": refusals, "dropout": lambda: dropout(federation), "grouped": lambda: grouped(federation)}
    cases |= {method: lambda method=method: compared(federation, method) for method in CATALOGUE}
    cases["augmented"] = lambda: compared(shaken, "fedavg")
    cases |= {f"waits {m}": lambda m=m: waits(federation, m) for m in STEPS}
    for name, case in cases.items():
        try:
            case()
            told = ""
        except Exception:
            told = traceback.format_exc()[-1500:]
        print(json.dumps({"case": name, "told": told}), flush=True)


if __name__ == "__main__":
    main()
