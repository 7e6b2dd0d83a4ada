"""Networks for text: their sizes, what padding may not change, and derivatives of every order that is used."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.functional import hessian
from torch.func import functional_call

from fedflat.errors import RecipeError
from fedflat.flatness import GaussNewton, Hessian
from fedflat.flatness.objective import Objective
from fedflat.models import AttentionOutput, Network, build
from fedflat.models.sequences import CausalAttention, Lstm, _attention, _fused, _lstm, _unrolled
from fedflat.tasks import TASKS

SMALL = {"char-lstm": {"embedding": 3, "hidden": 4, "layers": 2}, "gpt": {"width": 4, "heads": 2, "layers": 1}}


def small(name: str, per_token: bool = True) -> nn.Module:
    return build(name, (6,), 5, vocabulary=5, per_token=per_token, **SMALL[name]).double()


def tokens() -> torch.Tensor:
    return torch.tensor([[3, 1, 4, 1, 0, 2], [2, 4, 1, -1, -1, -1], [0, 0, 3, 2, -1, -1]])


def labels() -> torch.Tensor:
    x = tokens()
    return torch.where(x >= 0, (x + 1) % 5, torch.tensor(-100))


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        # LEAF's: an embedding of 8, two BasicLSTMCells of 256 with one bias each, a dense layer.
        ("char-lstm", 80 * 8 + 4 * 256 * (8 + 256 + 1) + 4 * 256 * (256 + 256 + 1) + 256 * 80 + 80),
        ("gpt", 1_022_336),
    ],
)
def test_parameter_counts(name, parameters):
    model = build(name, (80,), 80, vocabulary=80)
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert model(torch.zeros(2, 80, dtype=torch.long)).shape == (2, 80)
    assert build(name, (80,), 80, vocabulary=80, per_token=True)(torch.zeros(2, 7, dtype=torch.long)).shape == (
        2,
        7,
        80,
    )


def test_torchs_own_lstm_and_its_gradient_are_those_of_the_definition():
    layer, x = Lstm(3, 4).double(), torch.randn(2, 5, 3, dtype=torch.float64, requires_grad=True)
    arguments = (x, layer.weight_x, layer.weight_h, layer.bias)
    torch.testing.assert_close(layer(x), _unrolled(*arguments))
    fused = partial(_fused, _lstm, _unrolled)
    assert torch.autograd.gradcheck(fused, arguments) and torch.autograd.gradgradcheck(fused, arguments)
    frozen = (x.detach(), layer.weight_x.detach(), layer.weight_h, layer.bias)
    assert torch.autograd.gradgradcheck(fused, frozen)


def test_torchs_own_attention_and_its_gradient_are_those_of_the_definition():
    layer, x = CausalAttention(4, 2).double(), torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    q, k, v = layer.qkv(x).unflatten(2, (3, 2, 2)).permute(2, 0, 3, 1, 4).unbind()
    expected = layer.out(_attention(q, k, v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x), expected)
    assert torch.autograd.gradcheck(layer, x) and torch.autograd.gradgradcheck(layer, x)


@pytest.mark.parametrize("name", SMALL)
def test_padding_changes_nothing(name):
    every, last, x = small(name), small(name, per_token=False), tokens()
    for row, length in zip(x, (6, 3, 4), strict=True):
        alone = every(row[None, :length])[0]
        torch.testing.assert_close(every(x)[x[:, 0] == row[0]][0][:length], alone)
        torch.testing.assert_close(last(x)[x[:, 0] == row[0]][0], last(row[None, :length])[0])


@pytest.mark.parametrize("name", SMALL)
def test_a_token_does_not_see_what_follows(name):
    x = tokens()[:1]
    other = x.clone()
    other[0, 4:] = 1
    torch.testing.assert_close(small(name)(x)[:, :4], small(name)(other)[:, :4])


@pytest.mark.parametrize("name", SMALL)
def test_hessian_and_gauss_newton_of_a_mean_over_tokens_are_the_dense_ones(name):
    module, x, y, loss = small(name), tokens(), labels(), TASKS["next-token"].loss
    # Batches of 9 and 4 tokens: the mean over all tokens weighs them by their tokens, not by their samples.
    objective = Objective(module, loss, [(x[:2], y[:2]), (x[2:], y[2:])])
    layout = objective.layout
    here = y.flatten() != -100

    def mean(w):
        z = functional_call(module, layout.views(w), (x,)).flatten(0, 1)
        return F.cross_entropy(z[here], y.flatten()[here])

    w = objective.weights
    assert objective.value() == pytest.approx(float(mean(w)), rel=1e-12)
    torch.testing.assert_close(objective.gradient(), torch.func.grad(mean)(w))
    dense = hessian(mean, w)  # torch.func.hessian is wrong for a LayerNorm under vmap: differences of gradients tell
    v = torch.randn(len(w), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(Hessian(objective) @ v, dense @ v)

    outputs = lambda w: functional_call(module, layout.views(w), (x,)).flatten(0, 1)[here]  # noqa: E731
    jacobian, p = torch.func.jacrev(outputs)(w), outputs(w).softmax(1)
    bend = (torch.diag_embed(p) - p[:, :, None] * p[:, None]) / len(p)
    expected = torch.einsum("tki,tkl,tlj,j->i", jacobian, bend, jacobian, v)
    torch.testing.assert_close(GaussNewton(objective) @ v, expected)


@pytest.mark.parametrize(("name", "plain", "with_attention"), [("gpt", 1, 2), ("char-lstm", 2, None)])
def test_activations_are_those_of_the_mlp_blocks_and_on_request_of_the_attention(name, plain, with_attention):
    network = Network(small(name), torch.float64)
    with network.listening(activations=True) as tap:
        assert len(tap(tokens()).squares) == plain
    if with_attention is None:
        with pytest.raises(RecipeError, match="no attention to look at"), network.listening(attention=True):
            pass
        return
    seen = []
    (mixed,) = [m for m in network.module.modules() if isinstance(m, AttentionOutput)]
    with torch.no_grad(), network.listening(activations=True, attention=True) as tap:
        hook = mixed.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
        squares = tap(tokens()).squares
        hook.remove()
    assert len(squares) == with_attention
    expected = seen[0][tokens() >= 0].square().mean()  # padding has no activations
    assert float(squares["blocks.0.attention.attention.mixed"]) == pytest.approx(float(expected))


@pytest.mark.parametrize("name", SMALL)
def test_padding_changes_no_mean_square_of_the_activations(name):
    """The mean over a padded batch is that over its texts one by one, and so is its gradient."""
    network, x = Network(small(name), torch.float64), tokens()
    parameters = list(network.module.parameters())

    def squares(batch):
        with network.listening(activations=True) as tap:
            total = torch.stack(list(tap(batch).squares.values())).sum()
        return total, torch.autograd.grad(total, parameters, materialize_grads=True)

    together, slopes = squares(x)
    sizes = (x >= 0).sum(dim=1)
    alone = [squares(row[None, :size]) for row, size in zip(x, sizes.tolist(), strict=True)]
    weights = sizes / sizes.sum()
    assert float(together.detach()) == pytest.approx(
        float(sum(w * one.detach() for w, (one, _) in zip(weights, alone, strict=True)))
    )
    for k, slope in enumerate(slopes):
        torch.testing.assert_close(slope, sum(w * one[k] for w, (_, one) in zip(weights, alone, strict=True)))


def test_samples_that_are_not_tokens_are_refused():
    with pytest.raises(RecipeError, match="needs rows of token ids, not samples of shape"):
        build("gpt", (1, 28, 28), 10)
    with pytest.raises(RecipeError, match="model mlp: does not read the token ids of a text; take char-lstm, gpt"):
        build("mlp", (8,), 5, vocabulary=5)
    with pytest.raises(RecipeError, match="must divide the width"):
        build("gpt", (8,), 5, vocabulary=5, width=10, heads=3)
