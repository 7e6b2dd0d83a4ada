"""Runs that are killed, stopped, begun twice or made longer: real processes, and results to the bit."""

import contextlib
import os
import runpy
import signal
import sys
import time
from pathlib import Path

import pytest
from torch import nn

from fedflat import train
from fedflat.errors import RunError, TrainingError
from fedflat.recipe import load
from fedflat.runs.build import prepare
from fedflat.runs.experiment import execute
from fedflat.runs.manifest import verified
from forking import Command, until

CRASH = Path(__file__).parents[2] / "benchmarks" / "crash.py"
TINY = ["model.hidden=[8]", "split.clients=6", "server.cohort=3", "server.rounds=5", "checkpoint.every=2",
        "local.steps=3"]  # fmt: skip
HELD = '''
import time
from pathlib import Path
from torch import nn

class Held(nn.Module):
    """It waits while there is a file `hold`, and says so by a file `waits`: rounds as long as a test wants."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, x):
        while Path("hold").exists():
            Path("waits").touch()
            time.sleep(0.01)
        return self.layer(x.flatten(1))
'''

crash = runpy.run_path(str(CRASH))
outcome = crash["outcome"]


@pytest.fixture
def fedflat(tmp_path, digits):
    """Starts commands in a folder with a model that can be held; none outlives the test."""
    (tmp_path / "held_rounds.py").write_text(HELD)
    started = []

    def start(*arguments):
        started.append(Command(tmp_path, *arguments))
        return started[-1]

    yield start
    for command in started:
        command.close()


def lines(folder):
    metrics = folder / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else -1


def held(*settings):
    """Arguments of a run whose rounds can be held, and which is saved only when it stops."""
    held = ("model=held_rounds:Held", "split.clients=4", "local.steps=3", "engine.workers=2", "checkpoint.every=100000")
    return ["run", "--trust", "--set", *held, *settings]


def hold(folder):
    """Once this returns, the run is within a round, and stays there."""
    until(lambda: lines(folder / "run") > 0)
    (folder / "hold").touch()
    until((folder / "waits").exists)


def settle(folder, *settings, resume=False, callbacks=()):
    """A run in this process, from its beginning or from where it stopped."""
    problem = prepare(load(None, [*TINY, "engine=inline", *settings]))
    return execute(problem, folder, callbacks, resume)


class PowerCutError(Exception):
    pass


def cut_after(round):
    def callback(record):
        if record["round"] == round:
            raise PowerCutError

    return callback


def test_runs_that_were_killed_end_as_if_nothing_had_happened(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["crash.py", "--kills", "8"])
    assert crash["main"]() == 0, capsys.readouterr().out
    assert "8 of 8 equal" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("number", "engine", "code"),
    [(signal.SIGINT, "inline", 130), (signal.SIGINT, "pool", 130), (signal.SIGTERM, "pool", 143)],
)
def test_a_signal_lets_the_round_finish_saves_it_and_says_how_to_go_on(fedflat, tmp_path, number, engine, code):
    run = fedflat(*held("server.rounds=100000", f"engine={engine}"), "--out", "run")
    hold(tmp_path)
    run.signal(number)
    until(lambda: "stopping after this round is finished and saved" in run.said.read_text())
    assert run.runs
    (tmp_path / "hold").unlink()
    assert run.ended()[0] == code
    done = lines(tmp_path / "run")
    assert f"stopped after round {done} of 100000; continue with: fedflat resume run" in run.ended()[1]
    assert [path.name for path in (tmp_path / "run/checkpoints").glob("*.json")] == [f"{done:08}.json"]
    longer = f"server.rounds={done + 1}"
    assert fedflat("resume", "run", "--trust", "--set", longer).ended()[0] == 0
    assert fedflat(*held(longer, "engine=inline"), "--out", "whole").ended()[0] == 0
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


@pytest.mark.parametrize("engine", ["inline", "pool"])
def test_a_second_sigint_stops_at_once(fedflat, tmp_path, engine):
    run = fedflat(*held("server.rounds=100000", f"engine={engine}"), "--out", "run")
    hold(tmp_path)
    run.signal(signal.SIGINT)
    until(lambda: "interrupt again to stop at once" in run.said.read_text())
    run.signal(signal.SIGINT)
    code, said = run.ended()
    assert (code, "interrupted" in said, "Traceback" in said) == (130, True, False)
    assert not (tmp_path / "run/checkpoints").exists()


def test_a_run_is_worked_on_by_one_process_only_and_free_once_that_is_gone(fedflat, tmp_path):
    first = fedflat(*held("server.rounds=100000", "engine=pool"), "--out", "run")
    until(lambda: lines(tmp_path / "run") > 0)
    code, said = fedflat("resume", "run", "--trust").ended()
    assert (code, "run: another process is working on this run" in said, first.runs) == (6, True, True)
    first.signal(signal.SIGKILL)
    first.ended()
    longer = f"server.rounds={lines(tmp_path / 'run') + 1}"
    assert fedflat("resume", "run", "--trust", "--set", longer).ended()[0] == 0
    assert fedflat(*held(longer, "engine=inline"), "--out", "whole").ended()[0] == 0
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_anew(tmp_path):
    settle(tmp_path / "whole")
    with pytest.raises(PowerCutError):
        settle(tmp_path / "run", "checkpoint.every=100", callbacks=[cut_after(3)])
    assert (lines(tmp_path / "run"), (tmp_path / "run/checkpoints").exists()) == (3, False)
    settle(tmp_path / "run", resume=True)
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


@pytest.mark.parametrize("method", ["moon", "fedlesam_d", "swa(start=1, every=2)", "fedcm", "feddc"])
def test_a_run_goes_on_with_more_workers_and_ends_the_same(tmp_path, method):
    settle(tmp_path / "whole", f"method={method}")
    with pytest.raises(PowerCutError):
        settle(tmp_path / "run", f"method={method}", callbacks=[cut_after(3)])
    settle(tmp_path / "run", f"method={method}", "engine=pool", "engine.workers=2", resume=True)
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


def test_a_model_and_a_federation_made_in_python_go_on_too(digits, tmp_path):
    layers = nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10)
    arguments = dict(model=nn.Sequential(nn.Flatten(), *layers), method="feddyn", model_buffers="local", batch=0)
    settings = dict(rounds=4, cohort=3, checkpoint_every=1, engine="inline")
    whole = train(digits, **arguments, **settings, out=tmp_path / "whole")
    with pytest.raises(PowerCutError):
        train(digits, **arguments, **settings, out=tmp_path / "run", callbacks=[cut_after(3)])
    told = []
    resumed = train(digits, **arguments, **settings, out=tmp_path / "run", resume=True, callbacks=[told.append])
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")
    assert [record["round"] for record in told] == [3, 4]
    assert [record["accuracy"] for record in resumed.history] == [record["accuracy"] for record in whole.history]


def test_resuming_a_finished_run_changes_nothing_but_clears_up_after_a_process_that_was_killed(fedflat, tmp_path):
    settle(tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    (tmp_path / "run/.model.safetensors.4194305").write_bytes(b"half of it")
    code, said = fedflat("resume", "run").ended()
    assert (code, "fedavg" in said) == (0, True)
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


def test_a_run_that_stopped_by_its_loss_is_finished_and_an_interrupted_one_stops_at_the_same_round(fedflat, tmp_path):
    losses = [r["train_loss"] for r in settle(tmp_path / "probe", "server.stop_loss=1e-9").history]
    assert sorted(losses, reverse=True) == losses
    stop = f"server.stop_loss={(losses[2] + losses[3]) / 2}"
    settle(tmp_path / "whole", stop)
    assert lines(tmp_path / "whole") == 4
    for round in (3, 4):  # before the round that stops it, and in that round before it is saved
        with pytest.raises(PowerCutError):
            settle(tmp_path / f"run{round}", stop, callbacks=[cut_after(round)])
        settle(tmp_path / f"run{round}", stop, "engine=pool", "engine.workers=2", resume=True)
        assert outcome(tmp_path / f"run{round}") == outcome(tmp_path / "whole")
    before = {path: path.read_bytes() for path in (tmp_path / "whole").rglob("*") if path.is_file()}
    code, said = fedflat("resume", "whole").ended()
    assert (code, "whole: finished after round 4 of at most 5: training loss" in said) == (0, True)
    assert {path: path.read_bytes() for path in (tmp_path / "whole").rglob("*") if path.is_file()} == before
    assert fedflat("resume", "whole", "--set", "server.stop_loss=1e-9").ended()[0] == 0
    assert outcome(tmp_path / "whole") == outcome(tmp_path / "probe")


def test_a_run_can_be_made_longer_but_not_shorter_than_it_is(fedflat, tmp_path):
    settle(tmp_path / "run", "method=scaffold", "server.rounds=3")
    settle(tmp_path / "whole", "method=scaffold")
    assert fedflat("resume", "run", "--set", "server.rounds=5").ended()[0] == 0
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")
    recipe = (tmp_path / "run/recipe.toml").read_text()
    code, said = fedflat("resume", "run", "--set", "server.rounds=4").ended()
    assert (code, "run: has done 5 rounds already" in said) == (6, True)
    assert (tmp_path / "run/recipe.toml").read_text() == recipe


def test_an_empty_directory_is_a_run_that_has_yet_to_begin(fedflat, tmp_path):
    (tmp_path / "run").mkdir()
    code, said = fedflat("resume", "run").ended()
    assert (code, "run: no run is here" in said) == (6, True)
    code, said = fedflat("run", "--resume").ended()
    assert (code, "--resume: name the run to continue with --out" in said) == (2, True)
    settings = ["--set", *TINY, "engine=inline"]
    assert fedflat("run", *settings, "--out", "run", "--resume").ended()[0] == 0
    settle(tmp_path / "whole")
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


def test_a_comparison_is_resumed_with_the_methods_that_are_left(fedflat, tmp_path):
    settle(tmp_path / "both/fedavg")
    settings = ["--set", *TINY, "engine=inline", "--method", "fedavg", "--method", "scaffold", "--out", "both"]
    code, said = fedflat("run", *settings).ended()
    assert (code, "both/fedavg: already holds a run; continue it with `fedflat resume" in said) == (6, True)
    assert fedflat("run", *settings, "--resume").ended()[0] == 0
    settle(tmp_path / "whole", "method=scaffold")
    assert outcome(tmp_path / "both/scaffold") == outcome(tmp_path / "whole")


def test_a_run_is_resumed_with_the_recipe_that_it_began_with(tmp_path):
    settle(tmp_path / "run", "server.rounds=2")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    for other, sentence in (
        ("local.lr=0.5", r"run: was begun with local\.lr = 0\.1, not 0\.5; resume it as it was, or start a new run"),
        ("method=fedsam", r"run: was begun with method = 'fedavg', not 'fedsam\(rho=0\.1\)'"),
    ):
        with pytest.raises(RunError, match=sentence):
            settle(tmp_path / "run", other, resume=True)
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


def test_skipped_rounds_in_a_row_are_counted_across_an_interruption(tmp_path):
    skipping = ["admission.quorum=4", "admission.patience=3", "checkpoint.every=1"]
    with pytest.raises(PowerCutError):
        settle(tmp_path, *skipping, callbacks=[cut_after(3)])
    assert verified(max(tmp_path.glob("checkpoints/*.json"))).round == 2
    with pytest.raises(TrainingError, match="3 rounds in a row were skipped"):
        settle(tmp_path, *skipping, resume=True)
    assert lines(tmp_path) == 3


def test_a_signal_to_the_whole_group_as_batch_systems_send_it_costs_no_client(fedflat, tmp_path):
    arguments = ["--set", "server.rounds=200", "engine.workers=2", "engine.group=1", "checkpoint.every=1"]
    run = fedflat("run", *arguments, "--out", "run")
    metrics = tmp_path / "run" / "metrics.jsonl"
    until(lambda: metrics.exists() and metrics.stat().st_size)
    os.killpg(run.pid, signal.SIGTERM)
    code, said = run.ended()
    assert code == 143, said
    assert "continue with: fedflat resume run" in said
    assert "refused" not in metrics.read_text()


@pytest.mark.parametrize("patience", [3, 100])
def test_a_run_whose_every_round_is_skipped_has_trained_nothing_and_says_so(fedflat, tmp_path, patience):
    skipping = ["admission.quorum=4", f"admission.patience={patience}", "server.rounds=2", "engine=inline"]
    code, said = fedflat("run", "--set", *TINY, *skipping, "--out", "run").ended()
    assert code == 5 and "all 2 rounds were skipped, so nothing was trained; in the last one: " in said
    assert not (tmp_path / "run/summary.json").exists() and "Traceback" not in said
    code, said = fedflat("resume", "run").ended()
    assert code == 5 and "all 2 rounds were skipped" in said


def test_workers_do_not_outlive_a_killed_server_not_even_within_a_local_round(fedflat, tmp_path):
    run = fedflat(*held("server.rounds=100000", "engine=pool"), "--out", "run")
    hold(tmp_path)
    group = run.pid
    assert len(members(group)) == 3
    run.signal(signal.SIGKILL)
    run.ended()
    deadline = time.monotonic() + 5  # the round would last for as long as the file `hold` is there
    while members(group) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert (tmp_path / "hold").exists() and not members(group)


def members(group):
    """The processes of a group that are at work."""
    found = []
    for place in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, number = place.read_text().rpartition(")")[2].split()[:3]
            found += [int(place.parent.name)] * (int(number) == group and state != "Z")
    return found
