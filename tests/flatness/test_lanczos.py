"""The largest eigenvalues by Lanczos, against dense matrices, and how many products they take."""

import pytest
import torch

from fedflat.errors import TrainingError
from fedflat.flatness import lanczos, top_eigenvalues
from fedflat.flatness.lanczos import orthogonal


class Diagonal:
    """A diagonal matrix that shows only its products."""

    def __init__(self, values, dtype=torch.float64):
        self.values, self.size, self.dtype, self.products = values.to(dtype), len(values), dtype, 0

    def __matmul__(self, vector):
        self.products += 1
        return self.values * vector


def outliers(size=3000, seed=0):
    """Nine outliers above a bulk around 0, the shape of a trained classifier's Hessian with ten classes."""
    bulk = 0.1 * torch.randn(size - 9, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.cat([torch.linspace(3, 20, 9, dtype=torch.float64), bulk])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("k", [1, 5])
def test_for_any_seed_it_ends_early_at_the_largest_eigenvalues(k, seed, dtype):
    matrix = Diagonal(outliers(seed=seed), dtype)
    found = top_eigenvalues(matrix, k, tolerance=1e-3, seed=seed)
    torch.testing.assert_close(
        found.values.double(), matrix.values.double().sort().values.flip(0)[:k], rtol=1e-5, atol=0
    )
    assert found.products <= 14 + 2 * k and matrix.products == found.products


@pytest.mark.parametrize("scale", [1e-20, 1e20])
def test_what_is_rounding_depends_on_the_scale_of_the_matrix(scale):
    plain, scaled = (top_eigenvalues(Diagonal(factor * outliers()), 2, tolerance=1e-3) for factor in (1.0, scale))
    torch.testing.assert_close(scaled.values / scale, plain.values, rtol=1e-9, atol=0)
    assert scaled.products == plain.products


def test_the_residuals_are_those_of_the_vectors():
    matrix = Diagonal(outliers())
    found = top_eigenvalues(matrix, 4, tolerance=1e-2)
    expected = (matrix.values * found.vectors - found.values[:, None] * found.vectors).norm(dim=1)
    torch.testing.assert_close(found.residuals, expected, rtol=1e-6, atol=1e-12)
    assert bool((expected <= 1e-2 * found.values).all())


def test_in_little_memory_it_restarts_and_finds_the_same(monkeypatch):
    values = torch.linspace(-1, 1, 400, dtype=torch.float64)
    plenty = top_eigenvalues(Diagonal(values), 3, tolerance=1e-6)
    monkeypatch.setattr(lanczos, "BASIS_BYTES", 0)
    little = top_eigenvalues(Diagonal(values), 3, tolerance=1e-6)
    assert little.products > plenty.products > 20
    torch.testing.assert_close(little.values, values.flip(0)[:3], rtol=1e-9, atol=0)
    torch.testing.assert_close(little.vectors @ little.vectors.T, torch.eye(3, dtype=torch.float64), atol=1e-9, rtol=0)


@pytest.mark.parametrize(
    ("k", "memory", "longest", "room"),
    [(3, 0, 200, 20), (8, 0, 200, 32), (3, 400 * 8 * 50, 200, 50), (3, 1 << 30, 40, 40)],
)
def test_the_basis_has_the_rows_that_memory_allows_and_a_restart_keeps_k_and_a_third_of_the_rest(
    monkeypatch, k, memory, longest, room
):
    rows, kept = [], k + (room - k) // 3
    monkeypatch.setattr(lanczos, "BASIS_BYTES", memory)
    monkeypatch.setattr(lanczos, "LONGEST", longest)
    monkeypatch.setattr(lanczos, "orthogonal", lambda v, basis: rows.append(len(basis)) or orthogonal(v, basis))
    monkeypatch.setattr(lanczos, "PRODUCTS", room + 2)
    with pytest.raises(TrainingError):
        top_eigenvalues(Diagonal(torch.linspace(-1, 1, 400, dtype=torch.float64).pow(3)), k, tolerance=1e-12)
    assert rows == [*range(1, room + 1), kept + 1, kept + 2]


def test_equal_eigenvalues_are_all_found_if_the_krylov_space_ends():
    values = torch.cat([torch.tensor([5.0, 5.0, 5.0, 2.0]), torch.zeros(96)])
    found = top_eigenvalues(Diagonal(values), 4, tolerance=1e-6)
    torch.testing.assert_close(found.values, torch.tensor([5.0, 5.0, 5.0, 2.0], dtype=torch.float64))
    again = top_eigenvalues(Diagonal(values), 4, tolerance=1e-6)
    assert torch.equal(again.vectors, found.vectors), "the seed decides on the new directions too"


def test_tiny_eigenvalues_below_a_large_negative_one_converge_to_rounding():
    values = torch.cat([torch.full((1,), -1e6), torch.linspace(1e-4, 1e-3, 500)])
    found = top_eigenvalues(Diagonal(values, torch.float32), 1, tolerance=1e-3)
    assert found.products < 100


def test_without_convergence_the_number_of_products_is_bounded(monkeypatch):
    monkeypatch.setattr(lanczos, "PRODUCTS", 25)
    matrix = Diagonal(torch.linspace(0, 1, 5000, dtype=torch.float64))
    with pytest.raises(TrainingError, match="3 largest eigenvalues did not converge to tolerance 1e-08 in 25 products"):
        top_eigenvalues(matrix, 3, tolerance=1e-8)
    assert matrix.products == 25
