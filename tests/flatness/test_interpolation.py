"""Paths between models: closed forms, and matching that recovers every permutation."""

import math
from itertools import permutations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedflat.errors import RecipeError
from fedflat.flatness import Interpolation, Objective, hidden_layers, interpolate, match, permuted
from fedflat.flatness.door import objective_of
from fedflat.models import build

NETWORKS = {"mlp": (3, 4, 4), "fedavg-cnn": (3, 4, 4), "lenet64": (3, 16, 16)}


def network(name, shape, seed):
    return build(name, shape, 5, torch.Generator().manual_seed(seed)).double().eval()


def orders_of(module, seed):
    chance = torch.Generator().manual_seed(seed)
    sizes = {each.name: len(module.get_submodule(each.name).weight) for each in hidden_layers(module)}
    return {name: torch.randperm(size, generator=chance) for name, size in sizes.items()}


def samples(shape, count=8):
    x = torch.randn(count, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return [(x[:3], torch.arange(3) % 5), (x[3:], torch.arange(count - 3) % 5)]


@pytest.mark.parametrize(("name", "shape"), NETWORKS.items())
@pytest.mark.parametrize("seed", [0, 1])
def test_a_permuted_copy_is_matched_back_exactly_and_its_barrier_is_zero(name, shape, seed):
    module = network(name, shape, seed)
    orders = orders_of(module, seed)
    copy = permuted(module, orders)
    found = match(module, copy)
    for layer, order in orders.items():
        assert torch.equal(order[found.orders[layer]], torch.arange(len(order)))
    back = permuted(copy, found.orders)
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), back.parameters(), strict=True))
    assert found.inner == pytest.approx(sum(float(p.detach().square().sum()) for p in module.parameters()))
    path = interpolate(module, copy, samples(shape), points=5, match=True)
    assert path.matched and path.distance == 0
    assert path.barrier < 1e-14
    assert np.ptp(path.losses) < 1e-14


def test_a_permuted_and_disturbed_copy_is_matched_back_too_and_the_plain_path_has_a_barrier():
    """Trained for a while, so that the loss between two orders of the units is higher than at both."""
    torch.manual_seed(0)
    shape = (1, 4, 4)
    module = nn.Sequential(
        nn.Flatten(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 5)
    ).double()
    data = samples(shape, 40)
    steps = torch.optim.Adam(module.parameters(), 0.02)
    for _ in range(150):
        steps.zero_grad()
        sum(F.cross_entropy(module(x), y) for x, y in data).backward()
        steps.step()
    orders = orders_of(module, 3)
    copy = permuted(module, orders)
    with torch.no_grad():
        for p in copy.parameters():
            p.add_(0.01 * torch.randn_like(p))
    found = match(module, copy).orders
    assert all(torch.equal(order[found[name]], torch.arange(len(order))) for name, order in orders.items())
    plain, matched = (interpolate(module, copy, data, points=11, match=m) for m in (False, True))
    assert plain.barrier > 0.1 > 100 * matched.barrier
    assert plain.distance > 10 * matched.distance


@pytest.mark.parametrize(
    "parts",
    [
        lambda: (nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)),
        lambda: (nn.Conv2d(1, 4, 2), nn.ReLU(), nn.Conv2d(4, 3, 2), nn.Flatten(), nn.Linear(12, 2)),
    ],
    ids=["linear", "convolutional"],
)
def test_matching_is_no_worse_than_any_order_of_a_small_network(parts):
    """Every pair of orders, by enumeration: the oracle of Σ⟨W, P W' P'ᵀ⟩."""
    one, two = (nn.Sequential(*parts()).double() for _ in range(2))
    for seed, module in enumerate((one, two)):
        chance = torch.Generator().manual_seed(seed)
        for p in module.parameters():
            p.data.copy_(torch.randn(p.shape, generator=chance, dtype=torch.float64))
    flat = torch.nn.utils.parameters_to_vector(one.parameters()).detach()

    def inner(a, b):
        other = permuted(two, {"0": torch.tensor(a), "2": torch.tensor(b)})
        return float(flat @ torch.nn.utils.parameters_to_vector(other.parameters()).detach())

    found = match(one, two)
    reached = inner(found.orders["0"].tolist(), found.orders["2"].tolist())
    assert found.inner == pytest.approx(reached, rel=1e-12)
    best = max(inner(a, b) for a in permutations(range(4)) for b in permutations(range(3)))
    assert reached == pytest.approx(best, rel=1e-12)


def test_the_barrier_is_the_height_above_the_chord():
    x = torch.tensor([[1.0]], dtype=torch.float64)
    a, b = (nn.Linear(1, 1, bias=False).double() for _ in range(2))
    nn.init.constant_(a.weight, 1.0), nn.init.constant_(b.weight, -1.5)
    found = interpolate(a, b, [(x, x)], lambda z, y: (z**4 - 5 * z**2).mean(), points=31)
    alphas = np.linspace(0, 1, 31)
    w = 1 - 2.5 * alphas
    f = w**4 - 5 * w**2
    excess = f - (1 - alphas) * f[0] - alphas * f[-1]
    np.testing.assert_allclose(found.losses, f, rtol=0, atol=1e-12)
    assert (found.barrier, found.peak) == pytest.approx((excess.max(), alphas[excess.argmax()]))
    assert found.distance == pytest.approx(2.5)
    np.testing.assert_allclose(found.excess, excess, rtol=0, atol=1e-12)
    assert f[0] != f[-1]


@pytest.mark.parametrize("overflow", [math.nan, math.inf])
def test_an_overflow_is_an_infinite_barrier_at_its_place(overflow):
    found = Interpolation(np.array([0, 0.3, 0.6, 1]), np.array([1.0, 9.0, overflow, 1.0]), 1.0, 1, False)
    assert (found.barrier, found.peak) == (math.inf, 0.6)
    twice = Interpolation(np.array([0, 0.3, 0.6, 1]), np.array([1.0, math.inf, overflow, 1.0]), 1.0, 1, False)
    assert (twice.barrier, twice.peak) == (math.inf, 0.3)


@pytest.mark.parametrize("matched", [False, True])
def test_a_caption_says_whether_the_units_were_matched(matched):
    found = Interpolation(np.array([0, 0.5, 1]), np.array([1.0, 4.0, 2.0]), 3.0, 10, matched)
    assert ("at distance 3, its units matched: barrier 2.5 at α = 0.5" in found.caption()) == matched
    assert ("at distance 3: barrier 2.5 at α = 0.5" in found.caption()) != matched


def test_the_samples_are_drawn_and_read_as_asked():
    torch.manual_seed(0)
    a, b, x, y = nn.Linear(2, 3), nn.Linear(2, 3), torch.randn(20, 2), torch.arange(20) % 3
    ends = [interpolate(a, b, (x, y), points=3, samples=7, seed=seed) for seed in (5, 6)]
    with objective_of(b, (x, y), samples=7, seed=5) as there:
        assert (ends[0].samples, ends[0].losses[-1]) == (7, pytest.approx(there.value(), rel=1e-12))
    assert ends[0].losses[-1] != ends[1].losses[-1]
    rows = [{"left": x[:9], "right": y[:9]}, {"left": x[9:], "right": y[9:]}]
    named = interpolate(a, b, rows, points=3, collate=lambda row: (row["left"], row["right"]))
    np.testing.assert_allclose(named.losses, interpolate(a, b, (x, y), points=3).losses, rtol=1e-6)


def test_frozen_weights_that_both_models_share_stay_where_they_are():
    torch.manual_seed(0)
    body, x = nn.Linear(2, 2).requires_grad_(False), torch.randn(4, 2)
    a, b = (nn.Sequential(body, nn.Linear(2, 2)) for _ in range(2))
    found = interpolate(a, b, [(x, torch.arange(4) % 2)], points=3)
    assert found.losses[0] == pytest.approx(F.cross_entropy(a(x), torch.arange(4) % 2).item(), rel=1e-6)
    assert found.distance == pytest.approx(
        math.dist(*(m[1].weight.flatten().tolist() + m[1].bias.tolist() for m in (a, b)))
    )


def small_pair():
    """Two networks without a permutation between them, the second layer without biases."""
    torch.manual_seed(3)
    one, two = (
        nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 8, bias=False), nn.ReLU(), nn.Linear(8, 2)) for _ in "ab"
    )
    return one, two


def test_the_matching_sweeps_until_nothing_improves_and_no_more_often_than_asked():
    one, two = small_pair()
    inner = [match(one, two, most=most).inner for most in (0, 1, 100)]
    assert inner[0] < inner[1] <= inner[2]
    assert (match(one, two, most=1).sweeps, match(one, one).sweeps) == (1, 1)
    before = torch.get_rng_state()
    assert match(one, two, seed=4).inner == match(one, two, seed=4).inner
    assert torch.equal(torch.get_rng_state(), before), "its turns come from its own seed"


def test_a_network_without_hidden_layers_has_nothing_to_match():
    assert match(nn.Linear(2, 3), nn.Linear(2, 3)).orders == {}


def test_both_models_stay_as_they_are():
    shape = (3, 4, 4)
    a, b = (network("mlp", shape, seed).train() for seed in (0, 1))
    before = [p.clone() for module in (a, b) for p in module.parameters()]
    interpolate(a, b, samples(shape), points=3, match=True)
    assert all(torch.equal(p, q) for p, q in zip(before, [*a.parameters(), *b.parameters()], strict=True))
    assert a.training and b.training


def test_the_ends_are_the_models_to_the_bit():
    shape = (3, 4, 4)
    a, b = (network("mlp", shape, seed).float() for seed in (0, 1))
    data = [(x.float(), y) for x, y in samples(shape)]
    found = interpolate(a, b, data, points=4)
    assert [found.losses[0], found.losses[-1]] == [Objective(m, F.cross_entropy, data).value() for m in (a, b)]


def test_what_has_no_path_is_refused_in_one_sentence():
    one, two = nn.Linear(2, 2), nn.Linear(2, 3)
    x = [(torch.ones(1, 2), torch.zeros(1, dtype=torch.int64))]
    norm = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    frozen = [nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2)) for _ in range(2)]
    for a, b, options, sentence in (
        (one, two, {}, r"weight is \(2, 2\) in the first model and \(3, 2\) in the second"),
        (one, nn.Sequential(nn.Linear(2, 2)), {}, "weight is .* and nothing in the second"),
        (norm, norm, {}, "keeps running statistics"),
        (*frozen, {}, "is frozen and differs"),
        (nn.Linear(2, 2, bias=False), one, {}, r"bias is nothing in the first model and \(2,\) in the second"),
        (one, one, {"points": 2}, "points is 2; it must be at least 3"),
    ):
        with pytest.raises(RecipeError, match=sentence):
            interpolate(a, b, x, **options)
    for other in (
        nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)),
        nn.Sequential(nn.Linear(2, 2), nn.ReLU(), two),
    ):
        with pytest.raises(RecipeError, match="differ in their layers"):
            match(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), other)
