"""Ray: the same numbers as on the other engines, also when a node is lost in the middle of a round."""

import os
import socket
import sys
import threading
import time
from contextlib import closing
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

from fedflat import federate, train, trusted
from fedflat.engine import cluster
from fedflat.errors import RecipeError, TrainingError
from fedflat.methods.parser import parse
from fedflat.methods.part import Part
from fedflat.models.vector import Network
from fedflat.rounds.server import first_state
from fedflat.rounds.setup import Problem

ray = pytest.importorskip("ray")
Cluster = pytest.importorskip("ray.cluster_utils").Cluster
METHODS = ("fedavg", "scaffold", "fedsmoo", "fedsol", "feddyn + man(0.1)")
pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own


@pytest.fixture(scope="module")
def two_nodes():
    """A head without cores for clients, and two nodes of one core each: real processes on this machine."""
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    store = 100 * 2**20
    here = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": store})
    try:
        nodes = [here.add_node(num_cpus=1, object_store_memory=store) for _ in range(2)]
        ray.init(address=here.address, log_to_driver=False, logging_level="ERROR")
        yield here, nodes
    finally:
        ray.shutdown()
        here.shutdown()


@pytest.fixture(scope="module")
def digits():
    return federate("digits", clients=20, alpha=0.5)


def weights(result):
    return torch.cat([p.detach().flatten() for p in result.model.parameters()])


def test_a_cluster_that_a_file_names_is_not_joined_unless_ray_is_trusted(digits, monkeypatch):
    """Its processes send pickled objects, which run code in those that read them."""
    monkeypatch.setattr(trusted, "_packages", set())
    monkeypatch.setattr(socket, "create_connection", lambda *_, **__: pytest.fail("it was called"))
    with pytest.raises(RecipeError, match=r"engine.address = 'evil.example:6379': who joins a Ray cluster runs what"):
        train(digits, rounds=1, engine="ray", address="evil.example:6379")


def test_without_an_address_no_cluster_is_joined_that_somebody_announces(digits, monkeypatch):
    """Ray takes the address in /tmp/ray/ray_current_cluster, which any user can write, unless told otherwise."""
    said = {}
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **settings: said.update(settings))
    monkeypatch.setattr(cluster.signal, "signal", lambda *_: None)
    cluster._connect(None, 0)
    assert said["address"] == "local"


def test_a_cluster_that_is_not_there_is_one_sentence(digits, monkeypatch):
    monkeypatch.setattr(trusted, "_packages", {"ray"})
    with pytest.raises(TrainingError, match=r"engine.address = '127.0.0.1:1': no Ray cluster answers there"):
        train(digits, rounds=1, engine="ray", address="127.0.0.1:1")


def test_ray_is_an_extra(digits, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(RecipeError, match=r"pip install 'fedflat\[ray\]'"):
        train(digits, rounds=1, engine="ray")


@pytest.mark.parametrize("method", METHODS)
def test_a_run_on_ray_equals_one_in_this_process_to_the_bit(two_nodes, digits, method):
    settings = dict(method=method, rounds=3, cohort=6)
    here, there = (train(digits, **settings, engine=engine) for engine in ("inline", "ray"))
    assert torch.equal(weights(here), weights(there))
    numbers = [[{k: v for k, v in r.items() if k != "seconds"} for r in run.history] for run in (here, there)]
    assert numbers[0] == numbers[1]


def test_clients_that_share_steps_do_so_on_ray_too(two_nodes, digits):
    settings = dict(rounds=2, cohort=8, model_hidden=[8], engine_group=4)
    here, there = (train(digits, **settings, engine=engine) for engine in ("inline", "ray"))
    assert torch.equal(weights(here), weights(there))


def test_a_model_that_has_not_changed_is_scored_once_on_ray_too(two_nodes, digits):
    problem = Problem.of(digits, Network(nn.Sequential(nn.Flatten(), nn.Linear(64, 10))), parse("fedavg"))
    state = first_state(problem)
    with closing(cluster.Cluster(problem)) as engine:
        first = engine.score(state, "test", 1000)
        assert engine.score(replace(state, round=5), "test", 1000) is first
        again = engine.score(replace(state, weights=state.weights.clone()), "test", 1000)
        assert again == first and again is not first


class Moody(nn.Module):
    """Fails for the clients whose last batch has three samples."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        if self.training and len(x) == 3:
            raise ValueError("a short batch")
        return self.head(x.flatten(1))


def test_a_client_that_raises_on_ray_is_refused_and_the_others_are_merged(two_nodes, digits):
    settings = dict(rounds=1, cohort=20, batch=10, engine_group=1)
    here, there = (train(digits, Moody(), **settings, engine=engine) for engine in ("inline", "ray"))
    assert [r["reason"] for r in there.history[0]["refused"]] == ["raised"] * len(here.history[0]["refused"])
    assert {r["client"] for r in there.history[0]["refused"]} == {r["client"] for r in here.history[0]["refused"]}
    assert torch.equal(weights(here), weights(there))


@dataclass(frozen=True)
class Slow(Part):
    """Half a second for every client, so that a node can be lost in the middle of a round."""

    def plan(self, rule, sent, memory):
        time.sleep(0.5)
        return rule


def test_a_node_that_is_lost_in_a_round_changes_nothing(two_nodes, digits):
    here, nodes = two_nodes
    calm = train(digits, method="scaffold", rounds=3, cohort=6, engine="inline")
    loss = threading.Timer(2.0, lambda: here.remove_node(nodes[0], allow_graceful=False))
    loss.start()
    shaken = train(digits, method=parse("scaffold") + Slow(), rounds=3, cohort=6, engine="ray")
    loss.join()
    end = time.monotonic() + 60
    while sum(node["Alive"] for node in ray.nodes()) > 2 and time.monotonic() < end:
        time.sleep(0.5)
    assert sum(node["Alive"] for node in ray.nodes()) == 2, "the head and the node that is left"
    assert torch.equal(weights(calm), weights(shaken))
    assert not any("refused" in record for record in shaken.history)
