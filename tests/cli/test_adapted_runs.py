"""The commands on a run that trains only low-rank adapters: they work, or say what to do."""

import json

import pytest

from fedflat.recipe import load
from fedflat.runs.build import prepare
from fedflat.runs.experiment import execute

SETTINGS = ["model.hidden=[16]", "model.lora={rank = 2, targets = 'all', average = 'product'}", "split.clients=5",
            "server.rounds=1", "evaluation.model=active", "engine=inline"]  # fmt: skip


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    execute(prepare(load(None, SETTINGS)), folder / "run")
    return folder


@pytest.fixture
def fedflat(called_in, adapted):
    return called_in(adapted)


def test_the_table_of_a_run_shows_what_the_adapters_alone_cost(called_in, tmp_path):
    """SCAFFOLD sends two vectors each way and keeps one with each client: here the adapters' entries and no others."""
    fedflat = called_in(tmp_path)
    weights = 2 * (64 + 16) + 2 * (16 + 10)  # of both layers' adapters; the whole model has 1,210 more
    given = ["--method", "scaffold", "--set", *SETTINGS[:3], "engine=inline", "server.rounds=2", "server.cohort=3"]
    code, printed, _ = fedflat("run", *given, "--out", "a", "--json")
    (found,) = json.loads(printed)
    assert code == 0 and (found["parameters_trained"], found["parameters"]) == (weights, weights + 1210)
    assert found["bytes_down"] == found["bytes_up"] == 2 * 3 * 2 * 4 * weights
    assert found["bytes_kept"] == 4 * weights
    code, printed, _ = fedflat("run", *given, "--out", "b")
    heads, row = (next(line for line in printed.splitlines() if word in line) for word in ("MB down", "0.0102"))
    cells = dict(zip(*([cell.strip() for cell in line[1:-1].split(line[0])] for line in (heads, row)), strict=True))
    assert (cells["trained"], cells["MB down"], cells["MB up"]) == ("212 of 1,422", "0.0102", "0.0102")
    assert cells["MB kept by a client"] == "0.000848"


def test_local_only_training_begins_anew_with_the_parts_of_the_recipe(fedflat):
    """The product average and the evaluated model are in the method already, and are not added again."""
    code, printed, complaint = fedflat("personalize", "run", "--how", "local", "--epochs", "1", "--size", "40")
    assert (code, complaint) == (0, "") and "local" in printed


def test_a_rescaling_of_the_merged_model_does_not_change_its_function(fedflat):
    code, printed, _ = fedflat("rescale", "run", "--samples", "200", "--parameters", "all", "--json")
    assert code == 0 and json.loads(printed)["outputs"] < 1e-5


@pytest.mark.parametrize("command", [["rescale"], ["flatness", "--layers"], ["duality", "--layer", "fc1"]])
def test_what_needs_the_weight_of_a_layer_says_how_to_get_it(fedflat, command):
    code, _, complaint = fedflat(command[0], "run", *command[1:])
    assert code == 2 and "--parameters all" in complaint and len(complaint.strip().splitlines()) == 1


def test_a_page_of_measures_goes_without_layers(fedflat, adapted):
    code, _, complaint = fedflat("report", "run", "--measure")
    assert (code, complaint) == (0, "")
    assert b"Input activations of each layer" not in (adapted / "run/report.html").read_bytes()
