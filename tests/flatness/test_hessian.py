"""The Hessian's products, spectrum and trace against dense float64 matrices."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from fedflat.errors import RecipeError, TrainingError
from fedflat.flatness import Fisher, GaussNewton, Hessian, Objective, matrix_of, measure, top_eigenvalues
from fedflat.flatness.hessian import ratio
from fedflat.tasks import TASKS, TokenLoss
from fedflat.tokens import IGNORED


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


class Matrix:
    """A dense symmetric matrix that shows only its products, and counts them."""

    def __init__(self, dense):
        self.dense, self.size, self.dtype, self.products = dense, len(dense), dense.dtype, 0

    def __matmul__(self, vector):
        self.products += 1
        return self.dense @ vector


def with_spectrum(values):
    chance = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(len(values), len(values), generator=chance, dtype=torch.float64)).Q
    return basis @ torch.diag(values) @ basis.T


@pytest.mark.parametrize("k", [1, 6, 30])
def test_any_number_of_eigenvalues_may_be_asked_for(k):
    values = torch.linspace(-2, 5, 120, dtype=torch.float64).square()
    top = top_eigenvalues(Matrix(with_spectrum(values)), k=k, tolerance=1e-10)
    torch.testing.assert_close(top.values, values.sort(descending=True).values[:k])
    torch.testing.assert_close(top.vectors @ top.vectors.T, torch.eye(k, dtype=torch.float64), rtol=0, atol=1e-9)


def test_an_operator_of_float32_gets_vectors_of_float32_and_gives_such_values():
    dense = with_spectrum(torch.arange(100, dtype=torch.float64)).float()
    top = top_eigenvalues(Matrix(dense), k=2)
    assert top.values.dtype == top.vectors.dtype == torch.float32
    torch.testing.assert_close(top.values, torch.tensor([99.0, 98.0]), rtol=1e-3, atol=0)


def test_a_looser_tolerance_costs_fewer_products():
    dense = with_spectrum(torch.linspace(0, 1, 200, dtype=torch.float64))
    costs = [top_eigenvalues(Matrix(dense), k=3, tolerance=tolerance).products for tolerance in (1e-1, 1e-4, 1e-12)]
    assert costs[0] < costs[1] < costs[2]


def test_products_that_are_not_finite_give_eigenvalues_of_nan():
    dense = torch.full((50, 50), float("nan"), dtype=torch.float64)
    top = top_eigenvalues(Matrix(dense), k=4)
    assert top.values.isnan().all() and top.values.dtype == torch.float64
    torch.testing.assert_close(top.vectors, torch.eye(4, 50, dtype=torch.float64))


@pytest.mark.parametrize("size", [1, 3, 4, 5])
def test_a_matrix_that_is_hardly_larger_than_k_is_written_out(size):
    values = torch.arange(size, dtype=torch.float64) - 1.5
    matrix = Matrix(with_spectrum(values))
    top = top_eigenvalues(matrix, k=4, tolerance=0.5)
    torch.testing.assert_close(top.values, values.flip(0)[:4], rtol=1e-12, atol=1e-12)
    assert top.products == size and float(top.residuals.max()) < 1e-12
    assert top_eigenvalues(matrix, k=4).products == size, "only what this call spent"


@pytest.mark.parametrize("k", [0, 2.5])
def test_the_number_of_eigenvalues_is_a_whole_one(k):
    with pytest.raises(RecipeError, match=f"k = {k}: ask for at least one eigenvalue, by a whole number"):
        top_eigenvalues(Matrix(torch.eye(9)), k)


def test_the_seed_decides_where_lanczos_starts():
    matrix = Matrix(with_spectrum(torch.linspace(0, 1, 200, dtype=torch.float64)))
    one, again, other = (top_eigenvalues(matrix, k=2, tolerance=0.1, seed=seed).values for seed in (1, 1, 2))
    assert torch.equal(one, again) and not torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_eigenvalues_of_zero_have_the_operators_precision(dtype):
    top = top_eigenvalues(Matrix(torch.zeros(40, 40, dtype=dtype)), k=3)
    assert top.values.dtype == top.vectors.dtype == top.residuals.dtype == dtype


class Spare(nn.Module):
    """A linear map with a parameter that no output depends on."""

    def __init__(self):
        super().__init__()
        self.spare, self.map = nn.Parameter(torch.ones(2)), nn.Linear(3, 2)

    def forward(self, x):
        return self.map(x)


def test_gauss_newton_is_zero_for_parameters_that_no_output_depends_on():
    torch.manual_seed(0)
    x, y, module = torch.randn(7, 3, dtype=torch.float64), torch.arange(7) % 2, Spare().double()
    batches = [(x, y)]
    v = torch.randn(10, dtype=torch.float64)
    found = GaussNewton(Objective(module, F.cross_entropy, batches)) @ v
    expected = dense_gauss_newton(module.map, batches) @ v[2:]
    torch.testing.assert_close(found, torch.cat([torch.zeros(2, dtype=torch.float64), expected]))


@pytest.mark.parametrize("layer", [nn.Linear(3, 2), nn.Conv1d(1, 2, 3)])
@pytest.mark.parametrize("operator", [Hessian, GaussNewton])
def test_a_hinge_loss_of_a_linear_layer_has_no_curvature(layer, operator):
    x = torch.ones(5, 1, 3) if isinstance(layer, nn.Conv1d) else torch.ones(5, 3)
    objective = Objective(layer, lambda z, y: F.relu(9 - z).sum() / len(y), [(x, torch.zeros(5))])
    assert torch.equal(operator(objective) @ torch.ones(8), torch.zeros(8))


def test_a_convolution_whose_loss_is_linear_has_no_curvature():
    objective = Objective(nn.Conv1d(1, 2, 3), lambda z, y: z.sum() / len(y), [(torch.ones(5, 1, 3), torch.zeros(5))])
    assert torch.equal(objective.product(torch.ones(8)), torch.zeros(8))


def test_gauss_newton_of_a_parameter_alone_that_no_output_depends_on():
    objective = Objective(Spare(), F.cross_entropy, [(torch.ones(4, 3), torch.arange(4) % 2)])
    assert torch.equal(GaussNewton(objective.of(["spare"])) @ torch.ones(2), torch.zeros(2))


def test_gauss_newton_is_zero_where_a_loss_with_weights_of_its_own_is_linear_in_the_outputs():
    own = torch.tensor([1.0, -2.0], requires_grad=True)
    objective = Objective(nn.Linear(3, 2), lambda z, y: (z @ own).mean(), [(torch.ones(4, 3), torch.zeros(4))])
    assert torch.equal(GaussNewton(objective) @ torch.ones(8), torch.zeros(8))


def test_frozen_parameters_are_no_part_of_the_objective():
    module = nn.Linear(3, 2)
    module.bias.requires_grad_(False)
    objective = Objective(module, F.cross_entropy, [(torch.ones(4, 3), torch.arange(4) % 2)])
    assert (objective.size, list(objective.layout.shapes)) == (6, ["weight"])


def dense_fisher(module, x, real):
    """E over the model's own labels of the outer products of ∇log p, class by class, the oracle."""
    parameters = {n: p.detach() for n, p in module.named_parameters()}

    def log_likelihood(w, sample, label):
        z = functional_call(module, w, (sample[None],))[0]
        return torch.log_softmax(z, dim=0)[label]

    total = 0
    for sample in x:
        p = torch.softmax(module(sample[None])[0].detach(), dim=0)
        if real:
            by_name = torch.func.jacrev(lambda w: functional_call(module, w, (sample[None],))[0])(parameters)  # noqa: B023
            jacobian = torch.cat([by_name[n].flatten(1) for n in parameters], dim=1)
            total += jacobian.T @ jacobian
            continue
        for label in range(len(p)):
            slope = torch.func.grad(log_likelihood)(parameters, sample, label)
            g = torch.cat([slope[n].reshape(-1) for n in parameters])
            total += p[label] * torch.outer(g, g)
    return total / len(x)


@pytest.mark.parametrize("real", [False, True])
def test_fisher_products_are_the_expectation_over_the_models_own_labels(real):
    """The loss that was trained plays no part: here one with label smoothing, for which G is another matrix."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    x = torch.randn(7, 4, dtype=torch.float64)
    y = torch.randn(7, 3, dtype=torch.float64) if real else torch.arange(7) % 3
    loss = (lambda z, y: (z - y).abs().pow(3).mean()) if real else (lambda z, y: 2 * F.cross_entropy(z, y))
    objective = Objective(module, loss, [(x[:2], y[:2]), (x[2:], y[2:])])
    operator, v = Fisher(objective), torch.randn(27, dtype=torch.float64)
    torch.testing.assert_close(operator @ v, dense_fisher(module, x, real) @ v, rtol=1e-9, atol=1e-12)
    assert operator.products == 1
    assert not torch.allclose(GaussNewton(objective) @ v, operator @ v)


def test_a_column_of_outputs_has_the_fisher_matrix_of_single_numbers():
    torch.manual_seed(0)
    module, x = nn.Linear(4, 1).double(), torch.randn(7, 4, dtype=torch.float64)
    operator = Fisher(Objective(module, TASKS["regression"].loss, [(x[:2], x[:2, 0]), (x[2:], x[2:, 0])]))
    v = torch.randn(5, dtype=torch.float64)
    torch.testing.assert_close(operator @ v, dense_fisher(module, x, real=True) @ v, rtol=1e-9, atol=1e-12)


def test_labels_that_are_each_there_or_not_have_the_fisher_matrix_of_coins():
    """The likelihood sums over the labels and the loss takes their mean, so F = G times their number."""
    torch.manual_seed(0)
    module, x = nn.Linear(4, 3).double(), torch.randn(7, 4, dtype=torch.float64)
    objective = Objective(module, TASKS["multi-label"].loss, [(x, (x[:, :3] > 0).double())])
    v = torch.randn(15, dtype=torch.float64)
    torch.testing.assert_close(Fisher(objective) @ v, 3 * (GaussNewton(objective) @ v))


@pytest.mark.parametrize("length", [3, 5])  # as many tokens as classes, or more
def test_the_fisher_matrix_of_tokens_is_gauss_newton_wherever_the_classes_are(length):
    torch.manual_seed(0)
    module, x = nn.Linear(2, 3).double(), torch.randn(4, length, 2, dtype=torch.float64)
    y = torch.arange(4 * length).view(4, length) % 3
    y[0, :2], y[3] = IGNORED, IGNORED
    last = Objective(module, TokenLoss(), [(x[:3], y[:3]), (x[3:], y[3:]), (x[1:], y[1:])])
    turned = nn.Sequential(module, nn.Flatten(1), nn.Unflatten(1, (length, 3)), Transposed())
    first = Objective(turned, F.cross_entropy, [(x[1:3], y[1:3])])
    v = torch.randn(9, dtype=torch.float64)
    for objective in (last, first):
        torch.testing.assert_close(Fisher(objective) @ v, GaussNewton(objective) @ v)


class Transposed(nn.Module):
    def forward(self, x):
        return x.transpose(1, 2)


def test_for_cross_entropy_fisher_is_gauss_newton_and_measured_under_its_name(case):
    module, batches = case
    objective = Objective(module, F.cross_entropy, batches)
    v = torch.randn(objective.size, dtype=torch.float64)
    torch.testing.assert_close(Fisher(objective) @ v, GaussNewton(objective) @ v)
    for name, kind in {"hessian": Hessian, "ggn": GaussNewton, "fisher": Fisher}.items():
        assert type(matrix_of(objective, name)) is kind and kind.matrix == name
    with pytest.raises(RecipeError, match="matrix = 'fischer' is unknown; did you mean fisher"):
        matrix_of(objective, "fischer")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([6.0, 3.0, 1.5], (4.0, "")),
        ([6.0], (1.0, "")),
        ([6.0, 0.0], (None, "λ2 = 0 is not positive")),
        ([6.0, 3.0, -1.0], (None, "λ3 = -1 is not positive")),
        ([6.0, -2.0], (None, "λ2 = -2 is not positive")),
        ([-1.0, -2.0], (None, "λ1 = -1 is not positive")),
        ([math.nan, math.nan], (None, "λ1 is not finite")),
    ],
)
def test_the_ratio_of_eigenvalues_is_guarded_and_says_why(values, expected):
    assert ratio(values) == expected


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_one_sentence(value):
    module = nn.Linear(3, 2)
    with torch.no_grad():
        module.bias[1] = value
    with pytest.raises(TrainingError, match="bias: holds weights that are not finite"):
        Objective(module, F.cross_entropy, [(torch.ones(4, 3), torch.arange(4) % 2)])


def test_a_loss_that_is_not_finite_is_one_sentence():
    objective = Objective(nn.Linear(3, 2), F.cross_entropy, [(torch.full((4, 3), math.nan), torch.arange(4) % 2)])
    with pytest.raises(TrainingError, match="the mean loss of these samples is nan"):
        measure(objective)
