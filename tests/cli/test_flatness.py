"""The commands that look at finished runs: what they print, what they write, and what they refuse."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from fedflat import federate, train
from fedflat.flatness import (
    Landscape,
    Portion,
    by_class,
    by_client,
    curvature,
    filter_normalised,
    landscape,
    locality,
    matrix_of,
    measure,
    spectrum,
)
from fedflat.recipe import load
from fedflat.runs.build import prepare
from fedflat.runs.experiment import execute
from fedflat.runs.loading import last_lr, load_run

TINY = ["seed=2", "split.clients=5", "split.alpha=0.5", "model.hidden=[8]", "server.rounds=3"]
QUICK = ("--samples", "200")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Two runs: of one process, and of a pool whose cohort is smaller than the federation."""
    base = tmp_path_factory.mktemp("runs")
    for name, settings in {"plain": ["engine=inline"], "flat": ["method=fedsam(0.05)", "engine=pool"]}.items():
        problem = prepare(load(None, [*TINY, *settings, "engine.workers=2"]))
        execute(problem, base / name)
    return base


@pytest.fixture
def runs(finished, tmp_path, monkeypatch):
    """A copy of them in the current directory, since landscapes are written into the runs."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def fedflat(called_in, tmp_path):
    return called_in(tmp_path)


@pytest.fixture
def read(fedflat):
    """What a command prints with --json."""

    def call(*arguments):
        code, printed, complaint = fedflat(*arguments, "--json")
        assert code == 0, complaint
        return json.loads(printed)

    return call


def test_flatness_as_json_is_what_the_library_measures_and_says_on_what(runs, read):
    found = read("flatness", "plain", "flat", *QUICK, "--k", 3, "--products", 6, "--rho", 0.1, "--seed", 2)
    assert found["measured"] == "mean training loss of 200 samples (evaluation mode, no decay, no augmentation)"
    named = [(row["run"], row["method"]) for row in found["runs"]]
    assert named == [("plain", "fedavg"), ("flat", "fedsam(rho=0.05)")]
    for row in found["runs"]:
        problem = load_run(runs / row["run"])
        expected = measure(Portion(200, 2).pooled(problem), k=3, products=6, rho=0.1, seed=2)
        assert row["spectrum"]["eigenvalues"] == pytest.approx(expected.spectrum.eigenvalues, rel=1e-6)
        assert row["spectrum"]["ratio"] == pytest.approx(expected.spectrum.ratio, rel=1e-6)
        assert row["spectrum"]["trace"]["mean"] == pytest.approx(expected.spectrum.trace.mean, rel=1e-6)
        for name in ("loss", "ascent_sharpness", "adaptive_sharpness", "weight_norm", "log10_capacity"):
            assert row[name] == pytest.approx(getattr(expected, name), rel=1e-5)
        assert (row["layers"], row["spectrum"]["density"]) == ([], None)


def test_the_table_has_a_column_for_each_run_and_a_row_for_each_number(runs, fedflat):
    code, printed, _ = fedflat("flatness", "plain", "flat", *QUICK, "--k", 2, "--products", 6)
    assert code == 0
    head, methods, *_ = (line for line in printed.splitlines() if line.startswith("┃"))
    assert [cell.strip() for cell in head.strip("┃").split("┃")] == ["", "plain", "flat"]
    assert [cell.strip() for cell in methods.strip("┃").split("┃")] == ["", "fedavg", "fedsam"]
    for row in ("λ1 ", "λ1/λ2", "trace [95 %]", "samples", "sharpness, adaptive", "‖w‖", "log10 V_L"):
        assert re.search(rf"│ {re.escape(row)}|{re.escape(row)} +│", printed), row
    assert "mean training loss of 200 samples" in printed


def test_layers_are_shown_for_each_run_with_curvature_activity_and_bound(runs, fedflat, read):
    arguments = ("flatness", "plain", *QUICK, "--k", 1, "--products", 6, "--layers")
    (row,) = read(*arguments)["runs"]
    assert "λ1/λ" not in fedflat(*arguments)[1]  # of one eigenvalue there is no ratio
    assert [(layer["name"], layer["parameters"]) for layer in row["layers"]] == [("fc1", 520), ("head", 90)]
    for layer in row["layers"]:
        assert 0 < layer["eigenvalues"][0] <= layer["activity"]["bound"] * (1 + 1e-3)
    code, printed, _ = fedflat(*arguments)
    assert code == 0
    assert all(text in printed for text in ("fc1", "head", "MAN's bound", "plain: Hessian block"))


ENCODER = """
from torch import nn

class Encoder(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, classes)

    def forward(self, x):
        return self.head(self.layer(x.flatten(1, 2)).mean(dim=1))
"""


def test_a_run_of_ones_own_transformer_has_second_derivatives(tmp_path, monkeypatch, fedflat, read):
    monkeypatch.chdir(tmp_path)
    Path("own_encoder.py").write_text(ENCODER)
    own = ("model=own_encoder:Encoder", "split.clients=2", "server.rounds=1", "local.steps=2", "engine=inline")
    code, _, complaint = fedflat("run", "--trust", "--out", "run", *(text for one in own for text in ("--set", one)))
    assert code == 0, complaint
    samples = ("--samples", 40, "--trust")
    for matrix in ("hessian", "ggn"):
        found = read("flatness", "run", *samples, "--k", 1, "--products", 6, "--layers", "--matrix", matrix)["runs"][0]
        assert found["spectrum"]["eigenvalues"][0] > 0
    bounds = {layer["name"]: layer["activity"] and layer["activity"]["bound"] for layer in found["layers"]}
    assert bounds["head"] > 0 and bounds["layer.linear1"] > 0
    layers = read("duality", "run", "--pairs", 20, "--test-samples", 40, *samples)["layers"]
    assert [each["layer"] for each in layers] == ["layer.linear1", "layer.linear2", "head"]


def test_a_run_of_a_gpt_has_all_three_matrices_and_its_layers(tmp_path, monkeypatch, fedflat, read):
    """Its attention is fused in training, and every token has a label."""
    monkeypatch.chdir(tmp_path)
    Path("texts.jsonl").write_text(
        "".join(f'{{"text": "fox {n} and the lazy dog", "client": {n % 2}}}\n' for n in range(24))
    )
    own = ("data.name=jsonl", "data.dir=texts.jsonl", "data.window=8", "data.stride=8", "data.predict=all",
           "split.name=natural", "split.clients=0", "model.name=gpt", "model.width=8", "model.heads=2",
           "model.layers=1", "server.rounds=1", "local.steps=1", "engine=inline")  # fmt: skip
    code, _, complaint = fedflat("run", "--out", "run", *(text for one in own for text in ("--set", one)))
    assert code == 0, complaint
    found = {
        matrix: read("flatness", "run", "--samples", 10, "--k", 1, "--products", 6, "--matrix", matrix)["runs"][0]
        for matrix in ("hessian", "ggn", "fisher")
    }
    tops = {matrix: row["spectrum"]["eigenvalues"][0] for matrix, row in found.items()}
    assert tops["fisher"] == pytest.approx(tops["ggn"], rel=1e-4) and tops["hessian"] > 0
    layers = read("flatness", "run", "--samples", 10, "--k", 1, "--products", 6, "--layers")["runs"][0]["layers"]
    assert {"head", "blocks.0.mlp.fc1"} <= {layer["name"] for layer in layers}


def test_a_gpt_for_texts_of_many_lengths_has_a_landscape_and_a_duality(tmp_path, monkeypatch, fedflat, read):
    """A batch of texts is cut at its longest one: here at 3 and 17 letters in training, and at 12 in testing."""
    monkeypatch.chdir(tmp_path)
    texts = ["fox"] * 130 + ["the lazy dog" if n % 5 == 4 else "the very lazy dog" for n in range(20)]
    rows = [{"text": text, "label": n % 2, "client": n // 130} for n, text in enumerate(texts)]
    Path("texts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    own = ("data.name=jsonl", "data.dir=texts.jsonl", "data.window=40", "split.name=natural", "split.clients=0",
           "model.name=gpt", "model.width=8", "model.heads=2", "model.layers=1", "server.rounds=1", "local.steps=1",
           "engine=inline")  # fmt: skip
    code, _, complaint = fedflat("run", "--out", "run", *(text for one in own for text in ("--set", one)))
    assert code == 0, complaint
    problem = load_run(Path("run"))
    data = problem.federation.dataset
    with torch.no_grad():
        losses = [
            float(problem.loss(problem.network.module(x.inputs.long()), x.labels)) for x in (data.train, data.test)
        ]

    layers = read("duality", "run", "--pairs", 30)["layers"]
    assert [each["layer"].rpartition(".")[2] for each in layers] == ["qkv", "out", "fc1", "fc2", "head"]
    for row in layers:
        assert (row["train_loss"], row["test_loss"]) == pytest.approx(losses, rel=1e-5)
        assert [each["pairs"] + each["skipped"] for each in row["pairings"].values()] == [30, 30]

    (found,) = read("landscape", "run", "--points", 3, "--samples", 0)["runs"]
    assert np.shape(found["values"]) == (3, 3) and np.isfinite(found["values"]).all()
    assert found["centre"] == found["values"][1][1] == pytest.approx(losses[0], rel=1e-5)


def test_a_layers_block_has_its_bias_unless_it_is_left_out(runs, fedflat, read):
    arguments = ("flatness", "plain", *QUICK, "--k", 1, "--products", 6, "--layers")
    found = read(*arguments, "--no-bias")
    assert not found["bias"] and [layer["parameters"] for layer in found["runs"][0]["layers"]] == [512, 80]
    assert "each layer's weight and bias" in " ".join(fedflat(*arguments)[1].split())
    assert "each layer's weight, and" in " ".join(fedflat(*arguments, "--no-bias")[1].split())


def test_layers_of_the_clients_are_those_of_each_clients_own_samples(runs, fedflat, read):
    arguments = ("flatness", "plain", *QUICK, "--k", 1, "--products", 6, "--layers", "--federated")
    (row,) = read(*arguments)["runs"]
    problem = load_run(runs / "plain")
    assert sum(client["samples"] for client in row["clients"]) == row["samples"]
    for client, found in enumerate(row["clients"]):
        expected = curvature(Portion(200).own(problem, client))
        assert found["hessian"] == pytest.approx(expected.hessian, rel=1e-5)
        for block, other in zip(found["blocks"], expected.blocks, strict=True):
            assert (block["name"], block["parameters"]) == (other.name, other.parameters)
            assert [block["hessian"], block["bound"]] == pytest.approx([other.hessian, other.bound], rel=1e-5)
            assert block["hessian"] <= block["bound"]
    code, printed, _ = fedflat(*arguments)
    assert code == 0
    assert all(text in printed for text in ("each client's loss", "Σ pᵢ λ1(Hᵢ)", "MAN's bound ÷ λ1(Hᵢ_l), range"))


def test_the_theory_is_one_table_with_a_ratio_to_the_first_run(runs, fedflat, read):
    arguments = ("flatness", "plain", "flat", *QUICK, "--k", 1, "--products", 6, "--theory")
    plain, flat = (row["theory"] for row in read(*arguments)["runs"])
    for found in (plain, flat):
        assert found["pooled"]["hessian"] <= found["clients_sum"] * (1 + 1e-5)
        assert found["pooled"]["gauss_newton"] <= found["blocks_sum"] * (1 + 1e-5)
    code, printed, _ = fedflat(*arguments)
    assert code == 0
    assert "a layer's block is its weight and bias" in " ".join(printed.split())
    changes = {
        name: f"{other['hessian'] / first['hessian']:.3g}"
        for name, first, other in (
            ("all", plain["pooled"], flat["pooled"]),
            *((a["name"], a, b) for a, b in zip(plain["pooled"]["blocks"], flat["pooled"]["blocks"], strict=True)),
        )
    }
    for name, ratio in changes.items():
        (line,) = (line for line in printed.splitlines() if re.match(rf"│ {name} +│ λ1\(H", line))
        assert re.search(rf" {re.escape(ratio)}( ↑)? +│$", line), line


def test_the_density_is_a_rule_whose_weights_add_up_to_one(runs, read):
    (row,) = read("flatness", "plain", *QUICK, "--k", 1, "--products", 6, "--density", 10)["runs"]
    density = row["spectrum"]["density"]
    ((nodes,), (weights,)) = density["nodes"], density["weights"]
    assert len(nodes) == len(weights) == density["products"] == 10
    assert sum(weights) == pytest.approx(1.0)
    assert max(nodes) <= row["spectrum"]["eigenvalues"][0] * (1 + 1e-4)


def test_clients_products_give_the_same_spectrum_on_either_engine(runs, fedflat, read):
    arguments = ("flatness", "plain", "flat", *QUICK, "--k", 2, "--products", 6)
    pooled, federated = read(*arguments), read(*arguments, "--federated")
    assert federated["measured"] == pooled["measured"]
    for here, there in zip(pooled["runs"], federated["runs"], strict=True):
        assert there["spectrum"]["eigenvalues"] == pytest.approx(here["spectrum"]["eigenvalues"], rel=1e-5)
        assert there["spectrum"]["trace"]["mean"] == pytest.approx(here["spectrum"]["trace"]["mean"], rel=1e-4)
        parameters = 64 * 8 + 8 + 8 * 10 + 10
        assert there["spectrum"]["bytes"] == there["spectrum"]["products"] * 2 * 5 * parameters * 4
        assert "loss" not in there
    code, printed, _ = fedflat(*arguments, "--federated")
    assert code == 0
    assert "MB sent" in printed
    assert "sharpness" not in printed.split("┃", 1)[1]


def test_the_spectrum_of_another_matrix_is_that_of_the_library_under_its_name(runs, fedflat, read):
    arguments = ("flatness", "plain", *QUICK, "--k", 2, "--products", 6, "--matrix", "ggn", "--density", 12)
    found = read(*arguments)
    (row,) = found["runs"]
    expected = spectrum(matrix_of(Portion(200).pooled(load_run(runs / "plain")), "ggn"), 2, 6)
    assert found["matrix"] == row["spectrum"]["matrix"] == "ggn"
    assert row["spectrum"]["eigenvalues"] == pytest.approx(expected.eigenvalues, rel=1e-5)
    code, printed, _ = fedflat(*arguments)
    assert code == 0
    assert "Gauss–Newton matrix, sharpness" in " ".join(printed.split())
    assert "outliers (K − 1 = 9)" in printed


@pytest.mark.parametrize(("by", "measured"), [("class", by_class), ("client", by_client)])
def test_each_class_or_client_has_a_row_of_its_own(runs, fedflat, read, by, measured):
    arguments = ("flatness", "plain", *QUICK, "--k", 1, "--products", 6, "--by", by)
    (row,) = read(*arguments)["runs"]
    problem, portion = load_run(runs / "plain"), Portion(200)
    expected = measured(*((portion.pooled(problem),) if by == "class" else (problem, portion)), products=6)
    assert [(e["name"], e["samples"]) for e in row["groups"]] == [(e.name, e.samples) for e in expected]
    assert [e["lambda1"] for e in row["groups"]] == pytest.approx([e.lambda1 for e in expected], rel=1e-4)
    assert sum(e["samples"] for e in row["groups"]) == row["samples"]
    code, printed, _ = fedflat(*arguments)
    assert code == 0 and f"{by} 4" in printed and "Σ p λ1" in printed


def test_local_flatness_is_the_librarys_with_the_last_learning_rate_and_the_runs_weights(runs, fedflat, read):
    arguments = ("flatness", "flat", *QUICK, "--k", 1, "--products", 6, "--local")
    (row,) = read(*arguments)["runs"]
    problem = load_run(runs / "flat")
    expected = locality(problem, Portion(200), lr=last_lr(problem.recipe))
    assert row["local"]["lambda1"] == pytest.approx(expected.lambda1, rel=1e-4)
    for name in ("clients_sum", "explained", "distance", "gap"):
        assert row["local"][name] == pytest.approx(getattr(expected, name), rel=1e-3, abs=1e-4)
    (alike,) = read(*arguments, "--weights", "uniform")["runs"]
    assert [client["weight"] for client in alike["local"]["clients"]] == pytest.approx([0.2] * 5)
    code, printed, _ = fedflat(*arguments)
    assert code == 0
    assert all(text in printed for text in ("flatness distance", "λ1(H) ÷ Σ pᵢ λ1(fᵢ)", "part of λ1(H)"))


def test_runs_that_differ_in_method_and_seed_alone_are_compared_by_paired_differences(runs, fedflat, read):
    arguments = (*QUICK, "--k", 1, "--products", 6)
    (one,) = [e for e in read("flatness", "plain", "flat", *arguments)["differences"] if e["measure"] == "trace"]
    assert (one["note"], one["low"], one["seeds"]) == ("one seed: no interval", None, [2])
    for name in ("plain", "flat"):
        shutil.copytree(name, f"{name}3")
        recipe = Path(f"{name}3/recipe.toml")
        recipe.write_text(recipe.read_text().replace("seed = 2", "seed = 3"))
    four = ("flatness", "plain", "flat", "plain3", "flat3", *arguments)
    found = read(*four)
    (both,) = [each for each in found["differences"] if each["measure"] == "trace"]
    values = {(row["method"], row["seed"]): row["spectrum"]["trace"]["mean"] for row in found["runs"]}
    expected = [values["fedsam(rho=0.05)", seed] - values["fedavg", seed] for seed in (2, 3)]
    assert both["differences"] == pytest.approx(expected) and both["low"] < both["mean"] < both["high"]
    assert "2 seeds" in fedflat(*four)[1]
    recipe.write_text(recipe.read_text().replace("lr = 0.1", "lr = 0.2"))
    assert "differences" not in read(*four)


def test_two_landscapes_share_one_grid_and_are_written_and_drawn(runs, fedflat):
    arguments = ("--points", 5, "--span", 0.5, *QUICK, "-o", "both.png")
    code, printed, complaint = fedflat("landscape", "plain", "flat", *arguments)
    assert code == 0, complaint
    assert all(text in printed for text in ("plain", "flat", "eigen plane", "±0.5", "drawn to both.png"))
    assert Path("both.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    plain, flat = (Landscape.load(f"{run}/landscape-eigen.npz") for run in ("plain", "flat"))
    assert np.array_equal(plain.axes, flat.axes)
    assert plain.axes.tolist() == [[-0.5, -0.25, 0.0, 0.25, 0.5]] * 2
    for run, found in (("plain", plain), ("flat", flat)):
        objective = Portion(200).pooled(load_run(runs / run))
        assert found.centre == found.values[2, 2] == pytest.approx(objective.value(), rel=1e-6)
        assert f"{found.rise:.4g}" in printed


def test_a_random_line_is_the_librarys_and_becomes_json(runs, read):
    found = read("landscape", "plain", "--plane", "random", "--dimensions", 1, "--points", 3, *QUICK, "--seed", 4)
    assert found["measured"].endswith("on the random line")
    assert (found["plane"], found["span"]) == ("random", 1.0)
    objective = Portion(200, 4).pooled(load_run(runs / "plain"))
    expected = landscape(objective, filter_normalised(objective, 1, 4, orthogonal=True), points=3)
    (row,) = found["runs"]
    assert row["values"] == pytest.approx(expected.values.tolist(), rel=1e-6)
    assert row["rise"] == pytest.approx(expected.rise, rel=1e-5)
    written = Landscape.load("plain/landscape-random.npz")
    assert (written.values.tolist(), written.centre) == (row["values"], row["centre"])


def test_a_full_basis_carries_the_whole_gap_of_the_pairs(runs, read):
    found = read("duality", "plain", "--pairs", 60, "--samples", 100, "-o", "gap.png")
    assert "gap of 100 training and 355 test samples" in found["measured"]
    assert [(row["run"], row["method"], row["layer"]) for row in found["layers"]] == [
        ("plain", "fedavg", "fc1"),
        ("plain", "fedavg", "head"),
    ]
    for row in found["layers"]:
        assert row["gap"] == pytest.approx(row["test_loss"] - row["train_loss"])
        assert [*row["pairings"]] == ["train_to_test", "test_to_train"]
        for each in row["pairings"].values():
            assert len(each["contribution"]) == {"fc1": 512, "head": 80}[row["layer"]]
            assert abs(each["remainder"]) < 1e-5 * abs(each["paired_gap"])
            assert each["fluctuation"] + each["drift"] == pytest.approx(sum(each["contribution"]), rel=1e-6)
            assert 1.0 <= each["participation"] <= len(each["contribution"])
            assert -1 <= each["correlations"]["low"] <= each["correlations"]["median"] <= each["correlations"]["high"]
    assert Path("gap.png").read_bytes().startswith(b"\x89PNG")


def test_zero_samples_and_zero_pairs_mean_all(runs, read):
    """The gap is that of the whole training and test part, and every sample has its pair."""
    (row,) = read("duality", "plain", "--layer", "head", "--pairs", 0, "--samples", 0)["layers"]
    problem = load_run(runs / "plain")
    shards = torch.cat([problem.federation.shard(client) for client in range(5)])
    with torch.no_grad():
        train, test = problem.federation.batch(shards, None), problem.federation.held_out("test", 0, 355)
        losses = [float(problem.loss(problem.network.module(x), y)) for x, y in (train, test)]
    assert (row["train_samples"], row["test_samples"]) == (len(shards), 355) == (1442, 355)
    assert (row["train_loss"], row["test_loss"]) == pytest.approx(losses, rel=1e-5)
    counted = {name: each["pairs"] + each["skipped"] for name, each in row["pairings"].items()}
    assert counted == {"train_to_test": 1442, "test_to_train": 355}
    arguments = ("--layer", "head", "--samples", 60, "--test-samples", 40, "--pairs", 30)
    (few,) = read("duality", "plain", *arguments)["layers"]
    assert (few["train_samples"], few["test_samples"]) == (60, 40)
    assert [each["pairs"] for each in few["pairings"].values()] == [30, 30]


def test_more_training_samples_than_ten_thousand_are_all_looked_at(tmp_path, monkeypatch, read):
    """One feature, 12,000 training samples: none may be left out silently."""
    monkeypatch.chdir(tmp_path)
    chance = np.random.default_rng(0)
    labels = {"train": np.arange(12_000) % 2, "test": np.arange(40) % 2}
    arrays = {f"x_{part}": (chance.normal(size=(len(y), 1)) + y[:, None]).astype("f4") for part, y in labels.items()}
    np.savez("blobs.npz", **arrays, **{f"y_{part}": y for part, y in labels.items()})
    settings = ["data=arrays", "data.dir=blobs.npz", "split=iid", "split.clients=1", "server.cohort=1",
                "server.rounds=1", "local.steps=5", "model.hidden=[]", "engine=inline"]  # fmt: skip
    problem = prepare(load(None, settings))
    execute(problem, tmp_path / "run")
    (row,) = read("duality", "run", "--samples", 0, "--pairs", 50)["layers"]
    assert row["train_samples"] == 12_000


def test_a_duality_table_names_runs_and_layers_and_has_both_pairings(runs, fedflat):
    arguments = ("--layer", "head", "--pairs", 20, "--samples", 0)
    code, printed, complaint = fedflat("duality", "plain", "flat", *arguments)
    assert code == 0, complaint
    assert all(text in printed for text in ("plain head", "flat head", "gap of the pairs", "Σ c σ_w σ_g"))
    assert printed.count("train → test") == printed.count("test → train") == 2
    assert "fc1" not in printed


@pytest.fixture
def broken(runs):
    """Directories that are no runs, each in its own way, beside two that are."""
    (runs / "empty").mkdir()
    for name in ("unfinished", "misfit", "damaged"):
        shutil.copytree("plain", name)
    (runs / "unfinished/model.safetensors").unlink()
    (runs / "damaged/model.safetensors").write_bytes(b"no tensors")
    recipe = runs / "misfit/recipe.toml"
    recipe.write_text(recipe.read_text().replace("hidden = [8]", "hidden = [9]"))
    assert "hidden = [9]" in recipe.read_text()
    train(federate("digits", [[0, 1, 2], [3, 4]]), rounds=1, engine="inline", out=runs / "python")
    (runs / "python/split.npz").unlink()
    return runs


SENTENCES = {
    "nowhere": "nowhere: no run is here",
    "empty": "empty: no run is here",
    "unfinished": "unfinished: the run is not finished (no model.safetensors)",
    "damaged": "damaged/model.safetensors: is not the model that summary.json describes (model_sha256)",
    "misfit": "misfit: model.safetensors does not fit the recipe's model mlp: fc1.weight is (8, 64), but",
    "python": "python: its federation was made in Python",
}


@pytest.mark.parametrize("command", ["flatness", "landscape", "duality"])
def test_nothing_is_measured_or_written_if_a_later_run_is_bad(broken, fedflat, monkeypatch, command):
    def product(*_):
        raise AssertionError("something was measured")

    monkeypatch.setattr("fedflat.flatness.objective.Objective.product", product)
    monkeypatch.setattr("fedflat.flatness.objective.Objective.value", product)
    before = sorted(broken.rglob("*"))
    for bad, sentence in SENTENCES.items():
        drawing = () if command == "flatness" else ("-o", "picture.png")
        code, printed, complaint = fedflat(command, "plain", bad, *drawing)
        assert (code, printed) == (6, "")
        assert complaint.startswith(f"fedflat: {sentence}")
        assert len(complaint.splitlines()) == 1
    assert sorted(broken.rglob("*")) == before


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["flatness"], 2, "Missing argument 'RUNS...'"),
        (["flatness", "plain", "--k", "0"], 2, "'--k': 0 is not in the range"),
        (["flatness", "plain", "--samples", "-1"], 2, "'--samples': -1"),
        (["flatness", "plain", "--products", "1"], 2, "'--products'"),
        (["flatness", "plain", "--relative-error", "0"], 2, "--relative-error 0.0: it must be a positive number"),
        (["flatness", "plain", "--matrix", "kfac"], 2, "'kfac' is not one of 'hessian', 'ggn', 'fisher'"),
        (["flatness", "plain", "--weights", "uniform"], 2, "--weights is about the clients' losses"),
        (["flatness", "plain", "--theory", "--federated"], 2, "--theory compares the clients with the pooled samples"),
        (["landscape", "plain", "--plane", "diagonal"], 2, "'diagonal' is not one of 'eigen', 'random'"),
        (["landscape", "plain", "--dimensions", "3"], 2, "'--dimensions': 3"),
        (["landscape", "plain", "--span", "0", "--plane", "random"], 2, "--span 0.0: it must be a positive number"),
        (["duality", "plain", "--layer", "fc9"], 2, "layer 'fc9' cannot be analysed; choose one of: fc1, head"),
        (["duality", "plain", "--k", "0"], 2, "'--k': 0"),
        (["duality", "plain", "--pairs", "-1"], 2, "'--pairs': -1"),
        (["duality", "plain", "--layer", "head", "--pairs", "9", "-o", "no/where.png"], 6, "no/where.png: the figure"),
    ],
)
def test_a_mistake_is_one_sentence_and_an_exit_code(runs, fedflat, arguments, code, sentence):
    ended, printed, complaint = fedflat(*arguments)
    assert (ended, printed) == (code, "")
    assert sentence in complaint
    assert len(complaint.strip().splitlines()) == 1


def test_a_process_of_its_own_ends_the_same_way(runs):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}  # as in the other tests: the network is tiny

    def process(*arguments):
        command = [sys.executable, "-m", "fedflat.cli", *arguments]
        return subprocess.run(
            command, cwd=runs, env=environment, capture_output=True, text=True, timeout=120, check=False
        )

    good = process("flatness", "plain", *QUICK, "--k", "1", "--products", "6", "--json")
    assert (good.returncode, good.stderr) == (0, "")
    assert json.loads(good.stdout)["runs"][0]["run"] == "plain"
    bad = process("flatness", "plain", "--k", "0")
    assert (bad.returncode, bad.stdout, len(bad.stderr.splitlines())) == (2, "", 1)
    assert bad.stderr.startswith("fedflat: Invalid value for '--k'")
