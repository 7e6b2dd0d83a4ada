"""Faults that were found once and shall not come back: batch statistics, SWA, FedLESAM."""

import pytest
import torch
from torch import nn

from fedflat import train
from fedflat.client import Problem
from fedflat.engine.inline import Inline
from fedflat.local import LocalRule
from fedflat.methods import parse
from fedflat.parts import LookbackAscent
from fedflat.recipe import Local, Server
from fedflat.server import conduct, first_state
from fedflat.vector import Network


def normed():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10))


@pytest.mark.parametrize(
    "method",
    ["fedlesam", "fedsol(source='fedprox')", "fedsol(source='scaffold', scope='head')", "fedsol_ablation('A5')"],
)
def test_every_step_updates_the_batch_statistics_once(digits, method):
    settings = dict(rounds=1, cohort=4, steps=1, batch=0, evaluation_every=0, engine="inline")
    means = [train(digits, normed(), m, **settings).model[2].running_mean for m in (method, "fedavg")]
    assert means[1].any()
    torch.testing.assert_close(*means)


def test_the_frozen_global_model_has_the_global_batch_statistics(digits):
    problem = Problem(digits, Network(normed()), parse("fedntd"), Local(batch=0))
    state, engine = first_state(problem), Inline(problem)
    for _ in range(2):
        sent = state.buffers.clone()
        state, _ = conduct(problem, Server(), state, engine, [0, 1])
    assert torch.equal(engine._worker._reference.buffers, sent)
    engine.close()


def test_swa_never_shows_a_model_of_zeros(digits):
    model = train(digits, "mlp", "swa(start=0, every=2)", rounds=1, evaluation_every=0, engine="inline").model
    assert all(p.any() for p in model.parameters())


def test_swa_shows_where_the_servers_learning_rate_leads(digits):
    settings = dict(rounds=1, server_lr=0.5, evaluation_every=0, engine="inline")
    swa, fedavg = (train(digits, "mlp", m, **settings).model for m in ("swa(start=5)", "fedavg"))
    assert all(torch.equal(a, b) for a, b in zip(swa.parameters(), fedavg.parameters(), strict=True))


def test_fedlesam_looks_back_to_zero_weights_too():
    part, zeros, now = LookbackAscent(0.5), torch.zeros(3), torch.tensor([0.0, 3.0, 4.0])
    memory, _ = part.settle({"weights": zeros}, part.first_memory(zeros), None)
    lookback = part.plan(LocalRule(0.1, 1), {"weights": now}, memory).carry["lookback"]
    torch.testing.assert_close(lookback, torch.tensor([0.0, -0.3, -0.4]))
