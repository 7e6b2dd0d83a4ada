"""A certified bound on the largest eigenvalue after a few steps of Lanczos, against dense matrices."""

import math

import pytest
import torch

from fedflat.flatness.krylov import MISSED, certified, krylov, ritz


def lanczos(values, steps, seed):
    """α and β of Lanczos on diagonal matrices (rows of `values`), in the plain three-term form."""
    chance = torch.Generator().manual_seed(seed)
    v = torch.randn(values.shape, generator=chance, dtype=torch.float64)
    v /= v.norm(dim=1, keepdim=True)
    before, beta, alphas, betas = torch.zeros_like(v), torch.zeros(len(v), 1, dtype=torch.float64), [], []
    for _ in range(steps):
        w = values * v - beta * before
        alpha = (w * v).sum(dim=1, keepdim=True)
        w -= alpha * v
        beta = w.norm(dim=1, keepdim=True)
        before, v = v, w / beta.clamp_min(1e-150)
        alphas.append(alpha)
        betas.append(beta)
    return torch.cat(alphas, dim=1), torch.cat(betas, dim=1)


def drawn(kind, seed, rows=300, size=30):
    chance = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, size, generator=chance, dtype=torch.float64)
    if kind == "close":
        values[:, 0] = 3 + 1e-3 * values[:, 0]
        values[:, 1] = 3.0
    return {"normal": values, "outlier": values.pow(5), "positive": values.exp(), "close": values}[kind]


@pytest.mark.parametrize("kind", ["normal", "outlier", "positive", "close"])
@pytest.mark.parametrize("steps", [1, 2, 4, 8, 12])
def test_no_eigenvalue_lies_above_the_bound_however_early_lanczos_stops(kind, steps):
    values = drawn(kind, steps)
    bound = certified(*lanczos(values, steps, seed=steps), size=30)
    assert bool((bound >= values.amax(dim=1) * (1 - 1e-12)).all())


def test_the_ritz_value_with_its_residual_would_not_do():
    values = drawn("outlier", 0)
    alphas, betas = lanczos(values, 2, seed=0)
    nodes, vectors = ritz(alphas, betas[:, :-1])
    plausible = nodes[:, -1] + betas[:, -1] * vectors[:, -1, -1].abs()
    assert bool((plausible < values.amax(dim=1)).any())


def test_where_the_krylov_space_ends_the_bound_is_the_eigenvalue():
    values = torch.tensor([[5.0, 5.0, 2.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    alphas, betas = lanczos(values, 4, seed=1)
    assert float(certified(alphas, betas, 6)) == pytest.approx(5, rel=1e-5)


def test_after_one_step_it_is_the_ritz_value_and_what_may_have_been_missed():
    """λ − α ≤ β/c with c = 10⁻⁶ √(π/2d)."""
    bound = certified(torch.tensor([[2.0]]), torch.tensor([[0.5]]), size=8)
    assert float(bound) == pytest.approx(2 + 0.5 / (MISSED * math.sqrt(math.pi / 16)))


def test_after_two_steps_it_solves_its_quadratic_equation_at_every_scale():
    """(λ − θ₁)(λ − θ₂) = β₁β₂/c, in one batch of matrices that differ by 40 orders of magnitude."""
    scale = torch.tensor([[1e-20], [1.0], [1e20]], dtype=torch.float64)
    alphas, betas = torch.tensor([[2.0, 1.0]]) * scale, torch.tensor([[1.0, 0.5]]) * scale
    middle, apart = 1.5, math.hypot(0.5, 1.0)  # the Ritz values are 1.5 ± √1.25
    expected = middle + math.sqrt(apart**2 + 0.5 / (MISSED * math.sqrt(math.pi / 16)))
    assert (certified(alphas, betas, size=8) / scale[:, 0]).tolist() == pytest.approx([expected] * 3, rel=1e-12)


@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e9])
def test_a_beta_of_the_size_of_rounding_ends_the_krylov_space(scale):
    eps = torch.finfo(torch.float64).eps
    alphas, betas = (torch.tensor([pair], dtype=torch.float64) * scale for pair in ([2.0, 2.0], [1.0, 10 * eps]))
    assert float(certified(alphas, betas, size=8)) == pytest.approx(3 * scale, rel=1e-14)


def test_more_steps_give_a_tighter_bound():
    values = drawn("normal", 3)
    few, many = (certified(*lanczos(values, steps, seed=0), 30).mean() for steps in (4, 12))
    assert float(many) < 0.5 * float(few)


class Swap:
    """u vᵀ + v uᵀ with orthonormal u and v: its Krylov space from u ends after two steps, with α = 0 in both."""

    size, dtype, products = 40, torch.float64, 0
    u, v = torch.linalg.qr(torch.randn(40, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)).Q.T

    def __matmul__(self, vector):
        return self.u * (self.v @ vector) + self.v * (self.u @ vector)


def test_rounding_is_measured_against_both_diagonals():
    found = krylov(Swap(), Swap.u, 10)
    assert found.alphas.tolist() == pytest.approx([0, 0], abs=1e-14) and found.betas.tolist() == pytest.approx([1])
