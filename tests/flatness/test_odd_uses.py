"""Unusual models, losses and options: the numbers of a dense Hessian, or one sentence."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import grad
from torch.utils.checkpoint import checkpoint

from fedflat.errors import DataError, RecipeError, TrainingError
from fedflat.flatness import compare, interpolate, landscape, look, scale_test, sharpness, spectrum, trajectory

X = torch.randn(24, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.arange(24) % 3


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()


class Odd(nn.Module):
    """Two layers with one weight, a frozen bias, and a layer that no output depends on."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head, self.spare = (nn.Linear(5, n) for n in (5, 5, 3, 2))
        self.second.weight = self.first.weight
        self.first.bias.requires_grad_(False)

    def forward(self, x):
        return self.head(self.second(self.first(x).tanh()).tanh())


def dense(module):
    """The Hessian of the mean cross-entropy over X, row by row, in the order of the trained parameters."""
    trained = [p for p in module.parameters() if p.requires_grad]
    slopes = grad(F.cross_entropy(module(X), Y), trained, create_graph=True, materialize_grads=True)
    total = torch.cat([(slope + 0 * p).flatten() for slope, p in zip(slopes, trained, strict=True)])
    rows = [grad(slope, trained, retain_graph=True, materialize_grads=True) for slope in total]
    return torch.stack([torch.cat([part.flatten() for part in row]) for row in rows])


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_tied_frozen_and_unused_weights_against_a_dense_hessian(reduction):
    torch.manual_seed(0)
    model = Odd().double()
    expected = dense(model)
    loss = nn.CrossEntropyLoss(reduction=reduction)
    found = look(model, (X, Y), loss, k=3, products=len(expected), batch=7).spectrum
    assert found.eigenvalues == pytest.approx(torch.linalg.eigvalsh(expected).flip(0)[:3].tolist(), rel=1e-5)
    assert found.trace.mean == pytest.approx(float(expected.trace()), rel=1e-10)
    assert found.trace.products == len(expected) == 60  # 25 + 5 + 15 + 3 + 12


def test_the_spectrum_is_that_of_the_matrix_that_was_asked_for():
    model = nn.Linear(5, 3).double()  # linear in its weights, so H = G = F
    found = {
        matrix: spectrum(model, (X, Y), k=2, products=18, matrix=matrix) for matrix in ("hessian", "ggn", "fisher")
    }
    assert [each.matrix for each in found.values()] == list(found)
    for each in found.values():
        assert each.trace.mean == pytest.approx(found["hessian"].trace.mean, rel=1e-12)


def test_more_eigenvalues_than_parameters_are_all_of_them():
    model = nn.Linear(2, 3, bias=False).double()
    found = spectrum(model, (X[:, :2], Y), k=100).eigenvalues
    few = X[:, :2]
    slopes = lambda w: F.cross_entropy(few @ w.view(3, 2).T, Y)  # noqa: E731
    whole = torch.autograd.functional.hessian(slopes, model.weight.detach().flatten())
    assert found == pytest.approx(torch.linalg.eigvalsh(whole).flip(0).tolist(), abs=1e-12)


def test_one_weight_has_a_curve_along_it():
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(model.weight, 1.0)
    x = torch.tensor([[1.0], [3.0]], dtype=torch.float64)
    found = landscape(model, (x, x), dimensions=1, points=3)  # (w − 1)² · 5
    assert found.values.tolist() == pytest.approx([5.0, 0.0, 5.0])


def test_arrays_that_run_backwards():
    there = spectrum(network(), (X.flip(0), Y), k=1, samples=0)
    assert spectrum(network(), (X.numpy()[::-1], Y.numpy()), k=1, samples=0) == there


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_options_of_embeddings_that_change_the_gradient_or_the_weights_are_off_meanwhile(kind):
    tokens, found = torch.randint(0, 9, (len(Y), 2), generator=torch.Generator().manual_seed(0)), []
    for options in ({}, {"scale_grad_by_freq": True}, {"max_norm": 9.0}):
        torch.manual_seed(0)
        width = 6 if kind is nn.Embedding else 3
        model = nn.Sequential(kind(9, 3, **options), nn.Flatten(), nn.Linear(width, 3)).double()
        found.append(look(model, (tokens, Y), k=1))
        assert all(getattr(model[0], name) == value for name, value in options.items())
    assert found[0] == found[1] == found[2]
    nn.init.constant_(model[0].weight, 8.0)
    with pytest.raises(RecipeError, match=r"an embedding has a row of norm 13\.86, above its max_norm 9"):
        look(model, (tokens, Y))
    assert model[0].max_norm == 9.0
    assert bool((model[0].weight == 8).all())


class Around(nn.Module):
    """Does something to the outputs, or to the whole pass, of a network."""

    def __init__(self, change):
        super().__init__()
        self.inner, self.change = network(), change

    def forward(self, x):
        return self.change(self.inner, x)


def picky(inner, x):
    if len(x) < 7:
        raise ValueError("too few")
    return inner(x)


CONSTANT = {
    "detached": lambda inner, x: inner(x).detach(),
    "without gradients": torch.no_grad()(lambda inner, x: inner(x)),
    "reentrant checkpoint": lambda inner, x: checkpoint(inner, x, use_reentrant=True),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", CONSTANT)
@pytest.mark.parametrize("matrix", ["hessian", "ggn"])
def test_a_loss_without_derivative_is_one_sentence(name, matrix):
    with pytest.raises(TrainingError, match="the loss has no derivative in the weights"):
        spectrum(Around(CONSTANT[name]), (X, Y), matrix=matrix)
    with pytest.raises(TrainingError, match="the loss has no derivative in the weights"):
        sharpness(Around(CONSTANT[name]), (X, Y))


def test_a_batch_that_fails_later_is_one_sentence():
    wrong = Y.clone()
    wrong[-1] = 7
    for matrix in ("hessian", "ggn"):
        with pytest.raises(DataError, match=r"the loss cannot be computed .*Target 7 is out of bounds"):
            spectrum(network(), [(X[:20], Y[:20]), (X[20:], wrong[20:])], matrix=matrix)
        with pytest.raises(DataError, match=r"the model cannot process a batch of shape \(4, 5\).*too few"):
            spectrum(Around(picky), [(X[:10], Y[:10]), (X[10:20], Y[10:20]), (X[20:], Y[20:])], matrix=matrix, batch=9)


def complex_weights():
    model = network()
    model.phase = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    return model


MODELS = {
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(3)), "0.weight has no values yet; run the model once"),
    "compiled": (lambda: torch.jit.script(network()), "is a compiled ScriptModule"),
    "complex": (complex_weights, "phase is complex"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_cannot_be_measured_is_one_sentence(name):
    make, sentence = MODELS[name]
    with pytest.raises(RecipeError, match=sentence):
        look(make(), (X, Y))


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda m, d: look(m, d, k=2.5), "look: k is 2.5; it must be a whole number"),
        (lambda m, d: look(m, d, products=20.5), "products is 20.5; it must be a whole number"),
        (lambda m, d: look(m, d, k=None), "k is None; it must be a whole number"),
        (lambda m, d: look(m, d, None, 5), "look: after model, data and loss, give options by their name"),
        (lambda m, d: look(m, d, nn.CrossEntropyLoss), "loss: is the class CrossEntropyLoss; give a function"),
        (lambda m, d: landscape(m, d, points="3"), "landscape: points is '3'; it must be a whole number"),
        (lambda m, d: landscape(m, d, span="wide"), "landscape: span is 'wide'; it must be a number"),
        (lambda m, d: sharpness(m, d, rho=float("nan")), "sharpness: rho is nan; it must be a number"),
        (lambda m, d: sharpness(m, d, rho=-1), "rho = -1: the radius must be a number from 0 on"),
        (lambda m, d: sharpness(m, d, adaptive_rho=-1), "rho = -1: the radius"),
        (lambda m, d: sharpness(m, d, seed="x"), "seed is 'x'; it must be a whole number"),
        (lambda m, d: sharpness(m, d, seed=2**63), "it must fit into 64 bits"),
        (lambda m, d: scale_test(m, d, factor="x"), "scale_test: factor is 'x'; it must be a number"),
        (lambda m, d: compare(m, d), "compare: there is one model; give a list"),
        (lambda m, d: interpolate(m, "m", d), "the second model is a str; give two modules"),
        (lambda m, d: trajectory(m, d, models=[]), "0 models do not span a plane"),
        (lambda m, d: trajectory(m, d, models=["a"] * 3), "models: one is a str; give modules"),
        (
            lambda m, d: trajectory(m, d, models=[m, nn.Linear(5, 3)]),
            "0.weight is .4, 5. in one and nothing",
        ),
        (
            lambda m, d: trajectory(m, d, models=[m, nn.Sequential(nn.Linear(5, 3))]),
            "0.weight is .4, 5. in one and .3, 5. in another",
        ),
    ],
)
def test_a_mistake_is_one_sentence(call, sentence):
    with pytest.raises(RecipeError, match=sentence):
        call(network(), (X, Y))


def test_a_loss_must_return_a_tensor():
    with pytest.raises(DataError, match="loss: returns a float; it must return a tensor"):
        look(network(), (X, Y), lambda z, y: 1.0)


def test_names_of_compared_models_may_be_numbers():
    found = compare({1: network(), 2: network()}, (X, Y), k=1)
    assert list(found.found) == ["1", "2"]
    assert np.isfinite(found.found["1"][0].spectrum.eigenvalues[0])
    assert "2 − 1" in repr(found)
