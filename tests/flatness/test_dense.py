"""The Hessian written out: the matrix of torch.func, and rows that share a backward pass."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from fedflat.flatness import Objective
from fedflat.flatness.dense import dense_hessian


def case():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    x, y = torch.randn(11, 4, dtype=torch.float64), torch.arange(11) % 3
    return module, x, y


@pytest.mark.parametrize("rows", [1, 2, 26, 64])  # 27 weights: the last of 26 rows at a time stands alone
def test_it_is_the_matrix_of_all_parameters_for_any_number_of_rows_at_a_time(rows):
    module, x, y = case()
    weights = {name: parameter.detach() for name, parameter in module.named_parameters()}
    sizes = [weight.numel() for weight in weights.values()]

    def loss(vector):
        parts = zip(weights.items(), vector.split(sizes), strict=True)
        return F.cross_entropy(functional_call(module, {name: v.view_as(w) for (name, w), v in parts}, (x,)), y)

    expected = torch.func.hessian(loss)(torch.cat([weight.flatten() for weight in weights.values()]))
    found = dense_hessian(Objective(module, F.cross_entropy, [(x[:4], y[:4]), (x[4:], y[4:])]), rows)
    assert found.dtype == torch.float64 and found.shape == (27, 27)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-13)


class Count(TorchDispatchMode):
    """Counts the operations."""

    def __init__(self):
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.operations += 1
        return function(*args, **(kwargs or {}))


def test_rows_at_once_share_their_backward_pass():
    module, x, y = case()
    counted = {}
    for rows in (1, 27):
        with Count() as count:
            dense_hessian(Objective(module, F.cross_entropy, [(x, y)]), rows)
        counted[rows] = count.operations
    assert 5 * counted[27] < counted[1]
