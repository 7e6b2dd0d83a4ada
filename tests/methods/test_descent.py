"""The optimiser of the local step: AdamW against torch's own, Muon against its formulas, and who refuses them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedflat import Part, federate, models, train
from fedflat.errors import RecipeError
from fedflat.local.rule import LocalRule
from fedflat.local.step import step
from fedflat.local.step import train as local_train
from fedflat.methods.chain import Method
from fedflat.methods.parser import parse
from fedflat.methods.parts import LocalAdamW, LocalMuon, Proximal
from fedflat.methods.parts.descent import orthogonal
from fedflat.models.vector import Network

DOUBLE = dict(dtype=torch.float64)


def task():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 5), nn.Tanh(), nn.Linear(5, 4))
    batches = [(torch.randn(6, 1, 4, 4, **DOUBLE), torch.randint(0, 4, (6,))) for _ in range(7)]
    return net.double(), batches


def ours(net, batches, part, **facts):
    network = Network(net, torch.float64)
    start = network.weights.clone()
    rule = LocalRule(0.02, len(batches), layout=network.layout, head=network.head, **facts)
    rule = Method(part).plan(rule, {"weights": start}, {})
    local_train(network, start, rule, batches, F.cross_entropy)
    return network.weights


def theirs(net, batches, optimizer):
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in net.parameters()])


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_a_clients_round_of_adamw_is_that_of_torch(decay):
    net, batches = task()
    found = ours(net, batches, LocalAdamW(0.8, 0.95, 1e-6), momentum=0.9, weight_decay=decay)
    net, _ = task()
    adamw = torch.optim.AdamW(net.parameters(), lr=0.02, betas=(0.8, 0.95), eps=1e-6, weight_decay=decay)
    torch.testing.assert_close(found, theirs(net, batches, adamw), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("clip", [None, 1e9])
def test_nesterovs_momentum_is_that_of_torch_with_and_without_a_gradient_vector(clip):
    net, batches = task()
    found = ours(net, batches, Part(), momentum=0.8, nesterov=True, weight_decay=0.1, clip=clip)
    net, _ = task()
    sgd = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.8, nesterov=True, weight_decay=0.1)
    torch.testing.assert_close(found, theirs(net, batches, sgd), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("nesterov", [True, False])
def test_the_effective_steps_are_how_far_a_gradient_of_length_one_leads(nesterov):
    rule = LocalRule(0.1, 6, momentum=0.7, nesterov=nesterov)
    w, velocity = torch.zeros(1, **DOUBLE), torch.zeros(1, **DOUBLE)
    for k in range(rule.steps):
        step(w, torch.ones_like(w), velocity, rule, k)
    assert float(w) == pytest.approx(-0.1 * rule.effective_steps, rel=1e-12)


def test_muon_orthogonalises_what_lies_ahead_of_its_momentum_and_takes_adamw_for_the_rest():
    net, batches = task()
    found = ours(net, batches[:3], LocalMuon(0.9, steps=4), weight_decay=0.1)
    net, _ = task()
    matrices = [p for p in net.parameters() if p.dim() > 1]
    rest = torch.optim.AdamW([p for p in net.parameters() if p.dim() == 1], lr=0.02, weight_decay=0.1)
    buffers = [torch.zeros_like(p) for p in matrices]
    for x, y in batches[:3]:
        net.zero_grad()
        F.cross_entropy(net(x), y).backward()
        rest.step()
        for p, buffer in zip(matrices, buffers, strict=True):
            buffer.mul_(0.9).add_(p.grad)
            step = orthogonal((p.grad + 0.9 * buffer).flatten(1), 4).view_as(p)
            p.data.mul_(1 - 0.02 * 0.1).sub_(0.02 * step)
    expected = torch.cat([p.detach().flatten() for p in net.parameters()])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def matrices():
    """A network of matrices alone, which is all that torch.optim.Muon takes."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 9, bias=False), nn.Tanh(), nn.Linear(9, 4, bias=False))
    return net.double(), [(torch.randn(8, 6, **DOUBLE), torch.randint(0, 4, (8,))) for _ in range(7)]


def muons(decay):
    """The weights after a client's round of ours and of torch's."""
    net, batches = matrices()
    found = ours(net, batches, LocalMuon(0.9, steps=5), weight_decay=decay)
    net, _ = matrices()
    return found, theirs(net, batches, torch.optim.Muon(net.parameters(), lr=0.02, momentum=0.9, weight_decay=decay))


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_a_clients_round_of_muon_is_that_of_torch_but_for_its_bfloat16(decay, monkeypatch):
    rounded = muons(decay)
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)  # torch iterates in bfloat16, ours in float64
    torch.testing.assert_close(*muons(decay), rtol=1e-12, atol=1e-12)
    assert 1e-5 < float((rounded[0] - rounded[1]).abs().max()) < 1e-2


@pytest.mark.parametrize("shape", [(6, 6), (4, 9), (9, 4)])
def test_newton_schulz_brings_all_singular_values_near_one(shape):
    torch.manual_seed(1)
    matrix = torch.randn(shape, **DOUBLE)
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    found = orthogonal(matrix, 8) / max(1.0, shape[0] / shape[1]) ** 0.5
    singular = torch.linalg.svdvals(found)
    assert 0.6 < float(singular.min()) <= float(singular.max()) < 1.3  # the quintic does not converge, it hovers near 1
    torch.testing.assert_close(u.T @ found @ v.T, torch.diag(torch.diag(u.T @ found @ v.T)), rtol=0, atol=1e-9)


def test_the_pulls_of_other_parts_enter_the_gradient_and_the_weight_decay_does_not():
    net, batches = task()
    anchor = torch.cat([p.detach().flatten() for p in net.parameters()])
    found = ours(net, batches, Method(LocalAdamW(), Proximal(0.7)).parts[0], weight_decay=0.2)
    net, _ = task()
    both = Network(net, torch.float64)
    rule = LocalRule(0.02, len(batches), layout=both.layout, head=both.head, weight_decay=0.2)
    rule = Method(LocalAdamW(), Proximal(0.7)).plan(rule, {"weights": anchor}, {})
    local_train(both, anchor, rule, batches, F.cross_entropy)
    assert not torch.equal(found, both.weights)
    net, _ = task()
    adamw = torch.optim.AdamW(net.parameters(), lr=0.02, weight_decay=0.2)
    for x, y in batches:
        adamw.zero_grad()
        w = torch.cat([p.flatten() for p in net.parameters()])
        (F.cross_entropy(net(x), y) + 0.35 * (w - anchor).square().sum()).backward()
        adamw.step()
    expected = torch.cat([p.detach().flatten() for p in net.parameters()])
    torch.testing.assert_close(both.weights, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("method", ["scaffold", "fedcm", "fednova", "feddc", "fedsol(source='scaffold')"])
@pytest.mark.parametrize("descent", ["adamw", "muon", "fedadamw", "fedmuon"])
def test_what_divides_by_the_steps_of_sgd_is_refused_beside_another_descent(method, descent):
    with pytest.raises(
        RecipeError, match=r"method: (\w+): it divides Δ by K η, which (Local|Carried)(AdamW|Muon) does not have"
    ):
        parse(f"{method} + {descent}")


def test_two_descents_are_refused():
    with pytest.raises(RecipeError, match="LocalAdamW and LocalMuon both set the descent"):
        parse("adamw + muon")


@pytest.mark.parametrize(
    "method", ["adamw", "muon", "fedadamw", "fedmuon", "fedsol + adamw", "feddyn(0.01) + adamw", "fedsam + muon"]
)
def test_clients_learn_with_them(digits, method):
    module = models.build("mlp", (1, 8, 8), 10, torch.Generator().manual_seed(0), hidden=(16,))
    result = train(digits, module, method, rounds=12, epochs=2, batch=32, lr=0.01, cohort=8, engine="inline")
    assert result.accuracy > 0.6


@pytest.mark.parametrize(("method", "shared"), [("fedadamw", 4), ("fedadamw(blocks=False)", 1210)])
def test_fedadamw_sends_its_block_means_and_no_vector_of_them(digits, method, shared):
    """A float32 for each of the four tensors in both directions; without blocks one for each of the 1,210 weights."""
    run = dict(rounds=1, steps=1, batch=32, lr=0.01, cohort=3, evaluation_every=0)
    module = models.build("mlp", (1, 8, 8), 10, torch.Generator().manual_seed(0), hidden=(16,))
    found = train(digits, module, method, engine="inline", **run)
    assert found.history[0]["bytes_down"] == 3 * 4 * (2 * 1210 + shared)
    assert found.history[0]["bytes_up"] == 3 * 4 * (1210 + shared)


def test_a_vector_that_is_to_have_one_number_a_tensor_must_have_it():
    class Wrong(Part):
        tensorwise = ("sums",)

        def report(self, upload, sent, memory, outcome):
            return upload.update(sums=upload.delta[:3]), {}

    with pytest.raises(RecipeError, match="Wrong has 3 numbers in 'sums', not one for each tensor"):
        Method(Wrong())


def test_a_descent_of_ones_own_takes_a_few_lines(digits):
    class Sign(Part):
        def plan(self, rule, sent, memory):
            return rule.with_descent(self)

        def start(self, weights):
            return {}

        def __call__(self, g, weights, memory, layout, k):
            return g.sign(), memory

    assert train(digits, "mlp", Sign(), rounds=6, epochs=2, batch=32, lr=0.002, engine="inline").accuracy > 0.6


def test_a_frozen_head_neither_moves_nor_shrinks_under_adamw():
    federation = federate("digits", "iid", 4)
    module = models.build("mlp", (1, 8, 8), 10, torch.Generator().manual_seed(0), hidden=(8,))
    before = {n: p.clone() for n, p in module.named_parameters()}
    trained = train(federation, module, "fedbabu + adamw", rounds=2, lr=0.01, weight_decay=0.1, engine="inline").model
    after = dict(trained.named_parameters())
    changed = {n: not torch.equal(before[n], after[n]) for n in before}
    assert not changed["head.weight"] and not changed["head.bias"]
    assert sum(changed.values()) == len(changed) - 2
