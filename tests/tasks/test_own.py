"""Losses, metrics and data sets of one's own, named in recipes and on the command line, and only if trusted."""

import json
import sys

import pytest

from fedflat import trusted
from fedflat.cli import app
from fedflat.errors import DataError, RecipeError
from fedflat.federation import load as load_data
from fedflat.recipe import load
from fedflat.runs import execute, load_run, load_sweep
from fedflat.runs.build import prepare
from fedflat.tasks import find_task

MINE = """
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from fedflat import Dataset, Metric, Samples


class Focal(nn.Module):
    def forward(self, outputs, labels):
        loss = F.cross_entropy(outputs, labels, reduction="none")
        return ((1 - torch.exp(-loss)) ** 2 * loss).mean()


@dataclass(frozen=True)
class TopTwo(Metric):
    name = "top_two"
    hits: int
    count: int

    @classmethod
    def of(cls, outputs, labels):
        return cls(int((outputs.topk(2).indices == labels[:, None]).sum()), len(labels))

    def __add__(self, other):
        return TopTwo(self.hits + other.hits, self.count + other.count)

    @property
    def value(self):
        return self.hits / self.count


class Wards(Dataset):
    def __init__(self, directory):
        if directory is not None:
            raise OSError("no such ward")
        inputs = torch.arange(120.0).reshape(40, 3) / 60 - 1
        half = Samples(inputs, (inputs[:, 0] > 0).long(), torch.arange(40) % 4)
        super().__init__("wards", half, half, 2, (0.0,), (1.0,))
"""
TASK = "classification(loss=mine:Focal, metric=mine:TopTwo)"
TINY = ["model.hidden=[4]", "split.clients=4", "server.rounds=2", "local.steps=2", "engine=inline"]


@pytest.fixture(autouse=True)
def mine(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(trusted, "_packages", {"mine"})
    monkeypatch.setattr(trusted, "_anything", False)
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("mine", None)


def test_a_recipe_names_a_loss_and_a_metric_and_finds_them_again(tmp_path):
    recipe = load(None, [*TINY, f'task="{TASK}"', "evaluation.metric=top_two"])
    result = execute(prepare(recipe), tmp_path / "run")
    assert 0 < result.history[-1]["accuracy"] <= result.history[-1]["top_two"] <= 1
    again = load_run(tmp_path / "run")
    assert (again.recipe.task, type(again.loss).__name__, again.recipe.metric) == (TASK, "Focal", "top_two")
    plain = execute(prepare(load(None, TINY)))
    assert plain.history[-1]["loss"] != result.history[-1]["loss"]
    longer = load(None, [*TINY, f'task="{TASK}"', "evaluation.metric=top_two", "server.rounds=3"])
    assert len(execute(prepare(longer), tmp_path / "run", resume=True).history) == 3


def test_a_recipe_names_a_data_set_with_its_natural_clients(tmp_path):
    recipe = load(None, [*TINY, "data=mine:Wards", "split=natural", "split.clients=0"])
    result = execute(prepare(recipe), tmp_path / "run")
    assert result.federation.clients == 4
    assert load_run(tmp_path / "run").federation.dataset.name == "wards"


def test_a_sweep_and_the_command_line_name_them_too(tmp_path, capsys):
    (tmp_path / "sweep.toml").write_text(f'[grid]\ntask = ["classification", "{TASK}"]\ndata = ["mine:Wards"]\n')
    assert [point.recipe.task for point in load_sweep("sweep.toml").points] == ["classification", TASK]
    sets = [part for each in [*TINY, f'task="{TASK}"'] for part in ("--set", each)]
    app(["run", *sets, "--trust", "--json"], standalone_mode=False)
    assert json.loads(capsys.readouterr().out)[0]["rounds"] == 2
    assert '"top_two": ' in (tmp_path / "runs/0001/metrics.jsonl").read_text()


@pytest.mark.parametrize(("task", "sentence"), [
    (TASK, "loss = 'mine:Focal': is code from outside of fedflat; if you trust it add --trust"),
    ("classification(metric=mine:TopTwo)", "metric = 'mine:TopTwo': is code from outside of fedflat"),
])  # fmt: skip
def test_nothing_of_it_is_imported_without_trust(monkeypatch, task, sentence):
    monkeypatch.setattr(trusted, "_packages", set())
    with pytest.raises(RecipeError) as caught:
        find_task(task)
    assert sentence in str(caught.value)
    with pytest.raises(RecipeError, match=r"data\.name = 'mine:Wards': is code from outside of fedflat"):
        load_data("mine:Wards")
    assert "mine" not in sys.modules


@pytest.mark.parametrize(("task", "sentence"), [
    ("classification(loss=mine:TopTwo)", "loss = 'mine:TopTwo': is not a class that inherits from Module"),
    ("classification(metric=mine:Focal)", "metric = 'mine:Focal': is not a class that inherits from Metric"),
    ("classification(weight=2)", "'weight' is not an option of a task; give loss or metric"),
    ("classification(loss=mine:Focal", "write it like classification(loss=package.module:Loss)"),
    ("clasification(loss=mine:Focal)", "there is no such task; did you mean classification?"),
    ("classification(loss=mine:Gone)", "loss = 'mine:Gone': mine has no Gone; known: Focal"),
])  # fmt: skip
def test_a_mistake_is_one_sentence(task, sentence):
    with pytest.raises(RecipeError, match=r"^[^\n]*$") as caught:
        find_task(task)
    assert sentence in str(caught.value)


def test_a_data_set_that_cannot_be_made_is_one_sentence():
    with pytest.raises(DataError, match=r"data\.name = 'mine:Wards': could not be made \(OSError: no such ward\)"):
        load_data("mine:Wards", "nowhere")
