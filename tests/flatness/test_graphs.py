"""Graphs kept between products: the same numbers as without, never stale, and within their memory."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedflat.flatness import GaussNewton, Hessian, Objective, layers
from fedflat.flatness.graphs import Graphs
from fedflat.flatness.samples import Fields


class Counting(nn.Module):
    """Counts the forward passes of a network."""

    def __init__(self, net):
        super().__init__()
        self.net, self.passes = net, 0

    def forward(self, x):
        self.passes += 1
        return self.net(x)


def objective(net=None, batches=3):
    torch.manual_seed(0)
    net = net or nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 3)
    )
    x, y = torch.randn(5 * batches, 2, 6, 6), torch.arange(5 * batches) % 3
    return Objective(Counting(net), F.cross_entropy, list(zip(x.split(5), y.split(5), strict=True)))


def plain(matrix, f, v):
    return matrix(f, memory=0) @ v


BOTH = pytest.mark.parametrize("matrix", [Hessian, GaussNewton])


@BOTH
def test_each_batch_passes_forward_once_however_many_products_follow(matrix):
    f = objective()
    operator = matrix(f)
    for seed in range(4):
        v = torch.randn(f.size, generator=torch.Generator().manual_seed(seed))
        f.module.passes = 0
        found = operator @ v
        assert f.module.passes == (3 if seed == 0 else 0)
        assert torch.equal(found, plain(matrix, f, v)), "kept or not, to the bit"


def tripled(f):
    with torch.no_grad():
        f.parameters[0].mul_(3)


def behind_autograd(f):
    f.parameters[0].data.mul_(3)


def through_a_shared_vector(f):
    vector = torch.cat([p.detach().flatten() for p in f.parameters])
    for p, part in zip(f.parameters, vector.split([p.numel() for p in f.parameters]), strict=True):
        p.data = part.view_as(p)
    vector.mul_(3)


def statistics(f):
    f.module.net[1].running_mean.add_(1)


@BOTH
@pytest.mark.parametrize("moved", [tripled, behind_autograd, through_a_shared_vector, statistics])
def test_after_the_module_has_changed_in_any_way_products_are_those_of_the_new_state(matrix, moved):
    f = objective()
    operator, v = matrix(f), torch.ones(f.size)
    before = operator @ v
    moved(f)
    after = operator @ v
    assert torch.equal(after, plain(matrix, f, v)) and not torch.allclose(after, before)
    assert torch.equal(operator @ v, after)


@BOTH
def test_inside_at_products_are_those_of_the_weights_there_and_afterwards_of_the_old_ones(matrix):
    f = objective()
    operator, v, home = matrix(f), torch.ones(f.size), f.weights
    before = operator @ v
    with f.at(2 * home):
        assert torch.equal(operator @ v, plain(matrix, f, v))
    assert torch.equal(operator @ v, before)
    with f.at(2 * home):
        pass
    assert torch.equal(operator @ v, before)


@BOTH
def test_what_does_not_fit_into_the_memory_is_made_anew(matrix):
    f = objective()
    v = torch.ones(f.size)
    whole = matrix(f)
    expected = whole @ v
    two = matrix(f, memory=whole._graphs.bytes * 2 // 3)
    for _ in range(2):
        f.module.passes = 0
        assert torch.equal(two @ v, expected)
    assert f.module.passes == 1 and two._graphs.bytes <= two._graphs.budget
    none = matrix(f, memory=0)
    none @ v
    assert none._graphs.bytes == 0


def test_the_memory_that_is_counted_is_that_of_the_activations_and_their_derivatives():
    """One linear layer to 1000 units and a tanh: saved are tanh's output and what its second derivative needs."""
    f = Objective(
        nn.Sequential(nn.Linear(4, 1000, bias=False), nn.Tanh()),
        lambda z, y: z.square().sum() / len(y),
        [(torch.ones(10, 4), torch.zeros(10))],
    )
    hessian = Hessian(f)
    hessian @ torch.ones(f.size)
    assert 2 * 40_000 <= hessian._graphs.bytes <= 8 * 40_000


class Named(nn.Module):
    """Takes its input by name or as it is."""

    def __init__(self, size):
        super().__init__()
        self.map = nn.Linear(size, 1)

    def forward(self, x):
        return torch.tanh(self.map(x["wide"] if isinstance(x, dict) else x))


@BOTH
def test_inputs_and_labels_are_not_counted_by_name_or_not(matrix):
    """Both are saved for the derivatives, 400 kB each."""
    x, y = torch.randn(10, 10_000), torch.randn(10, 10_000)
    found = []
    for inputs in (x, Fields({"wide": x})):
        torch.manual_seed(0)
        f = Objective(Named(10_000), lambda z, y: (z.square() * y).sum() / len(y), [(inputs, y)])
        operator = matrix(f)
        found.append(operator @ torch.ones(f.size))
        assert 0 < operator._graphs.bytes < 200_000
    assert torch.equal(*found)


@pytest.mark.parametrize("change", [torch.float64, "meta"])
def test_a_module_in_another_precision_or_place_has_graphs_of_its_own(change):
    module, made, graphs = nn.Linear(2, 2), [], Graphs()
    batches = [(torch.ones(1, 2), torch.ones(1))]
    for count in (1, 1, 2):
        if count == 2:
            module.to(change)
        list(graphs.over(module, batches, made.append))
        assert len(made) == count


def test_a_single_product_of_the_objective_keeps_nothing():
    f = objective()
    f.product(torch.ones(f.size))
    f.product(torch.ones(f.size))
    assert f.module.passes == 6


def test_a_loss_without_curvature_in_some_parameters_has_zeros_there():
    class Spare(nn.Module):
        def __init__(self):
            super().__init__()
            self.spare, self.head = nn.Parameter(torch.ones(2)), nn.Linear(72, 3)

        def forward(self, x):
            return self.head(x.flatten(1))

    f = objective(Spare())
    found = Hessian(f) @ torch.ones(f.size)
    assert not found[:2].any() and found[2:].any()


def test_the_layers_of_a_small_convolutional_network_take_few_passes_and_products(monkeypatch):
    """Each layer and batch passes forward once for the bound and once for all products."""
    net = nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(144, 20), nn.ReLU(), nn.Linear(20, 3),
    )  # fmt: skip
    f = objective(net)
    spent = []
    product = Objective.product
    monkeypatch.setattr(Objective, "product", lambda *given: spent.append(1) or product(*given))
    found = layers(f, k=1, products=12)
    assert [layer.name for layer in found] == ["net.0", "net.3", "net.6", "net.8"]
    assert len(spent) <= 4 * (12 + 12), "at most twelve for each eigenvalue, twelve for each trace"
    assert f.module.passes == 4 * 3 * 2
