"""The average of products against the dense average in float64."""

import pytest
import torch
from torch import nn

from fedflat.errors import RecipeError
from fedflat.local import LocalRule
from fedflat.methods import Method, ServerView, Upload, collect, parse
from fedflat.methods.parts import ProductAverage
from fedflat.methods.parts.low_rank import refactored
from fedflat.models import Layout, factors, lora

MODULE = nn.Sequential(nn.Linear(9, 7), nn.Conv2d(2, 6, 3), nn.Linear(40, 30))
RANK = 2


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture
def layout():
    adapted = lora(MODULE, RANK, targets="all", also="0.bias")
    return Layout.of((name, p) for name, p in adapted.named_parameters() if p.requires_grad)


def merged_by(method, layout, deltas, weights="samples"):
    """w after a round of a method from the weights w, and w."""
    w = drawn(layout.size)
    uploads = collect([Upload(i, i + 1, 1, 0.1, 0.0, delta) for i, delta in enumerate(deltas)], weights)
    server = ServerView(w, w, 0, len(deltas), layout=layout)
    move, _ = method.merge(uploads.average("delta"), server, uploads)
    return server.arrival(move), w


def products(layout, weights):
    named = layout.views(weights)
    return [named[b].flatten(1) @ named[a].flatten(1) for a, b in factors(layout)]


def best(matrix, rank):
    """The nearest matrix of a rank, by the dense singular value decomposition."""
    u, s, v = torch.linalg.svd(matrix)
    return u[:, :rank] * s[:rank] @ v[:rank]


@pytest.mark.parametrize("clients", [1, 3, 20])  # stacked factors narrower and wider than the matrices
def test_the_product_is_the_best_of_its_rank_to_the_dense_average(layout, clients):
    deltas = [0.3 * drawn(layout.size, seed=1 + i) for i in range(clients)]
    after, w = merged_by(Method(ProductAverage()), layout, deltas)
    shares = torch.arange(1, clients + 1).double() / sum(range(1, clients + 1))
    each = [products(layout, w + delta) for delta in deltas]
    for i, ours in enumerate(products(layout, after)):
        dense = sum(p * matrices[i] for p, matrices in zip(shares, each, strict=True))
        torch.testing.assert_close(ours, best(dense, RANK), rtol=1e-10, atol=1e-10)
        lost = torch.linalg.svdvals(dense)[RANK:].square().sum().sqrt()
        torch.testing.assert_close((ours - dense).norm(), lost, rtol=1e-8, atol=1e-10)


def test_with_one_client_or_a_shared_a_it_is_the_plain_average(layout):
    shared = layout.mask(lambda name: "lora_a" not in name)
    for deltas in [drawn(layout.size, seed=1)], [drawn(layout.size, seed=i) * shared for i in range(5)]:
        for weights in "samples", "uniform":
            ours, plain = (
                merged_by(method, layout, deltas, weights)[0] for method in (Method(ProductAverage()), Method())
            )
            torch.testing.assert_close(ours, plain, rtol=1e-10, atol=1e-11)


def test_the_mean_of_factors_is_biased_and_the_product_is_not_where_the_sum_has_rank_r(layout):
    """Two clients with ±ΔA and ±ΔB: the mean of the factors does not move, the mean product does."""
    delta = 0.5 * drawn(layout.size, seed=1)
    plain, w = merged_by(Method(), layout, [delta, -delta], "uniform")
    torch.testing.assert_close(plain, w)
    ours, _ = merged_by(Method(ProductAverage()), layout, [delta, -delta], "uniform")
    assert all(float((a - b).norm()) > 0.1 for a, b in zip(products(layout, ours), products(layout, w), strict=True))


def test_a_product_of_lower_rank_keeps_the_rest_of_a():
    a, b = drawn(3, 8), torch.cat([drawn(6, 1, seed=1), torch.zeros(6, 2, dtype=torch.float64)], dim=1)
    for clients in [(a, b)] * 2, [(a, 0 * b)] * 2:
        new_a, new_b = refactored(clients, [0.5, 0.5])
        torch.testing.assert_close(new_a, a, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(new_b, clients[0][1], rtol=1e-10, atol=1e-12)


def test_the_rest_of_a_is_what_lies_farthest_from_the_rows_of_the_product():
    """P has only the first row of A, which is by far the longest; the two short ones stay."""
    a = torch.zeros(3, 5, dtype=torch.float64)
    a[0, 0], a[1, 3], a[2, 4] = 9.0, 2.0, 1.0
    b = torch.tensor([[1.0, 0, 0], [2.0, 0, 0]], dtype=torch.float64)
    new_a, new_b = refactored([(a, b)] * 2, [0.5, 0.5])
    torch.testing.assert_close(new_a, a, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(new_b, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("scale", [1e-13, 1e7])
def test_the_factors_scale_with_the_clients_factors(scale):
    """Which singular values are negligible, and which of A's are lifted, is a matter of their ratios."""
    a, b = drawn(2, 8), drawn(6, 2, seed=1)
    clients = [(a, b), (-a + 1e-5 * drawn(2, 8, seed=2), -b)]  # the mean of the A is short and nearly of rank one
    expected_a, expected_b = refactored(clients, [0.5, 0.5])
    new_a, new_b = refactored([(scale * a, b) for a, b in clients], [0.5, 0.5])
    torch.testing.assert_close(new_a / scale, expected_a, rtol=1e-8, atol=1e-12)
    torch.testing.assert_close(new_b, expected_b, rtol=1e-8, atol=1e-8 * float(expected_b.norm()))
    new_a, new_b = refactored([(a, scale * b) for a, b in clients], [0.5, 0.5])
    torch.testing.assert_close(new_a, expected_a, rtol=1e-8, atol=1e-12)
    torch.testing.assert_close(new_b / scale, expected_b, rtol=1e-8, atol=1e-8 * float(expected_b.norm()))


def test_nearly_dependent_rows_do_not_blow_up():
    """A's mean may be nearly orthogonal to the rows of P; its smallest singular value is then lifted."""
    a, b = drawn(2, 8), drawn(6, 2, seed=1)
    for signs in (-1.0, -1.0), (1.0, -1.0):  # both rows of the mean nearly vanish, or one of them
        flip = torch.diag(torch.tensor(signs, dtype=torch.float64))
        clients = [(a, b), (flip @ a + 1e-9 * drawn(2, 8, seed=2), b @ flip)]
        new_a, new_b = refactored(clients, [0.5, 0.5])
        torch.testing.assert_close(new_b @ new_a, b @ a, rtol=1e-6, atol=1e-6)
        assert float(torch.linalg.cond(new_a)) < 2e3
    zero_a, zero_b = refactored([(0 * a, b), (0 * a, b)], [0.5, 0.5])
    assert zero_a.isfinite().all() and zero_b.isfinite().all()


def test_other_weights_are_averaged_as_usual(layout):
    deltas = [drawn(layout.size, seed=1 + i) for i in range(3)]
    ours, plain = (merged_by(method, layout, deltas)[0] for method in (Method(ProductAverage()), Method()))
    bias = layout.slices["0.bias"]
    assert torch.equal(ours[bias], plain[bias])


def test_it_is_refused_for_a_model_without_adapters():
    with pytest.raises(RecipeError, match=r"^method: ProductAverage averages the products of low-rank adapters, and "):
        ProductAverage().fits(Layout.of(MODULE.named_parameters()))


@pytest.mark.parametrize("other", ["median", "fednova", "central_dp"])
def test_one_average_at_a_time(other):
    with pytest.raises(RecipeError, match=r"both replace the average|does not protect"):
        parse(f"fedflat.methods.parts:ProductAverage + {other}")


def test_a_rule_of_a_client_is_left_alone():
    rule = LocalRule(0.1, 2)
    assert ProductAverage().plan(rule, {}, {}) is rule


@pytest.mark.parametrize("shape", [(7, 9), (9, 7), (15, 9), (9, 15), (5, 15)])
@pytest.mark.parametrize("clients", [1, 4])
def test_a_rank_beyond_the_layer_as_peft_allows_it_loses_nothing(shape, clients):
    outputs, inputs = shape
    layout = Layout.of([("0.lora_a", torch.empty(12, inputs)), ("0.lora_b", torch.empty(outputs, 12))])
    deltas = [drawn(layout.size, seed=1 + i) for i in range(clients)]
    after, w = merged_by(Method(ProductAverage()), layout, deltas, "uniform")
    (ours,), each = products(layout, after), [products(layout, w + delta)[0] for delta in deltas]
    rank = min(12, outputs, inputs)
    torch.testing.assert_close(ours, best(sum(each) / clients, rank), rtol=1e-8, atol=1e-8)


def test_factors_of_a_grouped_convolution_of_peft_are_refused():
    layout = Layout.of([("0.lora_a", torch.empty(4, 6, 3, 3)), ("0.lora_b", torch.empty(6, 2, 1, 1))])
    with pytest.raises(
        RecipeError, match=r"products of a whole A and B, and 0\.lora_b has the shape \(6, 2, 1, 1\), as"
    ):
        ProductAverage().fits(layout)
