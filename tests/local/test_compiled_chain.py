"""A chain of linear layers in C: the loss, gradient and step of autograd in double precision, in both types."""

import shutil
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedflat import compiled
from fedflat.local.kernels import compiled_chain
from fedflat.local.kernels.compiled_chain import CompiledChain
from fedflat.local.kernels.linear import Chain
from fedflat.models import Network

pytestmark = pytest.mark.skipif(not shutil.which("cc"), reason="there is no C compiler")


@pytest.fixture(scope="module", autouse=True, params=["vectors of this processor", "vectors of 256 bits"])
def vectors(request):
    """Compiled for vectors as wide as the processor has, and as most have."""
    with pytest.MonkeyPatch.context() as patch:
        if "256" in request.param:
            patch.setattr(compiled, "FLAGS", (*compiled.FLAGS, "-mno-avx512f"))
        compiled.library.cache_clear()
        compiled_chain.chain_library.cache_clear()
        if compiled.library("chain", torch.float32) is None:
            pytest.skip("the compiler has no such vectors")
        yield
    compiled.library.cache_clear()
    compiled_chain.chain_library.cache_clear()


DTYPES = [torch.float32, torch.float64]


def chain_of(widths, bias=True):
    return CompiledChain(widths, [bias] * (len(widths) - 1))


def layers(widths):
    linear = [nn.Linear(a, b) for a, b in pairwise(widths)]
    return nn.Sequential(*[m for layer in linear for m in (layer, nn.ReLU())][:-1])


def drawn(widths, samples, dtype, bias=True, clients=None):
    chance = torch.Generator().manual_seed(sum(widths) + samples)
    size = sum(b * (a + bias) for a, b in pairwise(widths))
    rows = () if clients is None else (clients,)
    weights = torch.randn(*rows, size, generator=chance, dtype=torch.float64).div(2).to(dtype)
    inputs = torch.randn(*rows, samples, widths[0], generator=chance, dtype=torch.float64).to(dtype)
    return weights, inputs, torch.randint(0, widths[-1], (*rows, samples), generator=chance)


def reference(widths, weights, inputs, labels, bias=True, shares=None):
    """Loss and gradient of one client by autograd in double precision."""
    weights = weights.double().requires_grad_()
    h, end = inputs.double(), 0
    for number, (a, b) in enumerate(pairwise(widths)):
        start, end = end, end + a * b
        h = (h.relu() if number else h) @ weights[start:end].view(b, a).t()
        start, end = end, end + b * bias
        h = h + weights[start:end] if bias else h
    if shares is None:
        loss = F.cross_entropy(h, labels)
    else:
        loss = (F.cross_entropy(h, labels, reduction="none") * shares).sum()
    return loss.detach(), torch.autograd.grad(loss, weights)[0]


@given(
    widths=st.lists(st.integers(1, 90), min_size=2, max_size=5),
    samples=st.integers(1, 23),
    bias=st.booleans(),
    dtype=st.sampled_from(DTYPES),
)
def test_loss_gradient_and_step_are_those_of_autograd(widths, samples, bias, dtype):
    weights, inputs, labels = drawn(widths, samples, dtype, bias)
    loss, expected = reference(widths, weights, inputs, labels, bias)
    eps, chain = 200 * torch.finfo(dtype).eps, chain_of(widths, bias)
    rounding = dict(rtol=eps, atol=eps * float(1 + expected.abs().max()))
    found, stepped = torch.full_like(weights, torch.nan), weights.clone()
    torch.testing.assert_close(chain.gradient(weights, found, inputs, labels).double(), loss, **rounding)
    torch.testing.assert_close(found.double(), expected, **rounding)
    torch.testing.assert_close(chain.descend(stepped, 0.1, 0.5, inputs, labels).double(), loss, **rounding)
    torch.testing.assert_close(stepped.double(), weights - 0.1 * (expected + 0.5 * weights), **rounding)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_clients_with_shares_of_their_own(dtype):
    widths, clients, samples = (19, 33, 7), 3, 6
    weights, inputs, labels = drawn(widths, samples, dtype, clients=clients)
    shares = torch.rand(clients, samples, generator=torch.Generator().manual_seed(0)).to(dtype)
    shares[1, 4:] = 0
    shares[2] = 0  # a client that has finished
    gradients, stepped = torch.empty_like(weights), weights.clone()
    losses = chain_of(widths).gradient(weights, gradients, inputs, labels, shares)
    assert torch.equal(losses, chain_of(widths).descend(stepped, 0.1, 0.0, inputs, labels, shares))
    for i in range(clients):
        loss, expected = reference(widths, weights[i], inputs[i], labels[i], shares=shares[i])
        torch.testing.assert_close(losses[i].double(), loss, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(gradients[i].double(), expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(stepped[i].double(), weights[i] - 0.1 * expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(stepped[2], weights[2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_labels_that_do_not_count_are_left_out(dtype):
    widths = (5, 9, 4)
    weights, inputs, labels = drawn(widths, 6, dtype)
    labels[1::2] = -100
    loss, expected = reference(widths, weights, inputs, labels)
    found = torch.empty_like(weights)
    torch.testing.assert_close(chain_of(widths).gradient(weights, found, inputs, labels).double(), loss)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    labels[:] = -100
    assert chain_of(widths).gradient(weights, found, inputs, labels).isnan() and not found.any()


def test_numbers_that_are_none_stay_so():
    """As in torch, a ReLU passes NaN on, and infinite logits give NaN."""
    widths = (3, 20, 4)
    weights, inputs, labels = drawn(widths, 2, torch.float32)
    for value in (torch.nan, torch.inf):
        broken, found = inputs.clone(), torch.empty_like(weights)
        broken[0, 0] = value
        assert not chain_of(widths).gradient(weights, found, broken, labels).isfinite()
        network = Network(layers(widths))
        network.load(weights)
        expected = network.differentiate(F.cross_entropy(network.module(broken), labels))
        assert torch.equal(found.isnan(), expected.isnan())


@pytest.mark.parametrize("label", [4, -1, 2**40])
def test_a_label_that_is_no_class_changes_nothing_and_is_told_by_torch(label):
    network = Network(layers((5, 9, 4)))
    before, (_, inputs, labels) = network.weights.clone(), drawn((5, 9, 4), 6, torch.float32)
    labels[3] = label
    assert chain_of((5, 9, 4)).descend(network.weights, 0.1, 0.0, inputs, labels) is None
    with pytest.raises(IndexError, match="out of bounds"):
        Chain(network).descend(inputs, labels, 0.1, 0.0)
    assert torch.equal(network.weights, before)


@pytest.mark.parametrize("label", [4, -1, -100])
def test_a_label_of_any_client_that_is_no_class_changes_nothing(label):
    weights, inputs, labels = drawn((5, 9, 4), 6, torch.float32, clients=3)
    before, shares = weights.clone(), torch.full((3, 6), 1 / 6)
    labels[2, 5] = label
    assert chain_of((5, 9, 4)).descend(weights, 0.1, 0.0, inputs, labels, shares) is None
    assert torch.equal(weights, before)


def test_what_the_library_does_not_know_is_left_to_torch():
    widths = (5, 9, 4)
    weights, inputs, labels = drawn(widths, 6, torch.float32)
    chain = chain_of(widths)
    assert chain.descend(weights, 0.0, 0.0, inputs, labels) is not None
    other = {
        "type of the inputs": (weights, inputs.double(), labels),
        "type of the labels": (weights, inputs, labels.int()),
        "width of the inputs": (weights, inputs[:, :4], labels),
        "number of labels": (weights, inputs, labels[:5]),
        "no samples": (weights, inputs[:0], labels[:0]),
        "size of the weights": (weights[1:], inputs, labels),
        "weights with gaps": (weights.repeat_interleave(2)[::2], inputs, labels),
        "type of the weights": (weights.bfloat16(), inputs.bfloat16(), labels),
        "another device": (weights.to("meta"), inputs.to("meta"), labels.to("meta")),
        "another device of the inputs": (weights, inputs.to("meta"), labels),
        "another device of the labels": (weights, inputs, labels.to("meta")),
        "samples and features swapped": (weights, inputs.reshape(5, 6), labels),
        "samples in two dimensions": (weights, inputs.view(2, 3, 5), labels),
        "type of the shares": (weights, inputs, labels, torch.ones(6).double()),
        "number of shares": (weights, inputs, labels, torch.ones(5)),
        "shares with gaps": (weights, inputs, labels, torch.ones(12)[::2]),
        "rows for one client": (weights, inputs[None], labels[None]),
        "one client for rows": (weights[None], inputs, labels),
    }
    for what, (w, *batch) in other.items():
        assert chain.descend(w, 0.1, 0.0, *batch) is None, what


def test_inputs_need_not_be_contiguous():
    widths = (5, 9, 4)
    weights, inputs, labels = drawn(widths, 6, torch.float32)
    found, expected = torch.empty_like(weights), torch.empty_like(weights)
    chain = chain_of(widths)
    chain.gradient(weights, expected, inputs, labels)
    chain.gradient(weights, found, inputs.t().contiguous().t(), labels.repeat_interleave(2)[::2])
    assert torch.equal(found, expected)


def test_without_the_library_torch_computes_the_same(monkeypatch):
    network = Network(layers((5, 9, 4)), torch.float64)
    _, inputs, labels = drawn((5, 9, 4), 6, torch.float64)
    loss, gradient = Chain(network).gradient(inputs, labels)
    monkeypatch.setattr(compiled_chain, "library", lambda *_: None)
    compiled_chain.chain_library.cache_clear()
    try:
        other, by_torch = Chain(network).gradient(inputs, labels)
    finally:
        compiled_chain.chain_library.cache_clear()
    torch.testing.assert_close(loss, other)
    torch.testing.assert_close(gradient, by_torch)


@pytest.mark.parametrize(
    ("width", "samples", "onednn", "used"),
    [
        (compiled_chain.MOST_WEIGHTS // 2, 100, False, True),
        (compiled_chain.MOST_WEIGHTS // 2 + 1, 100, False, False),
        (3, 101, False, False),
        (compiled_chain.MOST_WEIGHTS // 2 + 1, 101, True, True),
    ],
)
def test_large_products_are_left_to_a_library_that_uses_the_whole_vectors(width, samples, onednn, used, monkeypatch):
    monkeypatch.setattr(compiled_chain, "by_onednn", lambda: onednn)
    inputs, labels = torch.zeros(1, 1).expand(samples, width), torch.zeros(samples, dtype=torch.int64)
    found = chain_of((width, 2), bias=False).descend(torch.zeros(2 * width), 0.1, 0.0, inputs, labels)
    assert (found is not None) == used
