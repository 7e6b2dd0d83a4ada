"""A building block that computes something in a cheaper form against the plain form of PyTorch."""

import io
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import vmap

from fedflat.models import winograd
from fedflat.models.blocks import Convolution

SAMPLES = 3


@pytest.fixture
def forms(monkeypatch):
    """How each convolution of maps with four channels was computed.

    A linear layer shows as the number of positions and of taps, torch's convolution as the format of the maps.
    """
    found, linear, usual = [], F.linear, F.conv2d

    def layer(x, weight, bias):
        found.append((x.numel() // weight.shape[1] // SAMPLES, weight.shape[1] // 4))
        return linear(x, weight, bias)

    def convolution(x, *others):
        found.append("converted" if x.is_contiguous() else "usual")
        return usual(x, *others)

    monkeypatch.setattr(F, "linear", layer)
    monkeypatch.setattr(F, "conv2d", convolution)
    return found


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("size", "stride", "padding", "image", "form"),
    [
        (3, 1, 1, (1, 1), (1, 1)),  # one tap of nine meets the pixel
        (2, 2, 1, (1, 1), (1, 1)),  # a tap at the edge
        (3, 2, 1, (2, 2), (1, 9)),  # one position, four taps
        (3, 2, 1, (1, 2), (1, 9)),
        (3, 1, 0, (3, 3), (1, 9)),  # one position, all taps
        (1, 2, 0, (2, 2), (1, 1)),  # one position, pixels that no tap meets
        (5, 4, 2, (2, 4), (1, 25)),
        (3, 1, 1, (2, 2), (1, 4)),  # four pixels to four pixels by one matrix
        (3, 1, 1, (1, 2), (2, 9)),
        (3, 2, 1, (4, 3), (4, 9)),  # four positions
        (3, 2, 1, (3, 3), (4, 9)),
        (1, 2, 0, (3, 4), (4, 1)),  # four positions, pixels that no tap meets
        (3, 1, 1, (2, 3), "converted"),  # six positions, more weights than inputs
        (3, 1, 1, (9, 9), "usual"),
    ],
)
def test_convolution_is_torchs_with_its_first_and_second_derivatives(
    size, stride, padding, image, form, bias, layout, forms
):
    torch.manual_seed(0)
    ours = Convolution(4, 40, size, stride, padding, bias).double()
    plain = nn.Conv2d(4, 40, size, stride, padding, bias=bias).double()
    plain.load_state_dict(ours.state_dict())
    x = torch.randn(SAMPLES, 4, *image, dtype=torch.float64).to(memory_format=layout)
    found = _derivatives(ours, x)
    assert forms == [form if form != "usual" or layout is torch.channels_last else "converted"]
    for mine, theirs in zip(found, _derivatives(plain, x), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(("stride", "image"), [(1, 1), (1, 4), (2, 4), (2, 2), (1, 9)])
def test_convolution_takes_one_sample_without_a_batch(stride, image):
    ours = Convolution(64, 64, 3, stride, padding=1).double()
    x = torch.randn(64, image, image, dtype=torch.float64)
    torch.testing.assert_close(ours(x), ours(x[None])[0], rtol=1e-12, atol=1e-13)


def _derivatives(conv: Callable[[Tensor], Tensor], x: Tensor, module: nn.Module | None = None) -> list[Tensor]:
    """The output, the gradients of Σ y³ for inputs and parameters, and the gradients of their squared norm."""
    x = x.clone().requires_grad_()
    variables = [x, *(module or conv).parameters()]
    y = conv(x)
    first = torch.autograd.grad(y.pow(3).sum(), variables, create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), variables)
    return [y, *first, *second]


@pytest.mark.parametrize("image", [1, 2, 4])
def test_convolution_runs_for_several_clients_at_once(image):
    torch.manual_seed(0)
    conv, x, weights = Convolution(2, 3, 3, 2, 1), torch.randn(4, 5, 2, image, image), torch.randn(4, 3, 2, 3, 3)
    one = lambda w, batch: torch.func.functional_call(conv, {"weight": w, "bias": conv.bias}, (batch,))  # noqa: E731
    for y, w, batch in zip(vmap(one)(weights, x), weights, x, strict=True):
        torch.testing.assert_close(y, F.conv2d(batch, w, conv.bias, 2, 1))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_the_gradient_of_the_bias_is_a_sum_of_its_own(layout, kind, monkeypatch):
    conv, given, real = Convolution(3, 4, 5, padding=2).to(kind), [], F.conv2d
    x = torch.randn(2, 3, 8, 8, dtype=kind).to(memory_format=layout)
    exact = F.conv2d(x.double(), conv.weight.double(), conv.bias.double(), padding=2).relu()
    monkeypatch.setattr(F, "conv2d", lambda *all: given.append(all[2].requires_grad) or real(*all))
    nn.functional.relu_(conv(x)).square().sum().backward()  # what follows may change the maps in place
    torch.testing.assert_close(conv.bias.grad.double(), 2 * exact.sum((0, 2, 3)), rtol=1e-5, atol=1e-5)
    assert given == [False]


@pytest.mark.parametrize("moving", [{"x"}, {"weight"}, {"bias"}, {"x", "weight", "bias"}])
def test_convolution_with_a_bias_has_derivatives_in_forward_mode(moving):
    torch.manual_seed(0)
    conv, x = Convolution(3, 4, 5, padding=2).double(), torch.randn(2, 3, 8, 8, dtype=torch.float64)
    values = {"x": x, "weight": conv.weight, "bias": conv.bias}
    along = {name: torch.randn_like(value) * (name in moving) for name, value in values.items()}
    with forward_ad.dual_level():
        dual = values | {name: forward_ad.make_dual(values[name], along[name]) for name in moving}
        y = torch.func.functional_call(conv, {"weight": dual["weight"], "bias": dual["bias"]}, (dual["x"],))
        found = forward_ad.unpack_dual(y).tangent
    expected = F.conv2d(along["x"], conv.weight, along["bias"], padding=2) + F.conv2d(x, along["weight"], padding=2)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("image", [(2, 2), (2, 4), (4, 2), (4, 4), (6, 8)])
def test_winograds_algorithm_is_a_convolution_with_its_first_and_second_derivatives(image, samples, layout):
    torch.manual_seed(0)
    plain = nn.Conv2d(5, 4, 3, padding=1, bias=False).double()
    x = torch.randn(samples, 5, *image, dtype=torch.float64).to(memory_format=layout)
    ours = lambda x: winograd.convolve(x, plain.weight)  # noqa: E731
    for mine, theirs in zip(_derivatives(ours, x, plain), _derivatives(plain, x), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_winograds_algorithm_takes_a_batch_without_samples():
    assert winograd.convolve(torch.zeros(0, 5, 4, 2), torch.zeros(3, 5, 3, 3)).shape == (0, 3, 4, 2)


def test_winograds_algorithm_does_not_round_worse_than_torchs_convolution():
    torch.manual_seed(0)
    x, weight = torch.randn(8, 64, 4, 4), torch.randn(64, 64, 3, 3)
    exact = F.conv2d(x.double(), weight.double(), padding=1)
    ours, torchs = winograd.convolve(x, weight) - exact, F.conv2d(x, weight, padding=1) - exact
    assert ours.norm() < 3 * torchs.norm()


@pytest.mark.parametrize(
    ("channels", "image", "gradient", "onednn", "saves"),
    [
        (64, (4, 4), True, False, True),  # 64 · 64 products for each pixel, 16 pixels in each of the 64 + 64 maps
        (64, (8, 8), True, False, False),
        (128, (8, 8), True, False, True),
        (128, (8, 8), False, False, False),
        (64, (2, 2), False, False, True),
        (64, (3, 4), True, False, False),  # not whole tiles
        (64, (1, 1), True, False, False),
        (128, (4, 4), True, True, False),  # an eighth of what is saved in products by MKL
        (256, (4, 4), True, True, True),
        (64, (2, 2), True, True, True),
    ],
)
def test_convolution_saves_products_if_the_transforms_cost_less(channels, image, gradient, onednn, saves, monkeypatch):
    used = []
    monkeypatch.setattr("fedflat.models.blocks.by_onednn", lambda: onednn)
    monkeypatch.setattr("fedflat.models.blocks.convolve", lambda *given: used.append(True) or winograd.convolve(*given))
    torch.manual_seed(0)
    conv, x = Convolution(channels, channels, 3, padding=1), torch.randn(2, channels, *image)
    with torch.set_grad_enabled(gradient):
        y = conv(x)
    assert bool(used) == saves
    torch.testing.assert_close(y, F.conv2d(x, conv.weight, conv.bias, padding=1))


def test_convolution_in_bfloat16_is_torchs():
    torch.manual_seed(0)
    conv, x = Convolution(32, 32, 3, padding=1), torch.randn(2, 32, 2, 4)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(conv(x), F.conv2d(x, conv.weight, conv.bias, padding=1))


@pytest.mark.parametrize("bias", [True, False])
def test_convolution_of_four_pixels_in_bfloat16_rounds_as_torchs(bias):
    torch.manual_seed(0)
    conv, x = Convolution(64, 48, 3, padding=1, bias=bias), torch.randn(20, 64, 2, 2)
    forms = [conv, lambda x: F.conv2d(x, conv.weight, conv.bias, padding=1)]
    exact = _derivatives_of_first_order(conv, forms[1], x)
    with torch.autocast("cpu", torch.bfloat16):
        ours, torchs = (_derivatives_of_first_order(conv, form, x) for form in forms)
    for mine, theirs, right in zip(ours, torchs, exact, strict=True):
        assert mine.dtype == theirs.dtype
        assert (mine - right).norm() < 1.5 * (theirs - right).norm() < 0.02 * right.norm()


def test_convolution_of_four_pixels_in_double_precision_is_not_rounded_by_autocast():
    torch.manual_seed(0)
    conv, x = Convolution(6, 5, 3, padding=1).double(), torch.randn(3, 6, 2, 2, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(conv(x), F.conv2d(x, conv.weight, conv.bias, padding=1))


def _derivatives_of_first_order(conv, form, x):
    x = x.clone().requires_grad_()
    y = form(x)
    return [y.detach(), *torch.autograd.grad(y.float().square().sum(), [x, *conv.parameters()])]


def test_convolution_of_integers_is_torchs():
    torch.manual_seed(0)
    conv, x = Convolution(32, 32, 3, padding=1, bias=False), torch.randint(-5, 5, (2, 32, 4, 4))
    conv.weight = nn.Parameter(torch.randint(-5, 5, (32, 32, 3, 3)), requires_grad=False)
    assert torch.equal(conv(x), F.conv2d(x, conv.weight, padding=1))


@pytest.mark.parametrize("image", [(2, 2), (4, 4)])
def test_convolution_has_derivatives_in_forward_mode(image):
    torch.manual_seed(0)
    conv, (x, along) = Convolution(32, 32, 3, padding=1).double(), torch.randn(2, 2, 32, *image, dtype=torch.float64)
    kernels = torch.randn_like(conv.weight)
    with forward_ad.dual_level():
        weight = forward_ad.make_dual(conv.weight.detach(), kernels)
        y = torch.func.functional_call(conv, {"weight": weight}, (forward_ad.make_dual(x, along),))
        found = forward_ad.unpack_dual(y).tangent
    torch.testing.assert_close(found, F.conv2d(along, conv.weight, padding=1) + F.conv2d(x, kernels, padding=1))


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_convolution_can_be_traced_and_saved():
    torch.manual_seed(0)
    conv, x = Convolution(32, 32, 3, padding=1), torch.randn(3, 32, 2, 4)
    file = io.BytesIO()
    torch.jit.save(torch.jit.trace(conv, x), file)
    file.seek(0)
    torch.testing.assert_close(torch.jit.load(file)(x[:1]), conv(x[:1]))
