"""`train` as a person in a notebook meets it: what it shows, warns of, and leaves for the command line."""

import inspect
import logging
import sys
from dataclasses import dataclass, replace
from typing import get_type_hints

import numpy as np
import pytest
import torch
from torch import nn

import fedflat
import forking
from fedflat import Part, Result, federate, train
from fedflat.errors import RecipeError, RunError, TrainingError
from fedflat.recipe import Recipe, load, section_fields
from fedflat.runs import experiment
from fedflat.runs.build import prepare
from fedflat.runs.experiment import _tell_refused, execute
from fedflat.runs.given import DATA, SPLIT
from fedflat.runs.keywords import SECTIONS, Settings, fields
from fedflat.runs.loading import load_run

QUICK = dict(rounds=2, engine="inline")
PARAMETERS = inspect.signature(train).parameters


def section_of(name):
    section, field = fields()[name]
    return (section_fields(section) if section else Recipe.model_fields)[field]


def test_help_shows_every_setting_with_the_value_of_the_default_recipe():
    default = load()
    assert not any(each.kind is each.VAR_KEYWORD for each in PARAMETERS.values())
    for name, (section, field) in fields().items():
        assert PARAMETERS[name].default == getattr(getattr(default, section) if section else default, field), name
    whole = {(s, n) for s in SECTIONS for n in section_fields(s)}
    assert {place for place in fields().values() if place[0] in SECTIONS} == whole


def test_the_types_that_editors_see_are_those_of_the_recipe():
    kinds = get_type_hints(Settings)
    assert kinds.keys() == fields().keys()
    for name, kind in kinds.items():
        assert name == "model_lora" or kind == section_of(name).annotation, name


def test_federate_takes_the_fields_of_data_and_split_by_the_same_defaults():
    parameters = inspect.signature(federate).parameters
    assert not any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    for name, field in section_fields("split").items():
        if name not in ("name", "clients", "seed"):  # they have a default of their own
            assert parameters[name].default == field.default, name
    moved = {"name", "dir", "crop", "crop_probability", "crop_fill", "flip", "cutout"}  # data, directory and augment
    for name, field in section_fields("data").items():
        assert name in moved or parameters[name].default == field.default, name
    assert "alpha" in federate.__doc__ and federate("digits").tables()[1]["clients"] == 20


def test_train_without_settings_is_the_run_of_the_command_line():
    result = train(federate("digits"), rounds=1, engine="inline")
    plain = execute(prepare(load(None, ["server.rounds=1", "engine=inline"])))
    assert result.recipe == plain.recipe
    assert all(map(torch.equal, plain.model.parameters(), result.model.parameters()))


def test_a_misspelt_setting_gets_a_suggestion(digits):
    with pytest.raises(RecipeError, match=r"no setting 'ruonds'; did you mean rounds\?"):
        train(digits, ruonds=3)
    with pytest.raises(RecipeError, match=r"federation is a ndarray; make one of your data by fedflat\.federate"):
        train(np.zeros((3, 2)))


def test_verbose_prints_each_evaluated_round_and_otherwise_nothing_is_printed(digits, capsys):
    train(digits, **QUICK, verbose=True, every=2)
    assert capsys.readouterr().out.startswith("round 2: accuracy 0.")
    for verbose in (None, False):
        train(digits, **QUICK, verbose=verbose)
        assert capsys.readouterr() == ("", "")


def test_the_namespace_completes_and_help_needs_no_source():
    assert {"federate", "train", "Result", "flatness"} <= {*dir(fedflat)}
    assert "rounds: int = 40" in str(inspect.signature(train)).replace("'", "")
    assert all(len(line) < 121 for line in (train.__doc__ or "").splitlines())


@dataclass(frozen=True)
class Breaks(Part):
    """Fails on some clients, or on all."""

    who: tuple[int, ...] = ()

    def plan(self, rule, sent, memory):
        if rule.client >= 0 and (not self.who or rule.client in self.who):
            raise ValueError("no")
        return rule


def test_a_client_that_is_refused_in_all_of_its_rounds_is_warned_of(digits):
    with pytest.warns(UserWarning, match=r"client 3 was refused in all of their rounds.*client 3: raised: ValueError"):
        train(digits, method=Breaks((3,)), **QUICK, cohort=1.0)
    mixed = [
        {"cohort": [0], "refused": []},
        {"cohort": [1], "refused": [{"client": 0, "reason": "norm", "detail": ""}]},
    ]
    _tell_refused(mixed, pytest.fail)  # it was accepted once
    with pytest.raises(TrainingError, match="all 2 rounds were skipped"):
        train(digits, method=Breaks(), **QUICK)


def test_a_run_that_0_1_began_in_python_goes_on(digits, tmp_path, monkeypatch):
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    whole = train(digits, net, out=tmp_path / "whole", **QUICK)
    split = {"name": "given", "clients": digits.clients}
    with monkeypatch.context() as old:  # neither split nor layers had a name, and nothing was kept
        old.setattr(experiment, "described", lambda *_: {"data": {"name": "digits"}, "split": split})
        old.setattr(experiment, "model_table", lambda *_: {"name": "torch.nn.modules.container:Sequential"})
        old.setattr(experiment, "keep", lambda *_, **__: None)
        train(digits, net, out=tmp_path / "run", **QUICK | {"rounds": 1})
    result = train(digits, net, out=tmp_path / "run", resume=True, **QUICK)
    assert result.accuracy == whole.accuracy and len(result.history) == 2


class Net(nn.Module):
    """A network of the user's own, which needs an argument."""

    def __init__(self, width):
        super().__init__()
        self.body, self.head = nn.Linear(64, width), nn.Linear(width, 10)

    def forward(self, x):
        return self.head(self.body(x.flatten(1)).relu())


def named():
    return federate("digits", "lda", 4, alpha=0.5, seed=3, limit=200)


def listed():
    return federate("digits", [[*range(20)], [*range(20, 50)]])


def arrays():
    chance = np.random.default_rng(0)
    x, y = chance.normal(size=(40, 64)).astype("float32"), np.arange(40) % 10
    return federate(x, y, x, y, split="iid", clients=3, name="mine")


def tabled():
    return federate("digits", [[*range(20)], [*range(20, 50)]], augment=fedflat.Augment(crop=1), normalise=False)


@pytest.mark.parametrize("make", [named, listed, arrays, tabled])
def test_a_run_of_python_is_read_back_with_the_same_samples_for_everybody(make, tmp_path):
    made = make()
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))
    result = train(made, net, out=tmp_path / "run", **QUICK)
    again = load_run(tmp_path / "run")
    assert (tmp_path / "run" / SPLIT).exists() == (make in (listed, tabled))
    assert (tmp_path / "run" / DATA).exists() == (make is arrays)
    assert all(map(torch.equal, made.shards, again.federation.shards)) and made.augment == again.federation.augment
    some = torch.arange(3)
    assert torch.equal(made.batch(some, None)[0], again.federation.batch(some, None)[0])
    assert torch.equal(made.held_out("test", 0, 9)[0], again.federation.held_out("test", 0, 9)[0])
    assert all(map(torch.equal, again.network.module.parameters(), result.model.parameters()))


def test_the_command_line_goes_on_with_a_run_of_python_as_python_would(tmp_path):
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    whole = train(arrays(), net, out=tmp_path / "whole", rounds=3, engine="inline")
    train(arrays(), net, out=tmp_path / "run", **QUICK)

    def fedflat(*arguments):
        done = forking.fedflat(*arguments, cwd=tmp_path, COLUMNS="160")
        assert done.returncode == 0, done.stderr
        return done.stdout

    fedflat("resume", "run", "--set", "server.rounds=3")
    for name in ("metrics.jsonl", "model.safetensors"):
        ours, theirs = ((tmp_path / run / name).read_bytes() for run in ("run", "whole"))
        assert name == "metrics.jsonl" or ours == theirs
    assert Result.load(tmp_path / "run").accuracy == whole.accuracy
    assert "Hessian" in fedflat("flatness", "run", "--samples", "20")
    fedflat("personalize", "run", "--epochs", "1")
    fedflat("export", "run", "--no-onnx")
    fedflat("report", "run", "-o", "page.html")
    assert (tmp_path / "run/export/model.safetensors").exists() and (tmp_path / "page.html").exists()


def test_what_no_recipe_can_hold_is_told_when_the_run_is_written(tmp_path, caplog, monkeypatch):
    with caplog.at_level(logging.WARNING, "fedflat"):
        train(listed(), Net(4), out=tmp_path / "class", loss=nn.functional.multi_margin_loss, **QUICK)
    assert "missing a required argument: 'width'; say how it is built by model_options=" in caplog.text
    assert "the loss or task was made in Python" in caplog.text
    with pytest.raises(RecipeError, match="this task was made in Python"):
        load_run(tmp_path / "class")
    read = Result.load(tmp_path / "class", model=Net(4), task=fedflat.Task(nn.functional.multi_margin_loss))
    assert read.history[-1]["round"] == 2
    caplog.clear()
    train(listed(), Net(4), out=tmp_path / "told", model_options={"width": 4}, **QUICK)
    assert not caplog.text
    fedflat.trust(__name__)
    if __name__ in sys.modules:  # as it would be in a package
        assert load_run(tmp_path / "told").network.size == 64 * 4 + 4 + 4 * 10 + 10
    monkeypatch.setattr("fedflat.runs.given.LARGEST", 10)
    train(arrays(), "mlp", out=tmp_path / "large", **QUICK)
    assert "bytes and are not kept with the run" in caplog.text
    with pytest.raises(RunError, match=r"no data set 'mine', and its data .* federation was made in Python"):
        load_run(tmp_path / "large")


@pytest.mark.parametrize("change", ["dataset", "shards"])
def test_a_federation_that_was_changed_is_no_longer_called_by_its_name(digits, change):
    assert digits.tables()[0]["name"] == "digits"
    other = replace(digits.dataset, mean=(0.0,)) if change == "dataset" else digits.shards[:2]
    data, split = replace(digits, **{change: other}).tables()
    assert split is None and (data is None) == (change == "dataset")


@pytest.mark.parametrize("damage", [b"", b"no tensors", b"\x08\0\0\0\0\0\0\0{}      "])
def test_damaged_samples_of_a_run_are_told_in_a_sentence(tmp_path, damage):
    train(arrays(), "mlp", out=tmp_path / "run", rounds=1, engine="inline")
    (tmp_path / "run" / DATA).write_bytes(damage)
    with pytest.raises(RunError, match="does not hold the samples of a run"):
        load_run(tmp_path / "run")


def test_a_model_without_a_linear_layer_trains_and_only_what_needs_a_head_asks_for_one(digits):
    net = nn.Sequential(nn.Conv2d(1, 10, 8), nn.Flatten())
    plain, pooled = (train(digits, net, "fedsam", rounds=2, engine=e, workers=2) for e in ("inline", "pool"))
    assert plain.curve("loss") == pooled.curve("loss")
    for method, sentence in (("moon", "needs a head, and the model has no nn.Linear"), ("fedbabu", "not an nn.Linear")):
        with pytest.raises(RecipeError, match=sentence):
            train(digits, net, method, **QUICK)
