"""MAN's inequalities in numbers, against dense float64 matrices of the pooled loss and of each client's."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, hessian, jacrev

from fedflat import Dataset, Federation, Samples
from fedflat.flatness import Objective, Portion, client_curvatures, curvature, theory
from fedflat.flatness.theory import REST, BlockCurvature, Curvature, Theory, mean_over
from fedflat.methods.parser import parse
from fedflat.models.vector import Network
from fedflat.recipe import Local
from fedflat.rounds.setup import Problem

SIZES = (4, 9, 17)


class Affine(nn.Module):
    """Parameters that belong to no linear layer. (The dense Hessian of torch's own LayerNorm is not symmetric.)"""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(4) + 0.5), nn.Parameter(torch.rand(4))

    def forward(self, x):
        return x * self.weight + self.bias


def tiny():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), Affine(), nn.Tanh(), nn.Linear(4, 3)).double()


@pytest.fixture
def problem():
    """Three clients of different sizes, each around a place of its own."""
    chance = torch.Generator().manual_seed(0)
    x = torch.cat([torch.randn(n, 6, generator=chance, dtype=torch.float64) + i for i, n in enumerate(SIZES)])
    samples = Samples(x, torch.arange(len(x)) % 3)
    shards = tuple(torch.arange(len(x)).split(SIZES))
    federation = Federation(Dataset("tiny", samples, samples, 3, (), ()), shards, dtype=torch.float64)
    return Problem.of(federation, Network(tiny(), torch.float64), parse("fedavg"), Local())


def dense(module, x, y, names):
    """λ₁ of the dense Hessian and of the dense Gauss–Newton matrix in the named parameters."""
    own = {n: p.detach() for n, p in module.named_parameters() if n in names}
    sizes = [p.numel() for p in own.values()]

    def outputs(vector):
        views = {n: v.view_as(own[n]) for n, v in zip(own, vector.split(sizes), strict=True)}
        return functional_call(module, views, (x,))

    at = torch.cat([p.reshape(-1) for p in own.values()])
    h = hessian(lambda w: F.cross_entropy(outputs(w), y))(at)
    j, p = jacrev(outputs)(at), outputs(at).softmax(dim=1)
    g = torch.einsum("nap,nab,nbq->pq", j, torch.diag_embed(p) - p[:, :, None] * p[:, None, :], j) / len(x)
    return [float(torch.linalg.eigvalsh(m.detach())[-1]) for m in (h, g)]


BLOCKS = {"0": ["0.weight", "0.bias"], "3": ["3.weight", "3.bias"], REST: ["1.weight", "1.bias"]}


def assert_dense(found, module, x, y, blocks):
    everything = [name for names in blocks.values() for name in names]
    assert [found.hessian, found.gauss_newton] == pytest.approx(dense(module, x, y, everything), rel=1e-4)
    assert [block.name for block in found.blocks] == list(blocks)
    for block in found.blocks:
        expected = dense(module, x, y, blocks[block.name])
        assert [block.hessian, block.gauss_newton] == pytest.approx(expected, rel=1e-4)
        if block.name != REST:
            assert block.bound >= block.hessian and block.looseness == block.bound / block.hessian
    assert sum(block.parameters for block in found.blocks) == sum(p.numel() for p in module.parameters())


def test_pooled_and_clients_are_those_of_dense_matrices_and_the_inequalities_hold(problem):
    found, data = theory(problem, Portion(0)), problem.federation.dataset.train
    module = problem.network.module
    assert_dense(found.pooled, module, data.inputs, data.labels, BLOCKS)
    for client, shard, size in zip(found.clients, problem.federation.shards, SIZES, strict=True):
        assert client.samples == size
        assert_dense(client, module, data.inputs[shard], data.labels[shard], BLOCKS)
    shares = [size / sum(SIZES) for size in SIZES]
    expected = sum(p * client.hessian for p, client in zip(shares, found.clients, strict=True))
    assert found.clients_sum == pytest.approx(expected, rel=1e-12)
    assert found.pooled.hessian <= found.clients_sum
    assert found.pooled.gauss_newton <= found.pooled.blocks_sum
    assert found.pooled.blocks_sum == pytest.approx(sum(b.gauss_newton for b in found.pooled.blocks))
    for n, block in enumerate(found.pooled.blocks):
        assert block.hessian <= sum(p * c.blocks[n].hessian for p, c in zip(shares, found.clients, strict=True))


def test_without_biases_they_are_among_the_other_parameters(problem):
    (found, *_), data = client_curvatures(problem, Portion(0), bias=False), problem.federation.dataset.train
    shard = problem.federation.shards[0]
    blocks = {"0": ["0.weight"], "3": ["3.weight"], REST: ["0.bias", "1.weight", "1.bias", "3.bias"]}
    assert_dense(found, problem.network.module, data.inputs[shard], data.labels[shard], blocks)


def test_one_client_alone_makes_the_sum_over_clients_tight_and_one_layer_the_sum_over_blocks():
    module = nn.Linear(6, 3).double()
    samples = Samples(torch.randn(10, 6, dtype=torch.float64), torch.arange(10) % 3)
    federation = Federation(Dataset("one", samples, samples, 3, (), ()), (torch.arange(10),), dtype=torch.float64)
    found = theory(Problem.of(federation, Network(module, torch.float64), parse("fedavg"), Local()), Portion(0))
    assert found.clients_sum == found.pooled.hessian
    assert found.pooled.blocks_sum == pytest.approx(found.pooled.gauss_newton)
    assert found.pooled.hessian == pytest.approx(found.pooled.gauss_newton, rel=1e-6)  # it is linear


def test_the_sum_over_blocks_needs_a_positive_matrix():
    """f = (½ m)(w₁ w₂ − y)²: at w = 0 both blocks of H are 0, but λ₁(H) = y. G = 0 there, and the inequality holds."""
    module = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)).double()
    for layer in (module[0], module[1]):
        nn.init.zeros_(layer.weight)
    x = torch.ones(2, 1, dtype=torch.float64)
    found = curvature(Objective(module, lambda z, y: 0.5 * (z - y).square().mean(), [(x, 3 * x)]))
    assert found.hessian == pytest.approx(3) and sum(block.hessian for block in found.blocks) == 0
    assert found.gauss_newton == found.blocks_sum == 0


def test_a_bound_without_curvature_to_bound_has_no_ratio():
    module = nn.Linear(2, 2).double()
    x = torch.tensor([[0.0, 0.0]], dtype=torch.float64)
    saturated = Objective(module, lambda z, y: z.sum() * 0.0 + (z * 1.0).sum() ** 2 * 0.0, [(x, torch.tensor([0]))])
    (block,) = curvature(saturated).blocks
    assert block.hessian == 0 and block.looseness is None
    assert math.isfinite(block.bound)


def test_means_over_clients_count_their_samples():
    clients = [Curvature(1, 4.0, 0.0, []), Curvature(3, 8.0, 0.0, [])]
    assert Theory(clients[0], clients).clients_sum == (1 * 4.0 + 3 * 8.0) / 4
    assert mean_over(clients, lambda client: client.gauss_newton) == 0
    assert math.isnan(mean_over(clients, lambda client: None if client.samples == 1 else 2.0))


@pytest.mark.parametrize(
    ("bound", "hessian", "looseness"),
    [(6.0, 1.5, 4.0), (0.5, 0.25, 2.0), (6.0, 0.0, None), (6.0, -1.0, None), (None, 1.5, None)],
)
def test_looseness_is_the_bound_in_units_of_what_it_bounds(bound, hessian, looseness):
    assert BlockCurvature("", 1, hessian, 0.0, bound, None).looseness == looseness
