"""Median and trimmed mean: what numpy says, and what one liar can do to them."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import trim_mean

from fedflat import Dataset, Federation, Samples, train
from fedflat.errors import RecipeError
from fedflat.method import Method
from fedflat.methods import parse
from fedflat.parts import ServerView, TrimmedMean, Upload, collect
from fedflat.parts.robust import SPAN

NUMBERS = st.floats(-1e3, 1e3)
COHORTS = st.integers(1, 9).flatmap(
    lambda size: st.lists(st.lists(NUMBERS, min_size=size, max_size=size), min_size=1, max_size=12)
)


def move(deltas, trim):
    """What the server adds to its weights when the clients' Δ are these rows."""
    rows = torch.as_tensor(np.array(deltas), dtype=torch.float64)
    uploads = collect([Upload(i, 1 + i, 1, 0.1, 0.0, row) for i, row in enumerate(rows)], "samples")
    zeros = torch.zeros_like(rows[0])
    view = ServerView(zeros, zeros, 0, len(rows))
    return Method(TrimmedMean(trim)).merge(uploads.average("delta"), view, uploads)[0].numpy()


@given(COHORTS)
@settings(max_examples=60, deadline=None)
def test_half_trimmed_it_is_the_median_of_each_coordinate(deltas):
    np.testing.assert_allclose(move(deltas, 0.5), np.median(deltas, axis=0), rtol=1e-12, atol=1e-12)


@given(COHORTS)
@settings(max_examples=60, deadline=None)
def test_untrimmed_it_is_the_mean_in_which_every_client_counts_the_same(deltas):
    np.testing.assert_allclose(move(deltas, 0.0), np.mean(deltas, axis=0), rtol=1e-12, atol=1e-9)


@given(COHORTS, st.sampled_from([0.05, 0.1, 0.25, 0.4, 0.49]))
@settings(max_examples=60, deadline=None)
def test_in_between_it_is_the_mean_without_the_ends(deltas, trim):
    np.testing.assert_allclose(move(deltas, trim), trim_mean(deltas, trim, axis=0), rtol=1e-12, atol=1e-9)


@given(COHORTS, st.randoms(use_true_random=False), st.sampled_from([0.0, 0.2, 0.5]))
@settings(max_examples=40, deadline=None)
def test_who_sent_what_does_not_matter(deltas, chance, trim):
    shuffled = chance.sample(deltas, len(deltas))
    np.testing.assert_array_equal(move(shuffled, trim), move(deltas, trim))


@given(st.lists(NUMBERS, min_size=4, max_size=11), st.sampled_from([1e30, -1e30]), st.sampled_from([0.2, 0.34, 0.5]))
@settings(max_examples=60, deadline=None)
def test_one_liar_cannot_pull_it_out_of_the_range_of_the_others(honest, lie, trim):
    found = move([[x] for x in [*honest, lie]], trim)[0]
    slack = 1e-9 * max(map(abs, honest))
    assert min(honest) - slack <= found <= max(honest) + slack


def test_a_hundred_clients_lose_exactly_their_share():
    deltas = np.arange(100.0)[:, None] ** 2
    np.testing.assert_allclose(move(deltas, 0.29), np.mean(np.arange(29.0, 71.0) ** 2), rtol=1e-12)


def test_vectors_longer_than_a_span_are_joined_in_order():
    deltas = np.random.default_rng(0).normal(size=(5, 2 * SPAN + 3))
    np.testing.assert_array_equal(move(deltas, 0.5), np.median(deltas, axis=0))


def test_a_round_by_median_is_not_moved_by_a_client_that_sends_1e30(digits):
    inputs = digits.dataset.train.inputs / 255
    inputs[digits.shards[3]] *= 1e30
    samples = Samples(inputs, digits.dataset.train.labels)
    federation = Federation(Dataset("one too loud", samples, samples, 10, (), ()), digits.shards)
    settings = dict(model="mlp", model_hidden=[], rounds=1, cohort=8, steps=1, batch=0, engine="inline")
    largest = {}
    for method in ("fedavg", "median"):
        result = train(federation, method=method, max_norm=math.inf, **settings)
        assert 3 in result.history[0]["cohort"], "admission lets it pass"
        largest[method] = max(float(p.detach().abs().max()) for p in result.model.parameters())
    assert largest["fedavg"] > 1e25
    assert largest["median"] < 1


def test_it_is_an_average_and_there_can_be_only_one():
    assert parse("median").parts == (TrimmedMean(0.5),)
    assert parse("feddyn + trimmed_mean(0.2)").parts[0] == TrimmedMean(0.2), "before what goes on from the average"
    with pytest.raises(RecipeError, match="both replace the average"):
        parse("median + fednova")
    with pytest.raises(RecipeError, match=r"TrimmedMean.trim = 0.6: must be a number from 0 to 0.5"):
        TrimmedMean(0.6)
