"""The cost of a local step: a ratio of times that are taken in turns, and the column that a study reads."""

import json

import pytest

from fedflat.cli import app
from fedflat.recipe import load
from fedflat.rounds import Worker
from fedflat.runs import step_cost as timing
from fedflat.runs.build import prepare
from fedflat.runs.experiment import execute
from fedflat.runs.loading import load_run
from fedflat.runs.sweep.results import columns

SETTINGS = ["method=man(0.15)", "model.hidden=[8]", "split.clients=3", "server.rounds=1", "server.cohort=2",
            "local.steps=1", "local.batch=10", "engine.name=inline"]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    execute(prepare(load(None, SETTINGS)), folder)
    return folder


def test_the_command_gives_the_column_that_a_study_of_costs_reads(run, capsys):
    app(["cost", str(run), "--repeats", "1", "--steps", "1", "--json"], standalone_mode=False)
    answer = json.loads(capsys.readouterr().out)
    assert answer["method"].startswith("man(zeta=0.15") and answer["step_cost"] > 0
    assert columns(answer) == {"step_cost": answer["step_cost"]}
    app(["cost", str(run), "--repeats", "1", "--steps", "1"], standalone_mode=False)
    assert "a step of man(zeta=0.15" in capsys.readouterr().out


def test_it_is_the_median_of_ratios_without_the_first_of_the_method_and_a_plain_step_in_turns(run, monkeypatch):
    times, rounds = iter([90.0, 1.0, 2.0, 1.0, 30.0, 10.0, 10.0, 2.0]), []
    trained = Worker.local_round

    def followed(worker, sent, client, memory):
        rounds.append((worker.problem.method is problem.method, worker.problem.recipe.local.steps, client))
        return trained(worker, sent, client, memory)

    def seconds(job):
        job()
        return next(times)

    problem = load_run(run)
    monkeypatch.setattr(Worker, "local_round", followed)
    monkeypatch.setattr(timing, "_seconds", seconds)
    assert timing.step_cost(problem, repeats=3, steps=2) == 3.0, "of 2, 3 and 5"
    largest = max(range(3), key=lambda client: len(problem.federation.shards[client]))
    assert rounds == [(True, 2, largest), (False, 2, largest)] * 4
