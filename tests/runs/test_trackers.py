"""Trackers: what TensorBoard, MLflow and W&B hold of a run, read back from their own files."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedflat import train
from fedflat.errors import RecipeError
from fedflat.recipe import Recipe, load
from fedflat.runs.build import prepare
from fedflat.runs.experiment import execute
from fedflat.runs.trackers import Trackers, check_trackers, parameters
from forking import Command, until

QUICK = ["engine=inline", "checkpoint.every=3", "local.epochs=1"]
HERE = bool(find_spec("wandb"))


@pytest.fixture(autouse=True)
def no_mlflow_of_the_user(monkeypatch):
    for variable in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID", "WANDB_MODE"):
        monkeypatch.delenv(variable, raising=False)


def tracked(run, trackers, rounds=3, callbacks=(), warn=pytest.fail):
    changes = [f"server.rounds={rounds}", f"trackers={json.dumps(trackers)}", *QUICK]
    problem = prepare(load(None, changes))
    return execute(problem, run, callbacks, resume=True, warn=warn)


def events(run):
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    files = (run / "tensorboard").iterdir()
    found = [Event.FromString(raw) for file in files for raw in RawEventFileLoader(str(file)).Load()]
    return sorted(found, key=lambda event: event.wall_time)


def steps(run, tag="local_loss"):
    """The round of every point of a curve, in the order in which they were written."""
    return [event.step for event in events(run) if any(value.tag == tag for value in event.summary.value)]


def mlflow_of(run):
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=(run / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("fedflat")
    (only,) = client.search_runs([experiment.experiment_id])
    return client, only


def test_tensorboard_shows_every_number_of_every_round(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    history = tracked(tmp_path, ["tensorboard"]).history
    seen = EventAccumulator(str(tmp_path / "tensorboard"))
    seen.Reload()
    assert {"accuracy", "loss", "consistency", "bytes_up", "seconds", "refused"} <= {*seen.Tags()["scalars"]}
    for name in ("accuracy", "loss", "local_loss", "consistency", "bytes_up", "bytes_down", "seconds"):
        shown = [(point.step, point.value) for point in seen.Scalars(name)]
        assert shown == [(record["round"], pytest.approx(record[name], rel=1e-6)) for record in history]
    assert [point.value for point in seen.Scalars("refused")] == [0, 0, 0]


def test_tensorboard_has_the_recipe_as_parameters_and_the_summary_as_text(tmp_path):
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    result = tracked(tmp_path, ["tensorboard"])
    values = {value.tag: value for event in events(tmp_path) for value in event.summary.value}
    plugin = values["_hparams_/session_start_info"].metadata.plugin_data
    chosen = HParamsPluginData.FromString(plugin.content).session_start_info.hparams
    assert (chosen["local.lr"].number_value, chosen["split.name"].string_value) == (0.1, "dirichlet")
    assert result.recipe.to_toml() in values["recipe"].tensor.string_val[0].decode()
    assert f"| accuracy_best | {result.summary['accuracy_best']} |" in values["summary"].tensor.string_val[0].decode()


def test_mlflow_holds_parameters_curves_and_summary_in_its_own_store(tmp_path):
    result = tracked(tmp_path, ["mlflow"])
    client, run = mlflow_of(tmp_path)
    assert run.info.status == "FINISHED"
    assert run.data.params == {name: str(value) for name, value in parameters(result.recipe).items()}
    for name in ("accuracy", "local_loss", "bytes_up"):
        curve = [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, name)]
        assert curve == result.curve(name)
    assert run.data.metrics["summary/accuracy_best"] == result.summary["accuracy_best"]


def test_a_run_that_crashed_goes_on_in_the_same_tracks_and_writes_no_round_twice(tmp_path):
    def crash(record):
        if record["round"] == 5:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        tracked(tmp_path, ["tensorboard", "mlflow"], 6, [crash])
    assert mlflow_of(tmp_path)[1].info.status == "FAILED"
    assert steps(tmp_path) == [1, 2, 3, 4]  # and the checkpoint is of round 3: the fourth is done again
    tracked(tmp_path, ["tensorboard", "mlflow"], 6)
    tracked(tmp_path, ["tensorboard", "mlflow"], 6)
    client, run = mlflow_of(tmp_path)
    assert run.info.status == "FINISHED"
    assert [point.step for point in client.get_metric_history(run.info.run_id, "local_loss")] == [1, 2, 3, 4, 5, 6]
    assert steps(tmp_path) == [1, 2, 3, 4, 5, 6]
    assert steps(tmp_path, "summary") == [6]


def test_a_killed_process_and_its_successor_write_each_round_once(tmp_path):
    options = ["--set", "trackers=tensorboard", *QUICK, "engine.workers=1"]
    begun = Command(tmp_path, "run", "--out", "run", *options, "server.rounds=2000")
    metrics = tmp_path / "run/metrics.jsonl"
    until(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") > 7)
    begun.close()
    rounds = metrics.read_bytes().count(b"\n") + 2
    code, said = Command(tmp_path, "resume", "run", "--set", f"server.rounds={rounds}").ended()
    assert code == 0, said
    assert steps(tmp_path / "run") == [*range(1, rounds + 1)]


@settings(max_examples=15, deadline=None)
@given(sessions=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=5))
def test_however_often_a_run_is_interrupted_each_round_is_told_once(sessions):
    recipe, told = Recipe(trackers=["tensorboard"]), 0
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder)
        for back, ahead in sessions:
            with Trackers(recipe, run, pytest.fail) as trackers:
                for round in range(max(told - back, 0) + 1, told + ahead + 1):
                    trackers({"round": round, "local_loss": 1.0})
            told += ahead
        assert steps(run) == [*range(1, told + 1)]


def test_a_tracker_that_joins_a_run_later_is_told_of_the_rounds_before(tmp_path):
    tracked(tmp_path, [], 3)
    assert not (tmp_path / "trackers.json").exists()
    tracked(tmp_path, ["tensorboard"], 5)
    assert steps(tmp_path) == [1, 2, 3, 4, 5]


def test_a_server_that_cannot_be_reached_costs_a_sentence_and_not_the_run(tmp_path, monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    warned = []
    result = tracked(tmp_path, ["mlflow", "tensorboard"], warn=warned.append)
    (sentence,) = warned
    assert sentence.startswith("trackers: mlflow is off, the run continues without it")
    assert address.removeprefix("http://").partition(":")[0] in sentence
    assert "\n" not in sentence
    assert len(result.history) == 3
    assert steps(tmp_path) == [1, 2, 3]


def test_a_store_that_vanishes_during_the_run_turns_off_its_tracker_only(tmp_path):
    def vanish(record):
        if record["round"] == 2:
            shutil.rmtree(tmp_path / "mlruns")

    warned = []
    result = tracked(tmp_path, ["mlflow", "tensorboard"], 4, [vanish], warned.append)
    assert len(warned) == 1 and "trackers: mlflow is off" in warned[0]
    assert len(result.history) == 4
    assert steps(tmp_path) == [1, 2, 3, 4]


def test_without_trackers_none_of_their_packages_is_loaded(tmp_path):
    code = (
        "import sys, fedflat\n"
        "fedflat.train(fedflat.federate('digits', 'iid', 4), rounds=1, engine='inline', out='run')\n"
        "assert not {'tensorboard', 'mlflow', 'wandb'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=120)


def test_a_tracker_can_be_asked_for_from_python(tmp_path, digits):
    train(digits, rounds=2, engine="inline", trackers=["tensorboard"], out=tmp_path)
    assert steps(tmp_path) == [1, 2]


def test_a_tracker_without_a_run_directory_is_refused(digits):
    with pytest.raises(RecipeError, match="trackers: they need a run directory; set out="):
        train(digits, rounds=1, trackers=["tensorboard"])


def test_a_tracker_may_be_a_bare_name_and_an_unknown_one_is_named():
    assert load(None, ["trackers=mlflow"]).trackers == ["mlflow"]
    with pytest.raises(RecipeError, match=r"^trackers = 'tensorbord': input should be 'tensorboard', 'mlflow' or"):
        load(None, ["trackers=tensorbord"])


def test_trackers_are_no_part_of_what_the_numbers_depend_on():
    assert load(None, ["trackers=mlflow"]).essentials() == load(None).essentials()


@pytest.mark.skipif(HERE, reason="wandb is installed")
def test_a_missing_package_is_named_even_where_a_folder_has_its_name(tmp_path, monkeypatch):
    (tmp_path / "wandb").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RecipeError, match=r"^trackers: wandb is not installed; pip install 'fedflat\[wandb\]'$"):
        check_trackers(Recipe(trackers=["wandb"]), tmp_path)


@pytest.mark.skipif(not HERE, reason="wandb is not installed")
def test_wandb_writes_offline_and_a_resumed_run_keeps_its_id(tmp_path):
    tracked(tmp_path, ["wandb"], 2)
    tracked(tmp_path, ["wandb"], 4)
    identity = json.loads((tmp_path / "trackers.json").read_text())["wandb"]
    assert identity["round"] == 4
    files = [*(tmp_path / "wandb").glob("offline-run-*/run-*.wandb")]
    assert {file.name for file in files} == {f"run-{identity['id']}.wandb"}
    assert all(os.path.getsize(file) > 1000 for file in files)
