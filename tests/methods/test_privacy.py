"""Clipping, noise and ε: closed forms for the mechanism, independent computations for what it is said to be worth."""

import math
import sys
from contextlib import closing

import numpy as np
import pytest
import torch
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import compute_epsilon
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.optimize import brentq
from scipy.stats import kstest, norm

from fedflat import Part, train
from fedflat.engine.inline import Inline
from fedflat.errors import RecipeError
from fedflat.methods.chain import Method
from fedflat.methods.parser import parse
from fedflat.methods.part import ServerView
from fedflat.methods.parts import CentralPrivacy, LocalPrivacy
from fedflat.methods.uploads import Upload, collect
from fedflat.models import build
from fedflat.models.vector import Network
from fedflat.randomness import Secret, generator
from fedflat.recipe import Local, Server, validated
from fedflat.rounds.accountant import ORDERS, ledger, pld_epsilon
from fedflat.rounds.client import Worker
from fedflat.rounds.cohort import draw_cohort
from fedflat.rounds.server import conduct, first_state
from fedflat.rounds.setup import Broadcast, Problem

NUMBERS = st.floats(-1e3, 1e3)
COHORTS = st.integers(1, 6).flatmap(
    lambda size: st.lists(st.lists(NUMBERS, min_size=size, max_size=size), min_size=1, max_size=8)
)
LINEAR = dict(model="mlp", model_hidden=[], cohort=4, steps=3, lr=0.05)
POISSON = dict(sampling="bernoulli")
LONG = 200_000  # a sample's standard deviation is then within 1 % of the true one, by six of its own


def state(size, cohort=1.0, seed=0, round=0):
    zeros = torch.zeros(size, dtype=torch.float64)
    return ServerView(zeros, zeros, round, 10, seed=seed, cohort=cohort)


def uploads(deltas):
    rows = torch.as_tensor(np.array(deltas), dtype=torch.float64)
    return collect([Upload(i, 1 + 7 * i, 1, 0.1, 0.0, row) for i, row in enumerate(rows)], "samples")


def central(deltas, part, cohort):
    sent = uploads(deltas)
    return Method(part).merge(sent.average("delta"), state(len(deltas[0]), cohort), sent)[0].numpy()


def problem_of(digits, method, model="mlp", **options):
    network = Network(build(model, digits.dataset.shape, 10, **options))
    return Problem.of(digits, network, parse(method), Local(steps=3, lr=0.05), seed=5)


def weights(result):
    return torch.cat([p.detach().flatten() for p in result.model.parameters()])


# The mechanism


@given(COHORTS, st.floats(1e-3, 1e3), st.floats(0.5, 20))
@settings(max_examples=80, deadline=None)
def test_without_noise_the_server_moves_by_the_sum_of_clipped_updates_over_the_expected_cohort(deltas, clip, cohort):
    rows = np.array(deltas)
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    expected = (rows * np.minimum(1, clip / np.maximum(norms, 1e-300))).sum(axis=0) / cohort
    found = central(deltas, CentralPrivacy(clip, 0.0), cohort)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12 * clip)


@given(COHORTS, st.lists(NUMBERS, min_size=6, max_size=6), st.floats(1e-3, 1e3))
@settings(max_examples=60, deadline=None)
def test_one_client_more_changes_the_servers_sum_by_at_most_the_clip(deltas, other, clip):
    part, other = CentralPrivacy(clip, 1.0), other[: len(deltas[0])]
    change = central([*deltas, other], part, 1.0) - central(deltas, part, 1.0)
    assert np.linalg.norm(change) <= clip * (1 + 1e-9) + 1e-9


def test_zero_and_infinitely_long_updates_stay_within_the_clip():
    part = LocalPrivacy(clip=2.0)
    assert not part.clipped(torch.zeros(3)).any()
    assert part.clipped(torch.full((3,), 3e38)).norm() <= 2.0


@pytest.mark.parametrize("entropy", ["recipe", "system"])
def test_the_noise_is_normal_with_the_stated_deviation(entropy):
    moved = central([[0.0] * LONG] * 3, CentralPrivacy(2.0, 1.5, entropy=entropy), cohort=5.0)
    assert abs(moved.mean()) < 6 * 0.6 / math.sqrt(LONG)
    assert moved.std() == pytest.approx(1.5 * 2.0 / 5.0, rel=0.01)
    assert kstest(moved / 0.6, "norm").statistic < 2.5 / math.sqrt(LONG)


def test_rounds_clients_and_seeds_have_noise_of_their_own():
    part = LocalPrivacy(1.0, 1.0)
    draws = [part.drawn(torch.zeros(LONG), *who) for who in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]]
    correlation = torch.corrcoef(torch.stack(draws)) - torch.eye(4)
    assert correlation.abs().max() < 6 / math.sqrt(LONG)
    assert torch.equal(draws[0], part.drawn(torch.zeros(LONG), 0, 0, 0))


@pytest.mark.parametrize("seed", [5, Secret(2**200 + 5)], ids=["seed", "secret"])
def test_the_noise_comes_from_all_bits_of_the_seed(seed):
    expected = 0.5 * 2.0 * torch.randn(9, generator=generator(seed, "privacy", 3, 2), dtype=torch.float64)
    assert torch.equal(LocalPrivacy(2.0, 0.5).drawn(torch.zeros(9, dtype=torch.float64), seed, 3, 2), expected)


def test_a_client_uploads_its_clipped_update_with_noise_and_nothing_of_the_true_one(digits):
    part, task = LocalPrivacy(0.1, 0.5), problem_of(digits, "feddyn")
    broadcast = Broadcast(3, 0.05, {"weights": task.network.weights.clone()})
    true, _ = Worker(task).local_round(broadcast, 2, None)
    guarded = Worker(problem_of(digits, "feddyn + local_dp(0.1, 0.5)"))
    private, kept = guarded.local_round(broadcast, 2, None)
    assert true.norm > 0.1
    assert torch.equal(private.delta, part.clipped(true.delta) + part.drawn(true.delta, 5, 3, 2))
    assert not private.vectors
    assert torch.equal(kept["drift"], true.delta), "what stays with the client is its own"


def test_a_round_without_clients_still_moves_by_the_noise(digits):
    task, server = problem_of(digits, "central_dp(1.0, 0.5)"), Server(cohort=0.25, sampling="bernoulli")
    with closing(Inline(task)) as engine:
        before = first_state(task)
        after, report = conduct(task, before, engine, [], server)
    assert (after.weights - before.weights).std() == pytest.approx(0.5 / (0.25 * 8), rel=0.02)
    assert not report.skipped and math.isnan(report.local_loss)


def test_private_cohorts_are_drawn_independently_and_may_be_empty(digits):
    server = Server(cohort=0.1, sampling="bernoulli")
    empty = sum(not draw_cohort(server, 10, 0, t, empty=True) for t in range(2000)) / 2000
    assert empty == pytest.approx(0.9**10, abs=0.05)
    result = train(digits, method="central_dp(0.1, 0.01)", **LINEAR | {"cohort": 0.05}, sampling="bernoulli", rounds=9)
    assert [] in [record["cohort"] for record in result.history]
    assert not any("skipped" in record for record in result.history)


# Runs


@pytest.mark.parametrize("method", ["fedsam + central_dp(0.5, 0.1)", "feddyn + local_dp(0.5, 0.1)"])
def test_workers_do_not_change_a_bit_of_the_noise(digits, method):
    runs = [dict(engine="inline"), dict(engine="pool", workers=1), dict(engine="pool", workers=2)]
    first, *others = [weights(train(digits, method=method, rounds=3, **LINEAR, **run)) for run in runs]
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("method", ["central_dp(0.5, 0.1)", "local_dp(0.5, 0.1)"])
def test_a_resumed_run_has_the_same_noise_and_the_same_epsilon(digits, method, tmp_path):
    options = dict(method=method, engine="inline", **LINEAR)
    whole = train(digits, rounds=4, **options)
    train(digits, rounds=2, out=tmp_path / "run", **options)
    resumed = train(digits, rounds=4, out=tmp_path / "run", resume=True, **options)
    assert torch.equal(weights(resumed), weights(whole))
    assert resumed.curve("epsilon") == whole.curve("epsilon")
    assert len(whole.curve("epsilon")) == 4


def test_noise_from_the_system_is_another_in_every_run(digits):
    options = dict(method="local_dp(0.5, 0.1, entropy='system')", rounds=1, engine="inline", **LINEAR)
    assert not torch.equal(weights(train(digits, **options)), weights(train(digits, **options)))


def test_epsilon_grows_from_round_to_round_and_is_null_without_noise_and_absent_without_privacy(digits):
    options = dict(rounds=3, engine="inline", **LINEAR)
    private = train(digits, method="central_dp(0.5, 2.0)", **options)
    spent = [value for _, value in private.curve("epsilon")]
    assert 0 < spent[0] < spent[1] < spent[2] == private.summary["epsilon"]
    assert train(digits, method="central_dp(0.5, 0.0)", **options).history[0]["epsilon"] is None
    assert "epsilon" not in train(digits, method="fedavg", **options).history[0]


# What it is worth


def epsilon(method, rounds=1, clients=100, **server):
    return ledger(parse(method), validated({"server": server}), clients).epsilon(rounds)


def gaussian_epsilon(distance, delta=1e-5):
    """ε of two normal laws that far apart in standard deviations, from their exact δ(ε) (Balle and Wang 2018)."""

    def excess(eps):
        upper = norm.logcdf(distance / 2 - eps / distance)
        lower = eps + norm.logcdf(-distance / 2 - eps / distance)
        return math.exp(upper) - math.exp(lower) - delta

    return brentq(excess, 0, distance**2 / 2 + 10 * distance) if excess(0) > 0 else 0.0


@given(st.floats(0.5, 20), st.integers(1, 50))
@settings(max_examples=40, deadline=None)
def test_unsampled_it_is_the_epsilon_of_a_gaussian_mechanism_over_all_rounds(noise, rounds):
    apart = math.sqrt(rounds) / noise
    added = epsilon(f"central_dp(noise={noise})", rounds, sampling="bernoulli", cohort=1.0)
    replaced = epsilon(f"central_dp(noise={noise})", rounds, cohort=1.0)
    local = epsilon(f"local_dp(noise={noise})", rounds, cohort=0.1)
    assert added == pytest.approx(gaussian_epsilon(apart), rel=1e-3, abs=1e-6), "one client more or less: C"
    assert replaced == pytest.approx(gaussian_epsilon(2 * apart), rel=1e-3, abs=1e-6), "one for another: 2 C"
    assert local == replaced, "whoever sees the uploads knows the cohort"


SETTINGS = [(1.0, 0.1, 30), (2.0, 0.5, 30), (4.0, 0.05, 100), (1.0, 0.01, 1000), (0.8, 0.001, 1), (20.0, 0.3, 10)]


def rdp_epsilon(noise, odds, rounds):
    book = ledger(parse(f"central_dp(noise={noise})"), validated({"server": POISSON | {"cohort": odds}}), 1000)
    return compute_epsilon(ORDERS, rounds * book.sampled, 1e-5)[0]


@pytest.mark.parametrize(("noise", "odds", "rounds"), SETTINGS)
def test_independent_draws_cost_what_the_tightest_accountant_says_and_never_more_than_renyi_divergences(
    noise, odds, rounds
):
    tight = PLDAccountant(value_discretization_interval=2e-4)
    tight.compose(PoissonSampledDpEvent(odds, GaussianDpEvent(noise)), rounds)
    found = epsilon(f"central_dp(noise={noise})", rounds, clients=1000, cohort=odds, **POISSON)
    assert found == pytest.approx(tight.get_epsilon(1e-5), rel=0.01)
    assert found <= rdp_epsilon(noise, odds, rounds)


@pytest.mark.parametrize("noise", [0.5, 1.0, 3.0, 10.0])
def test_the_loss_distribution_of_one_round_without_sampling_has_the_exact_epsilon(noise):
    exact = gaussian_epsilon(1 / noise)
    assert pld_epsilon(noise, 1.0, 1, 1e-5, exact) == pytest.approx(exact, abs=1e-3)


@pytest.mark.parametrize("noise", [1e-4, 1e-2, 0.1, 1e3])
def test_an_epsilon_of_any_size_takes_little_memory_and_grows_with_the_rounds(noise):
    found = [epsilon(f"central_dp(noise={noise})", rounds, cohort=0.5, **POISSON) for rounds in (1, 10, 10_000)]
    assert found == sorted(found)
    assert all(map(math.isfinite, found))


@pytest.mark.parametrize(("noise", "cohort"), [(1.0, 10), (2.0, 30), (4.0, 50), (8.0, 5)])
def test_cohorts_of_fixed_size_cost_no_less_than_two_opposite_clients_show(noise, cohort):
    """All others send 0, and one sends +C or −C: the server shows a mixture, and δ(ε) is an integral."""
    share = cohort / 100
    found = epsilon(f"central_dp(noise={noise})", cohort=cohort)

    def gap(x):
        plus, minus = ((1 - share) * norm.pdf(x, 0, noise) + share * norm.pdf(x, s, noise) for s in (1, -1))
        return max(plus - math.exp(found) * minus, 0.0)

    assert quad(gap, -12 * noise, 12 * noise, points=[0, 2 * noise, 4 * noise], limit=200)[0] <= 1e-5


@pytest.mark.parametrize("sampling", ["uniform", "bernoulli"])
def test_smaller_cohorts_and_more_noise_cost_less(sampling):
    by_cohort = [epsilon("central_dp(noise=4.0)", 30, sampling=sampling, cohort=c) for c in (0.05, 0.2, 1.0)]
    by_noise = [epsilon(f"central_dp(noise={z})", 30, sampling=sampling, cohort=0.1) for z in (8.0, 4.0, 2.0)]
    assert by_cohort == sorted(by_cohort) and by_cohort[0] < by_cohort[-1] / 2
    assert by_noise == sorted(by_noise) and by_noise[0] < by_noise[-1] / 2


# What is refused


@pytest.mark.parametrize(
    ("method", "sentence"),
    [
        ("scaffold + local_dp", "ControlVariates uploads control_change, which LocalPrivacy does not protect"),
        ("fedsmoo + local_dp", "ConsensusAscent uploads dual, which LocalPrivacy does not protect"),
        ("fednova + local_dp", "NormalisedAveraging uploads normaliser, which LocalPrivacy does not protect"),
        ("feddyn(dual='active') + local_dp", "DynamicDual uploads drift"),
        ("fedsol(source='scaffold') + local_dp", "ControlVariates uploads control_change"),
        ("fedcm + central_dp", "ClientMomentum looks at the updates on the server"),
        ("feddyn + central_dp", "DynamicDual looks at the updates on the server"),
        ("fedgloss + central_dp", "looks at the updates on the server"),
        ("fedgf + central_dp", "InterpolatedAscent looks at the updates on the server"),
        ("central_dp + local_dp", "CentralPrivacy and LocalPrivacy both protect the updates"),
        ("local_dp + local_dp", "LocalPrivacy and LocalPrivacy both protect the updates"),
        ("central_dp + median", "both replace the average"),
        ("central_dp(clip=0)", "CentralPrivacy.clip = 0: must be a number > 0"),
        ("local_dp(entropy='mine')", "LocalPrivacy.entropy = 'mine': must be 'recipe' or 'system'"),
    ],
)
def test_methods_that_would_go_around_the_noise_are_refused(method, sentence):
    with pytest.raises(RecipeError, match=r"^(method: |CentralPrivacy|LocalPrivacy)") as caught:
        parse(method)
    assert sentence in str(caught.value)


@pytest.mark.parametrize("part", [CentralPrivacy, LocalPrivacy])
def test_in_a_deployment_noise_from_the_seed_is_refused_and_no_noise_is_not(part):
    with pytest.raises(RecipeError, match=f"^method: the noise of {part.__name__} would follow from the recipe's seed"):
        part(noise=0.5).refuse_seeded()
    part(noise=0.5, entropy="system").refuse_seeded()
    part(noise=0.0).refuse_seeded()
    part(noise=0.0, entropy="system").refuse_seeded()


@pytest.mark.parametrize("name", ["fedprox", "fedsam", "fedlesam", "fedsol", "fedadam", "fedavgm", "fedswa", "swa"])
def test_methods_that_use_the_private_move_alone_are_not(name):
    assert parse(f"{name} + central_dp").protection == CentralPrivacy()


def test_a_part_of_ones_own_that_looks_later_is_stopped_when_it_does():
    class Curious(Part):
        def merge(self, move, server, uploads):
            return (uploads.average("delta") if server.round == 7 else move), {}

    method = Method(CentralPrivacy(), Curious())
    with pytest.raises(RecipeError, match="a part looks at the updates, which CentralPrivacy protects"):
        method.merge(torch.zeros(3), state(3, round=7), uploads([[1.0, 2.0, 3.0]]))


def test_a_part_of_ones_own_that_looks_at_once_is_refused_with_its_name():
    class Curious(Part):
        def merge(self, move, server, uploads):
            return move + uploads.average("delta"), {}

    with pytest.raises(RecipeError, match="Curious looks at the updates on the server, which CentralPrivacy"):
        Method(CentralPrivacy(), Curious())


@pytest.mark.parametrize("order", [0, 1])
def test_what_another_part_makes_of_the_update_is_clipped_and_noised_after_it(digits, order):
    class Scaled(Part):
        def report(self, upload, sent, memory, outcome):
            return upload.update(delta=1e6 * upload.delta), {}

    guard = LocalPrivacy(clip=0.1, noise=0.01)
    task = problem_of(digits, Method(*[(Scaled(), guard), (guard, Scaled())][order]))
    upload, _ = Worker(task).local_round(Broadcast(3, 0.05, {"weights": task.network.weights.clone()}), 2, None)
    noise = guard.drawn(upload.delta, 5, 3, 2)
    assert float((upload.delta - noise).norm()) == pytest.approx(0.1, rel=1e-4)


def test_batch_norm_statistics_would_leak_and_are_refused_unless_they_stay_with_the_client(digits):
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 10))
    options = dict(method="local_dp", rounds=1, cohort=2, steps=1, engine="inline")
    with pytest.raises(RecipeError, match=r'batch-norm statistics .* set model.buffers = "local"'):
        train(digits, net, **options)
    assert train(digits, net, model_buffers="local", **options).history


@pytest.mark.parametrize(("field", "value"), [("max_ratio", 3.0), ("quorum", 2)])
def test_admission_by_comparison_is_refused_for_the_server_and_free_for_noisy_uploads(digits, field, value, tmp_path):
    options = dict(rounds=1, engine="inline", **LINEAR, **{field: value})
    with pytest.raises(RecipeError, match=rf"admission.{field} = {value:g}: one client could decide"):
        train(digits, method="central_dp", out=tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()
    assert train(digits, method="local_dp(0.1, 0.1)", **options).history


def test_without_dp_accounting_one_sentence_says_what_to_install(digits, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    for method in ("central_dp(noise=0.123)", "local_dp"):
        with pytest.raises(RecipeError, match=r"pip install 'fedflat\[privacy\]'"):
            train(digits, method=method, rounds=1, out=tmp_path / "run", **LINEAR)
    assert not (tmp_path / "run").exists()


# Down to the last bit


def test_the_outermost_bits_of_the_system_give_finite_noise_that_is_symmetric(monkeypatch):
    """52 zeros stand for half a step above 0, and 52 ones for half a step below 1."""
    part, like = LocalPrivacy(1.0, 1.0, entropy="system"), torch.zeros(1, dtype=torch.float64)
    lowest, highest = [], []
    for byte, found in ((b"\x00", lowest), (b"\xff", highest)):
        monkeypatch.setattr("os.urandom", lambda size, byte=byte: byte * size)
        found.append(float(part.drawn(like, 0, 0)))
    assert lowest == pytest.approx([norm.ppf(2.0**-53)], rel=1e-9)
    assert highest == pytest.approx([-lowest[0]], rel=1e-9)


def test_noise_for_weights_of_float64_has_the_digits_of_float64():
    noise = LocalPrivacy(1.0, 1.0).drawn(torch.zeros(100, dtype=torch.float64), 0, 0)
    assert (noise != noise.float().double()).all()


@pytest.mark.parametrize(
    "look",
    [
        lambda uploads: uploads.weights,
        lambda uploads: uploads.sum("delta"),
        lambda uploads: uploads[0],
        lambda uploads: list(uploads),
        lambda uploads: len(uploads),
    ],
)
def test_nothing_of_the_uploads_can_be_had_beside_a_private_average(look):
    class Curious(Part):
        def merge(self, move, server, uploads):
            if server.round == 7:
                look(uploads)
            return move, {}

    with pytest.raises(RecipeError, match="a part looks at the updates, which CentralPrivacy protects"):
        Method(CentralPrivacy(), Curious()).merge(torch.zeros(3), state(3, round=7), uploads([[1.0, 2.0, 3.0]]))
