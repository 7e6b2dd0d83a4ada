"""The gap as moves of one layer's weights: what must hold exactly, and the authors' experiment in small."""

import json
import math
import sys
from dataclasses import asdict, replace
from fractions import Fraction
from itertools import compress, pairwise
from operator import mul

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call

from fedflat.errors import DataError, RecipeError, TrainingError
from fedflat.flatness import DIRECTIONS, pairs
from fedflat.flatness.activities import SeenLayer, layers_of, patches
from fedflat.flatness.dual_weights import dual_weights
from fedflat.flatness.duality import Pairing, _moments, decompose
from fedflat.models import build
from fedflat.tokens import widened

both = pytest.mark.parametrize("direction", DIRECTIONS)


class Tokens(nn.Module):
    """A linear layer that sees four positions of each sample."""

    def __init__(self):
        super().__init__()
        self.mix, self.head = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.mix(x.flatten(2).transpose(1, 2)[:, :4])).mean(dim=1))


NETS = {
    "mlp": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(64, 7), nn.ReLU(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 3)
    ),
    "conv": lambda: nn.Sequential(
        nn.Conv2d(4, 3, 3), nn.ReLU(), nn.Conv2d(3, 4, 2, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(36, 3)
    ),
    "tokens": Tokens,
}


def samples(count, seed, classes=3):
    chance = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 4, 4, 4, generator=chance, dtype=torch.float64)
    return x, torch.randint(0, classes, (count,), generator=chance)


def network(kind):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return NETS[kind]().double()


LAYERS = [(kind, layer) for kind in NETS for layer in layers_of(network(kind))]


# The dual weight


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 5), st.integers(0, 99))
def test_with_the_dual_weight_the_layer_answers_the_old_input_as_it_did_the_new(positions, inputs, outputs, seed):
    chance = torch.Generator().manual_seed(seed)
    before, after = (
        torch.randn(3, positions, inputs, generator=chance, dtype=torch.float64) for _ in ("train", "test")
    )
    weight = torch.randn(outputs, inputs, generator=chance, dtype=torch.float64)
    dual = dual_weights(before, after, weight)
    moved = weight + dual.left.mT @ dual.right
    if positions == 1:
        a, b = before[:, 0], after[:, 0]
        closed = ((b - a) @ weight.T)[:, :, None] * (a / a.square().sum(1, keepdim=True))[:, None, :]
        torch.testing.assert_close(moved, weight + closed, rtol=0, atol=1e-12 * float(1 + closed.abs().max()))
        torch.testing.assert_close(before @ moved.mT, after @ weight.T, rtol=1e-12, atol=1e-12)
    if positions <= inputs:
        assert float(dual.residuals.max()) < 1e-9
    else:
        expected = torch.linalg.lstsq(before, (after - before) @ weight.T).solution.mT
        torch.testing.assert_close(moved, weight + expected, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(dual.squares, (moved - weight).square().sum(dim=(1, 2)))


def test_components_are_inner_products_with_the_directions_for_any_rank():
    chance = torch.Generator().manual_seed(1)
    for positions in (1, 3):
        before, after = (torch.randn(5, positions, 4, generator=chance, dtype=torch.float64) for _ in range(2))
        weight, directions = (torch.randn(*shape, generator=chance).double() for shape in ((2, 4), (6, 2, 4)))
        dual = dual_weights(before, after, weight)
        expected = torch.einsum("kro,kri,noi->kn", dual.left, dual.right, directions)
        torch.testing.assert_close(dual.along(directions), expected)


def test_of_dependent_rows_the_smallest_dual_weight_is_taken():
    before = torch.tensor([[[1.0, 0.0, 0.0], [2.0, 0.0, 0.0]]], dtype=torch.float64)
    after = before + torch.tensor([1.0, 1.0, 0.0]) * before[..., :1]
    weight = torch.tensor([[3.0, 4.0, 5.0]], dtype=torch.float64)
    dual = dual_weights(before, after, weight)
    torch.testing.assert_close(dual.left.mT @ dual.right, torch.tensor([[[7.0, 0, 0]]], dtype=torch.float64))
    assert float(dual.residuals) < 1e-12


def test_it_is_the_pseudoinverse_with_its_usual_threshold_for_every_pair_and_unit():
    """Singular values below max(positions, inputs) · ε · s₁ count as zero; here this is 8 ε s₁."""
    epsilon = torch.finfo(torch.float64).eps
    before = torch.zeros(40, 2, 8, dtype=torch.float64)
    before[:, 0, 0] = torch.linspace(1, 2, 40)
    before[:, 1, 1] = before[:, 0, 0] * torch.tensor([4.0, 16.0, 1.0, 0.5]).repeat(10) * epsilon
    before[2::4, 1, 1] = 0.5
    chance = torch.Generator().manual_seed(0)
    change, weight = (torch.randn(*shape, generator=chance).double() for shape in ((40, 2, 8), (3, 8)))
    for unit in (1.0, 1e-20, 1e20):
        moved = unit * (before + change)
        dual = dual_weights(unit * before, moved, weight)
        wanted = (moved - unit * before) @ weight.T
        expected = (torch.linalg.pinv(unit * before) @ wanted).mT
        scale = expected.abs().amax(dim=(1, 2), keepdim=True)
        torch.testing.assert_close(dual.left.mT @ dual.right / scale, expected / scale, rtol=1e-9, atol=1e-12)
        missed = (wanted - unit * before @ expected.mT).norm(dim=(1, 2)) / wanted.norm(dim=(1, 2))
        torch.testing.assert_close(dual.residuals, missed, rtol=1e-9, atol=1e-12)
        assert float(dual.residuals[0]) > 0.1 > 1e-9 > float(dual.residuals[2])


def test_no_array_of_pairs_times_weights_is_made_for_a_linear_layer():
    """40 dual weights of 3000 × 3000 would take 2.9 GB; the two factors and one direction take 0.1 GB."""
    chance = torch.Generator().manual_seed(0)
    before, after = torch.randn(40, 1, 3000, generator=chance), torch.randn(40, 1, 3000, generator=chance)
    weight = torch.randn(3000, 3000, generator=chance)
    biggest = 0

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal biggest
            out = function(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple | list) else [out]:
                biggest = max(biggest, tensor.numel() if isinstance(tensor, torch.Tensor) else 0)
            return out

    with Largest():
        dual_weights(before, after, weight).along(weight[None])
    assert 0 < biggest <= weight.numel()


# The decomposition


@both
@pytest.mark.parametrize(("kind", "layer"), LAYERS)
def test_in_a_full_basis_the_contributions_are_the_mean_gap_of_the_pairs(kind, layer, direction):
    module, train, test = network(kind), samples(40, 0), samples(30, 1)
    result = decompose(module, F.cross_entropy, train, test, layer)
    found = result.pairings[direction]
    assert len(found.contribution) == module.get_submodule(layer).weight.numel()
    assert sum(found.contribution) == pytest.approx(found.paired_gap, abs=1e-10)
    assert found.fluctuation + found.drift == pytest.approx(found.paired_gap, abs=1e-10)
    assert abs(found.remainder) < 1e-10

    @torch.no_grad()
    def mean(batch, indices=slice(None)):
        return float(F.cross_entropy(module(batch[0][indices]), batch[1][indices]))

    matched = pairs(train, test, direction)
    assert found.skipped == 0 and found.pairs == len(matched.test)
    assert found.paired_gap == pytest.approx(mean(test, matched.test) - mean(train, matched.train))
    assert (result.train_samples, result.test_samples) == (40, 30)
    assert (result.train_loss, result.test_loss) == pytest.approx((mean(train), mean(test)))
    assert result.gap == pytest.approx(mean(test) - mean(train))
    assert result.weight_norm == pytest.approx(float(module.get_submodule(layer).weight.detach().norm()))


@both
@pytest.mark.parametrize(("kind", "layer"), LAYERS)
def test_a_contribution_is_correlation_times_deviations_plus_the_product_of_means(kind, layer, direction):
    result = decompose(network(kind), F.cross_entropy, samples(40, 0), samples(30, 1), layer).pairings[direction]
    for n, part in enumerate(result.contribution):
        w, g = result.sigma_w[n], result.sigma_g[n]
        assert part == pytest.approx(
            result.correlation[n] * w * g + result.mean_w[n] * result.mean_g[n], rel=1e-6, abs=1e-12
        )
        assert abs(result.correlation[n]) <= 1 + 1e-9
    assert abs(result.fluctuation) <= result.envelope <= result.size * result.sharpness + 1e-12
    assert 1 <= result.participation <= len(result.contribution)


@both
def test_every_number_is_that_of_a_dense_computation_in_numpy(direction):
    """Nearest twins by all distances, ΔW and g as matrices, the Hessian by autograd, moments by NumPy."""
    module, train, test = network("mlp"), samples(120, 0), samples(50, 1)
    found = decompose(module, F.cross_entropy, train, test, "3").pairings[direction]
    (x, y), (u, v) = train, test
    apart = np.where(y[:, None] == v, torch.cdist(x.flatten(1), u.flatten(1)), np.inf)
    i, j = np.arange(120), apart.argmin(1)
    if direction == "test_to_train":
        i, j = apart.argmin(0), np.arange(50)
    weight = module[3].weight.detach()
    with torch.no_grad():
        a, b = (module[:3](inputs).numpy() for inputs in (x[i], u[j]))
        easy, hard = (F.cross_entropy(module(z), c, reduction="none").numpy() for z, c in ((x[i], y[i]), (u[j], v[j])))

    def loss(w):
        return F.cross_entropy(functional_call(module, {"3.weight": w}, x), y)

    values, vectors = np.linalg.eigh(torch.func.hessian(loss)(weight).reshape(42, 42).detach().numpy())
    assert np.diff(values).min() > 1e-9  # no two alike, so that the basis is unique up to signs
    alive = (a**2).sum(1) > 0
    a, b, easy, hard = a[alive], b[alive], easy[alive], hard[alive]
    moves = np.einsum("ko,ki->koi", (b - a) @ weight.numpy().T, a / (a**2).sum(1, keepdims=True)).reshape(-1, 42)
    slopes = (hard - easy)[:, None] * moves / (moves**2).sum(1, keepdims=True)
    w, g = ((each @ vectors)[:, ::-1] for each in (moves, slopes))
    c = np.array([np.corrcoef(w[:, n], g[:, n])[0, 1] for n in range(42)])
    expected = {
        "pairs": alive.sum(), "skipped": (~alive).sum(), "paired_gap": (hard - easy).mean(), "residual": 0,
        "mean_w": abs(w.mean(0)), "mean_g": abs(g.mean(0)), "sigma_w": w.std(0), "sigma_g": g.std(0),
        "correlation": c, "contribution": (w * g).mean(0),
        "fluctuation": (c * w.std(0) * g.std(0)).sum(), "drift": (w.mean(0) * g.mean(0)).sum(),
        "envelope": (w.std(0) * g.std(0)).sum(), "size": np.sqrt(w.var(0).sum()), "sharpness": np.sqrt(g.var(0).sum()),
        "remainder": 0,
    }  # fmt: skip
    for name, value in expected.items():
        measured = np.array(getattr(found, name), dtype=float)
        measured = abs(measured) if name.startswith("mean_") else measured
        np.testing.assert_allclose(measured, value, rtol=1e-6, atol=1e-9, err_msg=name)
    spread = [c.mean(), c.std(), *np.quantile(c, [0.1, 0.5, 0.9])]
    assert [*asdict(found.correlations).values()] == pytest.approx(spread, rel=1e-6)


def test_a_planted_case_in_which_the_two_pairings_have_opposite_signs():
    """A linear layer (u, v) ↦ 2u + v with the loss z²/2, on inputs along the axes: everything by hand.

    Train samples (1, 0), (6, 0), (0, 1) of class 0, 0, 1; test samples (2, 0), (3, 0), (0, 2). From train to test
    1 → 2, 6 → 3 and 1 → 2; from test to train 2 → 1, 3 → 1 and 2 → 1: nobody's twin is the sample at 6, whose loss is
    the largest. With Δl = z'²/2 − z²/2, ΔW = 2 (a' − a)/a along the first axis and (a' − a)/a along the second.
    """
    module = nn.Linear(2, 1, bias=False).double()
    with torch.no_grad():
        module.weight.copy_(torch.tensor([[2.0, 1.0]]))
    train = torch.tensor([[1.0, 0], [6, 0], [0, 1]]).double(), torch.tensor([0, 0, 1])
    test = torch.tensor([[2.0, 0], [3, 0], [0, 2]]).double(), torch.tensor([0, 0, 1])
    result = decompose(module, lambda z, _: z.square().mean() / 2, train, test, "")
    assert result.gap == pytest.approx((8 + 18 + 2) / 3 - (2 + 72 + 0.5) / 3)
    assert result.eigenvalues == pytest.approx([37 / 3, 1 / 3])
    assert [*result.pairings] == ["train_to_test", "test_to_train"]
    changes = {"train_to_test": (6.0, -54.0, 1.5), "test_to_train": (6.0, 16.0, 1.5)}
    moves = {"train_to_test": ((2, 0), (-1, 0), (0, 1)), "test_to_train": ((2, 0), (4, 0), (0, 1))}
    for direction, found in result.pairings.items():
        change, w = np.array(changes[direction]), np.array(moves[direction], dtype=float)
        g = change[:, None] * w / (w**2).sum(1, keepdims=True)
        assert found.paired_gap == pytest.approx(change.sum() / 3)
        assert found.contribution == pytest.approx([(change[0] + change[1]) / 3, change[2] / 3])
        assert found.drift == pytest.approx((w.mean(0) * g.mean(0)).sum())
        assert found.fluctuation == pytest.approx(change.sum() / 3 - found.drift)
        assert found.sigma_w == pytest.approx(w.std(0)) and found.sigma_g == pytest.approx(g.std(0))
    here, there = (result.pairings[direction].paired_gap for direction in DIRECTIONS)
    assert here == pytest.approx(result.gap) and here < 0 < there


def test_still_directions_have_no_part_in_the_spread_of_the_correlations():
    values = dict(pairs=9, skipped=0, paired_gap=0.0, residual=0.0, mean_w=[0.0] * 4, mean_g=[0.0] * 4)
    pairing = Pairing(
        **values, sigma_w=[1.0, 0.5, 0.0, 1e-9], sigma_g=[2.0, 1.0, 0.0, 1e-9], correlation=[0.2, 0.4, 0.0, -1.0],
        contribution=[0.0] * 4,
    )  # fmt: skip
    assert pairing.moving == [0, 1]
    for scale in (1e-9, 1e9):
        sigmas = {name: [scale * x for x in getattr(pairing, name)] for name in ("sigma_w", "sigma_g")}
        assert replace(pairing, **sigmas).moving == [0, 1], "whatever the unit"
    assert replace(pairing, sigma_w=[1.0, 1.0, 0.0, 1.0], sigma_g=[1.0, 0.0, 1.0, 1.0]).moving == [0, 3]
    spread = pairing.correlations
    assert (spread.mean, spread.std, spread.median) == pytest.approx((0.3, 0.1, 0.3))
    assert (spread.low, spread.high) == pytest.approx((0.22, 0.38))
    nothing = Pairing(**values, **{name: [0.0] * 4 for name in ("sigma_w", "sigma_g", "correlation", "contribution")})
    assert nothing.participation == 0.0
    assert nothing.moving == [] and asdict(nothing.correlations) == dict.fromkeys(asdict(spread), 0.0)


@both
@pytest.mark.parametrize("layer", ["1", "3", "5"])
def test_a_train_sample_with_its_dual_weight_has_the_loss_of_its_twin(layer, direction):
    module, train, test = network("mlp"), samples(40, 0), samples(30, 1)
    matched = pairs(train, test, direction)
    place, name = int(layer), f"{layer}.weight"
    before, after = (module[:place](x[i])[:, None] for (x, _), i in ((train, matched.train), (test, matched.test)))
    dual = dual_weights(before, after, module[place].weight)
    for k, (i, j) in enumerate(zip(matched.train, matched.test, strict=True)):
        moved = module[place].weight + dual.left[k].T @ dual.right[k]
        torch.testing.assert_close(
            functional_call(module, {name: moved}, train[0][i][None]), module(test[0][j][None]), rtol=1e-10, atol=1e-12
        )


def test_the_basis_is_that_of_the_layers_hessian_of_the_train_loss():
    module, train = network("mlp"), samples(300, 0)
    result = decompose(module, F.cross_entropy, train, samples(30, 1), "5")

    def loss(weight):
        return F.cross_entropy(functional_call(module, {"5.weight": weight}, train[0]), train[1])

    matrix = torch.func.hessian(loss)(module[5].weight.detach()).reshape(18, 18)
    expected = torch.linalg.eigvalsh(matrix).flip(0)
    torch.testing.assert_close(torch.tensor(result.eigenvalues, dtype=torch.float64), expected, rtol=1e-9, atol=1e-12)


class Rectified(torch.autograd.Function):
    """A user's own function that says nothing about batches of gradients."""

    @staticmethod
    def forward(context, x):
        context.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(context, slope):
        return slope * (context.saved_tensors[0] > 0)


class Own(nn.Module):
    def forward(self, x):
        return Rectified.apply(x)


def test_rows_of_the_hessian_are_the_same_at_once_and_one_by_one(monkeypatch):
    module, train, test = network("mlp"), samples(40, 0), samples(30, 1)
    module[4] = nn.ReLU()
    at_once = decompose(module, F.cross_entropy, train, test, "3").eigenvalues
    module[4] = Own()
    by_user = decompose(module, F.cross_entropy, train, test, "3").eigenvalues
    monkeypatch.setattr(sys.modules[SeenLayer.__module__], "MOST_ROWS", 1)
    one_by_one = decompose(module, F.cross_entropy, train, test, "3").eigenvalues
    assert at_once == pytest.approx(one_by_one, abs=1e-14)
    assert by_user == one_by_one


def test_a_large_layer_has_k_directions_that_are_the_first_of_the_full_basis(monkeypatch):
    arguments = network("mlp"), F.cross_entropy, samples(60, 0), samples(30, 1), "3"
    full = decompose(*arguments)
    monkeypatch.setattr(sys.modules[decompose.__module__], "DENSE", 10)
    monkeypatch.setattr(sys.modules[decompose.__module__], "top_eigenvalues", _accurate)
    some = decompose(*arguments, k=4)
    assert some.eigenvalues == pytest.approx(full.eigenvalues[:4], rel=1e-5)
    for direction in DIRECTIONS:
        found, expected = some.pairings[direction], full.pairings[direction]
        for name in ("contribution", "sigma_w", "sigma_g", "correlation"):
            assert getattr(found, name) == pytest.approx(getattr(expected, name)[:4], rel=1e-5, abs=1e-9)
        assert found.paired_gap == expected.paired_gap
        assert found.remainder == pytest.approx(sum(expected.contribution[4:]), rel=1e-5)


def _accurate(hessian, k, seed):
    from fedflat.flatness import top_eigenvalues

    return top_eigenvalues(hessian, k, tolerance=1e-12, seed=seed)


def test_zero_means_all_samples_and_all_pairs():
    module, train, test = network("mlp"), samples(40, 0), samples(30, 1)
    arguments = module, F.cross_entropy, train, test, "3"
    everything = decompose(*arguments, limit=0, samples=0)
    assert everything == decompose(*arguments, limit=40, samples=40)
    assert {name: found.pairs for name, found in everything.pairings.items()} == {
        "train_to_test": 40,
        "test_to_train": 30,
    }
    some = decompose(*arguments, limit=7, samples=11)
    assert [found.pairs for found in some.pairings.values()] == [7, 7]
    assert some.eigenvalues != everything.eigenvalues and some.gap == everything.gap


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(4, 2, 3, stride=2, padding=1),
        nn.Conv2d(4, 2, 2, dilation=2),
        nn.Conv2d(4, 2, (2, 3), padding="same"),
        nn.Conv2d(4, 2, 3, padding=(1, 2), padding_mode="circular"),
    ],
)
@pytest.mark.filterwarnings("ignore:Using padding='same'")
def test_a_convolution_is_its_kernels_times_the_patches_and_few_patches_leave_no_residual(conv):
    conv = conv.double()
    train, test = samples(20, 0), samples(10, 1)
    image = conv(train[0])
    rows = patches(conv, train[0])
    product = rows @ conv.weight.flatten(1).T + conv.bias
    torch.testing.assert_close(product.mT.unflatten(2, image.shape[2:]), image)

    module = nn.Sequential(conv, nn.Tanh(), nn.Flatten(), nn.Linear(image[0].numel(), 3)).double()
    result = decompose(module, F.cross_entropy, train, test, "0")
    assert rows.shape[1] <= rows.shape[2]
    assert all(found.residual < 1e-9 and abs(found.remainder) < 1e-10 for found in result.pairings.values())


def test_more_positions_than_inputs_leave_a_residual():
    module = nn.Sequential(nn.Conv2d(4, 2, 1), nn.Tanh(), nn.Flatten(), nn.Linear(32, 3)).double()
    result = decompose(module, F.cross_entropy, samples(20, 0), samples(10, 1), "0")
    assert all(0.1 < found.residual < 1 and abs(found.remainder) < 1e-10 for found in result.pairings.values())


def test_batches_and_chunks_change_nothing(monkeypatch):
    arguments = network("conv"), F.cross_entropy, samples(40, 0), samples(30, 1), "2"
    whole = decompose(*arguments)
    small = decompose(*arguments, batch=7)
    monkeypatch.setattr(sys.modules[SeenLayer.__module__], "BUDGET", 1)
    single = decompose(*arguments)
    for other in (small, single):
        assert other.gap == pytest.approx(whole.gap, abs=1e-12)
        for direction in DIRECTIONS:
            found, expected = other.pairings[direction], whole.pairings[direction]
            assert found.contribution == pytest.approx(expected.contribution, rel=1e-6, abs=1e-12)
            assert found.paired_gap == pytest.approx(expected.paired_gap, abs=1e-12)


def test_texts_have_the_same_numbers_however_far_they_are_padded():
    """Train and test texts may be cut at different lengths, and what a layer computes from padding has no effect."""
    chance = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 5, (12, 6), generator=chance)
    longest = torch.randint(2, 5, (12, 1), generator=chance)
    labels = torch.arange(12) % 2
    cut = torch.where(torch.arange(6) < longest, tokens, -1)
    train, test = (cut[:7, :5], labels[:7]), (cut[7:, :4], labels[7:])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = build("gpt", (9,), 2, vocabulary=5, width=4, heads=2, layers=1).double()
    wide = [widened(*half, 9) for half in (train, test)]
    for layer in ("blocks.0.mlp.fc1", "head"):
        found, expected = (decompose(module, F.cross_entropy, *halves, layer) for halves in ((train, test), wide))
        # Eigenvectors of one eigenvalue can be any basis, such as those that shift the logits of both classes.
        bent = [abs(value) > 1e-9 * found.eigenvalues[0] for value in found.eigenvalues]
        assert sum(bent) >= 3
        for direction in DIRECTIONS:
            one, other = (each.pairings[direction] for each in (found, expected))
            for name in ("mean_w", "mean_g", "sigma_w", "sigma_g", "contribution"):
                pair = (list(compress(getattr(each, name), bent)) for each in (one, other))
                assert next(pair) == pytest.approx(next(pair), rel=1e-9, abs=1e-12), name
            for name in ("pairs", "skipped", "paired_gap", "residual", "remainder", "size", "sharpness", "drift"):
                assert getattr(one, name) == pytest.approx(getattr(other, name), rel=1e-9, abs=1e-12), name


def test_the_dead_and_the_unchanged_are_skipped_and_counted():
    x = torch.tensor([[-1.0], [1.0], [2.0], [9.0]], dtype=torch.float64)
    module = nn.Sequential(nn.ReLU(), nn.Linear(1, 3, bias=False)).double()
    train = x, torch.tensor([0, 1, 1, 2])
    test = torch.tensor([[-0.9], [1.0], [2.5]], dtype=torch.float64), torch.tensor([0, 1, 1])
    result = decompose(module, F.cross_entropy, train, test, "1")
    assert result.missing == 1
    assert {name: (found.pairs, found.skipped) for name, found in result.pairings.items()} == {
        "train_to_test": (1, 2),
        "test_to_train": (1, 2),
    }
    assert all(found.correlation == [0, 0, 0] for found in result.pairings.values())
    with pytest.raises(DataError, match="no pair has activities that differ"):
        decompose(module, F.cross_entropy, train, (test[0][:2], test[1][:2]), "1")


def test_a_pair_is_dead_below_a_square_of_its_own_activities():
    """|a|² is 4 a² for a sample with four inputs a: 2e-12, 6.4e-13 and 4. The second one is dead."""
    x = torch.tensor([[0.5**0.5 * 1e-6], [4e-7], [1.0]], dtype=torch.float64).expand(3, 4)
    classes = torch.arange(3)
    module = nn.Linear(4, 3, bias=False).double()
    result = decompose(module, F.cross_entropy, (x, classes), (2 * x, classes), "")
    assert [(found.pairs, found.skipped) for found in result.pairings.values()] == [(2, 1), (2, 1)]


def test_the_result_is_data_and_the_module_is_as_it_was():
    module = network("conv")
    before = {name: value.clone() for name, value in module.state_dict().items()}
    result = decompose(module, F.cross_entropy, samples(40, 0), samples(30, 1), "0")
    assert json.loads(json.dumps(asdict(result))) == asdict(result)
    assert all(value.equal(before[name]) for name, value in module.state_dict().items())
    assert not any(part._forward_pre_hooks for part in module.modules())


# What a user may get wrong


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.idle = nn.Linear(64, 64), nn.Linear(64, 3)

    def forward(self, x):
        return self.layer(self.layer(x.flatten(1)))


def asked(layer, module=None, **options):
    return lambda: decompose(
        module or nn.Sequential(nn.Flatten(), nn.Linear(64, 3)).double(),
        F.cross_entropy,
        samples(20, 0),
        samples(10, 1),
        layer,
        **options,
    )


def broken():
    module = network("mlp")
    with torch.no_grad():
        module[1].weight[0, 0] = torch.nan
    return module


@pytest.mark.parametrize(
    ("call", "error", "sentence"),
    [
        (asked("head"), RecipeError, "layer 'head' cannot be analysed; choose one of: 1"),
        (asked("0", nn.Flatten()), RecipeError, "choose one of: none"),
        (asked("0", nn.Sequential(nn.Conv2d(4, 4, 3, groups=2))), RecipeError, "'0' is a grouped convolution"),
        (asked("layer", Twice().double()), RecipeError, "'layer' runs 2 times"),
        (asked("1", limit=-1), RecipeError, "limit = -1: it must be at least 1, or 0 for all"),
        (asked("1", k=0), RecipeError, "k = 0: it must be at least 1$"),
        (asked("1", samples=-1), RecipeError, "samples = -1: it must be at least 1, or 0 for all"),
        (asked("1", batch=0), RecipeError, "batch = 0: it must be at least 1"),
        (asked("3", broken()), TrainingError, "layer '3': activities or losses are not finite"),
    ],
)
def test_a_mistake_gives_one_sentence(call, error, sentence):
    with pytest.raises(error, match=sentence):
        call()


# The authors' experiment in small


def test_the_gap_of_a_trained_network_sits_in_few_directions():
    """An MLP without bias, its second layer, the full Hessian; the figures are those of each test sample's twin."""
    from sklearn.datasets import load_digits  # takes seconds, which every worker would spend while it collects tests

    data = load_digits()
    x, y = torch.tensor(data.data / 16), torch.tensor(data.target)
    train, test = (x[:400], y[:400]), (x[400:700], y[400:700])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        sizes = (64, 12, 12, 10)
        layers = [nn.Linear(i, o, bias=False) for i, o in pairwise(sizes)]
        module = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2]).double()
    optimiser = torch.optim.SGD(module.parameters(), lr=0.1)
    chance = torch.Generator().manual_seed(0)
    for _ in range(60):
        for part in torch.randperm(400, generator=chance).split(25):
            optimiser.zero_grad()
            F.cross_entropy(module(train[0][part]), train[1][part]).backward()
            optimiser.step()
    result = decompose(module, F.cross_entropy, train, test, "2")
    found = result.pairings["test_to_train"]
    assert result.gap > 0 and found.paired_gap > 0
    assert abs(found.remainder) < 1e-10 and found.residual < 1e-12
    assert found.participation < len(found.contribution) / 3
    assert abs(sum(found.contribution[:36])) > 0.8 * found.paired_gap
    assert abs(found.drift) < 0.5 * found.fluctuation


def test_chunks_are_as_large_as_the_budget_allows(monkeypatch):
    """Layer "2" has 9 positions, 12 inputs and 4 outputs: 12 · (9 + 4) a pair, 9 · (12 + 4) a sample."""
    here = SeenLayer(network("conv"), F.cross_entropy, "2")
    for budget, room, rows in ((156_000, 1000, 43), (156 * 3 - 1, 2, 1), (155, 1, 1), (10**9, 6_410_256, 64)):
        monkeypatch.setattr(sys.modules[SeenLayer.__module__], "BUDGET", budget)
        assert (here.room(samples(3, 0)), here.rows(samples(3, 0), batch=25)) == (room, rows)


def test_layers_are_the_trained_linear_maps_without_groups():
    net = nn.Sequential(nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1, groups=2), nn.GroupNorm(1, 4), nn.Conv2d(4, 2, 1))
    net = net.extend([nn.Flatten(), nn.Linear(8, 3), nn.Linear(3, 3)])
    net[5].weight.requires_grad_(False)
    assert layers_of(net) == ["0", "3", "6"]
    assert layers_of(nn.Linear(2, 2)) == [""]
    with pytest.raises(RecipeError, match="layer '5' cannot be analysed; choose one of: 0, 3, 6"):
        SeenLayer(net, F.cross_entropy, "5")
    # The output of the attention is computed from its weights: the layer itself is never called.
    assert layers_of(nn.TransformerEncoderLayer(4, 2, 5)) == ["linear1", "linear2"]


@pytest.mark.parametrize(
    ("x", "loss"),
    [(math.inf, lambda z, y: 0 * z.nan_to_num(0, 0, 0).sum()), (1.0, lambda z, y: z.sum() / 0)],
    ids=["activities", "losses"],
)
def test_activities_and_losses_must_both_be_finite(x, loss):
    here = SeenLayer(nn.Linear(2, 2), loss, "")
    with pytest.raises(TrainingError, match="activities or losses are not finite"):
        here.see((torch.full((3, 2), x), torch.zeros(3)))


@pytest.mark.parametrize("far", [(0.0, 0.0), (1e9, 0.0), (0.0, 1e9), (-1e9, 1e9)])
def test_correlations_do_not_suffer_from_means_that_are_large(far):
    """Exact rational numbers are the oracle; without both means taken off, the digits of the deviations are lost."""
    chance = torch.Generator().manual_seed(0)
    w, g = (torch.randn(50, 1, generator=chance, dtype=torch.float64) + mean for mean in far)
    g += w - far[0]
    exact = [[Fraction(x) for x in values.flatten().tolist()] for values in (w, g)]
    a, b = ([x - sum(values) / 50 for x in values] for values in exact)
    covariance, *squares = (sum(map(mul, x, y)) / 50 for x, y in ((a, b), (a, a), (b, b)))
    found = _moments(w, g)
    assert found["correlation"] == pytest.approx([float(covariance) / math.sqrt(squares[0] * squares[1])], rel=1e-10)
    assert found["sigma_w"] == pytest.approx([math.sqrt(squares[0])], rel=1e-10)
    assert found["sigma_g"] == pytest.approx([math.sqrt(squares[1])], rel=1e-10)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_where_a_deviation_is_too_small_for_its_square_there_is_no_correlation(sign):
    w, g = (torch.tensor([[x], [-x]], dtype=torch.float64) for x in (1e-170, sign))
    found = _moments(w, g)
    assert (found["sigma_w"], found["correlation"]) == ([0.0], [0.0])


def test_in_float32_a_hessian_is_decomposed_where_lapack_does_not_converge(monkeypatch):
    eigh = torch.linalg.eigh

    def in_double(matrix):
        if matrix.dtype == torch.float32:
            raise torch.linalg.LinAlgError("the algorithm failed to converge")
        return eigh(matrix)

    monkeypatch.setattr(torch.linalg, "eigh", in_double)
    (train, labels), (test, answers) = samples(40, 0), samples(30, 1)
    half = decompose(network("mlp").float(), F.cross_entropy, (train.float(), labels), (test.float(), answers), "3")
    full = decompose(network("mlp"), F.cross_entropy, (train, labels), (test, answers), "3")
    assert half.eigenvalues == pytest.approx(full.eigenvalues, abs=1e-5)
