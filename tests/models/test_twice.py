"""Second derivatives that torch does not have, or has wrong, against finite differences of the gradient."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from fedflat.errors import TrainingError
from fedflat.flatness import Hessian, Objective
from fedflat.models import twice_differentiable

TOKENS = torch.tensor([[0, 1, 2, 2], [3, 0, 1, 4], [2, 2, 0, 3], [0, 0, 0, 0], [1, 4, 3, 2]])
VECTORS = torch.linspace(-2, 3, 20, dtype=torch.float64).sin().view(5, 4)
LABELS = torch.tensor([0, 1, 2, 1, 0])


def normalised(layer):
    return nn.Sequential(layer, nn.Tanh(), nn.Linear(4, 3))


def bag(mode, **options):
    return nn.Sequential(nn.EmbeddingBag(5, 3, mode=mode, **options), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))


def squeeze():
    return nn.Sequential(nn.Linear(4, 4), nn.Hardsigmoid(), nn.Linear(4, 3))


CASES = {
    "weight norm": (lambda: normalised(parametrizations.weight_norm(nn.Linear(4, 4))), VECTORS),
    "weight norm of columns": (lambda: normalised(parametrizations.weight_norm(nn.Linear(4, 4), dim=1)), VECTORS),
    "weight norm of all": (lambda: normalised(parametrizations.weight_norm(nn.Linear(4, 4), dim=None)), VECTORS),
    "hardsigmoid": (squeeze, VECTORS),
    "sums of embeddings": (lambda: bag("sum"), TOKENS),
    "means of embeddings": (lambda: bag("mean"), TOKENS),
}


@pytest.mark.parametrize("name", CASES)
def test_the_hessian_is_the_difference_of_two_gradients(name):
    make, inputs = CASES[name]
    torch.manual_seed(0)
    f = Objective(make().double(), F.cross_entropy, [(inputs, LABELS)])
    units, w, hessian = torch.eye(f.size, dtype=torch.float64), f.weights, Hessian(f)
    found = torch.stack([hessian @ unit for unit in units])

    def gradient(at):
        with f.at(at):
            return f.gradient()

    expected = torch.stack([(gradient(w + 1e-6 * unit) - gradient(w - 1e-6 * unit)) / 2e-6 for unit in units])
    torch.testing.assert_close(found, found.T, rtol=0, atol=1e-13)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-8)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding", [None, 0])
def test_bags_are_those_of_torch(mode, padding):
    torch.manual_seed(0)
    table = nn.EmbeddingBag(5, 3, mode=mode, padding_idx=padding).double()
    weights = torch.rand(TOKENS.shape, dtype=torch.float64)
    many = {"weighted": (TOKENS, None, weights), "plain": (TOKENS,), "offsets": (TOKENS[0], torch.tensor([0, 1]))}
    for name, arguments in many.items():
        if name == "weighted" and mode != "sum":
            continue
        expected = table(*arguments)
        with twice_differentiable():
            torch.testing.assert_close(table(*arguments), expected, rtol=1e-14, atol=1e-14)


def test_other_functions_and_the_switches_stay_as_they_are():
    before = torch.backends.mha.get_fastpath_enabled()
    with twice_differentiable():
        assert torch.equal(F.hardsigmoid(torch.tensor([-4.0, 0.0, 4.0])), torch.tensor([0.0, 0.5, 1.0]))
        assert torch.equal(torch.ones(2) + 1, torch.full((2,), 2.0))
    assert torch.backends.mha.get_fastpath_enabled() == before


def test_an_operation_without_a_second_derivative_is_named():
    class Distances(nn.Linear):
        def forward(self, x):
            return torch.cdist(super().forward(x), VECTORS[:3])

    f = Objective(Distances(4, 4).double(), F.cross_entropy, [(VECTORS, LABELS)])
    with pytest.raises(TrainingError, match=r"an operation without a second derivative in torch .*cdist"):
        f.product(f.weights)
