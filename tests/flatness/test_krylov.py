"""A certified bound on the largest eigenvalue after a few steps of Lanczos, against dense matrices."""

import math

import pytest
import torch

from fedflat.flatness.krylov import MISSED, certified, ritz


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


def test_more_steps_give_a_tighter_bound():
    values = drawn("normal", 3)
    few, many = (certified(*lanczos(values, steps, seed=0), 30).mean() for steps in (4, 12))
    assert float(many) < 0.5 * float(few)
