"""Max-pooling of 2×2 pixels in C: torch's numbers to the bit, with all derivatives, and only where it applies."""

import shutil

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.func import vmap

from fedflat.models import Network, pooling
from fedflat.models.faster import faster_operations
from fedflat.models.pooling import FEWEST_CHANNELS, pooled, pools

pytestmark = pytest.mark.skipif(not shutil.which("cc"), reason="there is no C compiler")
CHANNELS_LAST = torch.channels_last


def drawn(*shape, dtype=torch.float64, ties=False):
    chance = torch.Generator().manual_seed(sum(shape))
    x = torch.randint(-2, 3, shape, generator=chance) if ties else torch.randn(shape, generator=chance)
    return x.to(dtype).to(memory_format=CHANNELS_LAST)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("shape", [(3, 8, 4, 4), (2, 9, 5, 7), (1, 70, 2, 3), (2, 33, 6, 6)])
def test_values_and_gradients_are_torchs_to_the_bit(shape, ties, dtype):
    x = drawn(*shape, dtype=dtype, ties=ties).requires_grad_()
    found, expected = pooled(x), F.max_pool2d(x, 2)
    assert torch.equal(found, expected) and found.dtype == dtype
    assert found.is_contiguous(memory_format=CHANNELS_LAST)
    slope = drawn(*expected.shape, dtype=dtype)
    for each in (slope, slope.contiguous(), slope[:, :, :1, :1].expand_as(slope)):
        ours, torchs = (torch.autograd.grad(y, x, each, retain_graph=True)[0] for y in (found, expected))
        assert torch.equal(ours, torchs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_nan_is_the_largest_and_infinities_are_numbers(dtype):
    x = drawn(1, 8, 4, 8, dtype=dtype)
    x[0, 0, 0, :4] = torch.tensor([torch.nan, 9.0, 9.0, torch.nan])
    x[0, 1, :2, :2] = -torch.inf
    x[0, 2, 1, 1], x[0, 3, 0, 1] = torch.inf, -torch.inf
    x.requires_grad_()
    found, expected = pooled(x), F.max_pool2d(x, 2)
    assert torch.equal(found.nan_to_num(7), expected.nan_to_num(7)) and found.isnan().sum() == 2
    ours, torchs = (torch.autograd.grad(y.sum(), x)[0] for y in (found, expected))
    assert torch.equal(ours, torchs)


def test_it_has_second_third_and_forward_derivatives():
    x = drawn(2, 8, 4, 5).requires_grad_()
    assert torch.autograd.gradcheck(pooled, x, check_forward_ad=True)

    def curved(x):
        return pooled(x.pow(3)).pow(2)

    assert torch.autograd.gradgradcheck(curved, x)
    (first,) = torch.autograd.grad(curved(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.pow(2).sum(), x, create_graph=True)
    (third,) = torch.autograd.grad(second.pow(2).sum(), x)
    y = x.detach().requires_grad_()
    expected = F.max_pool2d(y.pow(3), 2).pow(2).sum()
    for _ in range(3):
        (slope,) = torch.autograd.grad(expected, y, create_graph=True)
        expected = slope.pow(2).sum()
    torch.testing.assert_close(third, slope.detach(), rtol=1e-9, atol=1e-9)
    along = drawn(2, 8, 4, 5)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x.detach(), along)
        ours, torchs = (forward_ad.unpack_dual(f(dual)).tangent for f in (pooled, lambda x: F.max_pool2d(x, 2)))
    assert torch.equal(ours, torchs)


USUAL = (2, None, 0, 1, False, False)


@pytest.mark.parametrize(
    "geometry", [USUAL, ((2, 2), (2,), (0, 0), 1, False, False), ([2], 2, 0, (1, 1), False, False)]
)
def test_it_is_for_windows_of_four_pixels_side_by_side(geometry):
    assert pools(drawn(2, 8, 4, 4), *geometry)


@pytest.mark.parametrize(
    "geometry",
    [
        (3, None, 0, 1, False, False),
        ((2, 3), None, 0, 1, False, False),
        (2, 1, 0, 1, False, False),
        (2, (2, 1), 0, 1, False, False),
        (2, None, 1, 1, False, False),
        (2, None, 0, 2, False, False),
        (2, None, 0, 1, True, False),
        (2, None, 0, 1, False, True),
    ],
)
def test_other_windows_are_torchs(geometry):
    assert not pools(drawn(2, 8, 4, 4), *geometry)


@pytest.mark.parametrize(
    "x",
    [
        torch.zeros(2, FEWEST_CHANNELS, 4, 4),  # another memory format
        torch.zeros(2, FEWEST_CHANNELS - 1, 4, 4).to(memory_format=CHANNELS_LAST),
        torch.zeros(0, FEWEST_CHANNELS, 4, 4).to(memory_format=CHANNELS_LAST),
        torch.zeros(2, FEWEST_CHANNELS, 1, 4).to(memory_format=CHANNELS_LAST),
        torch.zeros(FEWEST_CHANNELS, 4, 4),
        torch.zeros(2, FEWEST_CHANNELS, 4, 4).to(memory_format=CHANNELS_LAST).to("meta"),
        torch.zeros(2, FEWEST_CHANNELS, 4, 4).to(memory_format=CHANNELS_LAST).half(),
        torch.zeros(2, FEWEST_CHANNELS, 4, 4).to(memory_format=CHANNELS_LAST).int(),
        torch.zeros(2, FEWEST_CHANNELS, 4, 8).to(memory_format=CHANNELS_LAST)[..., ::2],
    ],
)
def test_other_maps_are_torchs(x):
    assert not pools(x, *USUAL)


def test_a_pass_uses_it_and_not_without_the_library(monkeypatch):
    seen = []
    monkeypatch.setattr("fedflat.models.faster.pooled", lambda x: seen.append(tuple(x.shape)) or pooled(x))
    module = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.MaxPool2d(2), nn.MaxPool2d(3), nn.Flatten(), nn.Linear(8, 2)
    )
    x = drawn(2, 3, 8, 8, dtype=torch.float32)
    expected = module.to(memory_format=CHANNELS_LAST)(x)
    for autocast in (False, True):
        with Network(module, autocast=autocast).listening() as tap:
            torch.testing.assert_close(tap(x).logits, expected, rtol=0.1 * autocast + 1e-6, atol=0.1 * autocast + 1e-6)
    assert seen == [(2, 8, 8, 8)] * 2
    monkeypatch.setattr(pooling, "pool_library", lambda _: None)
    with faster_operations():
        module(x)
        assert F.max_pool2d(x, 2, return_indices=True)[1].shape == (2, 3, 4, 4)
    assert len(seen) == 2


def test_clients_in_shared_steps_keep_torchs_pool():
    x = drawn(2, 8, 4, 4)
    with faster_operations():
        found = vmap(lambda maps: F.max_pool2d(maps, 2))(torch.stack([x, 2 * x]))
    assert torch.equal(found[1], 2 * F.max_pool2d(x, 2))
