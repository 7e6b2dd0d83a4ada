"""Products by oneDNN: the values and derivatives of A Bᵀ, and which processors and layers use them."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fedflat.models import Network, products
from fedflat.models.faster import faster_operations
from fedflat.models.products import LARGE, by_onednn, product

needs_onednn = pytest.mark.skipif(
    not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="this torch was built without oneDNN"
)


@pytest.fixture(params=[False, pytest.param(True, marks=needs_onednn)], ids=["MKL", "oneDNN"])
def library(request, monkeypatch):
    monkeypatch.setattr(products, "by_onednn", lambda: request.param)
    return request.param


def drawn(*shape):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64) - 0.5


def pairs():
    """Matrices and batches, as they are in memory and transposed."""
    yield drawn(7, 5), drawn(3, 5)
    yield drawn(5, 7).t(), drawn(5, 3).t()
    yield drawn(4, 7, 5), drawn(4, 3, 5)
    yield drawn(4, 5, 7).mT, drawn(4, 5, 3).mT


def test_it_is_the_product_and_its_gradients_are_those_of_autograd(library):
    for a, b in pairs():
        here, there = ([x.to(dtype).requires_grad_() for x in (a, b)] for dtype in (torch.float32, torch.float64))
        found, expected = product(*here), there[0] @ there[1].mT
        torch.testing.assert_close(found, expected.float())
        slope = drawn(*found.shape)
        gradients = torch.autograd.grad(found, here, slope.float())
        for one, other in zip(gradients, torch.autograd.grad(expected, there, slope), strict=True):
            assert one.is_contiguous()
            torch.testing.assert_close(one, other.float())


def test_it_has_second_and_forward_derivatives(library):
    for a, b in pairs():
        values = a.requires_grad_(), b.requires_grad_()
        assert torch.autograd.gradcheck(product, values, check_forward_ad=True)
        assert torch.autograd.gradgradcheck(product, values)


class _Operands(TorchDispatchMode):
    """Keeps whether each matrix that oneDNN gets is dense, as it is or transposed."""

    def __torch_dispatch__(self, operation, types, arguments=(), named=None):
        if operation._schema.name == "mkldnn::_linear_pointwise":
            self.dense = [
                *getattr(self, "dense", []),
                *(x.is_contiguous() or x.mT.is_contiguous() for x in arguments[:2]),
            ]
        return operation(*arguments, **(named or {}))


@needs_onednn
@pytest.mark.parametrize("gaps", [0, 1])
def test_onednn_gets_dense_matrices(gaps, monkeypatch):
    """Of one with gaps, such as the first tokens of texts, it computes some products a thousand times as slowly."""
    monkeypatch.setattr(products, "by_onednn", lambda: True)
    values = [drawn(7, 5).float(), drawn(3, 5).float()]
    values[gaps] = drawn(len(values[gaps]), 2, 5).float()[:, 0]
    expected = values[0].double() @ values[1].double().mT
    with _Operands() as operands:
        found = product(*(value.requires_grad_() for value in values))
        found.sum().backward()
    torch.testing.assert_close(found, expected.float())
    assert operands.dense == [True] * 6


@pytest.mark.parametrize("needed", [0, 1])
def test_only_the_gradients_that_are_needed_are_computed(library, monkeypatch, needed):
    values = [drawn(7, 5), drawn(3, 5)]
    values[needed].requires_grad_()
    found, computed, real = product(*values), [], products._computed
    monkeypatch.setattr(products, "_computed", lambda *pair: computed.append(pair) or real(*pair))
    found.sum().backward()
    assert len(computed) == 1
    assert [value.grad is not None for value in values] == [needed == 0, needed == 1]


@needs_onednn
def test_other_types_and_small_layers_keep_their_library(monkeypatch):
    monkeypatch.setattr(products, "by_onednn", lambda: True)
    seen, real = [], products._by_onednn
    monkeypatch.setattr(products, "_by_onednn", lambda a, b: seen.append((a.shape, b.shape)) or real(a, b))
    rows = LARGE // (64 * 64)
    for count, dtype, uses in ((rows, torch.float32, 1), (rows - 1, torch.float32, 0), (rows, torch.float64, 0)):
        layer, x = nn.Linear(64, 64).to(dtype), drawn(count, 64).to(dtype)
        with faster_operations():
            found = layer(x)
        assert len(seen) == uses
        seen.clear()
        torch.testing.assert_close(found, F.linear(x, layer.weight, layer.bias))
    with torch.autocast("cpu", torch.bfloat16), faster_operations():
        assert nn.Linear(64, 64)(drawn(rows, 64).float()).dtype == torch.bfloat16
    layer, x = nn.Linear(64, 64), drawn(2, rows, 64).float()
    with faster_operations():
        torch.testing.assert_close(torch.vmap(layer)(x), layer(x))
    assert seen == [((2 * rows, 64), (64, 64))]
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with faster_operations():
        layer(x)
    assert len(seen) == 1


def test_a_pass_of_training_uses_it(library, monkeypatch):
    seen, real = [], products.product
    monkeypatch.setattr("fedflat.models.faster.product", lambda a, b: seen.append(a.shape) or real(a, b))
    module = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2, bias=False))
    x = drawn(2, LARGE // 4096, 64).float()
    with Network(module).listening() as tap:
        torch.testing.assert_close(tap(x).logits, module(x))
    assert seen == ([(2 * LARGE // 4096, 64)] if library else [])


@pytest.mark.parametrize(
    ("capability", "maker", "family", "expected"),
    [
        ("AVX512", "AuthenticAMD", 26, True),
        ("AVX512", "AuthenticAMD", 25, False),  # Zen 4, with vectors of half the width
        ("AVX512", "GenuineIntel", 26, False),
        ("AVX2", "AuthenticAMD", 26, False),
    ],
)
@needs_onednn
def test_the_processor_decides(monkeypatch, capability, maker, family, expected):
    text = f"processor\t: 0\nvendor_id\t: {maker}\ncpu family\t: {family}\nmodel\t\t: 2\n"
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(Path, "read_text", lambda *_: text)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    assert by_onednn.__wrapped__() is expected


def test_an_unknown_processor_keeps_torch_s_choice(monkeypatch):
    def missing(*_):
        raise FileNotFoundError

    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(Path, "read_text", missing)
    assert by_onednn.__wrapped__() is False
