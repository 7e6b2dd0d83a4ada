"""Deployments for the tests of this folder, by benchmarks/loopback.py, and the simulations to compare them with."""

import importlib.util
import json
from pathlib import Path

import pytest

from fedflat.recipe import load
from fedflat.runs.build import prepare
from fedflat.runs.experiment import execute
from fedflat.runs.launch import start_engine

LOOPBACK = Path(__file__).parents[2] / "benchmarks" / "loopback.py"
# A rehearsal: both sides draw by the recipe's seed, so that a deployment has the simulator's bits.
SMALL = ["model.hidden=[8]", "split.clients=4", "server.cohort=3", "server.rounds=3", "local.steps=2",
         "engine.name=inline", "engine.group=1", "admission.deadline=10", "deployment.draws=recipe"]  # fmt: skip
POLICY = """
code = ["batch_norm_net"]
ledger = "ledger"

[answers]
hessian = 1000
min_samples = 1
"""


@pytest.fixture(scope="session")
def loopback():
    """The module with `InProcess` and `Loopback`."""
    found = importlib.util.spec_from_file_location("loopback", LOOPBACK)
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def small():
    """A function that gives a small recipe, with changes."""
    return lambda *changes: load(None, [*SMALL, *changes])


@pytest.fixture
def simulated(tmp_path):
    """A function that runs a recipe in the simulator and gives the outcome."""

    def run(recipe, start=start_engine):
        execute(prepare(recipe), tmp_path / "here", start=start)
        return outcome(tmp_path / "here")

    return run


@pytest.fixture
def deployed(loopback, tmp_path):
    """A function that deploys a recipe in this process and gives the outcome; `grid` may be another class.

    Called again, it goes on with what it finds, on new nodes.
    """
    from fedflat.flower import client_app
    from fedflat.flower.service import serve

    def run(recipe, grid=loopback.InProcess, data=None, source=None, policy=POLICY, keys=None, **config):
        (tmp_path / "policy.toml").write_text(policy)
        config = {"policy": str(tmp_path / "policy.toml"), **config}
        nodes = grid(client_app(source or recipe, data), recipe.split.clients, **config)
        serve(nodes, recipe, tmp_path / "out", data, keys)
        return outcome(tmp_path / "out")

    return run


def outcome(folder):
    """A run's model to the byte, and its records without the seconds."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    model = (folder / "model.safetensors").read_bytes()
    return model, [{name: value for name, value in record.items() if name != "seconds"} for record in records]


@pytest.fixture
def cut_in(loopback):
    """A function that gives a grid on which the server dies as it sends the first broadcast of a round."""

    def cut(round):
        class Cut(loopback.InProcess):
            def answers(self, message):
                if message.metadata.group_id == str(round):
                    raise ConnectionAbortedError
                return super().answers(message)

        return Cut

    return cut
