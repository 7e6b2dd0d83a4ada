"""Flatness layer by layer, against dense float64 matrices."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call, hessian, vmap

from fedflat.errors import RecipeError
from fedflat.flatness import Objective
from fedflat.flatness.krylov import MISSED
from fedflat.flatness.layers import layers
from fedflat.flatness.samples import Fields


def block(module, x, y, layer, bias=True):
    """The dense block of one layer's parameters, the oracle."""
    own = {n: p.detach() for n, p in module.named_parameters() if n.rpartition(".")[0] == layer}
    own = {n: p for n, p in own.items() if bias or not n.endswith("bias")}
    sizes = [p.numel() for p in own.values()]

    def loss(vector):
        views = {n: v.view_as(own[n]) for n, v in zip(own, vector.split(sizes), strict=True)}
        return F.cross_entropy(functional_call(module, views, (x,)), y)

    return hessian(loss)(torch.cat([p.reshape(-1) for p in own.values()])).detach()


def curvatures(rest, z, y):
    """max(0, λ_max) of each sample's dense Hessian of the loss in the layer's output z."""

    def loss(z, y):
        return F.cross_entropy(rest(z[None]), y[None])

    matrices = vmap(hessian(loss))(z, y).detach().reshape(len(z), z[0].numel(), z[0].numel())
    return torch.linalg.eigvalsh(matrices)[:, -1].clamp_min(0)


def samples(seed, n=20, shape=(4, 4, 4)):
    chance = torch.Generator().manual_seed(seed)
    return torch.randn(n, *shape, generator=chance, dtype=torch.float64), torch.arange(n) % 3


def objective(module, x, y, cut=7):
    """The samples in two batches that differ in size."""
    return Objective(module, F.cross_entropy, [(x[:cut], y[:cut]), (x[cut:], y[cut:])])


class Tokens(nn.Module):
    """Attention over 4 tokens of 16 features."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.head = nn.Linear(16, 2), nn.Linear(16, 2), nn.Linear(16, 3), nn.Linear(3, 3)

    def forward(self, x):
        x = x.flatten(2)
        weights = torch.softmax(self.q(x) @ self.k(x).transpose(1, 2), dim=-1)
        return self.head((weights @ self.v(x)).mean(dim=1))


NETS = {
    "relu": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(64, 5), nn.ReLU(inplace=True), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)
    ),
    "tanh": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.Tanh(), nn.Linear(5, 3)),
    "conv": lambda: nn.Sequential(
        nn.Conv2d(4, 3, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(3, 3, 2, bias=False), nn.SiLU(),
        nn.Flatten(), nn.Linear(3, 3),
    ),
    "groups": lambda: nn.Sequential(
        nn.Conv2d(4, 4, 3, groups=2, padding=1, padding_mode="reflect"), nn.GroupNorm(2, 4), nn.GELU(),
        nn.AvgPool2d(2), nn.Flatten(), nn.Linear(16, 3),
    ),
    "tokens": Tokens,
}  # fmt: skip


@pytest.fixture(params=NETS)
def case(request):
    torch.manual_seed(0)
    return NETS[request.param]().double(), *samples(0)


@pytest.mark.parametrize("bias", [True, False])
def test_eigenvalues_and_trace_are_those_of_the_dense_blocks(case, bias):
    module, x, y = case
    found = layers(objective(module, x, y), k=2, tolerance=1e-10, products=60, bias=bias)
    kinds = nn.Linear | nn.Conv2d
    assert [layer.name for layer in found] == [n for n, m in module.named_modules() if isinstance(m, kinds)]
    for layer in found:
        dense = block(module, x, y, layer.name, bias)
        assert layer.bias == (bias and module.get_submodule(layer.name).bias is not None)
        assert layer.parameters == len(dense)
        expected = torch.linalg.eigvalsh(dense).flip(0)[:2].tolist()
        assert layer.eigenvalues == pytest.approx(expected, rel=1e-7, abs=1e-9)
        assert abs(layer.trace.mean - float(dense.trace())) < 4 * layer.trace.error + 1e-9


@settings(max_examples=8, deadline=None)
@given(
    net=st.sampled_from(sorted(NETS)),
    seed=st.integers(0, 10_000),
    scale=st.sampled_from([0.3, 1.0, 4.0]),
    bias=st.booleans(),
)
def test_mans_bound_holds_in_every_layer(net, seed, scale, bias):
    torch.manual_seed(seed)
    module = NETS[net]().double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(scale)
    x, y = samples(seed)
    for layer in layers(objective(module, x, y), products=6, seed=seed, bias=bias):
        top = float(torch.linalg.eigvalsh(block(module, x, y, layer.name, bias))[-1])
        assert layer.activity.bound >= top * (1 - 1e-9)
        if layer.activity.last:
            assert layer.activity.softmax_bound >= layer.activity.bound * (1 - 1e-9)


@pytest.mark.parametrize("bias", [True, False])
def test_the_bound_of_a_linear_layer_is_the_mean_of_norm_times_curvature(bias):
    """With the bias the layer's input is (a, 1)."""
    torch.manual_seed(1)
    module = NETS["tanh"]().double()
    x, y = samples(1)
    hidden, head = (layer.activity for layer in layers(objective(module, x, y), products=6, bias=bias))
    flat, rest = x.flatten(1), module[2:]
    norms = flat.square().sum(dim=1)
    expected = (norms + bias) * curvatures(rest, module[1](flat).detach(), y)
    assert hidden.bound == pytest.approx(float(expected.mean()), rel=1e-9)
    assert [hidden.norm, hidden.patches] == pytest.approx([float(norms.mean()), float((norms + bias).mean())])
    assert hidden.mean_square == pytest.approx(float(flat.square().mean()))
    assert not hidden.last and hidden.softmax_bound is None

    a = torch.tanh(module[1](flat)).detach()
    p = torch.softmax(module[3](a), dim=1).detach()
    tops = torch.linalg.eigvalsh(torch.diag_embed(p) - p[:, :, None] * p[:, None, :])[:, -1]
    reach = a.square().sum(dim=1) + bias
    assert head.bound == pytest.approx(float((reach * tops).mean()), rel=1e-9)
    assert head.last and head.softmax_bound == pytest.approx(float(reach.mean()) / 2)


@pytest.mark.parametrize("bias", [True, False])
def test_the_bound_of_a_convolution_sums_its_patches(bias):
    """With the bias every patch ends with a 1: one more for each of the 2 × 2 positions."""
    torch.manual_seed(2)
    module = NETS["conv"]().double()
    x, y = samples(2)
    first = layers(objective(module, x, y), products=6, bias=bias)[0].activity
    patches = F.unfold(x, 3, padding=1, stride=2).square().sum(dim=(1, 2)) + 4 * bias
    expected = patches * curvatures(module[1:], module[0](x).detach(), y)
    assert first.patches == pytest.approx(float(patches.mean()))
    assert first.norm == pytest.approx(float(x.square().sum(dim=(1, 2, 3)).mean()))
    assert first.bound == pytest.approx(float(expected.mean()), rel=1e-9)


@pytest.mark.parametrize("bias", [True, False])
def test_groups_of_channels_have_patches_of_their_own_and_the_largest_counts(bias):
    torch.manual_seed(3)
    module = NETS["groups"]().double()
    x, y = samples(3)
    padded = F.pad(x, (1, 1, 1, 1), mode="reflect")
    patches = torch.stack([F.unfold(half, 3).square().sum(dim=(1, 2)) for half in padded.chunk(2, dim=1)])
    found = layers(objective(module, x, y), products=6, bias=bias)[0].activity
    assert found.patches == pytest.approx(float(patches.amax(dim=0).mean()) + 16 * bias)


def test_every_token_of_a_linear_layer_has_its_own_1():
    torch.manual_seed(0)
    module = NETS["tokens"]().double()
    f = objective(module, *samples(0))
    pairs = zip(layers(f, products=6), layers(f, products=6, bias=False), strict=True)
    assert {a.name: round(a.activity.patches - b.activity.patches, 9) for a, b in pairs} == {
        "q": 4, "k": 4, "v": 4, "head": 1,
    }  # fmt: skip


def test_a_bias_that_is_frozen_or_serves_two_layers_is_left_out():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    module[5].bias = module[3].bias
    module[1].bias.requires_grad_(False)
    found = layers(objective(module.double(), *samples(0)), products=6)
    assert [(layer.name, layer.parameters, layer.bias) for layer in found] == [
        ("1", 192, False), ("3", 9, False), ("5", 9, False),
    ]  # fmt: skip


def test_two_samples_of_a_softmax_in_closed_form():
    """At W = 0 the classes are equally likely: ∇²_z ℓ = (I − 11ᵀ/2)/2, and λ₁ = ½ λ_max(E[a aᵀ])."""
    module = nn.Linear(2, 2, bias=False).double()
    nn.init.zeros_(module.weight)
    x, y = torch.tensor([[3.0, 0.0], [0.0, 1.0]], dtype=torch.float64), torch.tensor([0, 1])
    (layer,) = layers(Objective(module, F.cross_entropy, [(x, y)]), k=2, tolerance=1e-10, products=12)
    assert layer.name == "" and layer.parameters == 4
    assert layer.eigenvalues == pytest.approx([9 / 4, 1 / 4])
    assert layer.trace.mean == pytest.approx(10 / 4)
    assert layer.activity.norm == 5 and layer.activity.mean_square == 2.5
    assert layer.activity.bound == pytest.approx(5 / 2) == layer.activity.softmax_bound


def test_the_bound_converges_with_the_steps():
    torch.manual_seed(4)
    module = NETS["conv"]().double()
    x, y = samples(4, n=100)
    few, default, all_dimensions = (
        [layer.activity.bound for layer in layers(objective(module, x, y), products=6, steps=steps)]
        for steps in (4, 12, 40)
    )
    assert default == pytest.approx(all_dimensions, rel=1e-6)
    assert few == pytest.approx(all_dimensions, rel=0.1)


@pytest.mark.parametrize("classes", [2, 3, 5])
def test_before_a_piecewise_linear_rest_as_many_steps_as_classes_suffice(classes):
    torch.manual_seed(classes)
    rest = (nn.ReLU(), nn.Linear(40, 30), nn.LeakyReLU(), nn.Linear(30, classes))
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 40), *rest).double()
    x, _ = samples(classes)
    f = objective(module, x, torch.arange(len(x)) % classes)
    fewer, enough, more = (layers(f, products=6, steps=classes + more)[0].activity.bound for more in (-1, 0, 20))
    assert enough == pytest.approx(more, rel=1e-9) != pytest.approx(fewer, rel=1e-9)


def test_saturated_samples_have_no_curvature_and_no_nan():
    module = nn.Linear(2, 2, bias=False)
    nn.init.eye_(module.weight)
    x, y = torch.tensor([[500.0, 0.0], [1.0, 0.0]]), torch.tensor([0, 0])
    (layer,) = layers(Objective(module, F.cross_entropy, [(x, y)]), products=6)
    p = 1 / (1 + math.exp(-1))
    assert layer.activity.bound == pytest.approx(p * (1 - p), rel=1e-5)


class Odd(nn.Module):
    """`twice` is used two times, `spare` never, `side` over the batch's transpose, `named` by keyword."""

    def __init__(self):
        super().__init__()
        self.twice, self.spare, self.side = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.named, self.tied, self.frozen = nn.Linear(4, 3), nn.Linear(4, 4), nn.Linear(3, 3)
        self.tied.weight = self.twice.weight
        self.frozen.requires_grad_(False)

    def forward(self, x):
        x = x[:, 0].transpose(0, 1)
        x = self.side(x).transpose(0, 1).mean(dim=1)
        x = self.tied(torch.tanh(self.twice(x)))
        return self.frozen(self.named(input=x))


def test_where_the_bound_does_not_hold_there_is_none():
    torch.manual_seed(0)
    module = Odd().double()
    x, y = samples(0)
    found = {layer.name: layer for layer in layers(objective(module, x, y), products=6)}
    assert list(found) == ["twice", "side", "named"]
    assert found["twice"].activity.bound is None
    assert found["side"].activity.bound is None
    top = float(torch.linalg.eigvalsh(block(module, x, y, "named"))[-1])
    assert found["named"].activity.bound >= top
    assert found["side"].activity.norm == pytest.approx(float(x[:, 0].square().sum(dim=(1, 2)).mean()))


def test_an_objective_of_some_weights_has_their_layers_only():
    torch.manual_seed(0)
    module = NETS["relu"]().double()
    f = objective(module, *samples(0))
    assert [layer.name for layer in layers(f.of(["3.weight"]), products=6)] == ["3"]
    with pytest.raises(RecipeError, match=r"does not depend on the weight of any nn\.Linear or nn\.Conv2d"):
        layers(f.of(["3.bias"]))
    for wrong in ({"k": 0}, {"steps": 0}):
        ((name, _),) = wrong.items()
        with pytest.raises(RecipeError, match=f"layers: .*{name} = 0 .*must be at least 1"):
            layers(f, **wrong)


def test_the_module_is_left_as_it_was_and_the_seed_decides(case):
    module, x, y = case
    before = {name: value.clone() for name, value in module.state_dict().items()}
    first, again = (layers(objective(module, x, y), products=16, seed=5) for _ in range(2))
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert not any(m._forward_hooks for m in module.modules())
    assert first == again


@pytest.mark.parametrize("margin", [5.0, 45.0, 57.0, 80.0])
def test_nearly_saturated_samples_have_the_little_curvature_that_they_have(margin):
    """Two classes have λ_max = 2 p (1 − p); from a margin of about 45 on its square is no float32 any more."""
    module = nn.Linear(2, 2, bias=False)
    nn.init.eye_(module.weight)
    x, y = torch.tensor([[margin, 0.0], [1.0, 0.0]]), torch.tensor([0, 0])
    (layer,) = layers(Objective(module, F.cross_entropy, [(x, y)]), products=6)
    p = torch.sigmoid(x[:, 0].double())
    expected = (x[:, 0].double().square() * 2 * p * (1 - p)).mean()
    assert layer.activity.bound == pytest.approx(float(expected), rel=1e-4)


def test_the_bound_after_one_step_is_that_of_a_start_in_as_many_dimensions_as_outputs():
    """λ_max ≤ α + β √(2d/π)/10⁻⁶ with α = vᵀHv and β = ‖Hv − αv‖, from the dense H of each sample."""
    torch.manual_seed(1)
    module = NETS["tanh"]().double()
    x, y = samples(1)
    found = layers(Objective(module, F.cross_entropy, [(x, y)]), products=6, steps=1, seed=3)[0].activity
    z = module[1](x.flatten(1)).detach()
    matrices = vmap(hessian(lambda z, y: F.cross_entropy(module[2:](z[None]), y[None])))(z, y).detach()
    v = torch.randn(20, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    v /= v.norm(dim=1, keepdim=True)
    w = torch.einsum("nij,nj->ni", matrices, v)
    alpha = (w * v).sum(dim=1)
    beta = (w - alpha[:, None] * v).norm(dim=1)
    tops = (alpha + beta * math.sqrt(2 * 5 / math.pi) / MISSED).clamp_min(0)
    expected = ((x.square().sum(dim=(1, 2, 3)) + 1) * tops).mean()
    assert found.bound == pytest.approx(float(expected), rel=1e-9)


def test_a_rest_whose_second_derivative_torch_does_not_have_is_computed_in_plain_form():
    torch.manual_seed(1)
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.Hardsigmoid(), nn.Linear(5, 3)).double()
    x, y = samples(1)
    found = layers(objective(module, x, y), products=6)[0].activity
    tops = curvatures(lambda z: module[3]((z / 6 + 0.5).clamp(0, 1)), module[1](x.flatten(1)).detach(), y)
    expected = float(((x.square().sum(dim=(1, 2, 3)) + 1) * tops).mean())
    assert expected * (1 - 1e-12) <= found.bound == pytest.approx(expected, rel=1e-6)


def test_statistics_of_the_batch_leave_no_bound():
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(4, track_running_stats=False)
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 4), norm, nn.Linear(4, 3)).double()
    found = layers(objective(module, *samples(0)), products=6)
    assert [layer.activity.bound for layer in found] == [None, None]


class Recurrent(nn.Module):
    """One layer on four tokens, on their mean, and on what it makes of that."""

    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def steps(self, x):
        tokens = x[:, 0]
        mean = torch.tanh(self.cell(tokens)).mean(dim=1)
        return tokens, mean, torch.tanh(self.cell(mean))

    def forward(self, x):
        return self.head(self.cell(self.steps(x)[-1]))


def test_a_layer_that_is_used_several_times_has_all_its_inputs():
    torch.manual_seed(0)
    module = Recurrent().double()
    x, y = samples(0)
    cell = layers(objective(module, x, y), products=6)[0].activity
    entered = [each.detach() for each in module.steps(x)]
    total = sum(float(each.square().sum()) for each in entered)
    assert cell.bound is None and not cell.last
    assert cell.norm == pytest.approx(total / 20, rel=1e-9)
    assert cell.mean_square == pytest.approx(total / sum(each.numel() for each in entered), rel=1e-9)
    assert cell.patches == pytest.approx(total / 20 + 4 + 1 + 1, rel=1e-9), "with the 1 of every row"


class Sometimes(nn.Module):
    """Its layer has the last word in large batches only."""

    def __init__(self):
        super().__init__()
        self.map = nn.Linear(64, 3)

    def forward(self, x):
        z = self.map(x.flatten(1))
        return z if len(x) > 7 else 2 * z


@pytest.mark.parametrize(("cut", "last"), [(7, False), (13, False), (10, True)])
def test_a_layer_is_the_last_one_only_if_it_is_in_every_batch(cut, last):
    torch.manual_seed(0)
    (found,) = layers(objective(Sometimes().double(), *samples(0), cut), products=6)
    assert found.activity.last == last and (found.activity.softmax_bound is None) != last


def test_named_inputs_have_the_bound_of_plain_ones():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.map = nn.Linear(64, 3)

        def forward(self, x):
            return self.map((x["image"] if isinstance(x, dict) else x).flatten(1))

    torch.manual_seed(0)
    module = Named().double()
    x, y = samples(0)
    plain, named = (
        layers(Objective(module, F.cross_entropy, [(inputs, y)]), products=6)[0].activity
        for inputs in (x, Fields({"image": x}))
    )
    assert plain == named and named.bound is not None
