"""Sharpness against closed forms on quadratics, and what rescaling a ReLU network does to it."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call

from fedflat.errors import RecipeError
from fedflat.flatness import Hessian, Objective, top_eigenvalues
from fedflat.flatness.sharpness import adaptive_sharpness, ascent_sharpness, average_sharpness


def half_square(z, y):
    return 0.5 * (z - y).square().mean()


@pytest.fixture
def quadratic():
    """f(w) = ½ wᵀ A w + bᵀ w + c as least squares over unequal batches: the objective, A, and the gradient A w + b."""
    chance = torch.Generator().manual_seed(0)
    x = torch.randn(40, 6, generator=chance, dtype=torch.float64)
    y = torch.randn(40, 1, generator=chance, dtype=torch.float64)
    module = nn.Linear(6, 1, bias=False).double()
    with torch.no_grad():
        module.weight.copy_(torch.randn(1, 6, generator=chance))
    objective = Objective(module, half_square, [(x[:7], y[:7]), (x[7:], y[7:])])
    A, b = x.T @ x / 40, -(x.T @ y).squeeze() / 40
    return objective, A, A @ objective.weights + b


@pytest.mark.parametrize("rho", [0.01, 0.5, 3.0])
def test_ascent_on_a_quadratic(quadratic, rho):
    objective, A, g = quadratic
    expected = rho * g.norm() + 0.5 * rho**2 * (g @ A @ g) / (g @ g)
    assert ascent_sharpness(objective, rho) == pytest.approx(float(expected), rel=1e-9)


@pytest.mark.parametrize("rho", [0.01, 0.5, 3.0])
def test_adaptive_ascent_on_a_quadratic(quadratic, rho):
    objective, A, g = quadratic
    T = objective.weights.abs()
    step = rho * T**2 * g / (T * g).norm()
    assert adaptive_sharpness(objective, rho) == pytest.approx(float(g @ step + 0.5 * step @ A @ step), rel=1e-9)


def test_the_mean_over_directions_is_the_trace_of_the_hessian(quadratic):
    """E[f(w + ρ û) − f(w)] = ρ²/(2d) tr A: the linear term cancels in every pair."""
    objective, A, _ = quadratic
    found = average_sharpness(objective, rho=2.0, directions=3000)
    assert abs(found.mean - 2.0**2 / 12 * float(A.trace())) < 4 * found.error
    assert found.low < 2.0**2 / 12 * float(A.trace()) < found.high


def test_the_slope_has_no_part_in_the_mean_or_its_error(quadratic):
    """At a point with a steep slope and at the minimum the even part is the same, to rounding."""
    objective, A, g = quadratic
    with objective.at(objective.weights - torch.linalg.solve(A, g)):
        least = average_sharpness(objective, rho=1e-3)
        with objective.at(objective.weights + 100):
            steep = average_sharpness(objective, rho=1e-3)
    assert steep.largest > 1e3 * least.largest
    assert (steep.mean, steep.error) == pytest.approx((least.mean, least.error), rel=1e-2)


def test_the_interval_covers_the_closed_form_for_95_of_100_seeds():
    """A quadratic with a few large eigenvalues, away from its minimum: ρ² tr A/2d."""
    chance = torch.Generator().manual_seed(0)
    scale = torch.tensor([4.0, 3.0, 2.0, *[0.3] * 27], dtype=torch.float64)
    x = torch.randn(60, 30, generator=chance, dtype=torch.float64) * scale
    objective = Objective(nn.Linear(30, 1, bias=False).double(), half_square, [(x, torch.ones(60, 1).double())])
    true = 0.05**2 * float((x.T @ x / 60).trace()) / 60
    found = [average_sharpness(objective, seed=seed) for seed in range(400)]
    assert 0.93 <= sum(each.low <= true <= each.high for each in found) / 400 <= 0.97


def test_at_the_minimum_every_direction_rises_between_the_extreme_eigenvalues(quadratic):
    objective, A, g = quadratic
    low, high = (float(value) for value in 0.5 * torch.linalg.eigvalsh(A)[[0, -1]])
    with objective.at(objective.weights - torch.linalg.solve(A, g)):
        found = average_sharpness(objective, rho=1.0, directions=200)
    assert low < found.mean < found.largest < high
    assert found.largest > 0.5 * high


def test_mean_error_and_largest_are_those_of_the_drawn_pairs(quadratic):
    objective, A, g = quadratic
    chance, rises, means = torch.Generator().manual_seed(7), [], []
    for _ in range(8):
        u = torch.randn(6, generator=chance, dtype=torch.float64)
        u = 0.3 * u / u.norm()
        rises += [float(g @ u + 0.5 * u @ A @ u), float(-g @ u + 0.5 * u @ A @ u)]
        means.append(float(0.5 * u @ A @ u))
    found = average_sharpness(objective, rho=0.3, directions=16, seed=7)
    mean = sum(means) / 8
    variance = sum((each - mean) ** 2 for each in means) / 7
    expected = mean, math.sqrt(variance / 8), max(rises)
    assert (found.mean, found.error, found.largest) == pytest.approx(expected, rel=1e-12), "drawn in float64"
    assert found.low < mean < found.high and found.directions == 16


def test_the_standard_error_falls_with_the_root_of_the_directions(quadratic):
    few, many = (average_sharpness(quadratic[0], directions=n).error for n in (100, 1600))
    assert few / many == pytest.approx(4, rel=0.25)


def test_directions_come_from_the_seed_alone(quadratic):
    torch.manual_seed(1)
    first = average_sharpness(quadratic[0], seed=5)
    torch.manual_seed(2)
    assert average_sharpness(quadratic[0], seed=5) == first != average_sharpness(quadratic[0], seed=6)


def test_one_pair_has_no_interval_and_an_odd_number_is_a_mistake(quadratic):
    one = average_sharpness(quadratic[0], directions=2)
    assert math.isnan(one.error) and math.isnan(one.low) and math.isnan(one.high) and one.mean < one.largest
    for wrong in (0, 1, 7):
        with pytest.raises(RecipeError, match=f"directions: {wrong}; directions come in pairs"):
            average_sharpness(quadratic[0], directions=wrong)


@pytest.mark.parametrize("sharpness", [ascent_sharpness, adaptive_sharpness, average_sharpness])
@pytest.mark.parametrize("rho", [-0.1, math.inf, math.nan])
def test_a_radius_is_a_number_from_0_on(quadratic, sharpness, rho):
    with pytest.raises(RecipeError, match=f"rho = {rho}: the radius must be a number from 0 on"):
        sharpness(quadratic[0], rho)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_a_gradient_there_is_no_ascent(dtype):
    x = torch.ones(3, 2, dtype=dtype)
    module = nn.Linear(2, 1).to(dtype)
    flat = Objective(module, lambda z, y: 0.0 * z.sum(), [(x, x)])
    assert ascent_sharpness(flat, 1.0) == adaptive_sharpness(flat, 1.0) == 0.0


def test_a_tiny_gradient_still_gives_a_step_of_full_length():
    x = torch.ones(1, 1, dtype=torch.float64)
    module = nn.Linear(1, 1, bias=False).double()
    slope = Objective(module, lambda z, y: 1e-30 * z.mean(), [(x, x)])
    with slope.at(torch.tensor([2.0])):
        assert ascent_sharpness(slope, 0.5) == pytest.approx(0.5e-30, abs=0)
        assert adaptive_sharpness(slope, 0.5) == pytest.approx(1e-30, abs=0)


@pytest.fixture
def relu():
    """A ReLU network with biases and a convolution, in float64."""
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(36, 6), nn.ReLU(), nn.Linear(6, 3)
    ).double()
    x, y = torch.randn(30, 2, 5, 5, dtype=torch.float64), torch.randint(0, 3, (30,))
    return Objective(module, F.cross_entropy, [(x[:8], y[:8]), (x[8:], y[8:])])


def rescaled(objective, layer, following, c):
    """The weights after (W, b) → (cW, cb) in one layer and W → W/c in the one that follows."""
    views = objective.layout.views(weights := objective.weights)
    for name, factor in {f"{layer}.weight": c, f"{layer}.bias": c, f"{following}.weight": 1 / c}.items():
        views[name].mul_(factor)
    return weights


@settings(max_examples=15, deadline=None)
@given(st.floats(0.05, 20), st.sampled_from([("0", "2"), ("2", "4")]), st.floats(0.05, 1), st.integers(0, 300))
def test_adaptive_sharpness_is_one_of_the_function_not_of_its_scales(c, layers, rho, seed):
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
    x, y = torch.randn(12, 4, dtype=torch.float64), torch.randint(0, 3, (12,))
    objective = Objective(module.double(), F.cross_entropy, [(x, y)])
    before, sharp = objective.value(), adaptive_sharpness(objective, rho)
    with objective.at(rescaled(objective, *layers, c)):
        assert objective.value() == pytest.approx(before, rel=1e-12)
        assert adaptive_sharpness(objective, rho) == pytest.approx(sharp, rel=1e-9)


def test_the_same_rescaling_moves_the_top_eigenvalue_and_the_ascent(relu):
    def measure():
        top = float(top_eigenvalues(Hessian(relu), k=1, tolerance=1e-8).values[0])
        return relu.value(), adaptive_sharpness(relu), top, ascent_sharpness(relu)

    loss, adaptive, top, ascent = measure()
    with relu.at(rescaled(relu, "0", "3", 8.0)):
        loss_, adaptive_, top_, ascent_ = measure()
    assert (loss_, adaptive_) == pytest.approx((loss, adaptive), rel=1e-9)
    assert top_ > 2 * top and ascent_ > 1.5 * ascent


def test_of_one_layer_it_is_the_sharpness_with_the_others_standing_still(relu):
    names = ["3.weight", "3.bias"]
    parameters = {n: p.detach() for n, p in relu.module.named_parameters()}
    x, y = (torch.cat(parts) for parts in zip(*relu.batches, strict=True))

    def loss(chosen):
        return F.cross_entropy(functional_call(relu.module, {**parameters, **chosen}, (x,)), y)

    layer = {name: parameters[name] for name in names}
    slopes = torch.func.grad(loss)(layer)
    length = math.hypot(*(float(slope.norm()) for slope in slopes.values()))
    raised = loss({name: layer[name] + 0.2 * slopes[name] / length for name in names})
    assert ascent_sharpness(relu.of(names), 0.2) == pytest.approx(float(raised - loss(layer)), rel=1e-9)


def test_the_weights_stay_where_they_are_to_the_bit(relu):
    before = relu.weights
    ascent_sharpness(relu), adaptive_sharpness(relu), average_sharpness(relu, directions=4)
    assert torch.equal(relu.weights, before)


def test_in_a_round_bowl_every_direction_rises_by_the_same():
    """f(w) = ½‖w‖² rises by ρ²/2 from its minimum, to as many digits as the directions have."""
    module = nn.Linear(6, 1, bias=False).double()
    nn.init.zeros_(module.weight)
    x = math.sqrt(6) * torch.eye(6, dtype=torch.float64)
    found = average_sharpness(Objective(module, half_square, [(x, torch.zeros_like(x[:, :1]))]), rho=2.0, directions=10)
    assert found.mean == pytest.approx(2.0, rel=1e-14) and found.largest == pytest.approx(2.0, rel=1e-14)
    assert found.error < 1e-14
