"""Trace and density from products alone, against dense float64 matrices."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call

from fedflat.errors import RecipeError
from fedflat.flatness import Hessian, Objective
from fedflat.flatness.spectrum import Density, density, outliers, quadrature

seeds = st.integers(0, 10_000)


class Matrix:
    """A dense symmetric matrix that shows only its products, and counts them."""

    def __init__(self, dense):
        self.dense, self.size, self.dtype, self.products = dense, len(dense), dense.dtype, 0

    def __matmul__(self, vector):
        self.products += 1
        return self.dense @ vector


def with_eigenvalues(values, seed=0):
    chance = torch.Generator().manual_seed(seed)
    values = torch.as_tensor(values, dtype=torch.float64)
    basis = torch.linalg.qr(torch.randn(len(values), len(values), generator=chance, dtype=torch.float64)).Q
    return Matrix(basis @ torch.diag(values) @ basis.T)


def drawn(size, seed):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@settings(max_examples=30, deadline=None)
@given(seed=seeds, steps=st.integers(1, 6))
def test_the_quadrature_integrates_polynomials_below_degree_twice_the_steps(seed, steps):
    matrix, start = with_eigenvalues(drawn(12, seed), seed), drawn(12, seed + 1)
    nodes, weights = quadrature(matrix, start, steps)
    assert len(nodes) == matrix.products == steps
    v = start / start.norm()
    for degree in range(2 * steps):
        expected = float(v @ torch.linalg.matrix_power(matrix.dense, degree) @ v)
        assert float(weights @ nodes**degree) == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_the_next_degree_is_no_longer_exact():
    matrix, start = with_eigenvalues(range(12)), drawn(12, 1)
    nodes, weights = quadrature(matrix, start, steps=2)
    v = start / start.norm()
    exact = float(v @ torch.linalg.matrix_power(matrix.dense, 4) @ v)
    assert float(weights @ nodes**4) < 0.99 * exact


@settings(max_examples=20, deadline=None)
@given(seed=seeds)
def test_with_as_many_steps_as_dimensions_the_nodes_are_the_eigenvalues(seed):
    matrix, start = with_eigenvalues([-3, -1, 0, 0.5, 2, 4, 9], seed), drawn(7, seed + 1)
    nodes, weights = quadrature(matrix, start, steps=100)
    values, vectors = torch.linalg.eigh(matrix.dense)
    torch.testing.assert_close(nodes, values, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(weights, (vectors.T @ start / start.norm()).square(), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("values", "distinct"), [([0.0] * 9, [0.0]), ([2.0] * 9, [2.0]), ([0.0] * 6 + [1.0, 5.0, 5.0], [0.0, 1.0, 5.0])]
)
def test_it_stops_where_the_krylov_space_ends(values, distinct):
    matrix = with_eigenvalues(values)
    nodes, weights = quadrature(matrix, drawn(9, 1), steps=9)
    torch.testing.assert_close(nodes, torch.tensor(distinct, dtype=torch.float64), rtol=1e-9, atol=1e-9)
    assert float(weights.sum()) == pytest.approx(1)
    assert matrix.products == len(distinct)


def test_a_far_eigenvalue_comes_once_and_not_again_as_a_ghost():
    matrix = with_eigenvalues([*torch.linspace(0, 1, 99).tolist(), 1000.0])
    nodes, weights = quadrature(matrix, drawn(100, 1), steps=60)
    assert int((nodes > 2).sum()) == 1
    assert float(nodes[-1]) == pytest.approx(1000.0)
    assert float(weights.sum()) == pytest.approx(1)


def test_a_density_is_that_of_the_eigenvalues():
    values = drawn(300, 0).square()
    found = density(with_eigenvalues(values), steps=40, probes=10)
    assert found.moment(0) == pytest.approx(1)
    assert found.moment(2) == pytest.approx(float(values.square().mean()), rel=0.15)
    assert found.products == 400 and found.size == 300
    grid = torch.linspace(-2, 12, 2001, dtype=torch.float64)
    smooth = found.on(grid, width=0.3)
    kernels = torch.distributions.Normal(values, 0.3).log_prob(grid[:, None]).exp()
    assert float(torch.trapezoid(smooth, grid)) == pytest.approx(1, abs=1e-6)
    assert float(torch.trapezoid((smooth - kernels.mean(dim=1)).abs(), grid)) < 0.06


def test_a_single_eigenvalue_is_one_normal_peak():
    found = density(with_eigenvalues([3.0] * 5), steps=4, probes=2)
    peak = found.on(torch.tensor([3.0, 3.5]), width=0.5) * 0.5 * math.sqrt(2 * math.pi)
    torch.testing.assert_close(peak, torch.tensor([1.0, math.exp(-0.5)], dtype=torch.float64))


def test_the_densitys_trace_lies_within_its_error_and_falls_with_the_probes():
    matrix = with_eigenvalues(drawn(200, 3).exp())
    few, many = (density(matrix, steps=5, probes=probes).trace for probes in (5, 80))
    assert abs(many.mean - float(matrix.dense.trace())) < 4 * many.error
    assert 0 < many.error < few.error


SPECTRA = {
    "outliers and bulk": [20, 12, 8, 6, 5, 4, 3, 2.5, 2, *torch.linspace(-0.05, 0.3, 31).tolist()],
    "power law": [10 / k for k in range(1, 41)],
    "one outlier": [50, *torch.linspace(0, 0.3, 39).tolist()],
}


def from_one_step(values, probes, seed):
    """What `density` finds with one step in the eigenbasis, where the node of a start v is Σ λ v²/‖v‖²."""
    chance = torch.Generator().manual_seed(seed)
    starts = torch.stack([torch.randn(len(values), generator=chance, dtype=torch.float64) for _ in range(probes)])
    nodes = starts.square() @ torch.tensor(values, dtype=torch.float64) / starts.square().sum(dim=1)
    return Density(tuple(nodes[:, None]), (torch.ones(1, dtype=torch.float64),) * probes, len(values), probes)


@pytest.mark.parametrize("probes", [8, 20])
@pytest.mark.parametrize("name", SPECTRA)
def test_the_interval_of_the_densitys_trace_covers_it_for_95_of_100_seeds(name, probes):
    values = SPECTRA[name]
    made = density(Matrix(torch.tensor(values, dtype=torch.float64).diag()), steps=1, probes=probes, seed=3).trace
    assert made.high == pytest.approx(from_one_step(values, probes, 3).trace.high, rel=1e-12)
    found = [from_one_step(values, probes, seed).trace for seed in range(400)]
    assert 0.93 <= sum(each.low <= sum(values) <= each.high for each in found) / 400 <= 0.97


def test_the_seed_decides_and_nothing_else():
    matrix = with_eigenvalues(drawn(30, 0))
    one, again, other = (density(matrix, steps=5, probes=2, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one.nodes[0], again.nodes[0]) and not torch.equal(one.nodes[0], one.nodes[1])
    assert not torch.equal(one.nodes[0], other.nodes[0])


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"probes": 0}])
def test_a_density_of_nothing_is_refused(wrong):
    with pytest.raises(RecipeError, match=r"density: .* must be at least 1"):
        density(with_eigenvalues([1.0] * 5), **wrong)


def test_the_hessian_of_a_convolutional_net():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3)).double()
    x, y = torch.randn(20, 2, 4, 4, dtype=torch.float64), torch.randint(0, 3, (20,))
    parameters = {n: p.detach() for n, p in module.named_parameters()}
    sizes = [p.numel() for p in parameters.values()]

    def loss(vector):
        views = (v.view_as(p) for v, p in zip(vector.split(sizes), parameters.values(), strict=True))
        return F.cross_entropy(functional_call(module, dict(zip(parameters, views, strict=True)), (x,)), y)

    dense = torch.func.hessian(loss)(torch.cat([p.reshape(-1) for p in parameters.values()]))
    hessian = Hessian(Objective(module, F.cross_entropy, [(x[:8], y[:8]), (x[8:], y[8:])]))
    nodes = density(hessian, probes=1).nodes[0]
    top = torch.linalg.eigvalsh(dense)
    assert float(nodes[-1]) == pytest.approx(float(top[-1])) and float(nodes[0]) == pytest.approx(float(top[0]))


def test_it_stops_where_the_krylov_space_ends_though_the_diagonal_of_lanczos_is_zero():
    """Half an eigenvector of −1 and half one of 1: every α is 0, and only β says how large the matrix is."""
    matrix = with_eigenvalues([-1.0] * 4 + [1.0] * 5)
    _, vectors = torch.linalg.eigh(matrix.dense)
    nodes, weights = quadrature(matrix, vectors[:, 0] + vectors[:, -1], steps=9)
    torch.testing.assert_close(nodes, torch.tensor([-1.0, 1.0], dtype=torch.float64))
    torch.testing.assert_close(weights, torch.tensor([0.5, 0.5], dtype=torch.float64))


def test_directions_are_drawn_in_the_operators_precision():
    """Of the identity the one node is ‖v‖² = 1, as far as v has digits."""
    found = density(Matrix(torch.eye(50, dtype=torch.float64)), steps=1, probes=3)
    torch.testing.assert_close(torch.cat(found.nodes), torch.ones(3, dtype=torch.float64), rtol=0, atol=1e-14)


@pytest.mark.parametrize("scale", [1e-20, 1e-6, 1e6, 1e20])
def test_where_the_krylov_space_ends_does_not_depend_on_the_scale(scale):
    values = scale * torch.tensor([0.0] * 6 + [1.0, 5.0, 5.0], dtype=torch.float64)
    nodes, weights = quadrature(with_eigenvalues(values), drawn(9, 1), steps=9)
    expected = torch.tensor([0.0, 1.0, 5.0], dtype=torch.float64)
    torch.testing.assert_close(nodes / scale, expected, rtol=1e-9, atol=1e-9)
    assert float(weights.sum()) == pytest.approx(1)


def test_a_density_counts_only_its_own_products():
    matrix = with_eigenvalues(drawn(10, 0))
    assert [density(matrix, steps=4, probes=2).products for _ in range(2)] == [8, 8]


def test_moments_and_trace_of_two_probes_in_closed_form():
    """First moments 2 and 5: their mean is 3.5, its standard error half of their difference."""
    nodes, weights = ([1.0, 3.0], [5.0]), ([0.5, 0.5], [1.0])
    nodes, weights = (tuple(torch.tensor(x, dtype=torch.float64) for x in some) for some in (nodes, weights))
    found = Density(nodes, weights, size=10, products=3)
    assert [found.moment(power) for power in (0, 1, 2)] == pytest.approx([1, 3.5, 15])
    assert (found.trace.mean, found.trace.error, found.trace.products) == pytest.approx((35, 15, 3))
    assert math.isnan(found.trace.low) and math.isnan(found.trace.high), "two probes are too few for an interval"


def test_means_over_the_probes_have_the_digits_of_float64():
    third = torch.tensor([1 / 3], dtype=torch.float64)
    found = Density((third, third), (torch.ones_like(third),) * 2, size=1, products=2)
    assert found.moment(1) == found.trace.mean == pytest.approx(1 / 3, rel=1e-15)


def bulk(seed, size=300):
    """A Marchenko–Pastur bulk within [0, 1]."""
    chance = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 2 * size, generator=chance, dtype=torch.float64)
    values = torch.linalg.eigvalsh(x @ x.T)
    return values / values[-1]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "planted", [[], [1.5], [3.0, 2.0], [20.0, 12.0, 8.0, 6.0, 5.0, 4.0, 3.0, 2.5, 2.0], [100.0, 30.0, 10.0, 1.5]]
)
def test_planted_outliers_are_counted_and_none_is_found_in_a_bare_bulk(planted, seed):
    values = bulk(seed)
    values[: len(planted)] = torch.tensor(planted, dtype=torch.float64)
    found = outliers(density(with_eigenvalues(values, seed), steps=60, probes=1, seed=seed))
    assert found.values == pytest.approx(planted, rel=1e-6)
    assert found.count == len(planted)
    assert found.edge == pytest.approx(float(values[len(planted) :].max()), rel=0.02)


def test_outliers_are_above_the_lowest_wide_gap_of_the_upper_half_of_the_nodes_above_the_median():
    nodes = torch.tensor([-100.0, 0.8, 0.9, 1.0, 9.0, 10.0], dtype=torch.float64)  # the gap of 100 is below the median
    weights = torch.tensor([0.45, *[0.11] * 5], dtype=torch.float64)
    found = outliers(Density((nodes,), (weights,), 6, 6))
    assert (found.values, found.edge) == ([10.0, 9.0], 1.0)


def test_a_spectrum_that_falls_off_smoothly_has_no_outliers():
    found = outliers(density(with_eigenvalues([i**-0.5 for i in range(1, 201)]), steps=60, probes=1))
    assert (found.values, found.count) == ([], 0)


def test_eigenvalues_below_the_bulk_are_no_outliers():
    values = bulk(0)
    values[:3] = torch.tensor([-9.0, -5.0, -3.0])
    assert outliers(density(with_eigenvalues(values), steps=60, probes=1)).count == 0
