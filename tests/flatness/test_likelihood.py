"""The negative log-likelihood behind the Fisher matrix: its value for every kind of loss and labels."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedflat.flatness import Fisher, GaussNewton, objective_of
from fedflat.flatness.likelihood import Likelihood
from fedflat.tasks import TASKS, TokenLoss
from fedflat.tokens import IGNORED

chance = torch.Generator().manual_seed(0)
Z = torch.randn(5, 3, generator=chance, dtype=torch.float64)
SHARES = torch.softmax(torch.randn(5, 3, generator=chance, dtype=torch.float64), dim=1)
COINS = (SHARES > 0.3).double()


class Wrapped:
    def __init__(self, loss):
        self.loss = loss


@pytest.mark.parametrize("loss", [F.cross_entropy, nn.CrossEntropyLoss(), Wrapped(nn.CrossEntropyLoss())])
def test_after_cross_entropy_real_labels_are_probabilities_of_classes(loss):
    expected = -(SHARES * torch.log_softmax(Z, dim=1)).sum() / 5
    assert float(Likelihood(loss)(Z, SHARES)) == pytest.approx(float(expected), rel=1e-12)


@pytest.mark.parametrize(
    "loss", [TASKS["multi-label"].loss, F.binary_cross_entropy_with_logits, nn.BCEWithLogitsLoss()]
)
def test_after_binary_cross_entropy_they_are_coins_of_one_sample(loss):
    p = torch.sigmoid(Z)
    expected = -(COINS * p.log() + (1 - COINS) * (1 - p).log()).sum() / 5
    assert float(Likelihood(loss)(Z, COINS)) == pytest.approx(float(expected), rel=1e-12)


def test_otherwise_they_are_normal_with_unit_variance():
    likelihood = Likelihood(nn.L1Loss())
    assert float(likelihood(Z, SHARES)) == pytest.approx(float((Z - SHARES).square().sum()) / 10, rel=1e-12)
    column = float((Z[:, 0] - SHARES[:, 0]).square().sum()) / 10
    assert float(likelihood(Z[:, :1], SHARES[:, 0])) == pytest.approx(column, rel=1e-12)
    assert likelihood.counted(SHARES) == 5, "samples, however many outputs each of them has"


def test_classes_may_be_last_or_second_and_the_labels_decide():
    z, y = torch.randn(4, 5, 3, generator=chance), torch.arange(20).view(4, 5) % 3
    y[1, 2] = IGNORED
    expected = float(F.cross_entropy(z.flatten(0, 1), y.flatten()))
    for outputs in (z, z.transpose(1, 2)):
        likelihood = Likelihood(nn.L1Loss())
        assert float(likelihood(outputs, y)) == pytest.approx(expected) and likelihood.counted(y) == 19
    square, classes = z[:, :3], torch.arange(12).view(4, 3) % 3
    second, last = F.cross_entropy(square, classes), F.cross_entropy(square.flatten(0, 1), classes.flatten())
    assert float(Likelihood(F.cross_entropy)(square, classes)) == pytest.approx(float(second)) != float(last)
    assert float(Likelihood(TokenLoss())(square, classes)) == pytest.approx(float(last))
    assert float(Likelihood(TokenLoss())(Z, classes[:, 0].new_zeros(5))) == pytest.approx(
        float(F.cross_entropy(Z, torch.zeros(5, dtype=torch.int64)))
    )
    with pytest.raises(ValueError, match="size"):
        Likelihood(F.cross_entropy)(z, y.flatten())


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(("kind", "labels"), [(nn.BCEWithLogitsLoss, COINS), (nn.CrossEntropyLoss, SHARES)])
def test_the_fisher_matrix_of_a_loss_does_not_depend_on_how_it_reduces(kind, labels, reduction):
    """For coins the mean takes all 3 outputs of a sample, and the likelihood sums them."""
    torch.manual_seed(0)
    module, v = nn.Linear(3, 3).double(), torch.linspace(-1, 1, 12, dtype=torch.float64)
    with objective_of(module, (Z, labels), kind()) as f:
        expected = (3 if kind is nn.BCEWithLogitsLoss else 1) * (GaussNewton(f) @ v)
    with objective_of(module, (Z, labels), kind(reduction=reduction)) as f:
        torch.testing.assert_close(Fisher(f) @ v, expected)
