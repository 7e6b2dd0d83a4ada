"""The functions for a notebook: they give the numbers of the functions behind them, with every option in its place."""

from dataclasses import asdict

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedflat.errors import RecipeError
from fedflat.flatness import Objective, compare, decompose, duality, look, sharpness
from fedflat.flatness.sharpness import adaptive_sharpness, ascent_sharpness, average_sharpness
from fedflat.models import build

chance = torch.Generator().manual_seed(0)
X = torch.randn(1100, 2, generator=chance, dtype=torch.float64)
Y = torch.randint(0, 3, (1100,), generator=chance)
QUICK = {"k": 2, "products": 6}


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def test_the_three_kinds_of_sharpness_in_one_record():
    f = Objective(network(), F.cross_entropy, [(X[:40], Y[:40])])
    found = sharpness(f, rho=0.3, adaptive_rho=0.7, directions=10, seed=4)
    average = average_sharpness(f, 0.3, 10, 4)
    ascent, adaptive = ascent_sharpness(f, 0.3), adaptive_sharpness(f, 0.7)
    interval = [average.mean, average.error, average.low, average.high]
    assert [*asdict(found).values()] == [40, f.value(), 0.3, 0.7, ascent, *interval, adaptive]
    assert [[*row.values()] for row in found.rows()] == [
        ["one ascent, ρ = 0.3", ascent, None, None, None],
        ["average, ρ = 0.3", *interval],
        ["adaptive (scale-invariant), ρ = 0.7", adaptive, None, None, None],
    ]


@pytest.mark.parametrize("layer", [None, "0"])
def test_duality_decomposes_the_gap_of_all_samples_in_the_last_layer_or_the_given_one(layer):
    model, (train, test) = network(), ((X[:1050], Y[:1050]), (X[40:] + 0.3, Y[40:]))
    found = duality(model, train, test, layer=layer, limit=30, seed=5)
    expected = decompose(model, F.cross_entropy, train, test, layer or "4", limit=30, samples=0, seed=5)
    assert (found.layer, found.train_samples, found.test_samples) == (layer or "4", 1050, 1060)
    assert found.eigenvalues == pytest.approx(expected.eigenvalues, rel=1e-9, abs=1e-12)
    assert (found.train_loss, found.test_loss) == pytest.approx((expected.train_loss, expected.test_loss), rel=1e-12)
    for name, pairing in found.pairings.items():
        assert pairing.pairs == 30 and pairing.paired_gap == pytest.approx(expected.pairings[name].paired_gap)


def test_duality_takes_texts_in_batches_that_are_cut_at_different_lengths():
    model = build("gpt", (6,), 2, vocabulary=5, width=4, heads=2, layers=1)
    batches = [(torch.randint(0, 5, (8, width)), torch.arange(8) % 2) for width in (3, 6, 4, 5)]
    found = duality(model, batches[:3], batches[3:], layer="head")
    assert (found.train_samples, found.test_samples, found.missing) == (24, 8, 0)


def test_a_model_without_layers_for_duality_is_one_sentence():
    model = nn.Sequential(nn.Unflatten(1, (1, 2)), nn.Conv1d(1, 3, 2), nn.Flatten()).double()
    data = X[:9], Y[:9]
    with pytest.raises(RecipeError, match="duality: the model has no linear or convolutional layer"):
        duality(model, data, data)
    with pytest.raises(RecipeError, match="layer '1' cannot be analysed; choose one of: none"):
        duality(model, data, data, layer="1")


def test_models_are_compared_on_all_samples_with_the_options_of_look():
    models = [nn.Linear(2, 3).double() for _ in range(2)]
    found = compare(models, (X, Y), samples=0, batch=1100, seed=3, **QUICK)
    assert list(found.found) == ["model 1", "model 2"]
    for model, (each,) in zip(models, found.found.values(), strict=True):
        alone = look(model, (X, Y), samples=0, batch=1100, seed=3, **QUICK)
        assert each.numbers == alone.numbers and each.samples == 1100 and len(each.spectrum.eigenvalues) == 2
        assert each.average_sharpness != look(model, (X, Y), samples=0, batch=1100, **QUICK).average_sharpness
    assert found.caption() == "Flatness of 2 models, over 1,100 samples"


def test_what_was_measured_before_needs_no_data():
    seen = [look(nn.Linear(2, 3).double(), (X[:20], Y[:20]), **QUICK) for _ in range(4)]
    found = compare({"a": seen[:2], 7: seen[2:]})
    assert found.found == {"a": seen[:2], "7": seen[2:]}
    assert found.caption().endswith("over 20 samples; means over 2 seeds, paired differences with 95 % intervals")
    (alone,) = compare([seen[0]]).found.values()
    assert alone == [seen[0]] and compare([seen[0]]).differences == []
    with pytest.raises(RecipeError, match="compare: there is one model; give a list"):
        compare(seen[0])


@pytest.mark.parametrize("models", [{}, [], {"a": []}, {"a": [], "b": [nn.Linear(2, 3).double()]}])
def test_nothing_to_compare_is_one_sentence(models):
    with pytest.raises(RecipeError, match="compare: there is no model to look at"):
        compare(models, (X[:20], Y[:20]))
