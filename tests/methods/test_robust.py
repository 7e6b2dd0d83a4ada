"""Robust averages: dense float64 oracles, how many liars each stands, and that they reach all that is averaged."""

import itertools
import math
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from torch import nn

from fedflat import Dataset, Federation, Samples, train
from fedflat.errors import RecipeError, TrainingError
from fedflat.methods.chain import Method
from fedflat.methods.parser import parse
from fedflat.methods.part import ServerView
from fedflat.methods.parts import (
    Bucketing,
    CentredClipping,
    ConsensusAscent,
    ControlVariates,
    GeometricMedian,
    Krum,
    NormBound,
    TrimmedMean,
    robust,
)
from fedflat.methods.parts.robust import SPAN
from fedflat.methods.parts.robust import _gaps as gaps_of
from fedflat.methods.uploads import Upload, collect
from fedflat.models.vector import Network
from fedflat.randomness import Secret, generator
from fedflat.recipe import Local, Server
from fedflat.rounds.server import first_state, merge
from fedflat.rounds.setup import Problem

NUMBERS = st.floats(-1e3, 1e3)
COHORTS = st.integers(1, 9).flatmap(
    lambda size: st.lists(st.lists(NUMBERS, min_size=size, max_size=size), min_size=1, max_size=12)
)
ALL = [
    TrimmedMean(0.2), TrimmedMean(0.5), GeometricMedian(), CentredClipping(), Krum(0.2), Krum(0.2, several=True),
    NormBound(), Bucketing(GeometricMedian(), 2), Bucketing(CentredClipping(), 2),
]  # fmt: skip


def move(deltas, part, state=None, round=0, dtype=torch.float64):
    """What the server adds to its weights when the clients' Δ are these rows."""
    rows = torch.as_tensor(np.array(deltas), dtype=dtype)
    uploads = collect([Upload(i, 1 + i, 1, 0.1, 0.0, row) for i, row in enumerate(rows)], "samples")
    zeros, method = torch.zeros_like(rows[0]), Method(part)
    view = ServerView(zeros, zeros, round, len(rows), state or method.first_state(zeros))
    return method.merge(uploads.average("delta"), view, uploads)[0].numpy()


def cloud(count, size=6, seed=0, spread=1.0):
    return np.random.default_rng(seed).normal(3.0, spread, size=(count, size))


# --------------------------------------------------------------------------------------------------------------------
# What each is, by another computation
# --------------------------------------------------------------------------------------------------------------------


@given(COHORTS)
@settings(max_examples=60, deadline=None)
def test_half_trimmed_it_is_the_median_of_each_coordinate(deltas):
    np.testing.assert_allclose(move(deltas, TrimmedMean(0.5)), np.median(deltas, axis=0), rtol=1e-12, atol=1e-12)


@given(COHORTS)
@settings(max_examples=60, deadline=None)
def test_untrimmed_it_is_the_mean_in_which_every_client_counts_the_same(deltas):
    np.testing.assert_allclose(move(deltas, TrimmedMean(0.0)), np.mean(deltas, axis=0), rtol=1e-12, atol=1e-9)


@given(COHORTS, st.sampled_from([0.05, 0.1, 0.25, 0.4, 0.49]))
@settings(max_examples=60, deadline=None)
def test_in_between_it_is_the_mean_without_the_ends_whose_number_is_rounded_up(deltas, trim):
    cut = min(math.ceil(trim * len(deltas)), (len(deltas) - 1) // 2)
    kept = np.sort(deltas, axis=0)[cut : len(deltas) - cut]
    np.testing.assert_allclose(move(deltas, TrimmedMean(trim)), kept.mean(axis=0), rtol=1e-12, atol=1e-9)


def test_a_tenth_of_nine_clients_is_one_of_them():
    honest = cloud(8)
    found = move([*honest, np.full(6, 1e6)], TrimmedMean(0.1))
    assert (honest.min(axis=0) <= found).all()
    assert (found <= honest.max(axis=0)).all()


def test_a_hundred_clients_lose_exactly_their_share():
    deltas = np.arange(100.0)[:, None] ** 2
    np.testing.assert_allclose(move(deltas, TrimmedMean(0.29)), np.mean(np.arange(29.0, 71.0) ** 2), rtol=1e-12)


@pytest.mark.parametrize(("count", "size"), [(5, 2), (8, 3), (11, 20)])
def test_the_geometric_median_has_the_smallest_sum_of_distances(count, size):
    deltas = cloud(count, size, seed=count) ** 3
    expected = minimize(
        lambda v: np.linalg.norm(deltas - v, axis=1).sum(), np.median(deltas, axis=0), method="BFGS", tol=1e-12
    )
    found = move(deltas, GeometricMedian(2000))
    np.testing.assert_allclose(found, expected.x, atol=2e-4 * np.abs(deltas).max())
    assert np.linalg.norm(deltas - found, axis=1).sum() <= expected.fun * (1 + 1e-9)


def test_the_geometric_median_stops_when_it_moves_by_a_millionth_of_the_median_distance(monkeypatch):
    deltas, taken = cloud(7) - 3.0, []
    monkeypatch.setattr(robust, "_gaps", lambda *given: taken.append(1) or gaps_of(*given))
    GeometricMedian(2000).locate([*torch.as_tensor(deltas)], ServerView(torch.zeros(6), torch.zeros(6), 0, 7))
    point, steps = np.median(deltas, axis=0), 0
    while True:
        gaps, last, steps = np.linalg.norm(deltas - point, axis=1), point, steps + 1
        point = (deltas / gaps[:, None]).sum(axis=0) / (1 / gaps).sum()
        if np.linalg.norm(point - last) <= 1e-6 * np.median(gaps):
            break
    assert len(taken) == steps


def test_where_more_than_half_of_the_clients_agree_the_geometric_median_agrees_with_them():
    deltas = np.concatenate([np.tile(cloud(1), (4, 1)), cloud(3, seed=1)])
    np.testing.assert_allclose(move(deltas, GeometricMedian()), deltas[0], atol=1e-5)


def krum_by_brute_force(deltas, f, several):
    """Blanchard et al.'s definition: of every client's sums over n − f − 2 others the smallest is its score."""
    n = len(deltas)
    scores = []
    for i in range(n):
        squares = [np.sum((deltas[i] - deltas[j]) ** 2) for j in range(n) if j != i]
        scores.append(min(map(sum, itertools.combinations(squares, n - f - 2))))
    best = np.argsort(scores)[: n - f if several else 1]
    return deltas[best].mean(axis=0)


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize(("count", "liars", "f"), [(5, 0.2, 1), (9, 0.3, 3), (10, 0.2, 2), (6, 0.2, 1), (8, 0.5, 2)])
def test_krum_is_what_its_definition_says(count, liars, f, several):
    deltas = cloud(count, seed=count)
    np.testing.assert_allclose(move(deltas, Krum(liars, several)), krum_by_brute_force(deltas, f, several), rtol=1e-12)


def test_krum_does_not_depend_on_where_the_clients_are():
    deltas = cloud(30)
    np.testing.assert_allclose(move(deltas + 1e8, Krum(0.2)) - 1e8, move(deltas, Krum(0.2)), atol=1e-6)


def test_krum_tells_many_clients_apart_that_lie_far_from_the_origin():
    deltas = np.linspace(-1, 1.1, 30)[:, None] ** 3
    chosen = move(deltas + 1e8, Krum(0.0)) - 1e8  # a matrix product would have squares of distances from 1e16
    np.testing.assert_allclose(chosen, krum_by_brute_force(deltas, 0, False), atol=1e-6)


def test_krum_sees_differences_that_single_precision_does_not_and_takes_the_first_of_equals():
    deltas = np.array([[-5.0], [-3.0], [-1.0], [1.0], [3.0], [5.0]])
    assert move(deltas, Krum(0.0)) == [-1.0]
    deltas[-1] -= 1e-9  # a little nearer to the second of the two in the middle
    assert move(deltas, Krum(0.0)) == [1.0]


def test_without_a_radius_centred_clipping_takes_the_median_distance_of_every_step():
    deltas, centre = cloud(7), np.zeros(6)
    for _ in range(3):
        gaps = np.linalg.norm(deltas - centre, axis=1, keepdims=True)
        centre = centre + ((deltas - centre) * np.minimum(1, np.median(gaps) / gaps)).mean(axis=0)
    np.testing.assert_allclose(move(deltas, CentredClipping()), centre, rtol=1e-12)


def test_centred_clipping_of_other_vectors_starts_at_the_median():
    view = ServerView(torch.zeros(6), torch.zeros(6), 0, 4, {"centre": torch.full((6,), 9.0)})
    for count in (5, 6):
        found = CentredClipping(1e-9).locate([*torch.as_tensor(cloud(count))], view, "control")
        np.testing.assert_allclose(found, np.median(cloud(count), axis=0), atol=1e-7)


def test_centred_clipping_stands_clients_that_are_where_the_centre_is():
    deltas = [[0.0, 0.0], [0.0, 0.0], [0.3, 0.4]]
    np.testing.assert_allclose(move(deltas, CentredClipping(0.25, 1)), [0.05, 0.2 / 3], rtol=1e-12)


def test_centred_clipping_is_its_formula_and_remembers_the_last_move():
    deltas, centre = cloud(7), np.full(6, 2.0)
    expected = centre
    for _ in range(3):
        gaps = deltas - expected
        lengths = np.linalg.norm(gaps, axis=1, keepdims=True)
        expected = expected + (gaps * np.minimum(1, 1.5 / lengths)).mean(axis=0)
    part = CentredClipping(radius=1.5, steps=3)
    np.testing.assert_allclose(move(deltas, part, {"centre": torch.as_tensor(centre)}), expected, rtol=1e-12)
    assert torch.equal(part.after(torch.ones(2))["centre"], torch.ones(2))


def test_with_a_radius_beyond_everybody_centred_clipping_is_the_mean():
    np.testing.assert_allclose(move(cloud(7), CentredClipping(1e9, 1)), cloud(7).mean(axis=0), rtol=1e-12)


def test_the_clients_momentum_is_that_of_heavy_ball():
    deltas, kept = cloud(3), torch.zeros(6, dtype=torch.float64)
    part = CentredClipping(beta=0.9)
    for t, delta in enumerate(deltas):
        upload = Upload(0, 1, 1, 0.1, 0.0, torch.as_tensor(delta))
        sent, memory = part.report(upload, {}, {"momentum": kept}, None)
        kept = memory["momentum"]
        expected = sum(0.1 * 0.9 ** (t - s) * deltas[s] for s in range(t + 1))
        np.testing.assert_allclose(sent.delta, expected, rtol=1e-12)


@pytest.mark.parametrize("factor", [1.0, 0.4, 2.5])
def test_the_norm_bound_cuts_to_so_many_median_norms(factor):
    deltas = cloud(7) * np.arange(1, 8)[:, None]
    norms = np.linalg.norm(deltas, axis=1, keepdims=True)
    expected = (deltas * np.minimum(1, factor * np.median(norms) / norms)).mean(axis=0)
    np.testing.assert_allclose(move(deltas, NormBound(factor)), expected, rtol=1e-12)


def test_the_norm_bound_stands_clients_that_do_not_move():
    np.testing.assert_allclose(move([[0.0, 0.0], [3.0, 4.0], [6.0, 8.0]], NormBound()), [2.0, 8 / 3], rtol=1e-12)


@pytest.mark.parametrize("part", [NormBound(), GeometricMedian(), CentredClipping()], ids=repr)
def test_the_squares_of_long_vectors_do_not_overflow(part):
    """Entries of 1e25 have squares that float32 does not."""
    deltas = cloud(7)
    np.testing.assert_allclose(move(1e25 * deltas, part, dtype=torch.float32) / 1e25, move(deltas, part), rtol=1e-4)


def test_buckets_hold_every_client_once_and_change_from_round_to_round():
    deltas = cloud(8)
    plain = Bucketing(TrimmedMean(0.0), 2)  # the mean of equal buckets' means is the mean
    np.testing.assert_allclose(move(deltas, plain), deltas.mean(axis=0), rtol=1e-12)
    one, again, other = (move(deltas, Bucketing(TrimmedMean(0.5), 2), round=t) for t in (1, 1, 2))
    assert (one == again).all()
    assert (one != other).any()
    pairs = itertools.combinations(range(8), 2)
    means = np.array([deltas[list(pair)].mean(axis=0) for pair in pairs])
    alone = Bucketing(Krum(0.0), 2)
    assert np.isclose(means, move(deltas, alone)).all(axis=1).any(), "Krum chooses the mean of one bucket"


@pytest.mark.parametrize("seed", [5, Secret(2**200 + 5)], ids=["seed", "secret"])
def test_the_buckets_come_from_all_bits_of_the_seed(seed):
    rows, zeros = torch.as_tensor(cloud(6)), torch.zeros(6, dtype=torch.float64)
    order = torch.randperm(6, generator=generator(seed, "buckets", 3))
    found = Bucketing(TrimmedMean(0.5), 2).locate([*rows], ServerView(zeros, zeros, 3, 6, seed=seed))
    torch.testing.assert_close(found, rows[order].view(3, 2, 6).mean(dim=1).median(dim=0).values)


def test_vectors_longer_than_a_span_are_joined_in_order():
    deltas = np.random.default_rng(0).normal(size=(5, 2 * SPAN + 3))
    np.testing.assert_array_equal(move(deltas, TrimmedMean(0.5)), np.median(deltas, axis=0))
    np.testing.assert_allclose(move(deltas, Krum(0.2)), krum_by_brute_force(deltas, 1, False), rtol=1e-9)


@given(COHORTS, st.randoms(use_true_random=False), st.sampled_from([TrimmedMean(0.0), TrimmedMean(0.2), NormBound()]))
@settings(max_examples=40, deadline=None)
def test_who_sent_what_does_not_matter(deltas, chance, part):
    shuffled = chance.sample(deltas, len(deltas))
    np.testing.assert_allclose(move(shuffled, part), move(deltas, part), rtol=1e-9, atol=1e-9)


# --------------------------------------------------------------------------------------------------------------------
# How many liars each stands
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lie", [1e6, -1e6, 1e30])
@pytest.mark.parametrize(
    ("part", "stands"),
    [
        (TrimmedMean(0.1), 2), (TrimmedMean(0.3), 4), (TrimmedMean(0.5), 5), (GeometricMedian(), 5),
        (Krum(0.2), 3), (Krum(0.4), 4), (Krum(0.4, several=True), 4), (CentredClipping(steps=200), 5), (NormBound(), 5),
        (Bucketing(TrimmedMean(0.5), 2), 2), (Bucketing(GeometricMedian(), 2), 2),
    ],
)  # fmt: skip
def test_so_many_liars_of_eleven_move_it_no_further_than_the_honest_are_apart(part, stands, lie):
    honest = cloud(11 - stands, seed=3)
    found = move([*honest, *np.full((stands, 6), lie)], part)
    far = np.linalg.norm(honest, axis=1).max() + np.ptp(honest, axis=0).max() * 3
    assert np.linalg.norm(found) <= far
    assert np.linalg.norm(move([*honest, *np.full((stands, 6), lie)], TrimmedMean(0.0))) > 10 * far


@pytest.mark.parametrize(("part", "breaks"), [(TrimmedMean(0.1), 3), (TrimmedMean(0.5), 6), (GeometricMedian(), 6)])
def test_one_liar_more_takes_it_anywhere(part, breaks):
    assert np.linalg.norm(move([*cloud(11 - breaks), *np.full((breaks, 6), 1e6)], part)) > 1e4


@given(st.lists(NUMBERS, min_size=4, max_size=11), st.sampled_from([1e30, -1e30]), st.sampled_from([0.01, 0.34, 0.5]))
@settings(max_examples=60, deadline=None)
def test_one_liar_cannot_pull_it_out_of_the_range_of_the_others(honest, lie, trim):
    found = move([[x] for x in [*honest, lie]], TrimmedMean(trim))[0]
    slack = 1e-9 * max(map(abs, honest))
    assert min(honest) - slack <= found <= max(honest) + slack


def test_a_round_by_median_is_not_moved_by_a_client_that_sends_1e30(digits):
    inputs = digits.dataset.train.inputs / 255
    inputs[digits.shards[3]] *= 1e30
    samples = Samples(inputs, digits.dataset.train.labels)
    federation = Federation(Dataset("one too loud", samples, samples, 10, (), ()), digits.shards)
    settings = dict(model="mlp", model_hidden=[], rounds=1, cohort=8, steps=1, batch=0, engine="inline")
    largest = {}
    for method in ("fedavg", "median"):
        result = train(federation, method=method, max_norm=math.inf, outlier=0.0, **settings)
        assert 3 in result.history[0]["cohort"], "admission lets it pass"
        largest[method] = max(float(p.detach().abs().max()) for p in result.model.parameters())
    assert largest["fedavg"] > 1e25
    assert largest["median"] < 1


# --------------------------------------------------------------------------------------------------------------------
# All that is averaged
# --------------------------------------------------------------------------------------------------------------------


def after(method, loud, name, count=9):
    """The server's state after a round in which one of nine clients sends a `name` that is too loud."""
    torch.manual_seed(0)
    samples = Samples(torch.randn(count, 4), torch.arange(count) % 2)
    federation = Federation(Dataset("few", samples, samples, 2, (), ()), torch.arange(count).split(1))
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    problem = Problem.of(federation, Network(module), parse(method), Local())
    chance, uploads = torch.Generator().manual_seed(1), []
    for client in range(count):
        sent = {key: torch.randn(size, generator=chance) for key, size in problem.uploads.items()}
        if client == 4:
            sent[name] = torch.full_like(sent[name], loud)
        uploads.append(Upload(client, 1, 5, 0.1, 0.5, sent.pop("delta"), sent))
    state = first_state(problem)
    return merge(problem, Server(), state, collect(uploads, "uniform"), state.weights)


CARRIED = [
    ("fedavg", "delta"), ("fedavg", "buffers"), ("scaffold", "control_change"), ("fedcm", "delta"), ("feddyn", "delta"),
    ("feddyn(dual='active')", "drift"), ("fedsmoo", "dual"), ("fedsmoo_slides", "wish"), ("fedgloss", "delta"),
    ("feddc", "control_change"), ("fedgmt", "delta"),
]  # fmt: skip


@pytest.mark.parametrize("rule", ["trimmed_mean(0.1)", "median", "geometric_median", "krum", "multi_krum", "norm_bound",
                                  "centred_clipping", "bucketing('median')"])  # fmt: skip
@pytest.mark.parametrize(("method", "name"), CARRIED)
def test_one_loud_client_moves_nothing_of_the_state_beside_a_robust_average(method, name, rule):
    state = after(f"{method} + {rule}", 1e5, name)
    loudest = max(float(v.abs().max()) for v in [state.weights, state.buffers, *state.vectors.values()])
    assert loudest < 500, "honest entries are normal; Δ/(K η) and sums over nine clients are larger"


@pytest.mark.parametrize(("method", "name"), CARRIED)
def test_without_one_the_same_client_moves_it(method, name):
    quiet, loud = after(method, 0.0, name), after(method, 1e5, name)
    pairs = zip([quiet.weights, quiet.buffers, *quiet.vectors.values()],
                [loud.weights, loud.buffers, *loud.vectors.values()], strict=True)  # fmt: skip
    assert any(not torch.allclose(one, other, atol=1e-3) for one, other in pairs)


@pytest.mark.parametrize("rule", ["median", "geometric_median", "krum"])
def test_who_looks_at_single_uploads_is_refused_beside_it_by_both_names(rule):
    with pytest.raises(RecipeError, match=r"InterpolatedAscent looks at single uploads, which .* does not protect"):
        parse(f"fedgf + {rule}")


def test_it_is_an_average_and_there_can_be_only_one():
    assert parse("median").parts == (TrimmedMean(0.5),)
    assert parse("feddyn + trimmed_mean(0.2)").parts[0] == TrimmedMean(0.2), "before what goes on from the average"
    assert parse("scaffold + krum").parts == (Krum(0.2), ControlVariates())
    assert isinstance(parse("fedsmoo + bucketing").parts[0].part, GeometricMedian)
    assert isinstance(parse("fedsmoo + bucketing").parts[-1], ConsensusAscent)
    for other in ("fednova", "central_dp", "krum", "bucketing"):
        with pytest.raises(RecipeError, match="both replace the average"):
            parse(f"median + {other}")
    with pytest.raises(RecipeError, match=r"TrimmedMean.trim = 0.6: must be a number from 0 to 0.5"):
        TrimmedMean(0.6)
    with pytest.raises(RecipeError, match="bucketing: there is no robust average 'kram'; did you mean krum"):
        parse("bucketing('kram')")


@pytest.mark.parametrize(("method", "quorum"), [("median", 3), ("krum", 5), ("bucketing('median')", 5), ("fedavg", 1)])
def test_a_cohort_in_which_nobody_can_be_outvoted_is_skipped(digits, method, quorum):
    assert parse(method).quorum == quorum
    settings = dict(model_hidden=[4], rounds=1, batch=0, engine="inline", measures=[])
    for cohort in {max(quorum - 1, 1), quorum}:
        too_small = pytest.raises(TrainingError, match=f"robust average needs {quorum}")
        with too_small if cohort < quorum else nullcontext():
            assert "skipped" not in train(digits, "mlp", method, cohort=cohort, **settings).history[0]


@pytest.mark.parametrize("part", ALL)
def test_on_clients_that_agree_it_is_what_they_say(part):
    deltas = np.tile(cloud(1), (9, 1))
    part = CentredClipping(1e9, 1) if isinstance(part, CentredClipping) else part
    part = Bucketing(TrimmedMean(0.5)) if isinstance(getattr(part, "part", None), CentredClipping) else part
    np.testing.assert_allclose(move(deltas, part), deltas[0], rtol=1e-9)
