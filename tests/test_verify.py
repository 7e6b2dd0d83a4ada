"""Recorded runs of the authors' own code, replayed."""

import json
from pathlib import Path

import numpy as np
import pytest

from fedflat.errors import DataError, FedflatError
from fedflat.verify import verify

FILES = sorted((Path(__file__).parent / "trajectories").glob("*.npz"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_authors_weights_are_reproduced(path):
    verdict = verify(path)
    assert verdict.good, verdict
    assert verdict.rounds == 4


def changed(path, target, **arrays):
    with np.load(path) as file:
        content = {name: file[name] for name in file.files}
    np.savez(target, **{**content, **arrays})
    return target


@pytest.mark.parametrize("array", ["weights", "initial", "consistency"])
def test_a_deviation_is_seen(tmp_path, array):
    original = next(f for f in FILES if f.stem == "flsim-feddyn")
    with np.load(original) as file:
        nudged = file[array].copy()
    nudged.flat[-1] += 1e-6
    assert not verify(changed(original, tmp_path / "nudged.npz", **{array: nudged})).good


@pytest.mark.parametrize(
    ("recipe", "sentence"),
    [
        ("{", "not a trajectory"),
        ("{}", "not a trajectory"),
        (dict(method="fedsoam"), "did you mean fedsam"),
        (dict(model=["linear 6 8", "wavelet", "linear 8 4"]), "there is no layer 'wavelet'"),
        (dict(model=["linear 6 9", "tanh", "linear 9 4"]), "a model with 103 parameters"),
        (dict(model=["linear 6 x"]), "not a trajectory"),
    ],
)
def test_a_bad_file_is_named_with_what_is_wrong(tmp_path, recipe, sentence):
    with np.load(FILES[0]) as file:
        known = json.loads(str(file["recipe"])) | {"method": "fedavg", "options": {}}
    text = recipe if isinstance(recipe, str) else json.dumps(known | recipe)
    with pytest.raises(FedflatError, match=sentence) as caught:
        verify(changed(FILES[0], tmp_path / "bad.npz", recipe=np.array(text)))
    assert "bad.npz" in str(caught.value)


def test_what_is_no_npz_file_is_refused(tmp_path):
    (tmp_path / "text.npz").write_text("hello")
    for name in ("text.npz", "missing.npz"):
        with pytest.raises(DataError, match=name):
            verify(tmp_path / name)


@pytest.mark.parametrize(
    ("arrays", "sentence"),
    [
        ({"consistency": np.full(4, np.nan)}, None),
        ({"weights": np.zeros((8, 92))}, "weights has shape"),
        ({"labels_0": np.zeros(0), "inputs_0": np.zeros((0, 6))}, "client 0 has 0 inputs"),
    ],
)
def test_what_cannot_be_compared_does_not_hold(tmp_path, arrays, sentence):
    path = changed(next(f for f in FILES if f.stem == "flsim-fedavg"), tmp_path / "odd.npz", **arrays)
    if sentence is None:
        assert not verify(path).good
    else:
        with pytest.raises(FedflatError, match=sentence):
            verify(path)


def test_a_round_without_participants_changes_nothing(tmp_path):
    original = next(f for f in FILES if f.stem == "flsim-feddyn")
    with np.load(original) as file:
        content = {name: file[name] for name in file.files if name != "consistency"}
    content["participants"] = np.vstack([content["participants"][:2], content["participants"][:1] * False])
    content["weights"] = np.vstack([content["weights"][:2], content["weights"][1:2]])
    np.savez(tmp_path / "pause.npz", **content)
    assert verify(tmp_path / "pause.npz").good
