"""The commands about several models: what they print, write and refuse."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from fedflat.flatness import Film, Portion, Trajectory
from fedflat.recipe import load
from fedflat.runs.build import prepare
from fedflat.runs.experiment import execute
from fedflat.runs.loading import load_run

TINY = ["split.clients=5", "split.alpha=0.5", "model.hidden=[8]", "server.rounds=4", "engine=inline"]
QUICK = ("--samples", "100", "--points", "5")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    base = tmp_path_factory.mktemp("runs")
    for name, settings in {"one": ["seed=0"], "two": ["seed=1", "split.seed=0"], "few": ["checkpoint.keep=0"]}.items():
        execute(prepare(load(None, [*TINY, "checkpoint.keep=2", *settings])), base / name)
    return base


@pytest.fixture
def fedflat(finished, called_in):
    return called_in(finished)


@pytest.fixture
def read(fedflat):
    def call(*arguments):
        code, printed, complaint = fedflat(*arguments, "--json")
        assert code == 0, complaint
        return json.loads(printed)

    return call


def value(run, weights=None):
    objective = Portion(100).pooled(load_run(Path(run)))
    return objective.value()


def test_a_path_begins_and_ends_at_its_models_and_matching_helps_two_seeds(fedflat, read):
    found = read("path", "one", "two", "--match", *QUICK, "-o", "path.png")["paths"]
    plain, matched = found["as trained"], found["matched"]
    assert plain["losses"][0] == matched["losses"][0] == pytest.approx(value("one"))
    assert matched["losses"][-1] == pytest.approx(plain["losses"][-1], rel=1e-5)
    assert matched["distance"] < plain["distance"]
    chord = np.linspace(plain["losses"][0], plain["losses"][-1], 5)
    assert plain["barrier"] == pytest.approx((np.array(plain["losses"]) - chord).max(), abs=1e-9)
    assert Path("path.png").read_bytes().startswith(b"\x89PNG")
    code, printed, _ = fedflat("path", "one@2", "one", *QUICK)
    assert code == 0 and "barrier" in printed and "one@2" in printed


def test_a_trajectory_is_written_drawn_and_ends_at_the_loss_of_the_run(fedflat, read):
    found = read("trajectory", "one", *QUICK, "-o", "way.png")
    assert found["rounds"] == [0, 2, 4] and found["local_round"] == 3
    assert found["losses"][-1] == pytest.approx(value("one"), rel=1e-5) == pytest.approx(found["centre"], rel=1e-5)
    assert len(found["clients"]) == len(found["clients_path"])
    assert Trajectory.load("one/trajectory.npz").path.tolist() == found["path"]
    assert Path("way.png").read_bytes().startswith(b"\x89PNG")
    code, printed, _ = fedflat("trajectory", "few", "--plane", "clients", *QUICK)
    assert code == 0 and "average" in printed
    seen = Trajectory.load("few/trajectory.npz")
    assert sorted(seen.clients_off)[1] < 1e-5  # the plane goes through two of them


def test_an_animation_has_the_kept_rounds_and_is_written_for_the_page(fedflat):
    code, printed, complaint = fedflat("animate", "one", "two", *QUICK, "-o", "film.gif")
    assert code == 0, complaint
    assert "0, 2, 4" in printed and Path("film.gif").read_bytes().startswith(b"GIF89a")
    film = Film.load("two/landscapes-eigen.npz")
    assert film.rounds == [0, 2, 4] and film.landscapes[-1].centre == pytest.approx(value("two"), rel=1e-5)
    code, _, _ = fedflat("report", "one", "two", "-o", "page.html")
    assert code == 0 and b'type="range"' in Path("page.html").read_bytes()


def test_a_rescaled_run_computes_the_same_and_only_the_invariant_stays(fedflat, read):
    found = read("rescale", "one", "--samples", 100, "--factor", 4)
    before, after = found["before"], found["after"]
    assert found["outputs"] == 0  # a power of two
    assert after["loss"] == before["loss"]
    assert after["adaptive_sharpness"] == pytest.approx(before["adaptive_sharpness"], rel=1e-4)
    assert after["top_eigenvalue"] > 1.5 * before["top_eigenvalue"]
    code, printed, _ = fedflat("rescale", "one", "--samples", 100)
    assert code == 0 and "scale-invariant" in printed and "λ1" in printed


def test_flatness_is_kept_beside_the_run_with_the_invariant_next_to_the_top_eigenvalue(fedflat):
    code, printed, _ = fedflat("flatness", "one", "--samples", 100, "--k", 1)
    assert code == 0
    rows = [line for line in printed.splitlines() if line.startswith("│")]
    assert rows[1].startswith("│ λ1 ") and "adaptive (scale-invariant)" in rows[2]
    assert json.loads(Path("one/flatness.json").read_text())["samples"] > 0


def test_several_seeds_are_runs_of_their_own(fedflat, tmp_path):
    settings = [each for setting in TINY for each in ("--set", setting)]
    code, _, complaint = fedflat("run", *settings, "--set", "server.rounds=1", "--seeds", 2, "--out", tmp_path / "s")
    assert code == 0, complaint
    models = [load_run(tmp_path / "s" / f"fedavg-seed-{seed}").network.weights for seed in (0, 1)]
    assert not torch.equal(*models)


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["path", "one", "nowhere"], 6, "nowhere: no run is here"),
        (["path", "one@3", "two"], 6, "one@3: no checkpoint of that round is kept"),
        (["path", "one", "two", "--points", "2"], 2, "'--points': 2"),
        (["trajectory", "few", *QUICK], 2, "do not span a plane; keep more of them by checkpoint.keep"),
        (["trajectory", "one", "--plane", "clients", "--no-clients"], 2, "leave --no-clients out"),
        (["animate", "one", "-o", "film.png"], 2, "an animation is written as .gif or .mp4"),
        (["rescale", "one", "--factor", "-1"], 2, "the factor is -1.0"),
        (["rescale", "one", "--layer", "head"], 2, "'head' cannot be rescaled; choose one of fc1"),
    ],
)
def test_a_mistake_is_one_sentence_and_an_exit_code(fedflat, arguments, code, sentence):
    ended, printed, complaint = fedflat(*arguments)
    assert (ended, printed) == (code, "")
    assert sentence in complaint
    assert len(complaint.strip().splitlines()) == 1
