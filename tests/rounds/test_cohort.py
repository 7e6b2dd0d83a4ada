"""Who takes part: the authors' participants to the index, and the seeds that they depend on."""

from pathlib import Path

import numpy as np
import pytest

from fedflat.errors import RecipeError
from fedflat.recipe import Server, load
from fedflat.rounds.cohort import cohort_seed, cohort_size, draw_cohort

RECORDED = Path(__file__).parents[1] / "federation" / "recorded"


def slow_bernoulli(clients, ratio, first):
    """Seeds `first`, `first + 1`, … of the global generator until somebody takes part."""
    retry = 0
    while True:
        np.random.seed(first + retry)
        active = np.sort(np.where(np.random.uniform(size=clients) <= ratio)[0])
        retry += 1
        if len(active):
            return active.tolist()


def test_fedsols_cohorts_are_those_of_its_own_code_whatever_the_seed():
    recorded = np.sort(np.load(RECORDED / "fedsol-cohorts.npz")["cohorts"], axis=1).tolist()
    server = Server(cohort=0.1, draws="fedsol")
    for seed in 0, 7:
        assert [draw_cohort(server, 100, seed, t) for t in range(300)] == recorded


@pytest.mark.parametrize(("clients", "ratio"), [(100, 0.29), (200, 0.05), (7, 0.1), (10, 1.0)])
def test_fedsol_takes_the_floor_of_the_floating_point_product(clients, ratio):
    server = Server(cohort=ratio, draws="fedsol")
    assert cohort_size(server, clients) == max(int(clients * ratio), 1)
    for t in range(20):
        np.random.seed(t)
        expected = np.random.choice(clients, max(int(clients * ratio), 1), replace=False)
        assert draw_cohort(server, clients, 0, t) == sorted(expected.tolist())
    assert cohort_size(Server(cohort=0.29), 100) == 29


@pytest.mark.parametrize(("clients", "ratio"), [(100, 0.1), (200, 0.05), (5, 0.1), (10, 1.0)])
def test_bernoulli_participants_are_the_authors(clients, ratio):
    for t in range(60):
        for seed in 20, 0, 3:
            server = Server(cohort=ratio, sampling="bernoulli", draws="fl-simulator")
            assert draw_cohort(server, clients, seed, t) == slow_bernoulli(clients, ratio, t + seed)
            server = Server(cohort=ratio, sampling="bernoulli", draws="fedman")
            assert draw_cohort(server, clients, seed, t) == slow_bernoulli(clients, ratio, t)


def test_fl_simulator_has_one_seed_for_partition_and_participants():
    assert cohort_seed(load("smoo", ["seed=5"])) == 20
    assert cohort_seed(load("smoo", ["seed=5", "split.seed=6"])) == 6
    assert cohort_seed(load("default", ["seed=5", "split.seed=6"])) == 5


def test_our_own_draws_depend_on_the_seed_and_the_round():
    server = Server(cohort=0.1)
    drawn = {tuple(draw_cohort(server, 100, seed, t)) for seed in range(3) for t in range(3)}
    assert len(drawn) == 9


@pytest.mark.parametrize(("preset", "sampling"), [("sol", "bernoulli"), ("smoo", "uniform"), ("man", "uniform")])
def test_a_sampling_that_the_authors_do_not_have_is_refused(preset, sampling):
    with pytest.raises(RecipeError, match=r"server\.draws = .* those authors have server\.sampling = "):
        load(preset, [f"server.sampling={sampling}"])
    assert load(preset, [f"server.sampling={sampling}", "server.draws=fedflat"]).server.sampling == sampling
