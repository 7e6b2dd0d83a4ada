"""The trace of matrices whose trace is known: exact parts, unbiased estimates, and intervals that cover."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from torch import nn
from torch.func import functional_call, hessian

from fedflat.errors import RecipeError
from fedflat.flatness import density, hall, trace
from fedflat.flatness.intervals import Interval
from fedflat.flatness.traces import _missing, _wanted


class Matrix:
    """A dense symmetric matrix that shows only its products, and counts them."""

    def __init__(self, dense):
        self.dense, self.size, self.dtype, self.products = dense, len(dense), dense.dtype, 0

    def __matmul__(self, vector):
        self.products += 1
        return self.dense @ vector


def with_eigenvalues(values):
    values = torch.as_tensor(values, dtype=torch.float64)
    chance = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(len(values), len(values), generator=chance, dtype=torch.float64)).Q
    return Matrix(basis @ torch.diag(values) @ basis.T)


def outliers_and_bulk():
    bulk = torch.linspace(-0.05, 0.3, 71, dtype=torch.float64)
    return with_eigenvalues(torch.cat([torch.tensor([20, 12, 8, 6, 5, 4, 3, 2.5, 2], dtype=torch.float64), bulk]))


def trained_network(digits):
    """The dense float64 Hessian of a small network after some steps of training."""
    torch.manual_seed(0)
    x, y = digits.held_out("train", 0, 200)
    x = F.avg_pool2d(x.double(), 2)
    module = nn.Sequential(nn.Flatten(), nn.Linear(16, 4), nn.ReLU(), nn.Linear(4, 10)).double()
    for _ in range(60):
        loss = F.cross_entropy(module(x), y)
        slopes = torch.autograd.grad(loss, list(module.parameters()))
        with torch.no_grad():
            for parameter, slope in zip(module.parameters(), slopes, strict=True):
                parameter -= 0.5 * slope
    parameters = {n: p.detach() for n, p in module.named_parameters()}
    sizes = [p.numel() for p in parameters.values()]

    def value(vector):
        views = (v.view_as(p) for v, p in zip(vector.split(sizes), parameters.values(), strict=True))
        return F.cross_entropy(functional_call(module, dict(zip(parameters, views, strict=True)), (x,)), y)

    return Matrix(hessian(value)(torch.cat([p.reshape(-1) for p in parameters.values()])).detach())


@pytest.fixture(params=["outliers and bulk", "power law", "trained network"])
def matrix(request, digits):
    return {
        "outliers and bulk": outliers_and_bulk,
        "power law": lambda: with_eigenvalues(10 / torch.arange(1, 81)),
        "trained network": lambda: trained_network(digits),
    }[request.param]()


def by_hand(dense, steps, seed):
    """The trace within the Krylov space of that many steps, and a function that draws a probe outside of it."""
    chance = torch.Generator().manual_seed(seed)

    def drawn_signs():
        return torch.randint(0, 2, (len(dense),), generator=chance).double() * 2 - 1

    powers = [drawn_signs()]
    for _ in range(steps - 1):
        powers.append(F.normalize(dense @ powers[-1], dim=0))
    basis = torch.linalg.qr(torch.stack(powers, dim=1)).Q
    outside = torch.eye(len(dense), dtype=torch.float64) - basis @ basis.T
    rest = outside @ dense @ outside

    def probe():
        z = drawn_signs()
        return float(z @ rest @ z)

    return float((basis.T @ dense @ basis).trace()), probe


def test_it_is_the_trace_within_a_krylov_space_and_hutchinsons_mean_outside_of_it():
    matrix = outliers_and_bulk()
    known, probe = by_hand(matrix.dense, 8, seed=5)
    expected = hall([probe() for _ in range(8)])
    found = trace(matrix, 16, seed=5)
    assert found.products == 16
    assert (found.mean, found.error, found.low, found.high) == pytest.approx(
        (known + expected.mean, expected.error, known + expected.low, known + expected.high), rel=1e-6
    )


@pytest.mark.parametrize("products", [16, 32])
def test_the_interval_covers_the_trace_for_95_of_100_seeds(matrix, products):
    true = float(matrix.dense.trace())
    found = [trace(matrix, products, seed=seed) for seed in range(1000)]
    covered = sum(each.low <= true <= each.high for each in found) / 1000
    assert 0.93 <= covered <= 0.97
    spread = torch.tensor([each.mean for each in found], dtype=torch.float64)
    assert abs(float(spread.mean()) - true) < 4 * float(spread.std()) / math.sqrt(1000), "unbiased"
    assert all(each.products == products for each in found) and matrix.products == 1000 * products


@pytest.mark.parametrize(("products", "relative_error"), [(6, 0.2), (12, 0.1), (32, 0.006)])
def test_more_probes_reach_a_wanted_relative_error_and_still_cover(products, relative_error):
    matrix = outliers_and_bulk()
    true = float(matrix.dense.trace())
    found = [trace(matrix, products, seed=seed, relative_error=relative_error) for seed in range(400)]
    assert 0.93 <= sum(each.low <= true <= each.high for each in found) / 400 <= 0.97
    assert all((each.high - each.low) / 2 <= relative_error * abs(each.mean) for each in found), (
        "as narrow as asked for"
    )
    counts = [each.products for each in found]
    assert products + 8 <= min(counts) < max(counts) and sum(counts) == matrix.products


def test_fewer_than_eight_probes_have_no_interval():
    for each in (trace(outliers_and_bulk(), 14), density(outliers_and_bulk(), steps=5, probes=7).trace):
        assert math.isfinite(each.mean) and each.error > 0 and math.isnan(each.low) and math.isnan(each.high)
    assert trace(outliers_and_bulk(), 16).low < density(outliers_and_bulk(), steps=5, probes=8).trace.high


def test_the_second_stage_has_as_many_probes_as_students_interval_of_that_width_needs():
    samples = [1.0, 3.0, 2.0, 7.0, 1.5]
    reach = stats.t.ppf(0.975, 4) * np.std(samples, ddof=1)
    assert _wanted(samples, 0.1) == math.ceil((reach / 0.1) ** 2)
    assert _wanted(samples, 100.0) == 8 and _wanted([1.0] * 5, 0.0) == 8


def test_the_second_stage_draws_new_probes_until_their_interval_is_narrow_enough():
    matrix, seed, wish = outliers_and_bulk(), 3, 0.02
    known, probe = by_hand(matrix.dense, 8, seed)
    first = [probe() for _ in range(8)]
    wanted = _wanted(first, wish * abs(known + float(np.mean(first))))
    samples, added = [probe() for _ in range(wanted)], 0
    while (wide := (hall(samples).high - hall(samples).low) / 2 / (wish * abs(known + hall(samples).mean))) > 1:
        samples += [probe() for _ in range(math.ceil(len(samples) * (wide**2 - 1)))]
        added += 1
    expected, found = hall(samples), trace(matrix, 16, seed, wish)
    assert found.products == 16 + len(samples) and added > 0
    assert (found.mean, found.error, found.low, found.high) == pytest.approx(
        (known + expected.mean, expected.error, known + expected.low, known + expected.high), rel=1e-6
    )
    assert trace(matrix, 16, seed, wish, most=16 + wanted + 1).products == 16 + wanted + 1, "to the last product"


def test_an_interval_three_times_too_wide_needs_nine_times_as_many_probes():
    found = Interval(mean=5.0, error=1.0, low=2.0, high=8.0)
    assert _missing(found, 10, 1.0) == 10 * (9 - 1)
    assert _missing(found, 10, 2.5) == math.ceil(10 * (1.2**2 - 1))
    assert _missing(found, 10, 3.0) == _missing(found, 10, 4.0) == 0
    assert _missing(found, 10, 0.0) > 10**100


def test_a_budget_that_does_not_suffice_leaves_a_wider_interval():
    found = trace(outliers_and_bulk(), 8, relative_error=1e-6, most=20)  # twelve probes in the second stage
    assert found.products == 20 and found.high - found.low > 1e-6 * found.mean


def test_a_krylov_space_that_holds_all_eigenvectors_leaves_no_error():
    matrix = with_eigenvalues([7.0, -3.0, *[0.0] * 48])
    found = trace(matrix, 12)
    assert found.mean == pytest.approx(4) and found.error < 1e-10
    assert found.low == pytest.approx(4) and found.high == pytest.approx(4)
    assert found.products == 12, "three for Lanczos and the rest for probes"


@pytest.mark.parametrize("size", [1, 5, 12])
def test_a_matrix_with_no_more_rows_than_products_is_written_out(size):
    matrix = with_eigenvalues(torch.arange(size) - 1.5)
    found = trace(matrix, 12)
    assert found.mean == found.low == found.high == pytest.approx(float(matrix.dense.trace()))
    assert (found.error, found.products, matrix.products) == (0.0, size, size)


def test_the_seed_decides_and_nothing_else():
    matrix = outliers_and_bulk()
    assert trace(matrix, 16, seed=1) == trace(matrix, 16, seed=1) != trace(matrix, 16, seed=2)


def test_products_that_are_not_finite_give_a_trace_of_nan():
    found = trace(Matrix(torch.full((50, 50), math.nan, dtype=torch.float64)), relative_error=0.1)
    assert math.isnan(found.mean) and math.isnan(found.low) and math.isnan(found.high)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [({"products": 5}, "products = 5 is too few"), ({"relative_error": 0.0}, "relative_error = 0.0; it must be")],
)
def test_a_mistake_is_one_sentence(options, sentence):
    with pytest.raises(RecipeError, match=sentence):
        trace(outliers_and_bulk(), **options)
