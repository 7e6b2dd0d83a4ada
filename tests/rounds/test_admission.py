"""What is refused, by which reason, and that nothing else notices."""

import json
import math
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedflat import Dataset, Federation, Part, Samples, train
from fedflat.engine.inline import Inline
from fedflat.engine.pool import Pool
from fedflat.errors import TrainingError
from fedflat.methods.chain import Method
from fedflat.methods.parser import parse
from fedflat.methods.uploads import Upload
from fedflat.models.vector import Network
from fedflat.recipe import Admission, Local, Server
from fedflat.rounds.server import conduct, first_state
from fedflat.rounds.setup import Problem

NAN, INF = math.nan, math.inf
# SCAFFOLD sends a second vector up and FedNova two figures; six parameters.
METHOD, SIZE = "scaffold + fednova", 6


def federation(sizes):
    """Clients with so many samples each; no two are alike, so the number of steps tells them apart."""
    chance = torch.Generator().manual_seed(0)
    samples = Samples(torch.randn(sum(sizes), 2, generator=chance), torch.arange(sum(sizes)) % 2)
    return Federation(Dataset("few", samples, samples, 2, (), ()), torch.arange(sum(sizes)).split(list(sizes)))


def problem(method=METHOD, sizes=(3, 4, 5, 6)):
    torch.manual_seed(0)
    method = parse(method) if isinstance(method, str) else method
    return Problem.of(federation(sizes), Network(nn.Sequential(nn.Linear(2, 2))), method, Local(batch=1, lr_decay=0.9))


PROBLEM = problem(sizes=(3,) * 10_100)  # as many as upload anything in these tests


def upload(client, **changes):
    """A sound upload."""
    chance = torch.Generator().manual_seed(client)
    delta, control = torch.randn(2, SIZE, generator=chance)
    vectors = {"control_change": control, "normaliser": torch.tensor([3.0, 3.0])}
    return replace(Upload(client, 3 + client, 3, 0.1, 0.5, delta, vectors), **changes)


class Arriving:
    """An engine to which these uploads come, from wherever."""

    memory = None

    def __init__(self, uploads):
        self.uploads, self.remembered = uploads, []

    def local_rounds(self, broadcast, cohort):
        yield from self.uploads

    def remember(self, uploads):
        self.remembered += [each.client for each in uploads]


def outcome(uploads, limits=None, average="samples"):
    """State and report after a round to which these uploads came, and who may keep its memory."""
    engine, cohort = Arriving(uploads), sorted(each.client for each in uploads)
    server = Server(average=average)
    state, report = conduct(PROBLEM, first_state(PROBLEM), engine, cohort, server, limits=limits)
    return state, report, engine.remembered


def same(one, other):
    tensors = [[s.weights, s.buffers, *s.vectors.values()] for s in (one, other)]
    return one.round == other.round and all(torch.equal(a, b) for a, b in zip(*tensors, strict=True))


# --------------------------------------------------------------------------------------------------------------------
# Malformed uploads of every kind
# --------------------------------------------------------------------------------------------------------------------


def with_vector(sound, name, vector):
    if name == "delta":
        return replace(sound, delta=vector)
    return replace(sound, vectors={**sound.vectors, name: vector})


def with_entry(sound, name, place, value):
    vector = sound[name].clone()
    vector[place] = value
    return with_vector(sound, name, vector)


def without(sound, name):
    return replace(sound, vectors={key: v for key, v in sound.vectors.items() if key != name})


def permuted(sound):
    return replace(sound, vectors=dict(zip(sound.vectors, reversed(sound.vectors.values()), strict=True)))


def faults(reason, spoil, *choices):
    """How to spoil an upload in one of these ways, and the reason that it is to be refused by."""
    return st.tuples(*map(st.sampled_from, choices)).map(lambda drawn: (lambda sound: spoil(sound, *drawn), reason))


LONG, EXTRA, PLACES = ("delta", "control_change"), ("control_change", "normaliser"), range(SIZE)
SHAPES = [(1,), (0,), (SIZE - 1,), (SIZE + 1,), (1, SIZE), (SIZE, 1), ()]
UNSHAPELY = [*map(torch.zeros, SHAPES), None, "Δ", [1.0] * SIZE]
WEIGHTLESS = [0, -1, 0.0, -0.5, NAN, INF, -INF, 1e30, 10**400, "3", None, [3], torch.tensor(3)]
FAULTS = st.one_of(
    faults("not finite", with_entry, LONG, PLACES, [NAN, INF, -INF]),
    faults("norm", with_entry, LONG, PLACES, [1e30, -1e30]),
    faults("shape", with_vector, [*LONG, "normaliser"], UNSHAPELY),
    faults("shape", permuted),
    faults("dtype", lambda u, name, dtype: with_vector(u, name, u[name].to(dtype)), LONG, [torch.float64, torch.int64]),
    faults("names", without, EXTRA),
    faults("names", lambda u, name: replace(u, vectors={**u.vectors, name: u.delta}), ["delta", "Δ", "", 7]),
    faults("names", lambda u, name: replace(without(u, name), vectors={name.upper(): u[name]}), EXTRA),
    faults("weight", lambda u, name, value: replace(u, **{name: value}), ["samples", "steps", "lr"], WEIGHTLESS),
    faults("weight", with_entry, ["normaliser"], [0, 1], [0.0, -1.0, NAN, -INF]),
    faults("not finite", lambda u, value: replace(u, loss=value), [NAN, INF, -INF, None, "low"]),
)


@given(st.lists(FAULTS, min_size=20, max_size=20), st.integers(0, 4), st.randoms(use_true_random=False))
@settings(max_examples=500, deadline=None)
def test_of_10_000_malformed_uploads_each_is_counted_by_its_reason_and_none_changes_a_bit(drawn, sound, chance):
    clients = chance.sample(range(len(drawn) + sound), len(drawn) + sound)
    good = [upload(client) for client in clients[len(drawn) :]]
    bad = [(spoil(upload(client)), reason) for client, (spoil, reason) in zip(clients, drawn, strict=False)]
    arriving = [*good, *(each for each, _ in bad)]
    chance.shuffle(arriving)
    state, report, remembered = outcome(arriving)
    assert {(r.client, r.reason) for r in report.refused} == {(each.client, reason) for each, reason in bad}
    assert len(report.refused) == len(bad)
    assert report.cohort == remembered == sorted(each.client for each in good)
    if good:
        assert same(state, outcome(good)[0])
    else:
        assert same(state, replace(first_state(PROBLEM), round=1))
        assert report.skipped


# --------------------------------------------------------------------------------------------------------------------
# Limits
# --------------------------------------------------------------------------------------------------------------------


def test_the_order_of_names_is_nobodys_fault():
    turned = upload(0, vectors=dict(reversed(upload(0).vectors.items())))
    (state, report, _), (expected, _, _) = outcome([turned, upload(1)]), outcome([upload(0), upload(1)])
    assert not report.refused
    assert same(state, expected)


def long(client, norm):
    """An upload with a Δ of this length."""
    return upload(client, delta=torch.full((SIZE,), norm / math.sqrt(SIZE)))


@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize(("limit", "accepted"), [(1e6, [0, 1, 2]), (20.0, [0, 1]), (2.0, [0]), (0.5, [])])
def test_the_absolute_limit_is_on_the_norm_of_each_vector(name, limit, accepted):
    others = {"control_change": torch.zeros(SIZE), "normaliser": torch.tensor([0.1, 0.1])}
    short = [upload(i, delta=torch.zeros(SIZE), vectors=others) for i in range(3)]
    uploads = [with_vector(each, name, long(0, norm).delta) for each, norm in zip(short, [1, 10, 100], strict=True)]
    _, report, _ = outcome(uploads, Admission(max_norm=limit))
    assert report.cohort == accepted
    assert [(r.client, r.reason) for r in report.refused] == [(i, "norm") for i in range(len(accepted), 3)]


@pytest.mark.parametrize(
    ("ratio", "norms", "accepted"),
    [
        (0.0, [1, 1, 1, 1e5], [0, 1, 2, 3]),
        (2.0, [1, 1, 1, 5], [0, 1, 2]),
        (5.0, [1, 1, 1, 4.9], [0, 1, 2, 3]),
        (1.5, [1, 2, 3, 10], [0, 1, 2]),  # the median is 2.5
        (3.0, [7], [0]),
        (3.0, [0, 0, 0, 1], [0, 1, 2]),
    ],
)
def test_the_relative_limit_is_in_units_of_the_cohorts_median(ratio, norms, accepted):
    _, report, _ = outcome([long(i, norm) for i, norm in enumerate(norms)], Admission(max_ratio=ratio, outlier=0.0))
    assert report.cohort == accepted
    assert [(r.client, r.reason) for r in report.refused] == [
        (i, "norm") for i in range(len(norms)) if i not in accepted
    ]


def test_malformed_uploads_do_not_move_the_median():
    norms = [long(i, norm) for i, norm in enumerate([1, 1, 1, 100, 100])]
    unfit = [with_entry(long(i, 100), "delta", 0, NAN) for i in (5, 6, 7)]
    _, report, _ = outcome([*norms, *unfit], Admission(max_ratio=2.0))
    assert report.cohort == [0, 1, 2]
    assert Counter(r.reason for r in report.refused) == {"norm": 2, "not finite": 3}


def test_without_a_limit_1e30_passes_but_infinity_never_does():
    limits = Admission(max_norm=INF)
    huge, infinite = (with_entry(upload(i), "delta", 2, value) for i, value in enumerate([1e30, INF]))
    state, report, _ = outcome([huge, infinite], limits)
    assert (report.cohort, [(r.client, r.reason) for r in report.refused]) == ([0], [(1, "not finite")])
    assert float(state.weights.abs().max()) == pytest.approx(1e30)


def test_a_client_may_not_claim_more_samples_than_the_recipe_says():
    claims = [upload(0, samples=10), upload(1, samples=11)]
    _, report, _ = outcome(claims, Admission(max_samples=10))
    assert [r.detail for r in report.refused] == [
        "samples = 11 is not a whole number from 1 to 10 (admission.max_samples)"
    ]


@pytest.mark.parametrize(("good", "skipped"), [(2, True), (3, False), (4, False)])
def test_below_the_quorum_a_round_is_skipped(good, skipped):
    uploads = [upload(i) for i in range(good)] + [upload(i, samples=0) for i in range(good, 5)]
    state, report, remembered = outcome(uploads, Admission(quorum=3))
    assert same(state, replace(first_state(PROBLEM), round=1)) == skipped
    assert (report.cohort, remembered) == ([], []) if skipped else (list(range(good)),) * 2
    sentence = "2 accepted, admission.quorum = 3; client 2 in round 0: weight: samples = 0"
    assert report.skipped.startswith(sentence if skipped else "")
    assert len(report.refused) == 5 - good


def test_with_failures_stop_the_first_one_ends_the_run_in_a_sentence():
    uploads = [upload(0), upload(1, delta=torch.ones(1))]
    with pytest.raises(TrainingError, match=r"^client 1 in round 0: shape: delta is \(1,\), not \(6,\)$"):
        outcome(uploads, Admission(failures="stop"))


# --------------------------------------------------------------------------------------------------------------------
# On real engines
# --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Careless(Part):
    """Keeps and uploads Δ; once η is below 0.1, the client with `steps` steps makes something else of it."""

    steps: int = 0
    which: str = "echo"
    flaw: str = ""

    def first_memory(self, initial):
        return {"kept": torch.zeros_like(initial)}

    def report(self, upload, sent, memory, outcome):
        vectors = {"kept": memory["kept"] + outcome.delta, "echo": outcome.delta}
        if outcome.rule.steps == self.steps and outcome.rule.lr < 0.1:
            vectors[self.which] = FLAWS[self.flaw](vectors[self.which])
        return upload.update(echo=vectors["echo"]), {"kept": vectors["kept"]}


FLAWS = {
    "not finite": lambda v: v * INF,
    "shape": lambda v: v[:1],
    "dtype": lambda v: v.double(),
    "norm": lambda v: torch.full_like(v, 1e30),
}


@pytest.mark.parametrize("kind", ["inline", "pool"])
@pytest.mark.parametrize(("flaw", "which"), [(f, "echo") for f in FLAWS] + [("shape", "kept"), ("dtype", "kept")])
def test_a_refused_client_leaves_everything_as_it_was_on_every_engine(kind, flaw, which):
    def after_two_rounds(part, second):
        task = problem(Method(part))
        state = first_state(task)
        with closing(Inline(task) if kind == "inline" else Pool(task, state, slots=4, workers=2)) as engine:
            for cohort in (range(4), second):
                state, report = conduct(task, state, engine, cohort)
            return state, report, [engine.memory[client]["kept"].clone() for client in range(4)]

    state, report, memory = after_two_rounds(Careless(5, which, flaw), [0, 1, 2, 3])
    expected, _, expected_memory = after_two_rounds(Careless(), [0, 1, 3])
    assert [(r.client, r.reason) for r in report.refused] == [(2, flaw)]
    assert same(state, expected)
    assert all(map(torch.equal, memory, expected_memory))


def test_refusals_are_named_in_the_metrics_and_counted_in_the_summary(tmp_path):
    method = Method(Careless(5, "echo", "not finite"))
    settings = dict(batch=1, epochs=1, lr=0.05, rounds=2, cohort=4, engine="inline", out=tmp_path / "run")
    result = train(federation((3, 4, 5, 6)), nn.Sequential(nn.Linear(2, 2)), method, **settings)
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    refused = [{"client": 2, "reason": "not finite", "detail": "echo has entries that are not finite"}]
    assert [line["refused"] for line in lines] == [refused, refused]
    assert [line["cohort"] for line in lines] == [[0, 1, 3]] * 2
    assert json.loads((tmp_path / "run/summary.json").read_text())["refused"] == {"not finite": 2}
    assert all(bool(p.isfinite().all()) for p in result.model.parameters())
