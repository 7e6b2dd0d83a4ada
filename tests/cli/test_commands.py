"""The command line as a user meets it: exit codes, files, one sentence for a mistake."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

TRAJECTORIES = Path(__file__).parents[1] / "trajectories"
QUICK = ["--set", "server.rounds=2", "--set", "engine.workers=1"]


class Done(NamedTuple):
    """What a command has left behind."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def fedflat(called_in, monkeypatch):
    """The command line in this process: one of its own takes seconds to import torch."""

    def call(*arguments, cwd):
        monkeypatch.setenv("FEDFLAT_DATA", str(cwd / "no-data"))
        return Done(*called_in(cwd)(*arguments))

    return call


def test_a_process_of_its_own_ends_with_one_sentence_too(tmp_path):
    environment = {**os.environ, "FEDFLAT_DATA": str(tmp_path)}
    command = [sys.executable, "-m", "fedflat.cli", "run", "--set", "data=cifar10"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (3, "")
    assert "cifar" in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_comparison_prints_what_is_trained_progress_and_a_table(fedflat, tmp_path):
    done = fedflat("run", "--method", "fedavg", "--method", "feddyn + man(0.15)", "--out", "both", *QUICK, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for text in (
        "mlp on digits, 20 clients (dirichlet alpha 0.1), 2 rounds",
        "settings other than the default: server.rounds = 2, engine.workers = 1",
        "every setting: both/fedavg/recipe.toml, or --verbose",
        "round 2/2  accuracy 0.",
        "feddyn + man(0.15)",
        "written to both",
    ):
        assert text in done.stdout
    assert "clip_mode = " not in done.stdout and len(done.stdout.splitlines()) < 20
    folders = sorted(p.name for p in (tmp_path / "both").iterdir())
    assert folders == ["fedavg", "feddyn-man-0.15"]
    again = fedflat("run", "both/fedavg/recipe.toml", "--json", cwd=tmp_path)
    first = json.loads((tmp_path / "both/fedavg/summary.json").read_text())
    assert json.loads(again.stdout)[0]["accuracy_last"] == first["accuracy_last"]
    assert (tmp_path / "runs/0001/metrics.jsonl").exists()


def test_the_table_of_a_run_follows_the_metric_of_its_task(fedflat, tmp_path):
    x = np.random.default_rng(0).normal(size=(40, 3)).astype("float32")
    np.savez(tmp_path / "x.npz", x_train=x, y_train=x[:, 0], x_test=x, y_test=x[:, 0])
    settings = ["data=arrays", "data.dir=x.npz", "data.normalise=false", "split=iid", "split.clients=2"]
    done = fedflat("run", *QUICK, *(word for field in settings for word in ("--set", field)), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    last = json.loads((tmp_path / "runs/0001/summary.json").read_text())["r2_last"]
    assert "r2 of the global model" in done.stdout and f"│ {last:.4f} │" in done.stdout
    assert "accuracy" not in done.stdout
    done = fedflat("split", *(word for field in settings for word in ("--set", field)), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == "fedflat: arrays: its labels are not classes, so no client's classes can be counted\n"


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["run", "--method", "fedsoam"], 2, "did you mean fedsam?"),
        (["run", "--set", "local.lr=-1"], 2, "local.lr = -1"),
        (["run", "--method", "nowhere:A"], 2, "method = 'nowhere:A': is code from outside of fedflat"),
        (["run", "nothing.toml"], 2, "nothing.toml: no such recipe file"),
        (["run", "--set", "data=cifar10"], 3, "cifar"),
        (["run", "--set", "data=cifar11"], 2, "did you mean cifar10?"),
        (["run", "--set", "model=mlq"], 2, "did you mean mlp?"),
        (["run", "--set", "split.clients=5000"], 4, "5000 clients"),
        (["run", "--set", "local.lr=1e9"], 5, "lower local.lr"),
        (["run", "--out", "file/below"], 6, "file/below: cannot be written"),
        (["verify", "missing.npz"], 1, "missing.npz: no such file"),
        (["data", "show", "svhn"], 3, "fedflat data get svhn"),
        (["rum"], 2, "rum"),
        (["split", "--draw", "nowhere/x.png"], 6, "nowhere/x.png"),
    ],
)
def test_a_mistake_is_one_sentence_and_an_exit_code(fedflat, tmp_path, arguments, code, sentence):
    (tmp_path / "file").write_text("")
    done = fedflat(*arguments, cwd=tmp_path)
    assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr
    assert sentence in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_one_set_may_be_followed_by_several_fields(fedflat, tmp_path):
    done = fedflat("recipe", "sol", "--set", "local.lr=0.5", "local.batch=7", "method=fedavg", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert {"lr = 0.5", "batch = 7", 'method = "fedavg"'} <= set(done.stdout.splitlines())


def test_a_split_is_printed_saved_and_drawn(fedflat, tmp_path):
    done = fedflat("split", "--save", "s.npz", "--draw", "s.png", "--set", "split.clients=7", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "7 clients, 1442 samples" in done.stdout
    with np.load(tmp_path / "s.npz") as saved:
        assert sum(array.size for array in (saved[name] for name in saved.files)) >= 1442
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")


def test_methods_data_and_recipes_can_be_listed(fedflat, tmp_path):
    assert "sharpness-aware" in fedflat("methods", cwd=tmp_path).stdout
    shown = fedflat("methods", "feddyn", cwd=tmp_path).stdout
    assert "w ← mean_S wᵢ + h̄" in shown
    assert "penalty = 0.1" in shown
    assert "fashion-mnist" in fedflat("data", "list", cwd=tmp_path).stdout
    facts = json.loads(fedflat("data", "show", "digits", "--json", cwd=tmp_path).stdout)
    assert (facts["train"] + facts["test"], facts["shape"]) == (1797, [1, 8, 8])
    assert 'name = "fedavg-cnn"' in fedflat("recipe", "sol", cwd=tmp_path).stdout


def test_verify_fails_when_a_file_deviates(fedflat, tmp_path):
    good, bad = TRAJECTORIES / "flsim-fedavg.npz", tmp_path / "bad.npz"
    with np.load(good) as file:
        np.savez(bad, **{name: file[name] for name in file.files if name != "weights"}, weights=file["weights"] + 1e-3)
    assert fedflat("verify", good, cwd=tmp_path).returncode == 0
    done = fedflat("verify", good, bad, cwd=tmp_path)
    assert done.returncode == 1
    assert "deviates" in done.stdout
    assert f"{bad} deviates in weights (1.00e-03)" in done.stdout
