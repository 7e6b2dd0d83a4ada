"""On least-squares clients the global optimum is known, and so is which methods reach it."""

import pytest
import torch
from torch import nn

from fedflat import train


def half_squared_error(outputs, targets):
    return 0.5 * (outputs - targets).square().mean()


def distance_to_optimum(federation, method, rounds=40):
    data = federation.dataset.train
    optimum = torch.linalg.lstsq(data.inputs, data.labels).solution.T
    module = nn.Linear(3, 1, bias=False)
    nn.init.zeros_(module.weight)
    result = train(
        federation, module, method, loss=half_squared_error, rounds=rounds, steps=10, batch=0, lr=0.1, cohort=1.0,
        precision="float64", average="uniform", evaluation_every=0, engine="inline",
    )  # fmt: skip
    return float((result.model.weight.detach() - optimum).norm())


def test_feddyn_reaches_the_global_optimum_and_fedavg_does_not(regression):
    assert distance_to_optimum(regression, "feddyn(0.3)", rounds=250) < 1e-8
    assert distance_to_optimum(regression, "fedavg") > 1e-2


def test_fedprox_stops_between_the_two(regression):
    near, far = (distance_to_optimum(regression, f"fedprox({mu})") for mu in (3.0, 0.0))
    assert 1e-4 < near < far
    assert far == pytest.approx(distance_to_optimum(regression, "fedavg"), rel=1e-12)
