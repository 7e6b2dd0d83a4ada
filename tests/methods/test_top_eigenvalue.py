"""The penalty on the Hessian's largest eigenvalue, against dense float64 Hessians."""

import math
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, hessian

from fedflat.local.rule import LocalRule
from fedflat.local.step import train as local_train
from fedflat.methods.chain import Method
from fedflat.methods.parser import cost
from fedflat.methods.parts import Ascent, TopEigenvalue
from fedflat.methods.parts.terms import climbed
from fedflat.models.vector import Network

DOUBLE = dict(dtype=torch.float64)


def loss_of(network, batch):
    """The loss of a batch as a function of the weights."""
    x, y = batch
    return lambda w: F.cross_entropy(functional_call(network.module, network.layout.views(w), (x,)), y)


def curved():
    """A small smooth problem, trained a little, and its loss as a function of the weights."""
    torch.manual_seed(1)
    network = Network(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)), torch.float64)
    x, y = 2 * torch.randn(20, 3, **DOUBLE), torch.arange(20) % 3
    return network, (x, y), loss_of(network, (x, y))


def saddle():
    """A small smooth problem whose most negative eigenvalue is larger than its largest positive one."""
    torch.manual_seed(0)
    network = Network(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)), torch.float64)
    network.weights.mul_(3)
    x = 2 * torch.randn(20, 3, **DOUBLE)
    y = network.module(x).argmin(dim=1)  # every label is wrong
    return network, (x, y), loss_of(network, (x, y))


def eigenvalues(loss, weights):
    return torch.linalg.eigvalsh(hessian(loss)(weights.clone()))


def penalised(part, network, batch, steps=1, lr=1.0):
    """What a client's steps on one batch do, and the term that took part in them."""
    start = network.weights.clone()
    rule = part.plan(LocalRule(lr, steps), {"weights": start}, {})
    outcome = local_train(network, start, rule, [batch] * steps, F.cross_entropy)
    network.weights.copy_(start)
    return outcome, (*rule.terms, None)[0]


def gradient(loss, weights):
    return torch.func.grad(loss)(weights.clone())


@pytest.mark.parametrize("scale", [1.0, 1e-20])
@pytest.mark.parametrize("seed", range(5))
def test_one_improvement_is_the_best_of_the_plane_of_the_vector_and_its_image(seed, scale):
    chance = torch.Generator().manual_seed(seed)
    square, v = torch.randn(6, 6, generator=chance, **DOUBLE), torch.randn(6, generator=chance, **DOUBLE)
    matrix, v = scale * (square + square.T), v / v.norm()
    plane, _ = torch.linalg.qr(torch.stack([v, matrix @ v], dim=1))
    x, image = climbed(v, matrix @ v, lambda u: matrix @ u)
    best = torch.linalg.eigvalsh(plane.T @ matrix @ plane)[-1]
    torch.testing.assert_close(x @ matrix @ x / (x @ x), best, rtol=1e-12, atol=0)
    torch.testing.assert_close(image, matrix @ x, rtol=1e-12, atol=1e-12 * scale)


def test_its_start_does_not_depend_on_the_global_generator():
    found = []
    for seed in (1, 2):
        network, batch, _ = saddle()
        torch.manual_seed(seed)
        found.append(penalised(TopEigenvalue(0.1), network, batch)[0].delta)
    assert torch.equal(*found)


@pytest.mark.parametrize("task", [curved, saddle])
def test_the_noted_eigenvalue_is_the_algebraically_largest_of_the_dense_hessian(task):
    network, batch, loss = task()
    dense = eigenvalues(loss, network.weights)
    assert (-dense[0] > dense[-1]) == (task is saddle)
    outcome, _ = penalised(TopEigenvalue(0.1, steps=200), network, batch)
    assert outcome.notes["top eigenvalue"] == pytest.approx(float(dense[-1]), rel=1e-9)


def test_one_improvement_a_step_finds_it_since_the_vector_is_kept():
    network, batch, loss = saddle()
    top = float(eigenvalues(loss, network.weights)[-1])
    _, term = penalised(TopEigenvalue(0.1), network, batch, steps=60, lr=1e-12)
    v = term.vector
    assert float(v @ hessian(loss)(network.weights.clone()) @ v) == pytest.approx(top, rel=1e-4)


@pytest.mark.parametrize("task", [curved, saddle])
def test_its_gradient_is_that_of_the_largest_eigenvalue_by_finite_differences(task):
    network, batch, loss = task()
    start, h, weight = network.weights.clone(), 1e-5, 0.3
    outcome, _ = penalised(TopEigenvalue(weight, steps=200), network, batch)
    ours = -outcome.delta - gradient(loss, start)
    for seed in range(5):
        direction = torch.randn(network.size, generator=torch.Generator().manual_seed(seed), **DOUBLE)
        ahead, behind = (eigenvalues(loss, start + sign * h * direction)[-1] for sign in (1, -1))
        slope = float(ahead - behind) / (2 * h)
        assert float(ours @ direction) == pytest.approx(weight * slope, rel=1e-5, abs=1e-7)


def test_only_what_exceeds_the_bound_is_penalised():
    network, batch, loss = saddle()
    start, top = network.weights.clone(), float(eigenvalues(loss, network.weights)[-1])
    plain = gradient(loss, start)
    free, _ = penalised(TopEigenvalue(0.3, 200), network, batch)
    above, _ = penalised(TopEigenvalue(0.3, 200, bound=0.99 * top), network, batch)
    below, _ = penalised(TopEigenvalue(0.3, 200, bound=1.01 * top), network, batch)
    torch.testing.assert_close(above.delta, free.delta, rtol=1e-9, atol=1e-12)  # a constant τ has no gradient
    torch.testing.assert_close(-below.delta, plain, rtol=1e-12, atol=1e-14)
    assert below.notes["top eigenvalue"] == pytest.approx(top, rel=1e-9)  # it is noted all the same
    assert not torch.allclose(-free.delta, plain, rtol=1e-3)


def test_the_value_of_the_term_is_the_weight_times_the_excess():
    network, batch, loss = saddle()
    top, seen = float(eigenvalues(loss, network.weights)[-1]), []
    rule = TopEigenvalue(0.3, 200, bound=0.5 * top).plan(LocalRule(1.0, 1), {"weights": network.weights}, {})

    @dataclass(frozen=True)
    class Heard:
        term: object
        features = activations = False

        def __call__(self, here):
            seen.append(self.term(here))
            return seen[-1]

    rule = replace(rule, terms=(Heard(rule.terms[0]),))
    local_train(network, network.weights.clone(), rule, [batch], F.cross_entropy)
    assert seen[0].item() == pytest.approx(0.3 * 0.5 * top, rel=1e-9)


class Partial(nn.Module):
    """A network with a parameter that no pass uses, and one that is not trained."""

    def __init__(self):
        super().__init__()
        self.first, self.last, self.idle = nn.Linear(3, 4), nn.Linear(4, 3), nn.Parameter(torch.ones(2))
        self.first.bias.requires_grad_(False)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


def test_parameters_that_are_idle_or_not_trained_have_no_curvature():
    torch.manual_seed(0)
    network = Network(Partial(), torch.float64)
    x, y = torch.randn(20, 3, **DOUBLE), torch.arange(20) % 3
    dense = hessian(loss_of(network, (x, y)))(network.weights.clone())
    outcome, _ = penalised(TopEigenvalue(0.1, 300), network, (x, y))
    assert outcome.notes["top eigenvalue"] == pytest.approx(float(torch.linalg.eigvalsh(dense)[-1]), rel=1e-8)
    assert not outcome.delta[network.layout.slices["idle"]].any()


def test_a_flat_loss_stays_as_it_is_and_a_broken_one_is_told():
    network, (x, y), _ = curved()
    network.weights.zero_()
    still, _ = penalised(TopEigenvalue(0.1), network, (0 * x, y))
    assert torch.isfinite(still.delta).all()
    broken, _ = penalised(TopEigenvalue(0.1), network, (x * torch.nan, y))
    assert math.isnan(broken.notes["top eigenvalue"])


def test_penalising_it_ends_in_a_flatter_place():
    tops = []
    for weight in (0.0, 0.3):
        network, batch, loss = curved()
        outcome, _ = penalised(TopEigenvalue(weight), network, batch, steps=50, lr=0.3)
        tops.append(float(eigenvalues(loss, network.weights + outcome.delta)[-1]))
    assert 0 < tops[1] < 0.8 * tops[0]


def test_its_cost_is_stated_and_grows_with_the_products():
    costs = [cost(Method(TopEigenvalue(steps=steps)))["gradients"] for steps in (1, 2, 5)]
    assert costs == [14, 17, 26]
    assert cost(Method(Ascent(), TopEigenvalue()))["gradients"] == 28


def test_the_penalty_differentiates_attention_twice():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.outer = nn.Linear(4, 12), nn.Linear(4, 3)

        def forward(self, x):
            q, k, v = self.inner(x).unsqueeze(1).chunk(3, -1)
            return self.outer(F.scaled_dot_product_attention(q, k, v).squeeze(1).mean(1))

    torch.manual_seed(0)
    network = Network(Attention())
    start = network.weights.clone()
    rule = TopEigenvalue(0.5).plan(LocalRule(0.1, 1), {"weights": start}, {})
    batch = torch.randn(6, 5, 4), torch.arange(6) % 3
    assert local_train(network, start, rule, [batch], F.cross_entropy).delta.isfinite().all()
