"""Recorded runs of the authors' own code, replayed."""

import json
from pathlib import Path

import numpy as np
import pytest

from fedflat.errors import DataError, FedflatError
from fedflat.runs.verify import verify

FILES = sorted((Path(__file__).parents[1] / "trajectories").glob("*.npz"))
GIVEN = ("recipe", "initial", "participants", "inputs_", "labels_", "test_")  # what a replay begins with


def content(stem):
    with np.load(next(file for file in FILES if file.stem == stem)) as file:
        return {name: file[name] for name in file.files}


def written(path, arrays):
    np.savez(path, **arrays)
    return path


def changed(stem, path, **arrays):
    """The file with some arrays changed; None leaves one out."""
    return written(path, {name: a for name, a in {**content(stem), **arrays}.items() if a is not None})


def with_recipe(stem, path, personal=None, **fields):
    """The file with some fields of its recipe changed; in `personal` None leaves a setting out."""
    recipe = json.loads(str(content(stem)["recipe"])) | fields
    if personal:
        settings = recipe["personal"] | personal
        recipe["personal"] = {name: value for name, value in settings.items() if value is not None}
    return changed(stem, path, recipe=np.array(json.dumps(recipe)))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_recorded_array_is_reproduced(path):
    arrays, verdict = content(path.stem), verify(path)
    assert verdict.good, (verdict.deviating, verdict)
    assert verdict.rounds == len(arrays["participants"])
    recorded = {name for name in arrays if not name.startswith(GIVEN) and len(arrays[name])}
    assert set(verdict.deviations) == recorded


@pytest.mark.parametrize(
    ("stem", "array", "nudge"),
    [
        ("flsim-feddyn", "weights", 1e-6),
        ("flsim-feddyn", "consistency", 3e-9),  # less than float32 can tell
        ("fedman-fedavg", "active", 1e-8),
        ("fedman-fedavg", "all", 1e-8),
        ("fedman-feddyn", "active", 1e-8),
        ("fedman-feddyn", "all", 1e-8),
        ("fedsol-fedbabu", "personal_e2", 1e-5),
        ("fedsol-localonly", "personal_e8", 1e-8),
        ("fedsol-perfedavg", "personal_e1", 1e-5),
        ("fedsol-perfedavg-cnn", "accuracy_e1", 1e-6),
        ("fedsol-fedavg-ft", "accuracy_e2", 1e-9),
        ("fedsol-knnper", "neighbours_e1_3", 1e-5),
        ("fedsol-knnper", "scores_e0_5", 1e-5),
        ("fedsol-knnper", "predictions_e2_0", 1),
    ],
)
def test_a_deviation_is_seen_and_named(tmp_path, stem, array, nudge):
    nudged = content(stem)[array].copy()
    nudged.flat[-1] += nudge
    verdict = verify(changed(stem, tmp_path / "nudged.npz", **{array: nudged}))
    assert verdict.deviating == [array] and not verdict.good
    assert verdict.deviations[array] == pytest.approx(nudge, rel=0.1)


def test_another_start_changes_everything(tmp_path):
    initial = content("fedman-fedavg")["initial"].copy()
    initial[-1] += 1e-6
    verdict = verify(changed("fedman-fedavg", tmp_path / "nudged.npz", initial=initial))
    assert verdict.deviating == ["consistency", "active", "weights", "all"]


@pytest.mark.parametrize(
    ("stem", "settings"),
    [
        ("fedsol-perfedavg", {"how": "finetune"}),
        ("fedsol-fedavg-ft", {"how": "perfedavg"}),
        ("fedsol-fedavg-ft", {"lr": 0.03}),
        ("fedsol-fedavg-ft", {"how": "local"}),
        ("fedsol-localonly", {"lr_decay": 0.98}),
    ],
)
def test_another_way_to_adapt_gives_other_models(tmp_path, stem, settings):
    verdict = verify(with_recipe(stem, tmp_path / "other.npz", settings))
    longest = max(name for name in verdict.deviations if name.startswith("personal"))
    assert longest in verdict.deviating and "weights" not in verdict.deviating


@pytest.mark.parametrize("settings", [{"k": 4}, {"scale": 2}, {"mix": 0.4}, {"mix_with": "probabilities"}])
def test_other_neighbours_give_other_answers(tmp_path, settings):
    deviating = verify(with_recipe("fedsol-knnper", tmp_path / "other.npz", settings)).deviating
    assert any(name.startswith("scores") for name in deviating)
    assert not any(name.startswith(("weights", "personal")) for name in deviating)


@pytest.mark.parametrize(
    ("options", "good"),
    [
        ({}, True),
        ({"outer_lr": 0.02}, False),
        ({"shared_momentum": False}, False),
        ({"pairs": "once"}, False),
    ],
)
def test_per_fedavg_has_the_recorded_options(tmp_path, options, good):
    recorded = json.loads(str(content("fedsol-perfedavg")["recipe"]))["options"]
    verdict = verify(with_recipe("fedsol-perfedavg", tmp_path / "other.npz", options=recorded | options))
    assert verdict.good is good
    assert ("weights" in verdict.deviating) is not good


@pytest.mark.parametrize(
    ("recipe", "sentence"),
    [
        ("{", "not a trajectory"),
        ("{}", "not a trajectory"),
        (dict(method="fedsoam"), "did you mean fedsam"),
        (dict(model=["linear 6 8", "wavelet", "linear 8 4"]), "there is no layer 'wavelet'"),
        (dict(model=["linear 6 9", "tanh", "linear 9 4"]), "a model with 103 parameters"),
        (dict(model=["linear 6 x"]), "not a trajectory"),
        (dict(model=[6, 8]), "not a trajectory"),
        (dict(method="local"), 'method = "local" has no rounds, but 4 are recorded'),
    ],
)
def test_a_bad_recipe_is_named_with_what_is_wrong(tmp_path, recipe, sentence):
    path = tmp_path / "bad.npz"
    if isinstance(recipe, str):
        changed("flsim-fedavg", path, recipe=np.array(recipe))
    else:
        with_recipe("flsim-fedavg", path, **recipe)
    with pytest.raises(FedflatError, match=sentence) as caught:
        verify(path)
    assert "bad.npz" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"how": "knm"}, r"personal\.how = 'knm'.*did you mean knn"),
        ({"how": None}, r"personal\.how is missing"),
        ({"lr": None}, r"personal\.lr is missing"),
        ({"lr": -1}, r"personal\.lr = -1\.0"),
        ({"epochs": 1}, r"personal\.epochs = 1: must be a list"),
        ({"epochs": [-1]}, r"personal\.epochs = -1"),
        ({"epochs": [0, 1, 2, 3]}, "personal_e3 is missing"),
        ({"epochs": [0, 1]}, r"personal_e2 cannot be compared: .*personal\.epochs = \[0, 1\]"),
        ({"how": "finetune"}, "neighbours_e0_0 cannot be compared: personal.how = 'finetune'"),
        ({"k": 0}, r"personal\.k = 0"),
        ({"k": "five"}, "not a trajectory that can be replayed"),
        ({"mix_with": "logit"}, r"personal\.mix_with = 'logit'.*did you mean logits"),
        ({"mixt": 0.5}, "personal has no setting 'mixt'; did you mean mix"),
        ({"capacity": 3}, r"personal\.capacity = 3: client 0 has \d+ samples"),
    ],
)
def test_bad_settings_of_personal_models_are_named(tmp_path, settings, sentence):
    path = with_recipe("fedsol-knnper", tmp_path / "bad.npz", settings)
    with pytest.raises(FedflatError, match=sentence) as caught:
        verify(path)
    assert "bad.npz" in str(caught.value) and "\n" not in str(caught.value)


def test_personal_models_need_a_recipe_and_a_recipe_a_table(tmp_path):
    for value, sentence in ((None, "the recipe has no personal"), ("knn", "must be a table with how, epochs, lr")):
        path = tmp_path / "bad.npz"
        recipe = json.loads(str(content("fedsol-knnper")["recipe"])) | {"personal": value}
        changed("fedsol-knnper", path, recipe=np.array(json.dumps(recipe)))
        with pytest.raises(FedflatError, match=sentence):
            verify(path)


def test_what_is_no_npz_file_is_refused(tmp_path):
    (tmp_path / "text.npz").write_text("hello")
    for name in ("text.npz", "missing.npz"):
        with pytest.raises(DataError, match=name):
            verify(tmp_path / name)


@pytest.mark.parametrize(
    ("stem", "arrays", "sentence"),
    [
        ("flsim-fedavg", {"consistency": np.full(4, np.nan)}, None),
        ("fedsol-knnper", {"accuracy_e1": np.full(6, np.nan)}, None),
        ("flsim-fedavg", {"weights": np.zeros((8, 92))}, "weights has shape"),
        ("flsim-fedavg", {"weights": None}, "weights is missing"),
        ("flsim-fedavg", {"participants": np.ones(4, bool)}, r"participants has shape \(4,\)"),
        ("flsim-fedavg", {"participants": None}, "participants is missing"),
        ("flsim-fedavg", {"labels_3": None}, "labels_3 is missing"),
        ("flsim-fedavg", {"labels_0": np.zeros(0, int), "inputs_0": np.zeros((0, 6))}, r"inputs_0 has shape \(0, 6\)"),
        ("flsim-fedavg", {"labels_0": np.zeros(2, int), "inputs_0": np.zeros(())}, r"inputs_0 has shape \(\)"),
        ("flsim-fedavg", {"labels_0": np.full(content("flsim-fedavg")["labels_0"].shape, 99)}, "round 0|out of bounds"),
        ("fedman-fedavg", {"active": np.zeros((5, 3))}, r"active has shape \(5, 3\)"),
        ("fedman-fedavg", {"all": np.zeros(471)}, r"all has shape \(471,\)"),
        ("fedsol-fedbabu", {"personal_e1": None}, "personal_e1 is missing"),
        ("fedsol-fedbabu", {"personal_e1": np.zeros((5, 142))}, r"personal_e1 has shape \(5, 142\).*\(6, 142\)"),
        ("fedsol-fedbabu", {"accuracy_e2": None}, "accuracy_e2 is missing"),
        ("fedsol-fedbabu", {"accuracy_e2": np.zeros((6, 1))}, r"accuracy_e2 has shape \(6, 1\)"),
        ("fedsol-fedbabu", {"test_inputs_2": None}, "test_inputs_2 is missing"),
        ("fedsol-fedbabu", {"test_labels_2": np.zeros(3, int)}, r"test_labels_2 has shape \(3,\)"),
        ("fedsol-fedbabu", {"test_inputs_2": np.zeros((9, 4))}, "not a trajectory that can be replayed"),
        ("fedsol-fedbabu", {"personal_e7": np.zeros((6, 142))}, "personal_e7 cannot be compared"),
        ("fedsol-knnper", {"neighbours_e1_4": None}, "neighbours_e1_4 is missing"),
        ("fedsol-knnper", {"scores_e1_4": np.zeros((10, 3))}, r"scores_e1_4 has shape \(10, 3\).*\(10, 4\)"),
        ("fedsol-knnper", {"predictions_e0_1": np.zeros((7, 1), int)}, r"predictions_e0_1 has shape \(7, 1\)"),
        ("fedsol-localonly", {"initial": None}, "initial is missing"),
        ("flsim-fedavg", {"weigths": np.zeros(3)}, "weigths is not an array of a trajectory; did you mean weights"),
        ("flsim-fedavg", {"inputs_99": np.zeros((3, 6))}, r"inputs_99 is of a client that participants does not have"),
        ("flsim-fedavg", {"labels_0": content("flsim-fedavg")["labels_0"] + 0.5}, "labels_0 holds float64, but must"),
        (
            "flsim-fedavg",
            {"labels_1": content("flsim-fedavg")["labels_1"].astype(str)},
            "labels_1 holds <U.*whole numbers",
        ),
        (
            "flsim-fedavg",
            {"weights": content("flsim-fedavg")["weights"].astype(complex)},
            "weights holds complex128, but",
        ),
        ("flsim-fedavg", {"weights": content("flsim-fedavg")["weights"].astype(int)}, "weights holds int64, but must"),
        ("flsim-fedavg", {"initial": content("flsim-fedavg")["initial"].astype(bool)}, "initial holds bool, but must"),
        ("flsim-fedavg", {"participants": np.full((4, 10), 2)}, "participants must hold zeros and ones only"),
        ("flsim-fedavg", {"participants": np.full((4, 10), "yes")}, "participants holds <U3, but must hold zeros and"),
        ("fedsol-knnper", {"predictions_e0_1": np.zeros(7)}, "predictions_e0_1 holds float64, but must hold whole"),
        ("fedsol-localonly", {"participants": np.zeros((0, 0), bool)}, "bad.npz"),
    ],
)
def test_what_cannot_be_compared_does_not_hold(tmp_path, stem, arrays, sentence):
    path = changed(stem, tmp_path / "bad.npz", **arrays)
    if sentence is None:
        assert verify(path).deviating == [*arrays]
        return
    with pytest.raises(FedflatError, match=sentence) as caught:
        verify(path)
    assert "bad.npz" in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_with_neither_rounds_nor_personal_models_proves_nothing(tmp_path):
    arrays = {n: a for n, a in content("fedsol-localonly").items() if not n.startswith(("personal", "accuracy"))}
    recipe = json.loads(str(arrays["recipe"]))
    del recipe["personal"]
    with pytest.raises(FedflatError, match="nothing to compare"):
        verify(written(tmp_path / "empty.npz", {**arrays, "recipe": np.array(json.dumps(recipe))}))


def test_a_round_without_participants_changes_nothing(tmp_path):
    arrays = content("fedman-feddyn")
    names = ("participants", "weights", "active", "all", "consistency")
    paused = {name: np.insert(arrays[name], 2, arrays[name][1], axis=0)[:3] for name in names}
    paused["participants"][2] = False
    assert verify(changed("fedman-feddyn", tmp_path / "pause.npz", **paused)).good
    for name in ("weights", "all"):
        other = paused[name].copy()
        other[2, 0] += 1e-3
        path = changed("fedman-feddyn", tmp_path / "pause.npz", **{**paused, name: other})
        assert verify(path).deviating == [name]
