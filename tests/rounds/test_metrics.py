"""How far the clients are from one another, against the formulas."""

from itertools import combinations

import pytest
import torch

from fedflat import train
from fedflat.methods.uploads import Upload
from fedflat.rounds.metrics import MEASURES


def test_consistency_divergence_and_discord_are_their_formulas():
    sent, *local = (torch.randn(7, generator=torch.Generator().manual_seed(i), dtype=torch.float64) for i in range(5))
    new = sent + 0.3
    uploads = [Upload(i, 1, 1, 0.1, 0.0, w - sent) for i, w in enumerate(local)]
    found = {name: measure(uploads, new - sent) for name, measure in MEASURES.items()}
    assert found["consistency"] == pytest.approx(sum(float((w - new).square().sum()) for w in local) / 4)
    assert found["divergence"] == pytest.approx(sum(float((w - sent).norm()) for w in local) / 4)
    assert found["discord"] == pytest.approx(sum(float((a - b).norm()) for a, b in combinations(local, 2)) / 6)
    assert MEASURES["discord"](uploads[:1], new - sent) == 0


def test_a_recipe_switches_them_on_and_off(digits):
    measured = train(digits, rounds=1, cohort=3, engine="inline", measures=["divergence", "discord"]).history[0]
    assert "consistency" not in measured
    assert measured["divergence"] > 0 and measured["discord"] > 0
    assert not set(MEASURES) & set(train(digits, rounds=1, cohort=3, engine="inline", measures=[]).history[0])


def test_measures_are_the_same_in_the_pool(digits):
    settings = dict(rounds=2, cohort=4, measures=list(MEASURES))
    one, two = (train(digits, engine=engine, workers=2, **settings).history for engine in ("inline", "pool"))
    assert all(a[name] == b[name] for a, b in zip(one, two, strict=True) for name in MEASURES)
