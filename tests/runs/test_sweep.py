"""Sweeps: grids that say what they mean, runs that go on after anything, and tables of them."""

import csv
import json
import re
import signal
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedflat import trusted
from fedflat.cli import app
from fedflat.cli.sweep import train_all
from fedflat.engine import pool
from fedflat.errors import RecipeError, RunError
from fedflat.methods.parser import parse, spell
from fedflat.recipe import load
from fedflat.runs.build import gather, prepare
from fedflat.runs.experiment import execute
from fedflat.runs.lock import RunLock
from fedflat.runs.sweep import (
    Jobs,
    collect,
    jobs_for,
    load_sweep,
    refuse_other_settings,
    results,
    shipped,
    summarised,
    throughput,
    write_results,
)
from fedflat.runs.sweep.overrides import flattened
from fedflat.runs.sweep.results import columns, finished, mean_and_std, read_rows, save_result
from forking import Command, until

PATIENCE = 120  # seconds, against hanging only
GRID = """
preset = "sol"

[grid]
method = ["fedavg", "fedsam(0.1)"]
split.alpha = [0.1, 0.5]
size = ["small", "large"]
seed = [0, 1, 2]

[[override]]
when = { size = "small" }
set = { local.lr = 0.02 }

[[override]]
when = { size = "large", method = ["fedavg"] }
set = { local.lr = 0.03, after = ["flatness --k 1"] }

[[override]]
when = { size = "large", split.alpha = 0.5 }
skip = true

[scale.tiny]
server.rounds = 2
grid.seed = [7]

[[scale.tiny.override]]
when = { method = "fedsam(0.1)" }
set = { method = "fedsam(0.5)" }
"""
FILLED = """
preset = "man"
after = ["flatness --k {k}"]

[grid]
method = ["fedavg", "fedsam({rho})", "fedsam({rho}) + man({man})"]
setting = ["CIFAR δ=0.3", "CIFAR IID", "Tiny δ=0.3", "Tiny IID"]

[fill]
k = 1
rho = 0.05
man = 0.15

[[override]]
when = { setting = "CIFAR*" }
set = {}

[[override]]
when = { setting = "Tiny*" }
set = { model = "convnet-gn" }
fill = { man = "0.2, layers='official_convnet'" }

[[override]]
when = { setting = "Tiny IID", method = "*man*" }
fill = { rho = 0.01 }

[scale.tiny]
server.rounds = 2
fill.k = 5
"""
# What the rows of these sweeps have beside the usual columns.
COLUMNS = {
    "lora": {"lambda1", "lambda1_all", "trace", "trace_all", "seconds"},
    "fedsol-figure3": {
        "local_accuracy_before",
        "local_accuracy",
        "local_accuracy_std",
        "class_accuracy_std",
        "forgetting",
    },
    "fedsol-figure4": {"lambda1", "lambda5", "lambda1/lambda5", "trace", "landscape_eigen_rise"},
    "fedsol-figure8b": {"lambda/fc1", "lambda/head"},
    "fedsol-figure9": {"proximal_loss", "cosine"},
    "fedsol-figure10": {"divergence", "discord"},
    "man-sensitivity": {"activation/relu1", "lambda1", "trace"},
    "man-landscape": {"landscape_eigen_centre", "landscape_eigen_rise", "landscape_random_rise"},
    "fedsmoo-landscapes": {"landscape_random_centre", "landscape_random_rise"},
}
HELD = '''
import time
from pathlib import Path
from torch import nn

class Held(nn.Module):
    """Once a round is done it waits while there is a file `hold`, and says so by a file `waits`."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, x):
        while Path("hold").exists() and any(p.stat().st_size for p in Path("sweeps").rglob("metrics.jsonl")):
            Path("waits").touch()
            time.sleep(0.01)
        return self.layer(x.flatten(1))
'''
PLAY = "\n\n".join(f"{role}:\nWhat say you, {role}? Speak, and be heard by all of us." for role in [*"ABCD"] * 5)


BASED = """
model = { name = "mlp", hidden = [8] }
split.clients = 4
server = { rounds = 1, cohort = 2 }
engine = "inline"

[base]
method = "fedavg + adamw"
local = { lr = 0.01, steps = 2 }
split = { name = "iid", clients = 1 }
server.cohort = 1

[grid]
trained = ["all", "lora"]

[[override]]
when.trained = "all"
set = { local.lr = 0.05 }

[[override]]
when.trained = "lora"
set = { model.lora = { rank = 2, targets = "all" } }

[scale.tiny]
local.batch = 5

[scale.tiny.base]
local.steps = 1
"""


def written(folder, text, name="mine.toml"):
    (folder / name).write_text(text)
    return folder / name


def test_every_combination_is_a_run_but_those_that_are_skipped(tmp_path):
    sweep = load_sweep(written(tmp_path, GRID))
    assert len(sweep.points) == 2 * 3 * 3
    first, last = sweep.points[0], sweep.points[-1]
    assert first.values == {"method": "fedavg", "split.alpha": 0.1, "size": "small", "seed": 0}
    assert first.slug == "fedavg_alpha=0.1_small_seed=0"
    assert (last.recipe.method, last.recipe.split.alpha, last.recipe.seed) == ("fedsam(0.1)", 0.5, 2)


def test_overrides_refine_the_points_that_they_meet(tmp_path):
    points = {p.slug: p for p in load_sweep(written(tmp_path, GRID)).points}
    plain, large = points["fedavg_alpha=0.1_small_seed=0"], points["fedavg_alpha=0.1_large_seed=0"]
    assert (plain.recipe.local.lr, plain.after) == (0.02, ())
    assert (large.recipe.local.lr, large.after) == (0.03, ("flatness --k 1",))
    assert points["fedsam-0.1_alpha=0.1_large_seed=0"].recipe.local.lr == load("sol").local.lr


def test_the_base_is_the_files_recipe_with_settings_of_its_own(tmp_path):
    sweep = load_sweep(written(tmp_path, BASED), "tiny", ["seed=3"])
    base, grid = sweep.base.recipe, [point.recipe for point in sweep.points]
    assert [point.slug for point in sweep.runs] == ["base", "all", "lora"]
    assert (base.method, base.split.name, base.split.clients, base.server.cohort) == ("fedavg + adamw", "iid", 1, 1)
    assert (base.local.lr, base.local.steps, base.local.batch, base.model.lora) == (0.01, 1, 5, None)
    assert [each.local.lr for each in grid] == [0.05, load().local.lr]
    assert {each.seed for each in (base, *grid)} == {3}
    assert {each.local.steps for each in grid} == {None}
    assert sweep.points[0].asked()["base"] == sweep.base.asked()
    assert load_sweep(written(tmp_path, GRID)).base is None


@pytest.mark.parametrize(
    ("before", "after", "sentence"),
    [
        ("[base]", "base = 3\n[bass]", "mine.toml: base = 3: must be a table"),
        ("lr = 0.01", "lrr = 0.01", "mine.toml: [base]: local.lrr: there is no such field; did you mean local.lr?"),
        ("adamw", "adamw({beta})", "mine.toml: 'fedavg + adamw({beta})': {beta} has no value; give it one in [fill]"),
        ("hidden", "base = 'a', hidden", "mine.toml: model.base = 'a': the runs start from that of [base]; leave one"),
        ("cohort = 1", "cohort = 1\nafter = ['cost']", "mine.toml: [base]: after: no command follows the base; leave"),
    ],
)
def test_a_mistake_in_a_base_is_one_sentence(tmp_path, before, after, sentence):
    assert before in BASED
    with pytest.raises(RecipeError) as caught:
        load_sweep(written(tmp_path, BASED.replace(before, after, 1)))
    assert str(caught.value).startswith(sentence)


def test_no_run_of_the_grid_takes_the_directory_of_the_base(tmp_path):
    text = BASED.replace('["all", "lora"]', '["base", "lora"]').replace('"all"\nset', '"base"\nset')
    slugs = [point.slug for point in load_sweep(written(tmp_path, text)).runs]
    assert slugs[0] == "base" and slugs[1].startswith("base-") and slugs[2] == "lora"


def test_names_in_braces_are_filled_by_setting(tmp_path):
    points = load_sweep(written(tmp_path, FILLED)).points
    methods = {(p.values["setting"], p.values["method"]): p.recipe.method for p in points}
    both = "fedsam({rho}) + man({man})"
    assert methods["CIFAR IID", "fedavg"] == "fedavg"
    assert methods["Tiny IID", "fedsam({rho})"] == "fedsam(0.05)"
    assert methods["CIFAR IID", both] == "fedsam(0.05) + man(0.15)"
    assert methods["Tiny δ=0.3", both] == "fedsam(0.05) + man(0.2, layers='official_convnet')"
    assert methods["Tiny IID", both] == "fedsam(0.01) + man(0.2, layers='official_convnet')"
    assert {p.after for p in points} == {("flatness --k 1",)}
    assert {p.after for p in load_sweep(written(tmp_path, FILLED), "tiny").points} == {("flatness --k 5",)}


def test_a_label_of_the_grid_fills_braces_itself(tmp_path):
    text = 'method = "fedavg + man({zeta})"\n[grid]\nzeta = [0.0, 0.15]\nseed = [0]'
    points = load_sweep(written(tmp_path, text)).points
    assert [p.recipe.method for p in points] == ["fedavg + man(0.0)", "fedavg + man(0.15)"]
    assert [p.slug for p in points] == ["zeta=0.0_seed=0", "zeta=0.15_seed=0"]


def test_a_star_in_when_stands_for_anything(tmp_path):
    models = {p.values["setting"]: p.recipe.model.name for p in load_sweep(written(tmp_path, FILLED)).points}
    assert models == {
        "CIFAR δ=0.3": "lenet64",
        "CIFAR IID": "lenet64",
        "Tiny δ=0.3": "convnet-gn",
        "Tiny IID": "convnet-gn",
    }


@pytest.mark.parametrize(
    ("before", "after", "sentence"),
    [
        ("rho = 0.05", "", "mine.toml: 'fedsam({rho})': {rho} has no value; give it one in [fill]"),
        ("k = 1", "k = 1\nzeta = 0.1", "mine.toml: fill.zeta: no value contains {zeta}"),
        (
            "fill = { rho = 0.01 }",
            "fill = { roh = 0.01 }",
            "mine.toml: fill.roh: no value contains {roh}",
        ),
        ('"Tiny*"', '"Tini*"', "mine.toml: override 2: when.setting = 'Tini*' is not in the grid"),
    ],
)
def test_a_name_that_is_not_filled_or_not_used_is_one_sentence(tmp_path, before, after, sentence):
    assert before in FILLED
    with pytest.raises(RecipeError) as caught:
        load_sweep(written(tmp_path, FILLED.replace(before, after, 1)))
    assert sentence in str(caught.value)


def test_a_scale_lies_over_everything_and_set_over_that(tmp_path):
    sweep = load_sweep(written(tmp_path, GRID), "tiny", ["local.lr=0.5"])
    assert (sweep.scale, {p.recipe.seed for p in sweep.points}) == ("tiny", {7})
    assert {p.recipe.server.rounds for p in sweep.points} == {2}
    assert {p.recipe.local.lr for p in sweep.points} == {0.5}
    assert {p.recipe.method for p in sweep.points} == {"fedavg", "fedsam(0.5)"}


def test_only_takes_the_part_of_the_grid_that_has_these_values(tmp_path):
    sweep = load_sweep(written(tmp_path, GRID))
    part = sweep.only(["method=fedavg", "split.alpha=0.1", "seed=0", "seed=2"])
    assert [(p.values["size"], p.values["seed"]) for p in part.points] == [*product(("small", "large"), (0, 2))]
    assert {(p.recipe.method, p.recipe.split.alpha) for p in part.points} == {("fedavg", 0.1)}
    for wanted, sentence in (
        (["methd=fedavg"], "--only methd=fedavg: write it as field=value, with one of the grid's fields: method"),
        (["method=fedavgg"], "--only method=fedavgg: method has no such value in the grid; did you mean fedavg?"),
        (["size=large", "split.alpha=0.5"], "no run of the grid matches all of these"),
    ):
        with pytest.raises(RecipeError) as caught:
            sweep.only(wanted)
        assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("before", "after", "sentence"),
    [
        ("[grid]", "[grids]", "mine.toml: there is no [grid]; list the varying settings there"),
        ("seed = [0, 1, 2]", "seed = 0", "mine.toml: grid.seed = 0: must be a list of at least one value"),
        ("seed = [0, 1, 2]", "seed = [0, 0]", "mine.toml: grid.seed: a value is listed twice"),
        ("split.alpha = [", "split.alhpa = [", "mine.toml: override 3: when.split.alpha is not in the grid"),
        (
            "seed = [0, 1, 2]",
            "sede = [0]",
            "mine.toml: grid.sede: a recipe has no such field, and no [[override]] explains",
        ),
        ('"small", "large"', '"small", "large", "huge"', "mine.toml: grid.size: a recipe has no such field, and no"),
        ('size = "small" }', 'size = "smal" }', "when.size = 'smal' is not in the grid; did you mean small?"),
        (
            "skip = true",
            "skipp = true",
            "mine.toml: override 3: 'skipp' is unknown; the keys are when, set, fill and skip",
        ),
        ("flatness --k 1", "rm -r", "mine.toml: after: 'rm -r' cannot follow a run; use personalize"),
        ("local.lr = 0.02", "local.lrr = 0.02", "mine.toml: local.lrr: there is no such field; did you mean local.lr?"),
        ('preset = "sol"', 'preset = "soul"', "mine.toml: preset = 'soul': there is none of that name"),
        ("[grid]", "[grid", "mine.toml: not valid TOML"),
        ("[grid]", "grid = 3\n[grids]", "mine.toml: grid = 3: must be a table"),
        ("set = { local.lr = 0.02 }", "set = 0.02", "mine.toml: set = 0.02: must be a table"),
        ('when = { size = "large", split.alpha = 0.5 }', "", "mine.toml: every run of the grid is skipped"),
    ],
)
def test_a_mistake_in_a_sweep_file_is_one_sentence(tmp_path, before, after, sentence):
    assert before in GRID
    with pytest.raises(RecipeError) as caught:
        load_sweep(written(tmp_path, GRID.replace(before, after, 1)))
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_override_is_one_of_a_list(tmp_path):
    for text in ("override = 3\n[grid]\nseed = [0]", "[override]\nwhen = { seed = 0 }\n[grid]\nseed = [0]"):
        with pytest.raises(RecipeError, match=r"override: start each one with a line \[\[override\]\]"):
            load_sweep(written(tmp_path, text))


def test_a_file_or_scale_that_is_not_there_is_named(tmp_path):
    with pytest.raises(RecipeError, match=r"fedsol-tabel1: there is no such sweep file.*did you mean fedsol-table1"):
        load_sweep("fedsol-tabel1")
    with pytest.raises(RecipeError, match="--scale huge: there is no such scale; known: full, tiny"):
        load_sweep(written(tmp_path, GRID), "huge")


@settings(deadline=None, max_examples=30)
@given(st.lists(st.text("ab/.() é'", max_size=150), min_size=1, max_size=6, unique=True))
def test_every_run_has_a_directory_of_its_own(tmp_path_factory, names):
    listed = json.dumps(names, ensure_ascii=False)
    text = f"[grid]\nlabel = {listed}\n[[override]]\nwhen.label = {listed}\nset = {{}}\n"
    slugs = [p.slug for p in load_sweep(written(tmp_path_factory.mktemp("sweep"), text)).points]
    assert len({slug.casefold() for slug in slugs}) == len(names)
    assert all(slug not in ("", ".", "..") and "/" not in slug and len(slug.encode()) <= 100 for slug in slugs)


def test_runs_at_a_time_are_bounded_by_cores_memory_and_the_grid():
    gigabyte = 2**30
    assert jobs_for(4, 100, None) == 4
    assert jobs_for(4, 2, 8 * gigabyte) == 2
    assert jobs_for(4, 100, 3 * gigabyte) == 3
    assert jobs_for(4, 100, gigabyte // 2) == 1


def timed_trial(monkeypatch, rates, seconds=1.0):
    """Replace the trials by given rounds per second; return the layouts that are tried."""
    tried, clock = [], iter(range(0, 10**6))

    def trial(point, layout, trust):
        tried.append(layout)
        return rates[layout]

    monkeypatch.setattr(throughput, "trial", trial)
    monkeypatch.setattr(throughput.time, "monotonic", lambda: next(clock) * seconds)
    return tried


@pytest.mark.parametrize(
    ("rates", "best"), [((9.0, 5.0, 3.0), (4, 1)), ((2.0, 7.0, 6.0), (2, 2)), ((1.0, 2.0, 3.0), (1, 4))]
)
def test_the_cores_are_divided_as_it_is_fastest(tmp_path, monkeypatch, rates, best):
    sweep = load_sweep(written(tmp_path, "server.rounds = 1000\n[grid]\nseed = [0, 1, 2, 3, 4]\n"))
    choices = throughput.layouts(4, 4)
    tried = timed_trial(monkeypatch, dict(zip(choices, rates, strict=True)))
    assert throughput.fastest(sweep, tmp_path, 4, 4, False) == (best, dict(zip(choices, rates, strict=True)))
    assert tried == choices


@pytest.mark.parametrize(
    ("rounds", "seconds", "more", "trials"),
    [(10, 1.0, "", 0), (1000, 1.0, "engine.workers = 2", 0), (1000, 300.0, "", 1), (1000, 1.0, "", 2)],
    ids=["short sweep", "workers are set", "a trial takes long", "worth it"],
)
def test_a_trial_must_be_worth_its_time(tmp_path, monkeypatch, rounds, seconds, more, trials):
    text = f"server.rounds = {rounds}\n{more}\n[grid]\nseed = [0, 1, 2]\n"
    sweep = load_sweep(written(tmp_path, text))
    tried = timed_trial(monkeypatch, {(2, 1): 2.0, (1, 2): 1.0}, seconds)
    assert throughput.fastest(sweep, tmp_path, 2, 2, False)[0] == (2, 1)
    assert len(tried) == trials


@pytest.fixture
def taken(monkeypatch):
    """The layouts in which sweeps run on four cores with ample memory."""
    layouts = []
    monkeypatch.setattr(pool, "cores", lambda: 4)
    monkeypatch.setattr("fedflat.files.free_memory", lambda: None)
    monkeypatch.setattr(Jobs, "run", lambda work, *_: layouts.append((work.jobs, work.workers)))
    return layouts


@pytest.mark.parametrize("best", [(4, 1), (2, 2), (1, 4)])
def test_a_long_sweep_runs_in_the_layout_that_was_fastest(tmp_path, monkeypatch, taken, best):
    sweep = load_sweep(written(tmp_path, "server.rounds = 1000\n[grid]\nseed = [0, 1, 2, 3, 4]\n"))
    timed_trial(monkeypatch, {layout: 5.0 + (layout == best) for layout in throughput.layouts(4, 4)})
    train_all(sweep, tmp_path, jobs=0, trust=False)
    assert taken == [best]


@pytest.mark.parametrize(
    ("jobs", "left", "layout"),
    [(0, 3, (3, 1)), (0, 1, (1, 4)), (0, 0, (1, 4)), (2, 3, (2, 2)), (2, 1, (2, 4)), (9, 3, (9, 1)), (9, 1, (9, 4))],
)
def test_the_cores_are_divided_among_the_runs_that_are_left(tmp_path, monkeypatch, taken, jobs, left, layout):
    plan = load_sweep(written(tmp_path, "[grid]\nseed = [0, 1, 2]\n"))
    slugs = [point.slug for point in plan.points]
    monkeypatch.setattr(results, "finished", lambda folder, point: slugs.index(point.slug) >= left)
    train_all(plan, tmp_path, jobs, trust=False)
    assert taken == [layout]


def test_a_trial_trains_a_few_rounds_aside_and_a_run_that_fails_has_no_rate(tmp_path):
    sweep = load_sweep(written(tmp_path, "server.rounds = 1000\n[grid]\nseed = [0]\n"))
    before = {*tmp_path.iterdir()}
    assert throughput.trial(sweep.points[0], (1, 1)) > 0
    lost = replace(sweep.points[0], recipe=sweep.points[0].recipe.model_copy(update={"method": "no such"}))
    assert throughput.trial(lost, (1, 1)) == 0.0
    assert {*tmp_path.iterdir()} == before


@settings(deadline=None)
@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=5), st.floats(-10, 10))
def test_the_deviation_is_that_of_a_sample_and_knows_no_shift(values, shift):
    mean, std = mean_and_std(values)
    assert std**2 == pytest.approx(sum((v - mean) ** 2 for v in values) / (len(values) - 1), abs=1e-6)
    assert mean_and_std([v + shift for v in values])[1] == pytest.approx(std, abs=1e-6)


def test_a_mean_over_seeds_is_left_open_where_a_seed_never_reached_the_target():
    runs = [{"method": m, "seed": s, "scale": "full", "rounds_to_target": 10 * s or None, "asked": {}}
            for m in ("a", "b") for s in ((1, 2) if m == "a" else (0, 1))]  # fmt: skip
    a, b = summarised(runs)
    assert (a["method"], a["runs"], a["rounds_to_target_mean"], a["target_reached"]) == ("a", 2, 15.0, 2)
    assert (b["rounds_to_target_mean"], b["rounds_to_target_std"], b["target_reached"]) == (None, None, 1)


def test_results_that_are_none_are_a_sentence(tmp_path):
    with pytest.raises(RunError, match=r"has no results.jsonl"):
        read_rows(tmp_path)
    (tmp_path / "results.jsonl").write_text('{"method": "fedavg"}\n')
    with pytest.raises(RunError, match=r"results.jsonl: a line is not a valid result"):
        read_rows(tmp_path)


def test_a_recipe_that_is_complete_says_so_and_takes_nothing_from_the_default(tmp_path):
    for name in shipped():
        for point in load_sweep(name).points[::17]:
            assert load(written(tmp_path, f'preset = "none"\n{point.recipe.to_toml()}')) == point.recipe


def test_a_limit_leaves_so_many_training_samples_by_the_splits_seed_and_all_test_samples():
    whole, some = (gather(load(None, ["split.seed=3", f"data.limit={n}"])).dataset for n in (0, 100))
    assert (len(some.train), len(some.test)) == (100, len(whole.test))
    again, other = (gather(load(None, ["data.limit=100", f"split.seed={n}", "seed=9"])).dataset for n in (3, 4))
    assert some.train.inputs.equal(again.train.inputs)
    assert not some.train.inputs.equal(other.train.inputs)
    rows = {tuple(row) for row in whole.train.inputs.flatten(1).tolist()}
    assert all(tuple(row) in rows for row in some.train.inputs.flatten(1).tolist())


@pytest.mark.parametrize("name", shipped())
def test_every_sweep_that_comes_along_means_something_at_every_scale(name):
    sizes = []
    for scale in ("full", "laptop", "tiny"):
        sweep = load_sweep(name, scale)
        for method in {str(p.recipe.method): p.recipe.method for p in sweep.points}.values():
            parse(method)
        sizes.append(sum(p.recipe.server.rounds for p in sweep.points))
    assert sizes[0] > sizes[1] > sizes[2] == 2 * len(sweep.points)


@pytest.mark.parametrize("name", shipped())
def test_the_tiny_form_of_every_sweep_that_comes_along_runs_two_rounds(name, tmp_path, capsys):
    text = name in ("lora", "shakespeare")
    if text:
        (tmp_path / "shakespeare").mkdir()
        (tmp_path / "shakespeare/input.txt").write_text(PLAY)
    place = [f"data.dir={json.dumps(str(tmp_path))}"] if text else []
    points = load_sweep(name, "tiny", ["engine=inline", *place]).points
    for point in (points[0], points[-1]):
        folder = tmp_path / point.slug
        problem = prepare(point.recipe)
        recipe = problem.recipe
        used = ("shakespeare", point.recipe.model.name) if text else ("digits", "mlp")
        assert (problem.federation.dataset.name, recipe.model.name) == used
        assert len(execute(problem, folder).history) == 2
        answers = []
        for command in point.after:
            capsys.readouterr()
            verb, *options = command.split()
            app([verb, str(folder), *options, "--json"], standalone_mode=False)
            answers.append(folder / f"{len(answers)}.json")
            answers[-1].write_text(capsys.readouterr().out)
        save_result(folder, point, "tiny", answers)
        assert finished(folder, point)
        metrics = json.loads((folder / "result.json").read_text())["metrics"]
        assert 0 <= metrics["accuracy_last"] <= metrics["accuracy_best"] <= 1
        assert all(isinstance(metrics[column], float) for column in COLUMNS.get(name, ()))
        assert all(columns(json.loads(answer.read_text())).keys() <= metrics.keys() for answer in answers)


@pytest.mark.parametrize("name", [name for name in shipped() if name.startswith("fedsol-")])
def test_fedsol_is_adaptive_wherever_its_paper_does_not_say_otherwise(name):
    methods = {spell(p.recipe.method) for p in load_sweep(name).points}
    ours = [method for method in methods if method.startswith("fedsol(")]
    ours += [method for method in methods if method.startswith("fedsol_ablation(")]
    assert ours
    if name not in ("fedsol-figure8a", "fedsol-figure8b"):  # they compare forms of Λ
        assert all("radius='dim0'" in method for method in ours)
    if name not in ("fedsol-table8",):
        assert all("scope='all'" in method for method in ours)


def test_mans_settings_are_those_of_its_authors():
    points = {
        (p.values["setting"], p.values["method"]): p.recipe for p in load_sweep("man-accuracy").only(["seed=0"]).points
    }
    cifar = points["CIFAR-100 IID", "fedasam({asam}, eta=0.2) + man({man})"]
    assert (cifar.split.name, cifar.split.stratified, cifar.split.clients) == ("iid", True, 100)
    assert cifar.method == "fedasam(0.1, eta=0.2) + man(0.15)"
    assert points["CIFAR-100 IID", "fedasam({asam}, eta=0.2)"].method == "fedasam(0.5, eta=0.2)"
    tiny = points["Tiny-ImageNet IID", "fedsam({sam}) + man({man})"]
    assert (tiny.method, tiny.split.stratified, tiny.model.name) == ("fedsam(0.01) + man(0.1)", None, "convnet-gn")
    assert points["Tiny-ImageNet IID", "fedsam({sam})"].method == "fedsam(0.03)"
    assert points["Tiny-ImageNet δ=0.6, as coded", "fedavg + man({man})"].method == (
        "fedavg + man(0.2, layers='official_convnet')"
    )
    assert {recipe.evaluation.model for recipe in points.values()} == {"all"}
    averages = {method.split("(")[0].split()[0]: recipe.server.average for (_, method), recipe in points.items()}
    uniform = {"feddyn", "feddc", "fedspeed"}
    assert {name for name, average in averages.items() if average == "uniform"} == uniform
    assert averages.keys() - uniform == {"fedavg", "fedsam", "fedasam"}


def test_duality_after_a_run_gives_columns_of_the_gap_and_of_both_pairings():
    numbers = {"paired_gap": 0.5, "fluctuation": 0.4, "drift": 0.1, "envelope": 2.0, "size": 3.0, "sharpness": 4.0}
    each = {**numbers, "correlations": {"mean": 0.2, "std": 0.02}}
    pairings = {"train_to_test": each, "test_to_train": {**each, "paired_gap": -0.5}}
    row = {"layer": "fc2", "gap": 0.3, "weight_norm": 9.0, "pairings": pairings}
    found = columns({"layers": [row]})
    assert (found["duality_fc2_gap"], found["duality_fc2_norm"]) == (0.3, 9.0)
    assert (found["duality_fc2_train_to_test_gap"], found["duality_fc2_test_to_train_gap"]) == (0.5, -0.5)
    for direction in pairings:
        named = [found[f"duality_fc2_{direction}_{name}"] for name in ("fluctuation", "drift", "envelope", "size")]
        assert named == [0.4, 0.1, 2.0, 3.0]
        spread = [found[f"duality_fc2_{direction}_{name}"] for name in ("correlation", "correlation_spread")]
        assert spread == [0.2, 0.02]


def test_what_counts_as_done_is_done_with_this_very_recipe(tmp_path):
    tiny = load_sweep("fedsol-table8", "tiny", ["engine=inline"])
    (point,) = tiny.only(["method.scope=all", "method.rho=0.5"]).points
    assert not finished(tmp_path, point)
    problem = prepare(point.recipe)
    execute(problem, tmp_path)
    save_result(tmp_path, point, "tiny", [])
    assert finished(tmp_path, point)
    again = load_sweep("fedsol-table8", "tiny", ["engine.workers=2", "checkpoint.every=1"]).points
    assert finished(tmp_path, next(p for p in again if p.slug == point.slug))
    for other in ("local.lr=0.5", "server.rounds=3"):
        changed = load_sweep("fedsol-table8", "tiny", [other]).points
        assert not finished(tmp_path, next(p for p in changed if p.slug == point.slug))


def curve(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in lines]


def test_a_sweep_that_is_stopped_goes_on_by_the_same_command_past_a_run_that_fails(tmp_path, monkeypatch):
    (tmp_path / "held.py").write_text(HELD)
    text = """
        model = "held:Held"
        split.clients = 4
        local.steps = 3
        server.rounds = 3
        checkpoint.every = 1
        engine = "inline"

        [grid]
        local.lr = [1e9, 0.1]
    """
    sweep = load_sweep(written(tmp_path, text))
    (tmp_path / "hold").touch()
    first = Command(tmp_path, "sweep", "mine.toml", "--trust", "--only", "local.lr=0.1", COLUMNS="140")
    until((tmp_path / "waits").exists)
    first.signal(signal.SIGINT)
    log = tmp_path / "sweeps/mine/lr=0.1/log.txt"
    until(lambda: "stopping after this round is finished and saved" in log.read_text())
    (tmp_path / "hold").unlink()
    code, said = first.ended()
    assert (code, "Traceback" in said) == (130, False)
    assert said.endswith("fedflat: stopped; 0 of 1 runs are done; continue with the same command\n")
    folder = tmp_path / "sweeps/mine"
    assert len(curve(folder / "lr=0.1")) == 2

    code, said = Command(tmp_path, "sweep", "mine.toml", "--trust", "--jobs", "1", COLUMNS="140").ended()
    assert (code, "Traceback" in said) == (5, False)
    assert "lr=1000000000.0: " in said and "lower local.lr" in said
    assert "1 of 2 runs failed; see sweeps/mine/lr=1000000000.0/log.txt" in said
    assert "written to sweeps/mine" in said
    (row,) = read_rows(folder)
    for table, name in (("results.csv", "accuracy_last"), ("summary.csv", "accuracy_last_mean")):
        (written_row,) = csv.DictReader((folder / table).read_text().splitlines())
        assert (written_row["local.lr"], float(written_row[name])) == ("0.1", row["accuracy_last"])
    assert [finished(folder / p.slug, p) for p in sweep.points] == [False, True]

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(trusted, "_packages", {"held"})
    problem = prepare(sweep.points[1].recipe)
    execute(problem, tmp_path / "whole")
    assert curve(folder / "lr=0.1") == curve(tmp_path / "whole")
    assert row["accuracy_last"] == curve(tmp_path / "whole")[-1]["accuracy"]


def test_runs_start_from_the_model_of_their_base_which_is_trained_once(tmp_path):
    """The study of LoRA at its smallest: first all weights, then, by a second command, the adapters."""
    (tmp_path / "shakespeare").mkdir()
    (tmp_path / "shakespeare/input.txt").write_text(PLAY)
    folder = tmp_path / "sweeps/lora-tiny"

    def sweep(*more):
        given = ("--set", "data.dir=.", "--only", "method=fedavg", *more)
        return Command(tmp_path, "sweep", "lora", "--scale", "tiny", *given, COLUMNS="140").ended()

    code, said = sweep("--only", "trained=all")
    assert code == 0, said
    begun = (folder / "base/metrics.jsonl").read_bytes()
    code, said = sweep("--only", "trained=lora")
    assert (code, "base is done" in said) == (0, False)
    assert (folder / "base/metrics.jsonl").read_bytes() == begun
    digest = json.loads((folder / "base/summary.json").read_text())["model_sha256"]
    recipes = [(folder / f"{each}_fedavg_seed=0/recipe.toml").read_text() for each in ("all", "lora")]
    assert all(f'base_sha256 = "{digest}"' in text for text in recipes)
    whole, lora = read_rows(folder)
    assert lora["bytes_up"] < whole["bytes_up"] / 2
    assert whole["lambda1"] == whole["lambda1_all"] and lora["lambda1"] != lora["lambda1_all"]
    code, said = sweep("--set", "local.momentum=0.5")
    assert (code, said.count("\n")) == (6, 1)
    assert "runs have other settings, base for example has local.momentum = 0.9, and now it is 0.5" in said


def test_without_a_base_no_run_of_the_grid_starts(tmp_path):
    written(tmp_path, BASED.replace("lr = 0.01", "lr = 1e9").replace(" + adamw", ""))
    code, said = Command(tmp_path, "sweep", "mine.toml", COLUMNS="140").ended()
    assert code == 5 and "1 of 3 runs failed; see sweeps/mine/base/log.txt" in said
    assert {path.name for path in (tmp_path / "sweeps/mine").iterdir() if path.is_dir()} == {"base"}


def test_the_commands_of_a_sweep_are_listed_before_they_run(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    app(["sweep"], standalone_mode=False)
    assert "fedsol-table1" in capsys.readouterr().out.splitlines()
    app(["sweep", "fedsol-table8", "--scale", "tiny", "--only", "method.scope=head", "--dry"], standalone_mode=False)
    assert capsys.readouterr().out.splitlines()[0] == "to do  head_rho=0.5_seed=0"
    assert not (tmp_path / "sweeps").exists()


def test_the_sweep_of_the_docs_is_one(tmp_path):
    (text,) = re.findall(r"```toml\n(.*?)```", (Path(__file__).parents[2] / "docs/sweeps.md").read_text("utf-8"), re.S)
    assert len(load_sweep(written(tmp_path, text)).points) == (3 + 1) * 2 * 3
    assert len(load_sweep(written(tmp_path, text), "laptop").points) == (3 + 1) * 2


def test_the_docs_count_the_runs_of_every_sweep_of_a_paper():
    text = (Path(__file__).parents[2] / "docs/sweeps.md").read_text("utf-8")
    table = text.split("| sweep and table | runs | each |")[1].split("\n\n")[0]
    counted = {}
    for line in table.strip().splitlines()[1:]:
        names, runs, _ = line.strip("|").split("|")
        counted |= dict(zip(re.findall(r"`([\w-]+)`", names), map(int, runs.split(",")), strict=True))
    assert counted == {
        name: len(load_sweep(name).points) for name in shipped() if name not in ("fashion", "lora", "shakespeare")
    }


def test_nested_tables_and_dotted_names_are_the_same_grid():
    assert flattened({"split": {"alpha": [1]}, "seed": [0]}) == flattened({"split.alpha": [1], "seed": [0]})


def test_the_columns_of_a_spectrum_are_read_from_todays_files_and_from_those_of_0_1():
    """0.1 wrote two estimates of the trace without intervals, and a ratio of any two numbers."""
    old = {"trace": {"mean": 9.0, "error": 1.0}, "trace_plus_plus": {"mean": 8.0, "error": 2.0}}
    new = {"trace": {"mean": 7.0, "error": 1.0, "low": 5.0, "high": 9.0}}
    five = {"eigenvalues": [4.0, 3.0, 2.0, 1.5, 2.0]}
    assert columns({"runs": [{"spectrum": old | five}]}) == {
        "lambda1": 4.0, "trace": 8.0, "lambda5": 2.0, "lambda1/lambda5": 2.0,
    }  # fmt: skip
    found = columns({"runs": [{"spectrum": new | {"eigenvalues": [4.0, 3.0, 2.0, 1.5, -2.0]}}]})
    assert found == {
        "lambda1": 4.0, "trace": 7.0, "trace_low": 5.0, "trace_high": 9.0, "lambda5": -2.0, "lambda1/lambda5": None,
    }  # fmt: skip


def test_a_run_that_does_not_contain_a_label_is_trained_once_and_has_none(tmp_path):
    text = """
        [grid]
        method = ["fedavg", "fedsam(rho={rho})", "fedsam(rho={rho}) + man({zeta})"]
        rho = [0.05, 0.1]
        zeta = [0.1, 0.2]
        seed = [0]
    """
    sweep = load_sweep(written(tmp_path, text))
    assert [(p.recipe.method, p.values.get("rho"), p.values.get("zeta")) for p in sweep.points] == [
        ("fedavg", None, None),
        ("fedsam(rho=0.05)", 0.05, None),
        ("fedsam(rho=0.1)", 0.1, None),
        ("fedsam(rho=0.05) + man(0.1)", 0.05, 0.1),
        ("fedsam(rho=0.05) + man(0.2)", 0.05, 0.2),
        ("fedsam(rho=0.1) + man(0.1)", 0.1, 0.1),
        ("fedsam(rho=0.1) + man(0.2)", 0.1, 0.2),
    ]
    assert [p.slug for p in sweep.only(["rho=0.1", "zeta=0.2"]).points] == [
        "fedsam-rho=-rho-man-zeta_rho=0.1_zeta=0.2_seed=0"
    ]


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """A finished sweep of two runs."""
    monkeypatch.chdir(tmp_path)
    text = 'data.limit = 100\nmodel.hidden = [4]\nserver.rounds = 2\nengine = "inline"\n[grid]\nlocal.lr = [0.1, 0.2]'
    sweep = load_sweep(written(tmp_path, text))
    for point in sweep.points:
        folder = tmp_path / "sweeps/mine" / point.slug
        execute(prepare(point.recipe), folder)
        save_result(folder, point, "full", [])
    write_results(tmp_path / "sweeps/mine", collect(tmp_path / "sweeps/mine", sweep))
    return tmp_path / "sweeps/mine"


@pytest.mark.parametrize(("setting", "told"), [
    ("local.batch=20", "lr=0.1 for example has local.batch = 10, and now it is 20; choose another --out"),
    ("server.rounds=1", "lr=0.1 for example has server.rounds = 2, and now it is 1; choose another --out"),
])  # fmt: skip
def test_other_settings_for_a_finished_sweep_are_refused_and_leave_its_results(trained, setting, told):
    before = {path: path.read_bytes() for path in trained.rglob("*.*[!k]") if path.is_file()}
    with pytest.raises(RunError, match=rf"2 of 2 runs have other settings, {re.escape(told)}"):
        app(["sweep", "mine.toml", "--set", setting], standalone_mode=False)
    assert {path: path.read_bytes() for path in trained.rglob("*.*[!k]") if path.is_file()} == before
    assert len(read_rows(trained)) == 2


def test_more_rounds_continue_a_finished_sweep(trained):
    sweep = load_sweep("mine.toml", None, ["server.rounds=3"])
    refuse_other_settings(trained, sweep)


def test_a_finished_sweep_of_an_earlier_version_may_lack_the_newer_fields_also_in_its_base(tmp_path):
    sweep = load_sweep(written(tmp_path, BASED))
    for run in sweep.runs:
        asked = run.asked()
        for each in (asked, asked.get("base", asked)):
            each["data"].pop("half", None)
        (tmp_path / run.slug).mkdir()
        (tmp_path / run.slug / "result.json").write_text(json.dumps({"scale": "full", "metrics": {}, "asked": asked}))
    refuse_other_settings(tmp_path, sweep)
    assert all(finished(tmp_path / run.slug, run) for run in sweep.runs)
    other = load_sweep(written(tmp_path, BASED.replace("steps = 2", "steps = 3")))
    with pytest.raises(RunError, match=r"3 of 3 runs .*, base for example has local\.steps = 2, and now it is 3;"):
        refuse_other_settings(tmp_path, other)


def test_a_base_is_not_trained_on_once_a_run_has_begun_from_its_model(tmp_path):
    sweep = load_sweep(written(tmp_path, BASED))
    (tmp_path / "base").mkdir()
    whole = {"asked": sweep.base.asked(), "scale": "default", "metrics": {}}
    (tmp_path / "base/result.json").write_text(json.dumps(whole))
    longer = load_sweep(written(tmp_path, BASED.replace("cohort = 1", "cohort = 1\nserver.rounds = 3")))
    refuse_other_settings(tmp_path, longer)
    (tmp_path / "all").mkdir()
    (tmp_path / "all/metrics.jsonl").touch()
    refuse_other_settings(tmp_path, sweep)
    with pytest.raises(RunError, match=r"1 of 3 runs .*, base for example has server\.rounds = 1, and now it is 3;"):
        refuse_other_settings(tmp_path, longer)


def test_a_trial_has_no_base_and_an_unfinished_one_is_not_done(tmp_path, monkeypatch):
    sweep, seen = load_sweep(written(tmp_path, BASED)), []
    work = Jobs(sweep, tmp_path / "runs", 1, 1)
    monkeypatch.setattr(
        Jobs, "_run", lambda self, waiting, *_: seen.append(([p.slug for p in waiting], self.sweep.base))
    )
    work.run(lambda: None, lambda *_: None)
    assert [slugs for slugs, _ in seen] == [["base"], ["all", "lora"]] and work.done == []
    seen.clear()
    throughput.trial(sweep.points[0], (2, 1))
    assert seen == [([], None), (["0", "1"], None)]


def test_a_result_that_is_nested_too_deeply_counts_as_none(tmp_path):
    point = load_sweep(written(tmp_path, BASED)).points[0]
    (tmp_path / "result.json").write_text('{"asked": ' + "[" * 100_000)
    assert not finished(tmp_path, point)


def test_two_sweeps_do_not_work_in_one_directory(trained, capsys):
    with RunLock(trained, "sweep"), pytest.raises(RunError, match="another process is working on this sweep"):
        app(["sweep", "mine.toml"], standalone_mode=False)
    app(["sweep", "mine.toml"], standalone_mode=False)
    assert "written to sweeps/mine" in capsys.readouterr().out


def test_a_run_that_another_process_works_on_is_waited_for(tmp_path, monkeypatch):
    """After kill -9 the runs of a sweep go on without it, and the same command finds them at work."""
    sweep = load_sweep(written(tmp_path, GRID)).only(["size=small", "seed=0"])
    begun, seen = [], []
    monkeypatch.setattr(Jobs, "_begin", lambda _, point: begun.append(point))
    first = tmp_path / sweep.points[0].slug
    first.mkdir()
    orphan = RunLock(first)

    def watch():
        seen.append([*begun])
        if len(seen) == 2:
            orphan.close()

    work = Jobs(sweep, tmp_path, 1, 1)
    work.run(watch, lambda *_: None)
    assert seen[0] == seen[1] == [*sweep.points[1:]], "all others begin at once"
    assert begun == [*sweep.points[1:], sweep.points[0]] and not work.failed


@pytest.mark.skipif(sys.platform == "win32", reason="processes share files by locks of POSIX")
def test_the_runs_of_a_sweep_share_one_decoded_data_set(tmp_path):
    """The file is gone when the second run begins, so it can only map what the first one has stored."""
    file, chance, ends = tmp_path / "mine.npz", np.random.default_rng(0), []
    parts = {"train": 40, "test": 10}
    arrays = {f"x_{part}": chance.normal(size=(n, 3)).astype("float32") for part, n in parts.items()}
    np.savez(file, **arrays, **{f"y_{part}": np.arange(n) % 2 for part, n in parts.items()})
    text = 'server.rounds = 1\nsplit.clients = 4\nmodel.hidden = [4]\nengine = "inline"\n[grid]\nlocal.lr = [0.1, 0.2]'
    sweep = load_sweep(written(tmp_path, text), None, ["data=arrays", f"data.dir={file}"])

    def told(_, complaint):
        ends.append(complaint)
        file.unlink(missing_ok=True)

    Jobs(sweep, tmp_path, jobs=1, workers=1).run(lambda: None, told)
    assert ends == [None, None]
