"""Twins: the nearest sample of the same class in the other part of the data."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedflat.errors import DataError, RecipeError
from fedflat.flatness import DIRECTIONS, pairs


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
        (train, test, found.train, found.test)
        if direction == "train_to_test"
        else (test, train, found.test, found.train)
    )
    assert here.tolist() == [i for i, label in enumerate(mine[1].tolist()) if label in shared]
    for i, j in zip(here.tolist(), there.tolist(), strict=True):
        distance = (theirs[0].double() - mine[0][i]).flatten(1).norm(dim=1)
        distance[theirs[1] != mine[1][i]] = torch.inf
        assert j == int(distance.argmin())
    assert found.missing == len(set(train[1].tolist()) | set(test[1].tolist())) - len(shared)


def test_values_of_a_regression_have_no_pairs():
    """Floating 0 and 1 are classes; among values that differ in every sample there are no pairs, and it says why."""
    inputs = torch.zeros(2, 2)
    assert pairs((inputs, torch.tensor([0.0, 1.0])), (inputs, torch.tensor([1.0, 0.0]))).test.tolist() == [1, 0]
    with pytest.raises(DataError, match="their labels are values, and pairs need classes"):
        pairs((inputs, torch.tensor([0.1, 1.2])), (inputs, torch.tensor([1.1, 0.3])))


def samples(count, seed):
    chance = torch.Generator().manual_seed(seed)
    return torch.randn(count, 5, generator=chance), torch.randint(0, 3, (count,), generator=chance)


def test_the_default_is_the_papers_pairing_of_all_train_samples():
    train, test = samples(50, 0), samples(40, 1)
    found, named = pairs(train, test), pairs(train, test, "train_to_test", limit=50)
    assert found.train.equal(torch.arange(50)) and found.train.equal(named.train) and found.test.equal(named.test)
    assert pairs(train, test, "test_to_train").test.equal(torch.arange(40))


def test_a_limit_draws_by_the_seed():
    train, test = samples(50, 0), samples(40, 1)
    some, again, other = (pairs(train, test, limit=10, seed=seed) for seed in (3, 3, 4))
    assert len(some.train) == len(set(some.train.tolist())) == 10
    assert some.test.equal(again.test) and some.train.equal(again.train) and not some.train.equal(other.train)
    assert pairs(train, test).test[some.train].equal(some.test)


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"direction": "backwards"}, RecipeError, "direction = 'backwards' is unknown; known: test_to_train"),
        ({"limit": -1}, RecipeError, "limit = -1: it must be at least 1, or 0 for all"),
        ({"test": (torch.zeros(4, 5), torch.zeros(4, 3))}, DataError, r"^test labels: .*\(4, 3\)$"),
    ],
)
def test_a_mistake_gives_one_sentence(options, error, sentence):
    with pytest.raises(error, match=sentence):
        pairs(**{"train": samples(9, 0), "test": samples(9, 1), **options})


def test_classes_may_be_small_integers_and_samples_more_than_those_can_count():
    labels = torch.zeros(300, dtype=torch.uint8)
    inputs = torch.arange(300.0)[:, None]
    found = pairs((inputs, labels), (inputs.flip(0), labels))
    assert found.test.tolist() == list(range(299, -1, -1))


def test_labels_of_every_token_are_refused_with_the_way_out():
    text = torch.zeros(3, 4, dtype=torch.int64), torch.ones(3, 4, dtype=torch.int64)
    with pytest.raises(DataError, match=r'^train labels: .*, not the shape \(3, 4\); .*: data\.predict = "next"$'):
        pairs(text, text)
