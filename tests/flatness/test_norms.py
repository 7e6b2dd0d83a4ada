"""Norms of layers against the singular values of explicit matrices, and the capacity made of them."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedflat.errors import DataError, RecipeError
from fedflat.flatness.norms import capacity, layer_norms, weight_norm


def matrix(layer, *shape):
    """The linear part of a layer as an explicit matrix: column j is the answer to the j-th unit input."""
    units = torch.eye(math.prod(shape), dtype=torch.float64).view(-1, *shape)
    with torch.no_grad():
        return (layer(units) - layer(torch.zeros_like(units))).flatten(1).T.numpy()


def largest(dense):
    return np.linalg.svd(dense, compute_uv=False)[0]


def only(module, *shape):
    (norms,) = layer_norms(module, torch.zeros(2, *shape, dtype=next(module.parameters()).dtype))
    return norms


CONVOLUTIONS = {
    "valid": dict(),
    "padded": dict(padding=1),
    "strided": dict(padding=1, stride=2),
    "uneven": dict(padding=(0, 2), stride=(2, 1)),
    "dilated": dict(padding="same", dilation=2),
    "grouped": dict(padding=1, groups=2),
    "circular": dict(padding=1, padding_mode="circular"),
    "reflected": dict(padding=1, padding_mode="reflect"),
}


@pytest.mark.parametrize("kind", CONVOLUTIONS)
@pytest.mark.parametrize("size", [(5, 5), (6, 7)])
def test_a_convolutions_norms_are_those_of_its_matrix(kind, size):
    torch.manual_seed(0)
    layer = nn.Conv2d(4, 6, 3, **CONVOLUTIONS[kind]).double()
    found = only(layer, 4, *size)
    assert found.spectral == pytest.approx(largest(matrix(layer, 4, *size)), rel=1e-6)
    weight = layer.weight.detach().numpy()
    assert found.kernel == pytest.approx(largest(weight.reshape(6, -1)), rel=1e-9)
    assert found.frobenius == pytest.approx(np.sqrt((weight**2).sum()), rel=1e-12)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(1, 6), st.integers(1, 6))
def test_any_shape_of_convolution(inputs, outputs, kernel, stride, height, width):
    torch.manual_seed(inputs + outputs)
    layer = nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2).double()
    expected = largest(matrix(layer, inputs, height, width))
    assert only(layer, inputs, height, width).spectral == pytest.approx(expected, rel=1e-6)


def test_a_circular_convolutions_norm_is_the_peak_of_its_transfer_function():
    layer = nn.Conv2d(1, 1, 3, padding=1, padding_mode="circular", bias=False)
    with torch.no_grad():
        layer.weight.fill_(-1.0)[0, 0, 1, 1] = 8.0
    ring = torch.zeros(16, 16)
    ring[:3, :3] = layer.weight.detach()[0, 0]
    assert only(layer, 1, 16, 16).spectral == pytest.approx(float(torch.fft.fft2(ring).abs().max()), rel=1e-6)


def test_a_pointwise_convolution_is_its_kernel_matrix_on_any_image():
    layer = nn.Conv2d(5, 7, 1)
    for size in (1, 4, 9):
        found = only(layer, 5, size, size)
        assert found.spectral == pytest.approx(found.kernel, rel=1e-6)


def test_when_an_image_is_one_pixel_only_the_kernels_centre_counts():
    layer = nn.Conv2d(3, 4, 3, padding=1)
    expected = float(torch.linalg.matrix_norm(layer.weight.detach()[:, :, 1, 1], 2))
    assert only(layer, 3, 1, 1).spectral == pytest.approx(expected, rel=1e-6)
    nn.init.zeros_(layer.weight)
    layer.weight.data[:, :, 0, 0] = 1.0
    found = only(layer, 3, 1, 1)
    assert found.spectral == 0.0 and found.kernel == pytest.approx(math.sqrt(12))


@pytest.mark.parametrize("channels", [1, 40])
def test_the_identity_has_norm_one_and_a_zero_layer_has_none(channels):
    layer = nn.Conv2d(channels, channels, 1)
    nn.init.dirac_(layer.weight)
    assert only(layer, channels, 3, 3).spectral == pytest.approx(1.0)
    assert only(layer, channels, 1, 1).spectral == pytest.approx(1.0)
    nn.init.zeros_(layer.weight)
    assert only(layer, channels, 3, 3).spectral == 0.0


def test_each_layer_is_seen_on_the_images_that_reach_it():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(3, 4, 3, stride=2, padding=1)
    )
    net = net.extend([nn.Flatten(), nn.Linear(16, 5)]).double()
    first, second, head = layer_norms(net, torch.randn(3, 2, 10, 10, dtype=torch.float64))
    assert (first.name, second.name, head.name) == ("0", "4", "6")
    assert first.spectral == pytest.approx(largest(matrix(net[0], 2, 10, 10)), rel=1e-6)
    assert second.spectral == pytest.approx(largest(matrix(net[4], 3, 4, 4)), rel=1e-6)
    assert head.spectral == head.kernel == pytest.approx(largest(net[6].weight.detach().numpy()), rel=1e-9)


def test_measuring_changes_no_tensor_and_leaves_no_hook():
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 2))
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    capacity(net, torch.randn(5, 1, 4, 4))
    torch.testing.assert_close(dict(net.state_dict()), before, rtol=0, atol=0)
    assert net[0].bias is not None and net[0].weight.dtype == torch.float32
    assert not any(module._forward_pre_hooks for module in net.modules())


def test_the_norm_of_all_weights():
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Linear(3, 3))
    expected = np.linalg.norm(np.concatenate([p.detach().numpy().ravel() for p in net.parameters()]))
    assert weight_norm(net) == pytest.approx(float(expected), rel=1e-6)


def small(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(48, 6), nn.ReLU(), nn.Linear(6, 3)
    ).double()


IMAGES = torch.zeros(1, 1, 4, 4, dtype=torch.float64)


def test_capacity_is_the_product_of_norms_times_the_sum_of_stable_ranks():
    net = small()
    weights = [layer.weight.detach().numpy() for layer in net if hasattr(layer, "weight")]
    spectral = [largest(matrix(net[0], 1, 4, 4)), largest(weights[1]), largest(weights[2])]
    terms = [(w**2).sum() / s**2 for w, s in zip(weights, spectral, strict=True)]
    found = capacity(net, IMAGES)
    assert found.value == pytest.approx(math.prod(s**2 for s in spectral) * sum(terms), rel=1e-6)
    assert found.log10 == pytest.approx(math.log10(found.value))
    assert [layer.name for layer in found.layers] == ["0", "3", "5"]


@settings(max_examples=20, deadline=None)
@given(c=st.floats(1e-3, 1e3), sign=st.sampled_from([-1, 1]), layer=st.sampled_from([0, 3, 5]))
def test_a_layer_times_c_is_the_capacity_times_c_squared(c, sign, layer):
    net = small()
    before = capacity(net, IMAGES)
    with torch.no_grad():
        net[layer].weight.mul_(sign * c)
    after = capacity(net, IMAGES)
    assert after.value == pytest.approx(c**2 * before.value, rel=1e-6)
    assert after.log10 == pytest.approx(before.log10 + 2 * math.log10(c), abs=1e-6)


@settings(max_examples=10, deadline=None)
@given(c=st.floats(0.01, 100), seed=st.integers(0, 1000))
def test_capacity_stays_when_relu_layers_are_rescaled(c, seed):
    net = small(seed)
    before = capacity(net, IMAGES).log10
    with torch.no_grad():
        net[0].weight.mul_(c)
        net[3].weight.div_(c)
    assert capacity(net, IMAGES).log10 == pytest.approx(before, abs=1e-6)


def test_where_the_product_leaves_the_floats_its_logarithm_stays():
    net = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(40))).requires_grad_(False)
    for layer in net:
        layer.weight.copy_(1e5 * torch.eye(2))
    deep = capacity(net, torch.zeros(1, 2))
    assert deep.value == math.inf and deep.log10 == pytest.approx(400 + math.log10(80))


def test_a_zero_layer_leaves_no_capacity():
    net = small()
    nn.init.zeros_(net[3].weight)
    found = capacity(net, IMAGES)
    assert found.value == 0.0 and found.log10 == -math.inf


def test_mistakes_are_named():
    with pytest.raises(RecipeError, match=r"model: found no nn\.Linear or nn\.Conv2d"):
        capacity(nn.Sequential(nn.ReLU()), torch.zeros(1, 3))
    with pytest.raises(DataError, match=r"sample: the model cannot process a batch of shape \(1, 2, 4, 4\)"):
        layer_norms(small(), torch.zeros(1, 2, 4, 4, dtype=torch.float64))


def test_measuring_draws_nothing_from_torchs_own_generator():
    net = small()
    before = torch.get_rng_state()
    layer_norms(net, IMAGES)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_layer_that_the_pass_does_not_go_through_is_left_out():
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.spare, self.used = nn.Linear(3, 3), nn.Linear(3, 2)

        def forward(self, x):
            return self.used(x)

    assert [norms.name for norms in layer_norms(Half(), torch.zeros(1, 3))] == ["used"]


@pytest.mark.parametrize("size", [8, 24])
def test_a_padded_box_filters_norm_in_closed_form(size):
    """It is T ⊗ T, T tridiagonal of ones, with the largest eigenvalue 1 + 2 cos(π/(n + 1)) and others near it."""
    layer = nn.Conv2d(1, 1, 3, padding=1, bias=False)
    nn.init.ones_(layer.weight)
    expected = (1 + 2 * math.cos(math.pi / (size + 1))) ** 2
    assert only(layer, 1, size, size).spectral == pytest.approx(expected, rel=1e-9)
