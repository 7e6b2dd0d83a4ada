"""Steps by a graph equal direct steps.

No GPU is needed: a stand-in for torch.cuda.graph notes every operator that a step calls, below autograd, and repeats
them in the same memory. What a CUDA graph would miss is missed here too: everything that Python does in a step, and
every tensor that is not the recorded one.
"""

import gc
from copy import deepcopy
from weakref import ref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedflat import federate, train
from fedflat.errors import RecipeError
from fedflat.local import LocalRule
from fedflat.local import train as train_client
from fedflat.local.kernels import choose, graph
from fedflat.local.kernels.graph import GraphedStep
from fedflat.methods.parser import parse
from fedflat.models import Network
from fedflat.recipe import validated
from fedflat.rounds.client import local_rule
from fedflat.rounds.setup import Broadcast
from fedflat.runs.build import assemble


class Noted(TorchDispatchMode):
    """Notes the calls of operators with their arguments and results."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.calls.append((function, args, kwargs or {}, result))
        return result


@pytest.fixture(autouse=True)
def recorded(monkeypatch):
    """Graphs on the processor; returns how many steps were recorded."""
    steps = []

    def record(step):
        step()  # warms up
        with Noted() as noted:
            step()
        steps.append(noted)

        @torch.no_grad()
        def repeat():
            for function, args, kwargs, result in noted.calls:
                for old, new in zip(tree_leaves(result), tree_leaves(function(*args, **kwargs)), strict=True):
                    if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)

        return repeat

    monkeypatch.setattr(graph, "record", record)
    monkeypatch.setattr(graph, "DEVICES", ("cpu",))
    return steps


def network(*layers):
    torch.manual_seed(0)
    layers = layers or (nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(108, 4))
    return Network(nn.Sequential(*layers), torch.float64)


def batches(*sizes, seed=1):
    chance = torch.Generator().manual_seed(seed)
    draw = lambda n: torch.randn(n, 1, 8, 8, generator=chance, dtype=torch.float64)  # noqa: E731
    return [(draw(n), torch.randint(0, 4, (n,), generator=chance)) for n in sizes]


def compared(rule, clients, make=network):
    """Assert that clients who train one after the other end with the same bits and losses; return both networks."""
    plain, graphed = make(), make()
    start = plain.weights.clone()
    for client in clients:
        torch.manual_seed(7)
        one = train_client(plain, start, rule(graph=False), client, F.cross_entropy)
        torch.manual_seed(7)
        other = train_client(graphed, start, rule(graph=True), client, F.cross_entropy)
        assert one.delta.abs().max() > 0
        assert torch.equal(one.delta, other.delta)
        assert one.loss == other.loss
        assert torch.equal(plain.buffers, graphed.buffers)
    return plain, graphed


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_steps_are_those_without_a_graph(momentum, decay, recorded):
    def rule(graph):
        return LocalRule(0.1, 4, momentum=momentum, weight_decay=decay, graph=graph)

    compared(rule, [batches(5, 5, 5, 5), batches(5, 5, 5, 5, seed=2)])
    assert len(recorded) == 1  # for the second client too


def test_the_velocity_that_a_graph_has_recorded_is_the_only_one(monkeypatch):
    seen, graphed = [], GraphedStep.__call__

    def step(self, slope, velocity, k):
        seen.append((velocity, slope.velocity))
        graphed(self, slope, velocity, k)

    monkeypatch.setattr(GraphedStep, "__call__", step)
    net, rule = network(), LocalRule(0.1, 2, momentum=0.9, graph=True)
    train_client(net, net.weights.clone(), rule, batches(4, 4), F.cross_entropy)
    assert seen == [(None, None)] * 2


def test_a_short_batch_has_its_own_graph_and_very_many_sizes_none(recorded):
    def rule(graph):
        return LocalRule(0.1, 4, momentum=0.9, nesterov=True, graph=graph)

    compared(rule, [batches(5, 5, 3, 5), batches(3, 4, 2, 1), batches(6, 5, 7, 6)])
    assert len(recorded) == graph.MOST == 4


def test_another_rate_or_another_place_of_the_weights_is_recorded_anew(recorded):
    rates = iter([0.1, 0.1, 0.05, 0.05])
    compared(lambda graph: LocalRule(next(rates), 2, graph=graph), [batches(4, 4), batches(4, 4, seed=3)])
    assert len(recorded) == 2
    moved = network()
    for _ in range(2):
        train_client(moved, moved.weights.clone(), LocalRule(0.1, 2, graph=True), batches(4, 4), F.cross_entropy)
        moved.bind(moved.weights.clone())
    assert len(recorded) == 4


def test_graphs_go_with_their_network_and_stay_behind_when_it_is_copied():
    net = network()
    train_client(net, net.weights.clone(), LocalRule(0.1, 2, graph=True), batches(4, 4), F.cross_entropy)
    assert net.recordings is not None and deepcopy(net).recordings is None
    gone = ref(net)
    del net
    gc.collect()
    assert gone() is None


def test_statistics_counters_and_dropout_are_those_without_a_graph():
    def make():
        return network(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Dropout(0.4), nn.Flatten(), nn.Linear(108, 4))

    plain, graphed = compared(lambda graph: LocalRule(0.1, 3, 1, graph=graph), [batches(5, 5, 5)] * 2, make)
    for one, other in zip(plain.module.buffers(), graphed.module.buffers(), strict=True):
        assert torch.equal(one, other)


def test_only_plain_steps_of_classes_are_recorded():
    x, y = batches(4)[0]
    fits = lambda loss=F.cross_entropy, labels=y, **fields: GraphedStep.fits(  # noqa: E731
        network(), LocalRule(0.1, 4, **{"graph": True, **fields}), loss, labels
    )
    assert fits(momentum=0.9)
    assert not fits(graph=False)
    assert not fits(lr_floor=0.1)
    assert not fits(clip=1.0)
    assert not fits(terms=(lambda here: here.loss,))
    assert not fits(ascent=lambda slope, carry: (slope(), carry))
    assert not fits(pull=torch.ones(1))
    assert not fits(loss=F.mse_loss)
    assert not fits(labels=x)
    assert not fits(labels=y[:, None])


def test_without_a_gpu_no_step_is_recorded_and_a_recipe_that_asks_for_it_is_refused(monkeypatch):
    monkeypatch.setattr(graph, "DEVICES", ("cuda",))
    rule = LocalRule(0.1, 4, graph=True)
    assert not isinstance(choose(network(), rule, F.cross_entropy, batches(4)[0][1]).step, GraphedStep)
    with pytest.raises(RecipeError, match=r"engine\.graph = true works on cuda only"):
        train(federate("digits", "iid", 4), "mlp", "fedavg", rounds=1, graph=True)


def test_a_recipe_passes_the_wish_on(monkeypatch):
    monkeypatch.setattr("fedflat.runs.build.device_of", lambda recipe: "cpu")
    recipe = validated({"engine": {"graph": True}, "server": {"cohort": 40}, "split": {"clients": 40}})
    problem = assemble(recipe, federate("digits", "iid", 40), None, parse("fedavg"))
    with pytest.raises(RecipeError, match=r"engine\.group = 2: with engine\.graph = true clients train one by one"):
        validated({"engine": {"graph": True, "group": 2}})
    assert problem.group == 1
    assert local_rule(problem, Broadcast(0, 0.1, {}), 0, 10).graph
