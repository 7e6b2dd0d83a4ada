"""The Hessian's products, spectrum and trace against dense float64 matrices."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from fedflat.flatness import GaussNewton, Hessian, Objective, top_eigenvalues, trace


def dense(module, batches, names=None):
    """The full Hessian by torch.func, the oracle."""
    parameters = {n: p.detach() for n, p in module.named_parameters()}
    chosen = [n for n in parameters if names is None or n in names]
    sizes = [parameters[n].numel() for n in chosen]
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))

    def loss(vector):
        views = {n: v.view_as(parameters[n]) for n, v in zip(chosen, vector.split(sizes), strict=True)}
        return F.cross_entropy(functional_call(module, {**parameters, **views}, (x,)), y)

    return torch.func.hessian(loss)(torch.cat([parameters[n].reshape(-1) for n in chosen]))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        x = x.flatten(2).transpose(1, 2)[:, :, :4]
        weights = torch.softmax(self.q(x) @ self.k(x).transpose(1, 2) / 2, dim=-1)
        return self.head((weights @ self.v(x)).mean(dim=1))


NETS = {
    "mlp": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.Tanh(), nn.Linear(5, 3)),
    "conv": lambda: nn.Sequential(nn.Conv2d(4, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(3, 3)),
    "groupnorm": lambda: nn.Sequential(
        nn.Conv2d(4, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)
    ),
    "attention": Attention,
}


@pytest.fixture(params=NETS)
def case(request):
    torch.manual_seed(0)
    module = NETS[request.param]().double()
    x, y = torch.randn(30, 4, 4, 4, dtype=torch.float64), torch.randint(0, 3, (30,))
    return module, [(x[:8], y[:8]), (x[8:], y[8:])]


def test_products_are_those_of_the_dense_matrix_for_any_batches(case):
    module, batches = case
    matrix, hessian = dense(module, batches), Hessian(Objective(module, F.cross_entropy, batches))
    v = torch.randn(hessian.size, dtype=torch.float64)
    torch.testing.assert_close(hessian @ v, matrix @ v, rtol=1e-9, atol=1e-12)


def dense_gauss_newton(module, batches):
    """E[Jᵀ ∇²_z ℓ J] sample by sample from dense Jacobians, the oracle."""
    parameters = {n: p.detach() for n, p in module.named_parameters()}
    x = torch.cat([inputs for inputs, _ in batches])
    by_name = torch.func.jacrev(lambda w: functional_call(module, w, (x,)))(parameters)
    jacobian = torch.cat([by_name[n].flatten(2) for n in parameters], dim=2)
    p = torch.softmax(module(x).detach(), dim=1)
    curvature = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    return torch.einsum("nap,nab,nbq->pq", jacobian, curvature, jacobian) / len(x)


def test_gauss_newton_products_are_those_of_the_dense_matrix(case):
    module, batches = case
    matrix, operator = dense_gauss_newton(module, batches), GaussNewton(Objective(module, F.cross_entropy, batches))
    v = torch.randn(operator.size, dtype=torch.float64)
    torch.testing.assert_close(operator @ v, matrix @ v, rtol=1e-9, atol=1e-12)
    assert operator.products == 1
    values = torch.linalg.eigvalsh(matrix)
    assert float(values[0]) > -1e-12
    top = top_eigenvalues(operator, k=2, tolerance=1e-10).values
    torch.testing.assert_close(top, values.flip(0)[:2], rtol=1e-8, atol=1e-10)


def test_gauss_newton_is_the_hessian_of_what_is_linear_in_the_weights_and_not_of_the_rest():
    torch.manual_seed(0)
    module = NETS["mlp"]().double()
    x, y = torch.randn(9, 4, 4, 4, dtype=torch.float64), torch.randint(0, 3, (9,))
    whole = Objective(module, F.cross_entropy, [(x, y)])
    head = whole.of(["3.weight", "3.bias"])
    for objective, same in ((head, True), (whole, False)):
        v = torch.randn(objective.size, dtype=torch.float64)
        assert torch.allclose(GaussNewton(objective) @ v, Hessian(objective) @ v, rtol=1e-9, atol=1e-12) == same


def test_a_layer_without_a_forward_derivative_gets_the_same_products_by_a_second_backward_pass():
    torch.manual_seed(0)
    module = NETS["groupnorm"]().double()
    x, y = torch.randn(9, 4, 4, 4, dtype=torch.float64), torch.randint(0, 3, (9,))
    matrix = dense(module, [(x, y)])
    module[0] = module[0].to(memory_format=torch.channels_last)
    objective = Objective(module, F.cross_entropy, [(x.to(memory_format=torch.channels_last), y)])
    v = torch.randn(objective.size, dtype=torch.float64)
    torch.testing.assert_close(objective.product(v), matrix @ v, rtol=1e-9, atol=1e-12)
    assert not objective._forward_mode


def test_the_top_eigenvalues_are_those_of_the_dense_matrix_with_small_residuals(case):
    module, batches = case
    expected = torch.linalg.eigvalsh(dense(module, batches)).flip(0)[:5]
    eigen = top_eigenvalues(Hessian(Objective(module, F.cross_entropy, batches)), k=5, tolerance=1e-10)
    torch.testing.assert_close(eigen.values, expected, rtol=1e-8, atol=1e-10)
    assert float(eigen.residuals.max()) < 1e-7
    assert eigen.ratio == pytest.approx(float(expected[0] / expected[4]), rel=1e-6)


def test_a_layers_block_is_the_blocks_hessian(case):
    module, batches = case
    name = [n for n, _ in module.named_parameters() if n.endswith("weight")][-1]
    matrix = dense(module, batches, [name])
    eigen = top_eigenvalues(Hessian(Objective(module, F.cross_entropy, batches, [name])), k=3, tolerance=1e-10)
    torch.testing.assert_close(eigen.values, torch.linalg.eigvalsh(matrix).flip(0)[:3], rtol=1e-8, atol=1e-10)


def test_hutchinsons_trace_lies_within_its_error(case):
    module, batches = case
    expected = float(dense(module, batches).trace())
    estimate = trace(Hessian(Objective(module, F.cross_entropy, batches)), probes=200)
    assert abs(estimate.mean - expected) < 4 * estimate.error + 1e-9
    assert estimate.error < 0.3 * abs(expected) + 1e-3


def test_on_a_quadratic_everything_is_exact():
    chance = torch.Generator().manual_seed(0)
    x = torch.randn(50, 6, generator=chance, dtype=torch.float64)
    module = nn.Linear(6, 1, bias=False).double()
    hessian = Hessian(Objective(module, lambda z, y: 0.5 * (z - y).square().mean(), [(x, x[:, :1])]))
    expected = torch.linalg.eigvalsh(x.T @ x / 50).flip(0)
    torch.testing.assert_close(top_eigenvalues(hessian, k=3, tolerance=1e-12).values, expected[:3])


def test_a_hessian_of_zeros_has_eigenvalues_of_zero_and_orthonormal_vectors():
    class Flat:
        size, dtype, products = 300, torch.float64, 0

        def __matmul__(self, vector):
            self.products += 1
            return torch.zeros_like(vector)

    top = top_eigenvalues(Flat(), k=3)
    assert not top.values.any() and not top.residuals.any()
    torch.testing.assert_close(top.vectors @ top.vectors.T, torch.eye(3, dtype=torch.float64))
