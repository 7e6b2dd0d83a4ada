"""The gap as moves of one layer's weights: what must hold exactly, and the authors' experiment in small."""

import json
import sys
from dataclasses import asdict
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits
from torch import nn
from torch.func import functional_call

from fedflat.errors import DataError, RecipeError, TrainingError
from fedflat.flatness.duality import _patches, dual_weights, duality, layers_of, pairs

DIRECTIONS = ("test_to_train", "train_to_test")


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


# Pairs


@settings(deadline=None)
@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 4), st.integers(0, 999), st.sampled_from(DIRECTIONS))
def test_a_twin_is_the_nearest_of_its_class(many, few, classes, seed, direction):
    chance = torch.Generator().manual_seed(seed)
    train, test = (
        (torch.randn(n, 2, 3, generator=chance), torch.randint(0, classes, (n,), generator=chance)) for n in (many, few)
    )
    shared = set(train[1].tolist()) & set(test[1].tolist())
    if not shared:
        with pytest.raises(DataError, match="no class in common"):
            pairs(train, test, direction)
        return
    found = pairs(train, test, direction)
    mine, theirs, here, there = (
        (test, train, found.test, found.train) if direction == DIRECTIONS[0] else (train, test, found.train, found.test)
    )
    assert here.tolist() == [i for i, label in enumerate(mine[1].tolist()) if label in shared]
    for i, j in zip(here.tolist(), there.tolist(), strict=True):
        distance = (theirs[0].double() - mine[0][i]).flatten(1).norm(dim=1)
        distance[theirs[1] != mine[1][i]] = torch.inf
        assert j == int(distance.argmin())
    assert found.missing == len(set(train[1].tolist()) | set(test[1].tolist())) - len(shared)


def test_a_limit_draws_by_the_seed():
    train, test = samples(50, 0), samples(40, 1)
    some, again, other = (pairs(train, test, limit=10, seed=seed) for seed in (3, 3, 4))
    assert len(some.test) == len(set(some.test.tolist())) == 10
    assert some.test.equal(again.test) and some.train.equal(again.train) and not some.test.equal(other.test)
    assert pairs(train, test).train[some.test].equal(some.train)


# The decomposition


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(("kind", "layer"), LAYERS)
def test_in_a_full_basis_the_contributions_are_the_mean_gap_of_the_pairs(kind, layer, direction):
    module, train, test = network(kind), samples(40, 0), samples(30, 1)
    result = duality(module, F.cross_entropy, train, test, layer, direction=direction)
    assert len(result.contribution) == module.get_submodule(layer).weight.numel()
    assert sum(result.contribution) == pytest.approx(result.paired_gap, abs=1e-10)
    assert abs(result.remainder) < 1e-10

    @torch.no_grad()
    def mean(batch, indices=slice(None)):
        return float(F.cross_entropy(module(batch[0][indices]), batch[1][indices]))

    matched = pairs(train, test, direction)
    assert result.skipped == 0 and result.pairs == len(matched.test)
    assert result.paired_gap == pytest.approx(mean(test, matched.test) - mean(train, matched.train))
    assert result.gap == pytest.approx(mean(test) - mean(train))
    assert result.weight_norm == pytest.approx(float(module.get_submodule(layer).weight.detach().norm()))


@pytest.mark.parametrize(("kind", "layer"), LAYERS)
def test_a_contribution_is_correlation_times_deviations_plus_the_product_of_means(kind, layer):
    result = duality(network(kind), F.cross_entropy, samples(40, 0), samples(30, 1), layer)
    for n, part in enumerate(result.contribution):
        w, g = result.sigma_w[n], result.sigma_g[n]
        assert part == pytest.approx(
            result.correlation[n] * w * g + result.mean_w[n] * result.mean_g[n], rel=1e-6, abs=1e-12
        )
        assert abs(result.correlation[n]) <= 1 + 1e-9
    assert result.spread == pytest.approx(sum(w * g for w, g in zip(result.sigma_w, result.sigma_g, strict=True)))
    assert 1 <= result.participation <= len(result.contribution)


@pytest.mark.parametrize("layer", ["1", "3", "5"])
def test_a_train_sample_with_its_dual_weight_has_the_loss_of_its_twin(layer):
    module, train, test = network("mlp"), samples(40, 0), samples(30, 1)
    matched = pairs(train, test)
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
    result = duality(module, F.cross_entropy, train, samples(30, 1), "5")

    def loss(weight):
        return F.cross_entropy(functional_call(module, {"5.weight": weight}, train[0]), train[1])

    matrix = torch.func.hessian(loss)(module[5].weight.detach()).reshape(18, 18)
    expected = torch.linalg.eigvalsh(matrix).flip(0)
    torch.testing.assert_close(torch.tensor(result.eigenvalues, dtype=torch.float64), expected, rtol=1e-9, atol=1e-12)


def test_a_large_layer_has_k_directions_that_are_the_first_of_the_full_basis(monkeypatch):
    arguments = network("mlp"), F.cross_entropy, samples(60, 0), samples(30, 1), "3"
    full = duality(*arguments)
    monkeypatch.setattr(sys.modules[duality.__module__], "DENSE", 10)
    monkeypatch.setattr(sys.modules[duality.__module__], "top_eigenvalues", _accurate)
    some = duality(*arguments, k=4)
    for name in ("eigenvalues", "contribution", "sigma_w", "sigma_g", "correlation"):
        assert getattr(some, name) == pytest.approx(getattr(full, name)[:4], rel=1e-5, abs=1e-9)
    assert some.paired_gap == full.paired_gap
    assert some.remainder == pytest.approx(sum(full.contribution[4:]), rel=1e-5)


def _accurate(hessian, k, seed):
    from fedflat.flatness import top_eigenvalues

    return top_eigenvalues(hessian, k, tolerance=1e-12, seed=seed)


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
    rows = _patches(conv, train[0])
    product = rows @ conv.weight.flatten(1).T + conv.bias
    torch.testing.assert_close(product.mT.unflatten(2, image.shape[2:]), image)

    module = nn.Sequential(conv, nn.Tanh(), nn.Flatten(), nn.Linear(image[0].numel(), 3)).double()
    result = duality(module, F.cross_entropy, train, test, "0")
    assert rows.shape[1] <= rows.shape[2] and result.residual < 1e-9
    assert abs(result.remainder) < 1e-10


def test_more_positions_than_inputs_leave_a_residual():
    module = nn.Sequential(nn.Conv2d(4, 2, 1), nn.Tanh(), nn.Flatten(), nn.Linear(32, 3)).double()
    result = duality(module, F.cross_entropy, samples(20, 0), samples(10, 1), "0")
    assert 0.1 < result.residual < 1
    assert abs(result.remainder) < 1e-10


def test_batches_and_chunks_change_nothing(monkeypatch):
    arguments = network("conv"), F.cross_entropy, samples(40, 0), samples(30, 1), "2"
    whole = duality(*arguments)
    small = duality(*arguments, batch=7)
    monkeypatch.setattr(sys.modules[duality.__module__], "BUDGET", 1)
    single = duality(*arguments)
    for other in (small, single):
        assert other.contribution == pytest.approx(whole.contribution, rel=1e-6, abs=1e-12)
        assert (other.gap, other.paired_gap) == pytest.approx((whole.gap, whole.paired_gap), abs=1e-12)


def test_the_dead_and_the_unchanged_are_skipped_and_counted():
    x = torch.tensor([[-1.0], [1.0], [2.0], [9.0]], dtype=torch.float64)
    module = nn.Sequential(nn.ReLU(), nn.Linear(1, 3, bias=False)).double()
    train = x, torch.tensor([0, 1, 1, 2])
    test = torch.tensor([[-0.9], [1.0], [2.5]], dtype=torch.float64), torch.tensor([0, 1, 1])
    result = duality(module, F.cross_entropy, train, test, "1")
    assert (result.pairs, result.skipped, result.missing) == (1, 2, 1)
    assert result.correlation == [0, 0, 0]
    with pytest.raises(DataError, match="no pair has activities that differ"):
        duality(module, F.cross_entropy, train, (test[0][:2], test[1][:2]), "1")


def test_the_result_is_data_and_the_module_is_as_it_was():
    module = network("conv")
    before = {name: value.clone() for name, value in module.state_dict().items()}
    result = duality(module, F.cross_entropy, samples(40, 0), samples(30, 1), "0")
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
    return lambda: duality(
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
        (asked("head"), RecipeError, "layer 'head' cannot be analysed; these can: 1"),
        (asked("0", nn.Flatten()), RecipeError, "these can: none"),
        (asked("0", nn.Sequential(nn.Conv2d(4, 4, 3, groups=2))), RecipeError, "'0' is a grouped convolution"),
        (asked("layer", Twice().double()), RecipeError, "'layer' runs 2 times"),
        (asked("1", direction="backwards"), RecipeError, "direction = 'backwards' is unknown; known: test_to_train"),
        (asked("1", limit=0), RecipeError, "limit = 0: it must be at least 1"),
        (asked("1", k=0), RecipeError, "k = 0: it must be at least 1"),
        (asked("1", samples=0), RecipeError, "samples = 0: it must be at least 1"),
        (asked("1", batch=0), RecipeError, "batch = 0: it must be at least 1"),
        (asked("3", broken()), TrainingError, "layer '3': activities or losses are not finite"),
        (lambda: pairs(samples(4, 0), (torch.zeros(4, 64), torch.zeros(4, 3))), DataError, "test labels: .*(4, 3)"),
    ],
)
def test_a_mistake_gives_one_sentence(call, error, sentence):
    with pytest.raises(error, match=sentence):
        call()


# The authors' experiment in small


def test_the_gap_of_a_trained_network_sits_in_few_directions():
    """An MLP without bias, its second layer, the full Hessian; each test sample with its nearest train sample."""
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
    result = duality(module, F.cross_entropy, train, test, "2")
    assert result.gap > 0 and result.paired_gap > 0
    assert abs(result.remainder) < 1e-10 and result.residual < 1e-12
    assert result.participation < len(result.contribution) / 3
    assert abs(sum(result.contribution[:36])) > 0.8 * result.paired_gap
