"""Uploads by somebody who wants to do harm: each attack that once worked, and that whatever is accepted does little."""

import json
import math
import re
import time
from contextlib import closing
from dataclasses import dataclass, fields, replace
from statistics import median
from typing import ClassVar

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

from fedflat import Dataset, Federation, Part, Samples, federate, train
from fedflat.engine.inline import Inline
from fedflat.errors import DataError
from fedflat.methods.chain import Method
from fedflat.methods.parser import parse
from fedflat.methods.uploads import Upload
from fedflat.models import build
from fedflat.models.vector import Network
from fedflat.recipe import Admission, Deployment, Evaluation, Local, Server
from fedflat.rounds.admission import check_samples, counted_samples
from fedflat.rounds.faults import NOTES
from fedflat.rounds.medians import NORMS
from fedflat.rounds.metrics import flat_record
from fedflat.rounds.server import conduct, first_state
from fedflat.rounds.setup import Problem, Refusal
from fedflat.runs.manifest import Checkpoint

SIZES = (3, 4, 5, 6, 5)
SIZE = 6  # parameters


class Claimed(Federation):
    """A federation of which the server knows only what the clients said in their hello."""

    hello: ClassVar = dict(enumerate(SIZES))

    def samples(self, client):
        if client not in self.hello:
            raise DataError(f"client {client} was not connected")
        return self.hello[client]

    def largest_first(self, clients):
        return sorted(clients)


def problem(method="scaffold + fednova", trusted=False, kind=Federation, outlier=None, **local):
    chance = torch.Generator().manual_seed(0)
    samples = Samples(torch.randn(sum(SIZES), 2, generator=chance), torch.arange(sum(SIZES)) % 2)
    federation = kind(Dataset("few", samples, samples, 2, (), ()), torch.arange(sum(SIZES)).split(list(SIZES)))
    torch.manual_seed(0)
    method = parse(method) if isinstance(method, str) else method
    network = Network(nn.Sequential(nn.Linear(2, 2)))
    made = Problem.of(federation, network, method, Local(**{"batch": 1, "lr": 0.1, **local}), deployed=not trusted)
    loose = {} if outlier is None else {"deployment": Deployment(outlier=outlier)}
    return replace(made, recipe=made.recipe.model_copy(update=loose))


def honest(task, client, scale=1.0, **changes):
    """A sound upload of a client that says of itself what is so."""
    chance, steps = torch.Generator().manual_seed(client), SIZES[client]
    sent = {name: scale * torch.randn(size, generator=chance) for name, size in task.uploads.items()}
    if "normaliser" in sent:
        sent["normaliser"] = torch.tensor([steps, steps], dtype=torch.float32)
    upload = Upload(client, SIZES[client], steps, 0.1, 0.5, sent.pop("delta"), sent)
    return replace(upload, **changes)


class Arriving:
    """An engine to which these uploads come."""

    memory = None

    def __init__(self, uploads):
        self.uploads = uploads

    def local_rounds(self, broadcast, cohort):
        yield from self.uploads

    def remember(self, uploads): ...


def after(task, uploads, state=None, limits=None, measures=("consistency",), average="samples"):
    watch, server = Evaluation(measures=list(measures)), Server(average=average)
    cohort = [upload.client for upload in uploads]
    return conduct(task, state or first_state(task), Arriving(uploads), cohort, server, watch, limits)


def refusals(report):
    return [(refusal.client, refusal.reason) for refusal in report.refused]


# --------------------------------------------------------------------------------------------------------------------
# Notes
# --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Forger(Part):
    """A client of six samples that notes something under a name of the record's own."""

    name: str = "bytes_up"

    def report(self, upload, sent, memory, outcome):
        return replace(upload, notes={self.name: math.pi}) if outcome.rule.steps == 6 else upload, {}


OWN_KEYS = ["bytes_up", "round", "skipped", "cohort", "refused", "accuracy"]


@pytest.mark.parametrize("name", OWN_KEYS)
def test_a_note_never_takes_the_place_of_a_key_of_the_record(name, tmp_path):
    federation, out = problem().federation, tmp_path / "run"
    settings = dict(batch=1, cohort=5, engine="inline", out=out)
    train(federation, nn.Sequential(nn.Linear(2, 2)), Method(Forger(name)), rounds=2, **settings)
    result = train(federation, nn.Sequential(nn.Linear(2, 2)), Method(Forger(name)), rounds=3, resume=True, **settings)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [1, 2, 3]
    assert all(line["bytes_up"] == 5 * SIZE * 4 and line["cohort"] == [*range(5)] for line in lines)
    assert all(line["notes"] == {name: pytest.approx(math.pi)} for line in lines)
    assert not any("skipped" in line or "refused" in line for line in lines)
    assert (result.summary["rounds"], result.summary["bytes_up"]) == (3, 3 * 5 * SIZE * 4)


@pytest.mark.parametrize("name", [*OWN_KEYS, "x" * 10_000, "\x1b[2J"])
def test_in_a_deployment_a_client_that_notes_anything_else_than_its_method_is_refused(name):
    task = problem("fedavg")
    _, report = after(task, [honest(task, 0), honest(task, 3, notes={name: math.pi})])
    assert (refusals(report), report.notes) == ([(3, "notes")], {})
    assert report.refused[0].detail.isprintable()
    assert len(report.refused[0].detail) < 200


@pytest.mark.parametrize(
    "notes",
    [{f"activation/{i}": 1.0 for i in range(NOTES + 1)}, {"activation/1": math.nan}, {"activation/1": 1e30},
     {"activation/1": "high"}, {"activation/nowhere": 1.0}, {"activation/1#100": 1.0}, {7: 1.0}, {"loss": 1.0},
     {"activation/1": 10**400}],
)  # fmt: skip
def test_notes_are_bounded_in_number_name_and_value(notes):
    task = problem("man")
    task.network = Network(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))
    good = [honest(task, i, notes={"activation/1": 0.5, "activation/1#2": 0.1}) for i in range(3)]
    _, report = after(task, [*good, honest(task, 3, notes=notes)])
    assert refusals(report) == [(3, "notes")]
    assert report.notes == {"activation/1": pytest.approx(0.5), "activation/1#2": pytest.approx(0.1)}


def test_a_record_has_the_notes_under_their_own_key_and_one_of_0_1_is_read_alike():
    new = {"round": 3, "loss": 1.0, "notes": {"cosine": 0.25}}
    old = {"round": 3, "loss": 1.0, "cosine": 0.25}
    assert flat_record(new) == flat_record(old) == old


# --------------------------------------------------------------------------------------------------------------------
# Numbers
# --------------------------------------------------------------------------------------------------------------------

NORMALISERS = [torch.tensor([a, 6.0]) for a in (1e-30, 1e-6, 1e6, 7.0)]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"steps": 1e-30}, "weight"), ({"steps": 1}, "claim"), ({"steps": 10**6}, "claim"), ({"steps": True}, "weight"),
        ({"samples": 1e-300}, "weight"), ({"samples": 2**62}, "weight"), ({"samples": 7}, "claim"),
        ({"samples": 10**5000}, "weight"), ({"lr": 1e-300}, "claim"), ({"lr": 1e300}, "weight"), ({"lr": 0.2}, "claim"),
        ({"loss": 1e300}, "claim"), ({"loss": 10**400}, "not finite"), ({"steps": "6"}, "weight"),
    ],
)  # fmt: skip
def test_a_number_that_the_recipe_does_not_give_is_refused_in_one_sentence(changes, reason):
    task = problem()
    state, report = after(task, [*(honest(task, i) for i in range(3)), honest(task, 3, **changes)])
    assert refusals(report) == [(3, reason)]
    assert len(report.refused[0].detail) < 300
    expected, _ = after(task, [honest(task, i) for i in range(3)])
    assert torch.equal(state.weights, expected.weights)


@pytest.mark.parametrize("normaliser", NORMALISERS)
def test_fednovas_normaliser_follows_from_the_steps(normaliser):
    task = problem()
    bad = honest(task, 3)
    bad = replace(bad, vectors={**bad.vectors, "normaliser": normaliser})
    _, report = after(task, [honest(task, 0), bad])
    assert refusals(report) == [(3, "claim")]
    assert "by the recipe and its samples it is 6" in report.refused[0].detail


@pytest.mark.parametrize("method", ["fedswa", "perfedavg", "fedcm(momentum_aware=True)", "fednova + fedprox", "feddc"])
def test_what_the_server_expects_is_what_a_client_of_the_real_engine_says(method):
    task = problem(method, momentum=0.5, lr_decay=0.9, epochs=2, outlier=0.0)
    state = first_state(task)
    with closing(Inline(task)) as engine:
        for _ in range(2):
            state, report = conduct(task, state, engine, range(5))
            assert report.refused == []


def test_the_samples_of_a_hello_have_a_range_and_count_up_to_a_multiple_of_the_median():
    assert check_samples(2**62, Admission())
    assert check_samples("many", Admission()) and check_samples(True, Admission()) and check_samples(0, Admission())
    assert check_samples(20, Admission()) == ""
    assert counted_samples({0: 10, 1: 12, 2: 10**9}, Admission(max_share=5.0)) == {0: 10, 1: 12, 2: 60}
    assert counted_samples({0: 10, 1: 12, 2: 10**9}, Admission(max_share=0.0))[2] == 10**9
    assert counted_samples({}, Admission()) == {}
    for near in ({0: 361, 1: 361, 2: 360, 3: 360}, {0: 3, 1: 2, 2: 2}, {0: 1009, 1: 1000, 2: 990}):
        assert counted_samples(near, Admission()) == near, "equal parts of a data set differ by a sample or two"
    assert counted_samples({0: 1000, 1: 1000, 2: 1011}, Admission())[2] == 1000
    assert counted_samples({0: 5, 1: 10**9}, Admission(max_share=1e-9)) == {0: 1, 1: 1}


def test_a_claim_of_a_billion_samples_in_its_hello_does_not_own_the_average(monkeypatch):
    monkeypatch.setattr(Claimed, "hello", {0: 3, 1: 4, 2: 5, 3: 10**8})
    task = problem("fedavg", kind=Claimed, steps=4)
    uploads = [honest(task, i, steps=4, delta=torch.zeros(SIZE)) for i in range(3)]
    liar = honest(task, 3, samples=10**8, steps=4, delta=torch.ones(SIZE))
    first = first_state(task)
    moved = {}
    for share in (0.0, 2.0):
        state, report = after(task, [*uploads, liar], limits=Admission(max_share=share))
        assert report.refused == []
        moved[share] = float((state.weights - first.weights).max())
    assert moved[0.0] == pytest.approx(1, abs=1e-5)
    assert moved[2.0] == pytest.approx(9 / (3 + 4 + 5 + 9)), "twice the median of 3, 4, 5 and 10⁸"


def test_nor_do_the_steps_of_too_many_samples_scale_what_all_others_send(monkeypatch):
    """FedNova multiplies the average by Σ pᵢ aᵢ, and aᵢ by the recipe is the number of steps over the samples."""
    monkeypatch.setattr(Claimed, "hello", {0: 3, 1: 4, 2: 5, 3: 500_000})
    task = problem("fednova", kind=Claimed)
    steps = torch.tensor([5e5, 5e5])
    liar = honest(task, 3, samples=500_000, steps=500_000, delta=torch.zeros(SIZE), vectors={"normaliser": steps})
    uploads, first = [*(honest(task, i) for i in range(3)), liar], first_state(task)
    moved = {}
    for share in (0.0, 10.0):
        state, report = after(task, uploads, limits=Admission(max_share=share), average="uniform")
        assert report.refused == []
        moved[share] = float((state.weights - first.weights).norm())
    longest = max(upload.norm for upload in uploads)
    assert moved[0.0] > 1e3 * longest
    assert moved[10.0] < 10 * longest


def test_nor_do_they_loosen_the_limit_on_its_own_norm(monkeypatch):
    monkeypatch.setattr(Claimed, "hello", {0: 3, 1: 4, 2: 5})
    task = problem("fedavg", kind=Claimed)
    late = honest(task, 3, samples=10**7, steps=10**7, delta=torch.full((SIZE,), 1e4))
    for uploads in ([late], [honest(task, 0), honest(task, 1), honest(task, 2), late]):
        state, _ = after(task, [honest(task, i) for i in range(3)])
        _, report = after(task, uploads, state)
        assert refusals(report) == [(3, "norm")]


def test_a_claim_of_a_billion_samples_is_judged_in_no_time(monkeypatch):
    """With a proximal term the normaliser is a recursion over the steps."""
    monkeypatch.setattr(Claimed, "hello", {0: 3, 1: 4, 2: 5, 3: 10**9})
    task = problem("fednova + fedprox", kind=Claimed)
    liar = honest(task, 3, samples=10**9, steps=10**9)
    begun = time.perf_counter()
    _, report = after(task, [liar])
    assert refusals(report) == [(3, "claim")] and "normaliser = 6" in report.refused[0].detail
    assert time.perf_counter() - begun < 5


def test_a_simulation_trusts_its_own_counts():
    task = problem("fedavg", trusted=True)
    _, report = after(task, [honest(task, 0, samples=10**8), honest(task, 1)])
    assert report.refused == []


def test_a_merge_that_is_not_finite_is_skipped_and_changes_nothing():
    task, limits = problem("fedavg", trusted=True), Admission(max_norm=math.inf, outlier=0.0)
    first = first_state(task)
    huge = [honest(task, i, delta=torch.full((SIZE,), 3e38)) for i in range(3)]
    state, report = after(task, huge, limits=limits)
    assert (
        report.skipped
        == "the merged weights would not be finite, so the state stays as it was; lower admission.max_norm"
    )
    assert (state.round, report.cohort) == (1, [])
    assert torch.equal(state.weights, first.weights)


def test_a_part_that_keeps_nan_of_its_own_is_merged():
    task = problem("fedgf", trusted=True)
    state, report = after(task, [honest(task, i) for i in range(3)])
    assert not report.skipped
    assert bool(state.vectors["window"].isnan().any())


# --------------------------------------------------------------------------------------------------------------------
# Whatever is accepted leaves the state finite and the move bounded
# --------------------------------------------------------------------------------------------------------------------

WILD = st.one_of(
    st.floats(allow_nan=True, allow_infinity=True), st.integers(-(10**20), 10**20), st.booleans(), st.none(),
    st.sampled_from([0.1, 0.1000001, 1e-30, 1e-300, 1e300, 3, 4, 5, 6, 2**62]),
)  # fmt: skip
ENTRIES = st.one_of(st.floats(width=32), st.sampled_from([0.0, 1.0, -30.0, 3e38, 1e-45, 5.0]))
LIMITS = Admission(max_norm=100.0)
# By how much a round's move may exceed the bound on every admitted ‖Δᵢ‖ (and on each vector beside it), which is
# `admission.max_norm`. An average of Δᵢ is within it. FedNova's τ/aᵢ is at most 2 for these sizes. SCAFFOLD and FedSMOO
# average Δᵢ alone; FedDyn adds Σ Δ/m of the rounds so far, FedGloSS its own dual of the same size, FedCM a momentum
# that is an average of earlier moves; FedAdam's step is at most its learning rate.
FACTORS = {"fedavg": 1.0, "scaffold": 1.0, "fedcm": 1.0, "fednova": 2.0, "scaffold + fednova": 2.0, "feddyn": 3.0,
           "fedsmoo": 3.0, "fedgloss": 3.0, "fedadam": 1.0}  # fmt: skip
TASKS = {name: problem(name) for name in FACTORS}


@st.composite
def wild_uploads(draw, task):
    sound = honest(task, draw(st.integers(0, 4)))
    vectors = {
        name: draw(st.one_of(
            st.just(vector), ENTRIES.map(lambda x, v=vector: torch.full_like(v, x)),
            st.lists(ENTRIES, min_size=len(vector), max_size=len(vector)).map(torch.tensor)))
        for name, vector in {"delta": sound.delta, **sound.vectors}.items()
    }  # fmt: skip
    numbers = {
        name: draw(st.one_of(st.just(getattr(sound, name)), WILD)) for name in ("samples", "steps", "lr", "loss")
    }
    return replace(sound, delta=vectors.pop("delta"), vectors=vectors, **numbers)


@given(st.sampled_from(sorted(TASKS)), st.sampled_from(["samples", "uniform"]), st.data())
@settings(max_examples=200, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
def test_any_upload_that_is_accepted_leaves_the_state_finite_and_the_move_bounded(name, average, data):
    task = TASKS[name]
    state = first_state(task)
    for _ in range(2):
        uploads = {upload.client: upload for upload in data.draw(st.lists(wild_uploads(task), min_size=1, max_size=4))}
        before = state
        state, report = after(task, list(uploads.values()), state, LIMITS, average=average)
        for vector in (state.weights, state.buffers, *state.vectors.values()):
            assert bool(vector.isfinite().all())
        moved = float((state.weights - before.weights).double().norm())
        assert moved <= FACTORS[name] * LIMITS.max_norm * (1 + 1e-5)
        assert {*report.cohort} | {client for client, _ in refusals(report)} == {*uploads} or report.skipped


# --------------------------------------------------------------------------------------------------------------------
# Outliers, by default
# --------------------------------------------------------------------------------------------------------------------


def long(task, client, norm):
    return honest(task, client, delta=torch.full((SIZE,), norm / math.sqrt(SIZE)))


@pytest.mark.parametrize("measures", [("consistency",), ()])
def test_by_default_an_update_far_beyond_the_running_median_is_refused(measures):
    task = problem("fedavg")
    state, report = after(task, [long(task, i, 1.0) for i in range(4)], measures=measures)
    assert report.refused == []
    assert [float(x) for x in state.vectors[NORMS]] == [0, 0, 0, 0, pytest.approx(1.0)]
    _, report = after(task, [*(long(task, i, 1.0) for i in range(4)), long(task, 4, 8.0)], state, measures=measures)
    assert refusals(report) == [(4, "norm")]
    assert report.refused[0].detail == "‖Δ‖ = 8 is more than 5 × the cohorts' running median 1"


@pytest.mark.parametrize(("trusted", "outlier", "refused"), [
    (False, None, [8.0, 40.0, 80.0]), (False, 20.0, [40.0, 80.0]), (False, 0.0, []),
    (True, None, [80.0]), (True, 5.0, [80.0]),
])  # fmt: skip
def test_a_deployment_has_a_limit_of_its_own_and_a_simulation_a_wide_one(trusted, outlier, refused):
    task = problem("fedavg", trusted=trusted, outlier=outlier)
    for norm in (3.0, 8.0, 40.0, 80.0):
        _, report = after(task, [*(long(task, i, 1.0) for i in range(4)), long(task, 4, norm)])
        assert refusals(report) == [(4, "norm")] * (norm in refused)


def test_in_the_first_round_it_is_the_cohorts_own_median():
    task = problem("fedavg")
    _, report = after(task, [*(long(task, i, 1.0) for i in range(4)), long(task, 4, 8.0)], measures=())
    assert refusals(report) == [(4, "norm")]
    _, report = after(task, [long(task, 0, 1.0), long(task, 1, 1000.0)], measures=())
    assert report.refused == [], "of two nobody can say which one lies"


def test_in_a_small_cohort_the_rounds_before_remember():
    task = problem("fedavg")
    state, _ = after(task, [long(task, i, 1.0) for i in range(4)])
    _, report = after(task, [long(task, 0, 1.0), long(task, 1, 1000.0)], state)
    assert refusals(report) == [(1, "norm")]


def test_when_all_norms_grow_at_once_nobody_is_an_outlier():
    task = problem("fedavg")
    for measures in [("consistency",), ()]:
        state, _ = after(task, [long(task, i, 1.0) for i in range(4)], measures=measures)
        _, report = after(task, [long(task, i, 80.0) for i in range(4)], state, measures=measures)
        assert report.refused == []


@pytest.mark.parametrize("trusted", [False, True])
def test_the_running_median_falls_slowly(trusted):
    """Honest updates become short one after the other, and the last long ones are not outliers: a new median counts as
    95 % of the running one at least, so that the median of five falls to 95 % every third round."""
    task = problem("fedavg", trusted=trusted)
    state, seen = first_state(task), []
    for round in range(12):
        norm = 1.0 if round < 5 else 0.01
        state, report = after(task, [long(task, i, norm) for i in range(4)], state)
        seen.append(float(state.vectors[NORMS].quantile(0.5)))
    fallen = [0.95] * 3 + [0.95**2] * 2
    assert seen == pytest.approx([0.0, 0.0, *[1.0] * 5, *fallen], rel=1e-5)
    _, report = after(task, [*(long(task, i, 0.01) for i in range(4)), long(task, 4, 4.0)], state)
    assert report.refused == []


def test_who_has_more_steps_than_the_mean_client_may_go_further():
    task = problem("fedavg")
    _, report = after(task, [*(long(task, i, 1.0) for i in range(3)), long(task, 3, 5.6), long(task, 4, 5.7)])
    assert refusals(report) == [(4, "norm")], "six steps where a mean client has five allow 6; five allow 5"


def test_but_not_by_the_steps_of_samples_that_do_not_count(monkeypatch):
    """Twenty steps where a mean client has five allow 20 if all samples count, and 5 if they count up to the median."""
    monkeypatch.setattr(Claimed, "hello", {0: 3, 1: 4, 2: 5, 3: 20, 4: 5})
    task = problem("fedavg", kind=Claimed)
    uploads = [long(task, i, 1.0) for i in (0, 1, 2, 4)] + [replace(long(task, 3, 8.0), samples=20, steps=20)]
    assert refusals(after(task, uploads, limits=Admission(max_share=0.0))[1]) == []
    assert refusals(after(task, uploads)[1]) == [(3, "norm")]


def test_a_vector_beside_an_honest_update_has_its_own_running_median():
    """SCAFFOLD's control variate reaches every client in the next round, so an honest Δ must not let a false one in."""
    task = problem("scaffold")
    crowd = [honest(task, i) for i in range(4)]
    middle = median(float(upload["control_change"].norm()) for upload in crowd)
    liar = honest(task, 4)
    liar = replace(liar, vectors={"control_change": -1000 * liar["control_change"]})
    for state in (first_state(task), after(task, crowd)[0]):
        _, report = after(task, [*crowd, liar], state)
        assert refusals(report) == [(4, "norm")]
        found = re.fullmatch(r"‖control_change‖ = \S+ is more than 25 × the cohorts' running median (\S+)",
                             report.refused[0].detail)  # fmt: skip
        assert middle / 2 < float(found[1]) < 2 * middle


class Flipping(Inline):
    """An engine one of whose ten clients sends −10 times its honest update."""

    def local_rounds(self, broadcast, cohort):
        for upload in super().local_rounds(broadcast, cohort):
            vectors = {name: -10 * vector for name, vector in upload.vectors.items()}
            yield replace(upload, delta=-10 * upload.delta, vectors=vectors) if upload.client == 0 else upload


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedsmoo"])
def test_one_client_of_ten_that_flips_and_scales_its_update_by_ten_spoils_nothing(method):
    found = {}
    for kind, deployed in (Inline, True), (Flipping, True), (Flipping, False):
        federation = federate("digits", clients=10, alpha=0.5)
        network = Network(build("mlp", (1, 8, 8), 10, torch.Generator().manual_seed(0), hidden=[16]))
        task = Problem.of(federation, network, parse(method), Local(steps=5, batch=0, lr=0.3), deployed=deployed)
        state = first_state(task)
        with closing(kind(task)) as engine:
            for _ in range(10):
                state, _ = conduct(task, state, engine, range(10), Server(cohort=10))
            found[kind, deployed] = engine.score(state, "test", 500).values["accuracy"]
    assert found[Inline, True] > 0.85 and found[Flipping, True] > found[Inline, True] - 0.05
    assert found[Flipping, False] < 0.5, "where the limit is wide, the attack works"


class Boasting(Federation):
    """A federation whose first client said in its hello that it has a billion samples."""

    def samples(self, client):
        return 10**9 if client == 0 else super().samples(client)


class Reversing(Inline):
    """An engine whose first client sends minus its honest update, as one of a billion samples."""

    def local_rounds(self, broadcast, cohort):
        for upload in super().local_rounds(broadcast, cohort):
            yield replace(upload, delta=-upload.delta, samples=10**9) if upload.client == 0 else upload


def test_one_that_claims_a_billion_samples_in_its_hello_and_flips_its_update_spoils_nothing():
    """It counts for a median client; as three of twelve it would cost much, and as ten of nineteen everything."""
    found, federation = {}, federate("digits", clients=10, alpha=0.5)
    boasting = Boasting(**{field.name: getattr(federation, field.name) for field in fields(federation)})
    for share in Admission().max_share, 3.0, 10.0:
        network = Network(build("mlp", (1, 8, 8), 10, torch.Generator().manual_seed(0), hidden=[16]))
        task = Problem.of(boasting, network, parse("fedavg"), Local(steps=5, batch=0, lr=0.3), deployed=True)
        state = first_state(task)
        with closing(Reversing(task)) as engine:
            for _ in range(10):
                limits = Admission(max_share=share)
                state, report = conduct(task, state, engine, range(10), Server(cohort=10), limits=limits)
                assert report.refused == []
            found[share] = engine.score(state, "test", 500).values["accuracy"]
    assert found[10.0] < 0.2 < found[3.0] < 0.8
    assert found[Admission().max_share] > 0.85


def test_a_private_sum_compares_nobody():
    task = problem("central_dp(noise=0)", trusted=True)
    state, _ = after(task, [long(task, i, 1.0) for i in range(4)], measures=())
    _, report = after(task, [*(long(task, i, 1.0) for i in range(4)), long(task, 4, 1000.0)], state, measures=())
    assert report.refused == []


def test_the_running_median_is_in_the_checkpoint_and_a_resumed_run_has_the_same(digits, tmp_path):
    settings = dict(model="mlp", model_hidden=[4], cohort=4, batch=0, engine="inline", every=2)
    train(digits, rounds=4, out=tmp_path / "straight", **settings)
    train(digits, rounds=2, out=tmp_path / "resumed", **settings)
    train(digits, rounds=4, out=tmp_path / "resumed", resume=True, **settings)
    kept = [load_file(tmp_path / run / "checkpoints/00000004.server.safetensors") for run in ("straight", "resumed")]
    norms = [each[f"state.{NORMS}"] for each in kept]
    assert torch.equal(*norms)
    assert int((norms[0] > 0).sum()) == 4


def test_a_checkpoint_of_an_earlier_version_has_no_medians_of_the_other_vectors(monkeypatch, tmp_path):
    task, other = problem("scaffold"), f"{NORMS}.control_change"
    first, (state, _) = first_state(task), after(task, [honest(task, i) for i in range(4)], first_state(task))
    assert not first.vectors[other].any() and state.vectors[other].any()
    stored = {"weights": state.weights, "buffers": state.buffers}
    stored |= {f"state.{name}": vector for name, vector in state.vectors.items() if name != other}
    monkeypatch.setattr(Checkpoint, "_read", lambda *_: stored)
    found = Checkpoint(tmp_path, {"round": 1, "schema": 2, "server": {"file": "x"}}).state(first)
    assert torch.equal(found.vectors[other], first.vectors[other])
    assert torch.equal(found.vectors[NORMS], state.vectors[NORMS])
    assert first_state(problem("scaffold", trusted=True)).vectors.keys() == first.vectors.keys() - {other}


# --------------------------------------------------------------------------------------------------------------------
# Means of squares
# --------------------------------------------------------------------------------------------------------------------


def test_a_second_moment_below_zero_is_refused():
    """Its mean may be negative too: the root of it is NaN, and no client could take a step any more."""
    task = problem("fedadamw")
    crowd = [honest(task, i) for i in range(5)]
    crowd = [replace(upload, vectors={"square": upload["square"].abs()}) for upload in crowd]
    liar = replace(crowd[4], vectors={"square": -9 * crowd[4]["square"]})
    assert not any((after(task, [*crowd[:4], last])[0].vectors["square"] < 0).any() for last in (crowd[4], liar))
    _, report = after(task, [*crowd[:4], liar])
    assert [(r.client, r.reason, r.detail) for r in report.refused] == [
        (4, "weight", "square has negative entries, but is a mean of squares")]  # fmt: skip


def test_nor_may_a_variance_of_batch_norm_be_negative():
    class Net(nn.Sequential):
        def __init__(self):
            super().__init__(nn.Linear(2, 2), nn.BatchNorm1d(2))

    task = problem("fedavg")
    task = Problem.of(task.federation, Network(Net()), parse("fedavg"), task.recipe.local, deployed=True)
    crowd = [honest(task, i) for i in range(5)]
    crowd = [replace(upload, vectors={"buffers": upload["buffers"].abs() + 1}) for upload in crowd]
    spoilt = crowd[4]["buffers"].clone()
    task.network.buffer_layout.views(spoilt)["1.running_var"].neg_()
    _, report = after(task, [*crowd[:4], replace(crowd[4], vectors={"buffers": spoilt})])
    assert [(r.client, r.detail) for r in report.refused] == [
        (4, "1.running_var has negative entries, but is a mean of squares")]  # fmt: skip
    spoilt = crowd[4]["buffers"].clone()
    task.network.buffer_layout.views(spoilt)["1.running_mean"].neg_()
    assert after(task, [*crowd[:4], replace(crowd[4], vectors={"buffers": spoilt})])[1].refused == []


# --------------------------------------------------------------------------------------------------------------------
# Texts and answers
# --------------------------------------------------------------------------------------------------------------------


def test_a_clients_error_text_is_one_short_line_without_escape_sequences():
    task = problem("fedavg")
    text = "\x1b[2J\x1b]0;owned\x07" + "\n" * 5 + "x" * 5_000_000
    _, report = conduct(task, first_state(task), Arriving([Refusal(3, "rai\x1b[0msed", text)]), [3])
    (refusal,) = report.refused
    assert len(refusal.detail) <= 300 and len(refusal.reason) <= 40
    assert refusal.detail.isprintable() and refusal.reason.isprintable() and report.skipped.isprintable()
