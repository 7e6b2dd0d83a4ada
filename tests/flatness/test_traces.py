"""The trace of matrices whose trace is known: exact parts, unbiased estimates, and intervals that cover."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, hessian

from fedflat.errors import RecipeError
from fedflat.flatness import trace


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


def test_the_interval_covers_the_trace_for_95_of_100_seeds(matrix):
    true = float(matrix.dense.trace())
    found = [trace(matrix, seed=seed) for seed in range(400)]
    covered = sum(each.low <= true <= each.high for each in found) / 400
    assert 0.93 <= covered <= 0.97
    spread = torch.tensor([each.mean for each in found], dtype=torch.float64)
    assert abs(float(spread.mean()) - true) < 4 * float(spread.std()) / math.sqrt(400), "unbiased"
    assert all(each.products == 32 for each in found) and matrix.products == 400 * 32


def test_more_probes_reach_a_wanted_relative_error_and_still_cover():
    matrix = outliers_and_bulk()
    true = float(matrix.dense.trace())
    found = [trace(matrix, seed=seed, relative_error=0.006) for seed in range(400)]
    assert 0.93 <= sum(each.low <= true <= each.high for each in found) / 400 <= 0.975
    # Relative to the trace of the first stage, which the first interval tells to 2 %.
    assert max((each.high - each.low) / 2 / true for each in found) < 0.006 * 1.02
    assert 32 <= min(each.products for each in found) < max(each.products for each in found)


def test_a_budget_that_does_not_suffice_leaves_a_wider_interval():
    found = trace(outliers_and_bulk(), 8, relative_error=1e-6, most=20)
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
    assert trace(matrix, 12, seed=1) == trace(matrix, 12, seed=1) != trace(matrix, 12, seed=2)


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
