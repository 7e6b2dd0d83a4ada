"""Clients that raise, hang, or take their worker with them: named, left out, and nobody else notices."""

import hashlib
import os
import random
import signal
import threading
import time
import warnings
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import nn

from fedflat import Dataset, Federation, Part, Samples, train
from fedflat.engine.inline import Inline
from fedflat.engine.pool import Pool
from fedflat.errors import TrainingError
from fedflat.methods.chain import Method
from fedflat.methods.parser import parse
from fedflat.models.vector import Network
from fedflat.recipe import Admission, Evaluation, Local
from fedflat.rounds.client import STAGES
from fedflat.rounds.server import conduct, first_state
from fedflat.rounds.setup import Problem

SIZES, BATCH = (3, 5, 7, 9, 11, 13), 2
COHORT, BAD = [0, 1, 2, 3, 4, 5], 2
OTHERS = [client for client in COHORT if client != BAD]
MARK = 1e6  # an input that only the bad client has


def federation(sizes=SIZES):
    """Clients with so many samples each; no two are alike, so the number of steps tells them apart."""
    chance = torch.Generator().manual_seed(0)
    inputs = torch.randn(sum(SIZES), 4, generator=chance)
    test = Samples(inputs.clone(), torch.arange(len(inputs)) % 3)
    ends = torch.tensor([0, *SIZES]).cumsum(0).tolist()
    inputs[ends[BAD], 0] = MARK
    # A larger client has its own samples many times.
    own = [torch.arange(start, stop).repeat(-(-size // (stop - start)))[:size]
           for (start, stop), size in zip(pairwise(ends), sizes, strict=True)]  # fmt: skip
    return Federation(Dataset("few", Samples(inputs, test.labels), test, 3, (), ()), tuple(own))


def plain():
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))


def problem(method, build=plain, sizes=SIZES, group=1):
    torch.manual_seed(0)
    return Problem.of(federation(sizes), Network(build()), method, Local(batch=BATCH, momentum=0.5), group=group)


def digest(*vectors):
    return hashlib.sha256(b"".join(vector.numpy().tobytes() for vector in vectors)).hexdigest()


def played(task, engine, cohort, limits=None):
    """A round with this cohort and one with the others after it; what is left of both, and the first one's report."""
    state, report = conduct(task, first_state(task), engine, cohort, limits=limits)
    state, after = conduct(task, state, engine, OTHERS)
    assert (after.cohort, after.refused) == (OTHERS, [])
    assert engine.memory[BAD] is None
    memory = [vector for client in OTHERS for vector in engine.memory[client].values()]
    return digest(state.weights, *state.vectors.values(), *memory), report


def undisturbed(build=plain, sizes=SIZES, group=1):
    """What is left of two rounds in which the bad client was never asked."""
    task = problem(parse("scaffold"), build, sizes, group)
    with closing(Inline(task)) as engine:
        return played(task, engine, OTHERS)[0]


# --------------------------------------------------------------------------------------------------------------------
# Mischief from inside
# --------------------------------------------------------------------------------------------------------------------


def fail():
    raise ValueError("no such thing")


def sleep():
    time.sleep(600)


DEEDS = {
    "raised": (fail, r"ValueError while {}: no such thing \(test_failures.py, line \d+\)"),
    "died": (lambda: os._exit(3), "its worker process died with exit code 3, while {}"),
    "hung": (sleep, "no answer after 0.6 s, while {}"),
}
LIMITS = Admission(deadline=0.6)


@dataclass(frozen=True)
class Mischief(Part):
    """Does something else at one stage of the bad client's turn."""

    deed: str = ""
    when: str = ""

    def plan(self, rule, sent, memory):
        self._act(rule, "planning")
        return rule

    def report(self, upload, sent, memory, outcome):
        self._act(outcome.rule, "reporting")
        return upload, memory

    def _act(self, rule, stage):
        if (rule.client, stage) == (BAD, self.when):
            DEEDS[self.deed][0]()


class Tripwire(nn.Module):
    """A net that does something else when it is trained on the bad client's samples."""

    def __init__(self, deed):
        super().__init__()
        self.deed, self.head = deed, nn.Linear(4, 3)

    def forward(self, x):
        if self.training and self.deed and bool((x == MARK).any()):
            DEEDS[self.deed][0]()
        return self.head(x)


def spoilt(deed, stage, group=1):
    """A problem in which the bad client does this at that stage."""
    method = Method(*parse("scaffold").parts, Mischief(deed, stage))
    return problem(method, partial(Tripwire, deed) if stage == "training" else plain, group=group)


@pytest.mark.parametrize("stage", STAGES[:3])
@pytest.mark.parametrize("deed", DEEDS)
def test_a_bad_client_is_named_with_its_stage_and_the_rest_is_as_if_it_had_not_been_asked(deed, stage):
    task = spoilt(deed, stage)
    with closing(Pool(task, first_state(task), slots=6, workers=2, deadline=LIMITS.deadline)) as engine:
        found, report = played(task, engine, COHORT, LIMITS)
        assert len(engine._workers) == 2
        assert all(process.is_alive() for _, process in engine._workers.values())
    assert [(r.client, r.reason) for r in report.refused] == [(BAD, deed)]
    assert_matches(report.refused[0].detail, DEEDS[deed][1].format(stage))
    assert found == undisturbed(partial(Tripwire, "") if stage == "training" else plain)


def assert_matches(text, pattern):
    with pytest.raises(ValueError, match=f"^{pattern}$"):
        raise ValueError(text)


@pytest.mark.parametrize("stage", ["planning", "reporting"])
@pytest.mark.parametrize("deed", DEEDS)
def test_the_same_holds_where_clients_share_their_steps(deed, stage):
    task = spoilt(deed, stage, group=3)
    with closing(Pool(task, first_state(task), slots=6, workers=2, deadline=LIMITS.deadline)) as engine:
        found, report = played(task, engine, COHORT, LIMITS)
    assert [(r.client, r.reason) for r in report.refused] == [(BAD, deed)]
    assert_matches(report.refused[0].detail, DEEDS[deed][1].format(stage))
    assert found == undisturbed(group=3)


@pytest.mark.parametrize("group", [1, 3])
def test_in_this_process_a_client_that_raises_is_left_out_as_well(group):
    task = spoilt("raised", "reporting", group)
    with closing(Inline(task)) as engine:
        found, report = played(task, engine, COHORT)
    assert [(r.client, r.reason) for r in report.refused] == [(BAD, "raised")]
    assert found == undisturbed(group=group)


class Branching(nn.Module):
    """A net that decides by a number, which several clients at once cannot."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        y = self.head(x)
        return 2 * y if bool(y.sum() > 0) else y


@pytest.mark.parametrize("workers", [0, 2])
def test_common_steps_that_fail_though_no_client_does_are_told_and_clients_train_one_by_one(workers):
    ends = []
    for group in (1, 3):
        task = problem(parse("scaffold"), Branching, group=group)
        engine = Pool(task, first_state(task), slots=6, workers=workers) if workers else Inline(task)
        told = r"RuntimeError while training: vmap: .*; engine.group = 1 does not try common steps"
        with closing(engine), nullcontext() if group == 1 else pytest.warns(UserWarning, match=told):
            state, report = conduct(task, first_state(task), engine, COHORT)
        assert (report.cohort, report.refused) == (COHORT, [])
        ends.append(digest(state.weights))
    assert ends[0] == ends[1]


@pytest.mark.parametrize("workers", [0, 2])
def test_the_reason_is_told_once_in_a_run_not_for_every_group_and_round(workers):
    task = problem(parse("scaffold"), Branching, group=3)
    state = first_state(task)
    engine = Pool(task, state, slots=6, workers=workers) if workers else Inline(task)
    with closing(engine), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(3):
            state, _ = conduct(task, state, engine, COHORT)
    assert len(told) == 1


@dataclass(frozen=True)
class Forgetful(Part):
    """The bad client wants to keep a vector of another size than the others."""

    def first_memory(self, initial):
        return {"last": torch.zeros_like(initial)}

    def report(self, upload, sent, memory, outcome):
        return upload, {"last": outcome.delta[: 1 if outcome.rule.client == BAD else None]}


@pytest.mark.parametrize("workers", [0, 2])
def test_common_steps_are_not_blamed_if_one_of_the_clients_is_refused_on_its_own(workers):
    task = problem(Method(Forgetful()), Branching, group=len(COHORT))
    engine = Pool(task, first_state(task), slots=6, workers=workers) if workers else Inline(task)
    with closing(engine), warnings.catch_warnings():
        warnings.simplefilter("error")
        _, report = conduct(task, first_state(task), engine, COHORT)
    assert report.cohort == OTHERS
    assert [(r.client, r.reason) for r in report.refused] == [(BAD, "shape")]


@pytest.mark.parametrize("deed", DEEDS)
def test_where_failures_stop_the_run_the_error_names_client_round_and_stage(deed):
    settings = dict(batch=BATCH, rounds=3, cohort=6, failures="stop", deadline=0.6, workers=2)
    named = rf"^client 2 in round 0: {deed}: {DEEDS[deed][1].format('planning')}"
    with pytest.raises(TrainingError, match=named):
        train(federation(), nn.Sequential(nn.Linear(4, 3)), Mischief(deed, "planning"), engine="pool", **settings)


def test_in_this_process_it_is_the_clients_own_error_with_a_note():
    task = spoilt("raised", "training")
    with closing(Inline(task)) as engine, pytest.raises(ValueError, match=r"^no such thing") as caught:
        conduct(task, first_state(task), engine, COHORT, limits=Admission(failures="stop"))
    (note,) = caught.value.__notes__
    assert note.startswith("client 2 in round 0: raised: ValueError while training: no such thing (test_failures.py")


# --------------------------------------------------------------------------------------------------------------------
# Mischief from outside: a client with so many samples that its turn never ends
# --------------------------------------------------------------------------------------------------------------------

ENDLESS = tuple(1_000_000 if client == BAD else size for client, size in enumerate(SIZES))


def kill_one(engine):
    """SIGKILL to the first worker that is at the training of one client for a quarter of a second."""
    busy, stages = engine._shared.busy[0], engine._shared.stage
    before = {}
    for _ in range(400):
        workers = dict(engine._workers.values())
        now = {n: int(busy[n]) for n in workers if int(busy[n]) and STAGES[int(stages[n])] == "training"}
        for number, _ in now.items() & before.items():
            os.kill(workers[number].pid, signal.SIGKILL)
            return
        before = now
        time.sleep(0.25)


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_a_worker_killed_from_outside_costs_one_client_its_round(start):
    task = problem(parse("scaffold"), sizes=ENDLESS)
    with closing(Pool(task, first_state(task), slots=6, workers=2, start=start)) as engine:
        killer = threading.Thread(target=kill_one, args=(engine,), daemon=True)
        killer.start()
        found, report = played(task, engine, COHORT)
        killer.join()
    assert [(r.client, r.reason) for r in report.refused] == [(BAD, "died")]
    assert report.refused[0].detail == "its worker process died with exit code -9, while training"
    assert found == undisturbed(sizes=ENDLESS)


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_a_client_past_its_deadline_is_named_within_two_seconds(start):
    task, limits = problem(parse("scaffold"), sizes=ENDLESS), Admission(deadline=1.0)
    with closing(Pool(task, first_state(task), slots=6, workers=2, deadline=1.0, start=start)) as engine:
        conduct(task, first_state(task), engine, OTHERS)  # so that spawned workers have started
        begun = time.monotonic()
        _, report = conduct(task, first_state(task), engine, COHORT, limits=limits)
        assert time.monotonic() - begun < limits.deadline + 2
        assert [(r.client, r.detail) for r in report.refused] == [(BAD, "no answer after 1 s, while training")]
        assert report.cohort == OTHERS


class Mortal(nn.Module):
    """A net that takes its worker with it, in training or in evaluation, as often as it finds a file to remove."""

    def __init__(self, folder, training):
        super().__init__()
        self.folder, self.mode, self.net = folder, training, plain()

    def forward(self, x):
        for file in self.folder.iterdir() if self.training == self.mode else ():
            with suppress(FileNotFoundError):  # another worker was faster
                file.unlink()
                os._exit(3)
        return self.net(x)


def deaths(folder, count):
    for number in range(count):
        (folder / str(number)).touch()


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_lost_while_scoring_change_no_score(tmp_path, workers):
    task = problem(parse("fedavg"), lambda: Mortal(tmp_path, training=False))
    state = first_state(task)
    with closing(Pool(task, state, slots=6, workers=workers)) as engine:
        before = engine.score(state, "test", 5)
        deaths(tmp_path, 2)
        again = replace(state, weights=state.weights.clone())
        assert engine.score(again, "test", 5) == before
        assert not [*tmp_path.iterdir()]


def test_an_evaluation_that_kills_every_worker_is_an_error_that_names_its_samples(tmp_path):
    task = problem(parse("fedavg"), lambda: Mortal(tmp_path, training=False))
    deaths(tmp_path, 100)
    named = "evaluation of test samples 0 to 48: its worker process died with exit code 3, while evaluating"
    pool = Pool(task, first_state(task), slots=6, workers=2)
    with closing(pool), pytest.raises(TrainingError, match=named):
        pool.score(first_state(task), "test", 500)


def test_clients_that_share_steps_go_together_once_more_when_their_worker_is_lost(tmp_path):
    task = problem(parse("scaffold"), lambda: Mortal(tmp_path, training=True), group=3)
    digests = set()
    for count in (0, 1):
        deaths(tmp_path, count)
        with closing(Pool(task, first_state(task), slots=6, workers=2)) as engine:
            state, report = conduct(task, first_state(task), engine, COHORT)
        assert (report.cohort, report.refused, [*tmp_path.iterdir()]) == (COHORT, [], [])
        digests.add(digest(state.weights))
    assert len(digests) == 1


# --------------------------------------------------------------------------------------------------------------------
# Delays
# --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dawdle(Part):
    """Takes its time, and never the same."""

    seconds: float = 0.01

    def plan(self, rule, sent, memory):
        time.sleep(random.SystemRandom().random() * self.seconds)
        return rule


@pytest.mark.parametrize("group", [1, 2])
def test_delays_and_the_number_of_workers_do_not_change_a_bit(group):
    method = Method(*parse("scaffold + median").parts, Dawdle())
    settings = dict(model="mlp", model_hidden=[5], method=method, rounds=5, cohort=4, batch=BATCH, group=group)
    digests = set()
    for engine in (dict(engine="inline"), *(dict(engine="pool", workers=n) for n in (1, 2, 4))):
        result = train(federation(), **settings, **engine)
        digests.add(digest(*(p.detach() for p in result.model.parameters())))
    assert len(digests) == 1


def test_near_the_deadline_a_client_is_merged_or_refused_and_never_lost():
    task, limits = problem(Method(Dawdle(0.06))), Admission(deadline=0.03)
    state, ends = first_state(task), set()
    with closing(Pool(task, state, slots=6, workers=2, deadline=0.03)) as engine:
        for _ in range(15):
            after, report = conduct(task, state, engine, OTHERS, limits=limits)
            assert sorted(report.cohort + [r.client for r in report.refused]) == OTHERS
            assert {r.reason for r in report.refused} <= {"hung"}
            ends.add((digest(after.weights), *report.cohort))
    with closing(Inline(task)) as engine:
        for found, *cohort in ends:
            after = conduct(task, state, engine, cohort)[0] if cohort else state
            assert found == digest(after.weights)


def test_measures_are_those_of_the_clients_that_are_left():
    limits, watch = Admission(), Evaluation(measures=["consistency", "divergence", "discord"])
    reports = []
    for task, cohort in ((spoilt("raised", "planning"), COHORT), (problem(parse("scaffold")), OTHERS)):
        with closing(Inline(task)) as engine:
            reports.append(conduct(task, first_state(task), engine, cohort, watch=watch, limits=limits)[1])
    assert reports[0].measures == reports[1].measures
    assert (reports[0].cohort, reports[0].local_loss) == (reports[1].cohort, reports[1].local_loss)
