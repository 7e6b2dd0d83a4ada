"""What leaves a network's function unchanged: to float64 rounding, and for curvature by a closed form."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedflat.errors import RecipeError
from fedflat.flatness import (
    Hessian,
    Objective,
    adaptive_sharpness,
    ascent_sharpness,
    hidden_layers,
    permuted,
    rescaled,
    scale_test,
    weight_norm,
)
from fedflat.models import build

NETWORKS = {"mlp": (3, 4, 4), "fedavg-cnn": (3, 8, 8), "lenet64": (3, 16, 16)}


def network(name, shape, seed=0):
    return build(name, shape, 5, torch.Generator().manual_seed(seed)).double().eval()


def inputs(shape):
    return torch.randn(6, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def shuffled(module, seed=2):
    chance = torch.Generator().manual_seed(seed)
    return {
        each.name: torch.randperm(len(module.get_submodule(each.name).weight), generator=chance)
        for each in hidden_layers(module)
    }


@pytest.mark.parametrize(("name", "shape"), NETWORKS.items())
def test_units_in_another_order_compute_the_same_function(name, shape):
    module, x = network(name, shape), inputs(shape)
    other = permuted(module, shuffled(module))
    assert not torch.equal(other[1].weight, module[1].weight)
    torch.testing.assert_close(other(x), module(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("name", "shape"), NETWORKS.items())
def test_every_hidden_layer_can_be_rescaled_and_two_is_exact(name, shape):
    module, x = network(name, shape), inputs(shape)
    for each in hidden_layers(module):
        assert each.homogeneous
        torch.testing.assert_close(rescaled(module, 10.0, each.name)(x), module(x), rtol=1e-12, atol=1e-12)
        for factor in (2.0, 0.5):
            assert torch.equal(rescaled(module, factor, each.name)(x), module(x))


class Residual(nn.Sequential):
    """A chain with another forward pass than that of its parts one by one."""

    def forward(self, x):
        return x + super().forward(x)


def test_layers_of_nested_chains_have_their_full_names_and_say_what_follows_them():
    inner = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
    module = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), inner, nn.Linear(4, 2), nn.ReLU(), nn.Linear(2, 1))
    found = [(each.name, each.reader, each.homogeneous) for each in hidden_layers(module)]
    assert found == [("0", "2.0", True), ("2.0", "3", False), ("3", "5", True)]
    assert hidden_layers(nn.Sequential(nn.ReLU())) == []


def scalar(first, second):
    """z = w₂ max(0, w₁ x) with ℓ = ½ (z − 6)² at x = 1; at w₁ w₂ = 6, H = J Jᵀ with J = (w₂, w₁)."""
    module = nn.Sequential(nn.Linear(1, 1, bias=False), nn.ReLU(), nn.Linear(1, 1, bias=False)).double()
    nn.init.constant_(module[0].weight, first)
    nn.init.constant_(module[2].weight, second)
    one = torch.ones(1, 1, dtype=torch.float64)
    return Objective(module, lambda z, y: 0.5 * (z - 6 * y).square().mean(), [(one, one)])


def test_the_top_eigenvalue_after_a_rescaling_is_the_closed_form_and_the_invariant_stays():
    found = scale_test(scalar(2.0, 3.0), factor=10.0)
    assert found.before.top_eigenvalue == pytest.approx(2**2 + 3**2)
    assert found.after.top_eigenvalue == pytest.approx(20**2 + 0.3**2)
    assert found.outputs < 1e-15
    # ε at the minimum is 0 because the gradient is; away from it the closed form is the same for every factor.
    off = scale_test(scalar(2.0, 2.5), factor=10.0, adaptive_rho=0.5)
    z, rho = 5.0, 0.5  # w₁ g₁ = w₂ g₂ = (z − 6) z, so that each weight shrinks or grows by ρ/√2 of itself
    risen = 2.0 * (1 - rho * 2.0 / math.hypot(2.0, 2.0)) * 2.5 * (1 - rho * 2.5 / math.hypot(2.5, 2.5))
    assert off.before.adaptive_sharpness == pytest.approx(0.5 * (risen - 6) ** 2 - 0.5 * (z - 6) ** 2)
    assert off.after.adaptive_sharpness == pytest.approx(off.before.adaptive_sharpness, rel=1e-12)


def test_a_scale_test_has_every_measure_of_both_models_and_their_ratios():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    x, y = 100 * torch.randn(6, 3), torch.arange(6) % 2
    objective = Objective(module, F.cross_entropy, [(x[:4], y[:4]), (x[4:], y[4:])])
    found = scale_test(objective, 3.0, rho=0.01, adaptive_rho=0.02)
    other = rescaled(module, 3.0)
    for model, seen in (module, found.before), (other, found.after):
        f = Objective(model, F.cross_entropy, objective.batches)
        expected = f.value(), ascent_sharpness(f, 0.01), adaptive_sharpness(f, 0.02), weight_norm(model)
        assert (seen.loss, seen.ascent_sharpness, seen.adaptive_sharpness, seen.weight_norm) == pytest.approx(expected)
    # Batch by batch: a product of other rows is rounded in another way on some processors.
    old, new = (torch.cat([model(inputs).detach() for inputs, _ in objective.batches]) for model in (module, other))
    assert found.outputs == float((new - old).abs().max() / old.abs().max()) > 0
    rows = {row[""]: row for row in found.rows()}
    assert rows["‖w‖"]["ratio"] == found.after.weight_norm / found.before.weight_norm
    assert rows["largest change of an output"]["rescaled by 3"] == found.outputs
    at_minimum = {row[""]: row.get("ratio") for row in scale_test(scalar(2.0, 3.0)).rows()}
    assert at_minimum["loss"] is None, "0/0"


def test_the_hessian_of_a_rescaled_network_is_the_one_scaled_from_both_sides():
    """D H D with D = 1/c on the first layer, c on the weight of the second, 1 elsewhere; in float64."""
    x, c = inputs((2, 2, 1)), 3.0
    module = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)).double()
    y = torch.arange(6) % 2
    one, two = (Objective(each, F.cross_entropy, [(x, y)]) for each in (module, rescaled(module, c)))
    dense = [torch.stack([Hessian(f) @ row for row in torch.eye(f.size, dtype=torch.float64)]) for f in (one, two)]
    layers = {"1.weight": 1 / c, "1.bias": 1 / c, "3.weight": c, "3.bias": 1.0}
    full = {name: torch.full(one.layout.shapes[name], c, dtype=torch.float64) for name, c in layers.items()}
    scale = one.layout.flatten(full)
    torch.testing.assert_close(dense[1], scale[:, None] * dense[0] * scale, rtol=1e-9, atol=1e-12)
    assert adaptive_sharpness(two) == pytest.approx(adaptive_sharpness(one), rel=1e-10)


@pytest.mark.parametrize(
    ("module", "sentence"),
    [
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(4, 2)), "1 is a GroupNorm"),
        (nn.Sequential(nn.Conv2d(4, 4, 3, groups=2), nn.Flatten(), nn.Linear(4, 2)), "0 is a Conv2d"),
        (nn.Bilinear(2, 2, 2), "it is a Bilinear"),
        (nn.Sequential(nn.Linear(3, 3), Residual(nn.Linear(3, 3))), "1 is a Residual"),
        (nn.Sequential(*[nn.Linear(3, 3)] * 2), "share a weight"),
    ],
)
def test_a_network_that_is_no_chain_is_refused_in_one_sentence(module, sentence):
    with pytest.raises(RecipeError, match=sentence):
        hidden_layers(module)


@pytest.mark.parametrize("name", ["convnet-gn", "resnet18-gn", "sl-vit"])
def test_the_other_networks_of_the_library_are_refused(name):
    with pytest.raises(RecipeError, match="cannot be reordered or rescaled"):
        hidden_layers(build(name, (3, 16, 16), 5))


@pytest.mark.parametrize(
    ("factor", "name", "sentence"),
    [
        (0.0, None, "the factor is 0.0; it must be a positive number"),
        (math.inf, None, "the factor is inf"),
        (2.0, "head", "'head' cannot be rescaled; choose one of fc1, fc2"),
    ],
)
def test_a_rescaling_that_is_impossible_is_refused(factor, name, sentence):
    with pytest.raises(RecipeError, match=sentence):
        rescaled(network("mlp", (2, 2, 1)), factor, name)


def test_without_a_relu_no_layer_can_be_rescaled():
    with pytest.raises(RecipeError, match="has no hidden layer that is followed by a ReLU"):
        rescaled(nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)))
