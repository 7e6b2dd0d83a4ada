"""The gradient of a chain of linear layers by hand: that of autograd, and only where nothing else is asked for."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedflat import train
from fedflat.local import definition_only
from fedflat.local.kernels.linear import Chain, linear_layers
from fedflat.models.vector import Network


def layers(widths, bias=True):
    linear = [nn.Linear(a, b, bias=bias) for a, b in pairwise(widths)]
    return nn.Sequential(nn.Flatten(), *[m for layer in linear for m in (layer, nn.ReLU())][:-1])


@settings(deadline=None)
@given(
    widths=st.lists(st.integers(1, 40), min_size=2, max_size=5),
    samples=st.integers(1, 30),
    bias=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_loss_and_gradient_are_autograds_up_to_rounding(widths, samples, bias, dtype):
    torch.manual_seed(sum(widths) + samples)
    network = Network(layers(widths, bias), dtype)
    inputs, labels = torch.randn(samples, widths[0], dtype=dtype), torch.randint(0, widths[-1], (samples,))
    loss = F.cross_entropy(network.module(inputs), labels)
    expected = network.differentiate(loss).clone()
    by_hand, gradient = Chain.of(network).gradient(inputs, labels)
    rounding = 100 * torch.finfo(dtype).eps
    torch.testing.assert_close(by_hand, loss.detach(), rtol=rounding, atol=rounding)
    torch.testing.assert_close(gradient, expected, rtol=rounding, atol=rounding)


@pytest.mark.parametrize(
    "module",
    [
        nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)),
        nn.Sequential(nn.Linear(3, 3), nn.ReLU()),
        nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)),
        nn.Sequential(nn.Flatten(0), nn.Linear(3, 2)),
        nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Dropout(), nn.Linear(3, 2)),
        nn.Linear(3, 2),
    ],
)
def test_anything_else_is_left_to_autograd(module):
    assert Chain.of(Network(module)) is None


def test_a_layer_that_is_used_twice_is_left_to_autograd():
    shared = nn.Linear(3, 3)
    assert Chain.of(Network(nn.Sequential(shared, nn.ReLU(), shared, nn.ReLU(), nn.Linear(3, 2)))) is None
    tied = [nn.Linear(3, 3), nn.Linear(3, 3)]
    tied[1].weight = tied[0].weight
    assert Chain.of(Network(nn.Sequential(tied[0], nn.ReLU(), tied[1]))) is None


def test_frozen_layers_and_hooks_are_left_to_autograd():
    module = layers([3, 4, 2])
    assert Chain.of(Network(module)) is not None
    module[1].weight.requires_grad_(False)
    assert Chain.of(Network(module)) is None
    module[1].weight.requires_grad_(True)
    hook = module[2].register_forward_hook(lambda *_: None)
    assert Chain.of(Network(module)) is None
    hook.remove()
    assert Chain.of(Network(module)) is not None


def test_parameters_in_another_order_or_beside_the_layers_are_left_to_autograd():
    """Every ∇ has a place in the flat gradient, and the compiled chain finds W and b by their order in it."""
    turned, more, beside = (layers([3, 4, 2]) for _ in range(3))
    weight = turned[1].weight
    del turned[1].weight
    turned[1].weight = weight  # after the bias
    more[1].register_parameter("unused", nn.Parameter(torch.ones(2)))
    beside[2].register_parameter("unused", nn.Parameter(torch.ones(2)))
    for module in (turned, more, beside):
        assert Chain.of(Network(module)) is None


@pytest.mark.parametrize("place", [None, 1, 2])
def test_a_forward_of_its_own_is_left_to_autograd(place):
    module = layers([3, 4, 2])
    changed = module if place is None else module[place]
    changed.forward = lambda x: type(changed).forward(changed, x) * 2
    assert Chain.of(Network(module)) is None


@pytest.mark.parametrize("method", ["fedavg", "fedsam", "fedsmoo", "scaffold", "fedgf"])
def test_every_method_may_use_it(digits, method, monkeypatch):
    settings = dict(
        model="mlp", rounds=2, cohort=4, batch=16, momentum=0.9, weight_decay=1e-3, engine="inline", precision="float64"
    )
    calls, gradient = [], Chain.gradient
    monkeypatch.setattr(Chain, "gradient", lambda *given: calls.append(given) or gradient(*given))
    with definition_only():
        by_autograd = train(digits, method=method, **settings)
    assert not calls
    by_hand = train(digits, method=method, **settings)
    assert calls
    losses = [[record["local_loss"] for record in run.history] for run in (by_hand, by_autograd)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    for one, other in zip(by_hand.model.parameters(), by_autograd.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_no_layer_a_parameter_beside_the_layers_and_autocast_are_left_to_autograd():
    def found(module, autocast=None):
        return linear_layers(SimpleNamespace(module=module, trained=[*module.parameters()], base={}, autocast=autocast))

    assert found(nn.Sequential()) == []
    chain = nn.Sequential(nn.Linear(3, 2))
    assert found(chain) == [chain[0]]
    assert found(chain, autocast="bf16") == []
    chain.register_parameter("temperature", nn.Parameter(torch.ones(())))
    assert found(chain) == []
