"""Tuning: equal budgets, a planted optimum for a fraction of the grid, test samples never seen, and kill -9."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from importlib.util import find_spec
from multiprocessing import get_context

import numpy as np
import pytest
import torch

from fedflat import federate
from fedflat.cli import app
from fedflat.errors import RecipeError, RunError, SplitError
from fedflat.randomness import numpy_generator
from fedflat.recipe import load
from fedflat.runs.build import prepare
from fedflat.runs.experiment import execute
from fedflat.runs.sweep import load_sweep
from fedflat.runs.tune import (
    Plan,
    Space,
    Trial,
    Tuned,
    final_sweep,
    promoted,
    read_space,
    read_tuned,
    rows,
    rungs,
    search,
    spent,
    to_optuna,
    tuned_recipe,
)

SMALL = (
    "data.limit=300", 'model={name="mlp", hidden=[8]}', "split.clients=4", "split.alpha=1.0", "server.cohort=2",
    "engine.name=inline", "local.epochs=1",
)  # fmt: skip
RATES = "local.lr=1e-9,1e-8,1e-7,1e-6,0.2,1e-5,1e-4,3e-4,1e-3"  # only one of them learns anything in nine rounds


def here(sweep, folder):
    """Train in this process what jobs would train in theirs."""
    for point in sweep.points:
        execute(prepare(point.recipe), folder / point.slug, resume=True)


def small(rounds=9, methods=("fedavg",), space=(RATES,), **budget):
    return Plan(load(None, SMALL), read_space(methods, space), rounds, **budget)


def test_a_planted_optimum_is_found_with_less_than_a_third_of_the_grids_rounds(tmp_path):
    trained: list[int] = []

    def counted(sweep, folder):
        for point in sweep.points:
            history = execute(prepare(point.recipe), folder / point.slug, resume=True).history
            trained.append(len(history))

    plan = small()
    (found,) = search(plan, tmp_path, counted)
    assert found.best == {"local.lr": 0.2}
    lengths = [len((run / "metrics.jsonl").read_text().splitlines()) for run in tmp_path.glob("fedavg*")]
    assert sorted(lengths) == [1] * 6 + [3] * 2 + [9]
    assert sum(lengths) == found.used == 21 and 3 * found.used < 9 * 9
    # A promoted run went on: of the rounds that runs had at their ends, those of its earlier stages count once.
    assert sum(trained) > sum(lengths)


def test_a_promoted_run_is_the_run_that_was_never_stopped(tmp_path):
    plan = small()
    search(plan, tmp_path / "a", here)
    point = plan.point("fedavg", {"local.lr": 0.2}, 10_000, 9)
    execute(prepare(point.recipe), tmp_path / "b")
    model = (tmp_path / "a" / point.slug / "model.safetensors").read_bytes()
    assert model == (tmp_path / "b" / "model.safetensors").read_bytes()


def test_a_score_is_the_mean_over_the_last_third_of_the_rounds(tmp_path):
    plan = small(space=("local.lr=0.1,0.2,0.3",), trials=3)
    (found,) = search(plan, tmp_path, here)
    for trial in found.trials:
        run = tmp_path / plan.point("fedavg", trial.settings, 10_000, 9).slug
        accuracy = [json.loads(line)["accuracy"] for line in (run / "metrics.jsonl").read_text().splitlines()]
        for rounds, score in trial.scores.items():
            assert score == pytest.approx(np.mean(accuracy[rounds - rounds // 3 : rounds]))
    assert sorted(len(trial.scores) for trial in found.trials) == [1, 1, 2]


def _searched(folder, pipe):
    def slow(sweep, where):
        for point in sweep.points:
            pipe.send(point.slug)
            execute(prepare(point.recipe), where / point.slug, resume=True, callbacks=[lambda _: time.sleep(0.02)])

    search(small(), folder, slow)


def test_a_search_that_was_killed_goes_on_to_the_same_bit(tmp_path):
    whole = search(small(), tmp_path / "whole", here)
    ours, theirs = get_context("fork").Pipe()
    child = get_context("fork").Process(target=_searched, args=(tmp_path / "killed", theirs))
    child.start()
    for _ in range(11):  # inside of the second stage
        assert ours.poll(60)
        ours.recv()
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    begun = {run.name for run in (tmp_path / "killed").glob("fedavg*")}
    assert len(begun) == 9 and not (tmp_path / "killed" / "tuned.json").exists()
    assert search(small(), tmp_path / "killed", here) == whole
    for run in (tmp_path / "whole").glob("fedavg*"):
        other = tmp_path / "killed" / run.name
        assert (other / "model.safetensors").read_bytes() == (run / "model.safetensors").read_bytes()
    assert (tmp_path / "killed" / "tuned.json").read_bytes() == (tmp_path / "whole" / "tuned.json").read_bytes()
    seconds = [json.loads(line)["seconds"] for run in (tmp_path / "killed").glob("fedavg*")
               for line in (run / "metrics.jsonl").read_text().splitlines()]  # fmt: skip
    hours = json.loads((tmp_path / "killed" / "hours.json").read_text())
    assert hours == {"fedavg": pytest.approx(sum(seconds) / 3600, abs=1e-4)}


def _timeless(run):
    """The records of a run without the time that they took."""
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [{name: value for name, value in record.items() if name != "seconds"} for record in records]


@pytest.mark.skipif(sys.platform == "win32", reason="no kill -9")
def test_a_command_that_was_killed_goes_on_to_the_same_files(tmp_path, capsys):
    """Its runs are processes of their own, which outlive it; they and the next command do not disturb each other."""
    plan = small(4, space=("local.lr=0.1,0.2",), trials=2, eta=2)
    settings = [argument for text in (*SMALL, "server.rounds=4") for argument in ("--set", text)]
    command = ["tune", "--method", "fedavg", "--space", "local.lr=0.1,0.2", "--trials", "2", "--eta", "2",
               "--jobs", "2", "--final", "2", *settings, "--out", str(tmp_path / "killed")]  # fmt: skip
    with subprocess.Popen([sys.executable, "-m", "fedflat", *command], stderr=subprocess.DEVNULL) as begun:
        ends = time.monotonic() + 60
        while not any((tmp_path / "killed").glob("fedavg*/metrics.jsonl")) and time.monotonic() < ends:
            time.sleep(0.02)
        begun.kill()
    assert not (tmp_path / "killed" / "tuned.json").exists() and begun.returncode == -signal.SIGKILL
    app(command, standalone_mode=False)
    found = search(plan, tmp_path / "whole", here)
    runs = [run.name for run in (tmp_path / "whole").glob("fedavg*")]
    assert sorted(runs) == sorted(run.name for run in (tmp_path / "killed").glob("fedavg*")) and len(runs) == 2
    for name in runs:
        whole, killed = tmp_path / "whole" / name, tmp_path / "killed" / name
        assert _timeless(killed) == _timeless(whole)
        assert (killed / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    for name in ("search.json", "tuned.json"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert (tmp_path / "killed" / "tuned.toml").read_text() == final_sweep(plan, found, 2)


def test_every_method_is_given_the_same_and_the_table_says_what_it_used(tmp_path):
    methods = ("fedavg", "fedsam({rho})")
    plan = small(2, methods, ("local.lr=0.1,1e-9", "rho=0.05,0.1,0.2"), trials=4, eta=2)
    average, sam = search(plan, tmp_path, here)
    assert average.given == sam.given == spent(rungs(2, 4, 2), 4)
    assert (average.combinations, sam.combinations) == (2, 6)
    assert len(average.trials) == 2 and len(sam.trials) == 4
    assert average.used < average.given == sam.used
    text = final_sweep(plan, [average, sam], 3)
    path = tmp_path / "final.toml"
    path.write_text(text)
    sweep = load_sweep(path)
    assert {point.recipe.method for point in sweep.points} == {average.filled, sam.filled}
    assert {point.recipe.seed for point in sweep.points} == {0, 1, 2}, "the search had seeds from 10,000 on"
    assert all(point.recipe.evaluation.on == "test" for point in sweep.points)
    assert {p.recipe.local.lr for p in sweep.points if p.recipe.method == "fedavg"} == {average.best["local.lr"]}


@pytest.mark.parametrize(
    "space",
    [
        'precision="float32","bf16"',
        'model={name = "mlp", hidden = [4]},"lenet64"',
        "admission.max_norm=inf,100.0",
        'split.draws="fedflat","fedsol"',
        "data.normalise=true,false",
    ],
)
def test_tuned_settings_of_any_kind_reach_the_final_sweep(tmp_path, space):
    plan = small(1, space=(space,), trials=2)
    for settings in plan.space.drawn("fedavg", 9):
        (tmp_path / "final.toml").write_text(final_sweep(plan, [Tuned("fedavg", settings, 0.5, 2, 2, 2, [])], 1))
        (point,) = load_sweep(tmp_path / "final.toml").points
        asked = tuned_recipe(plan.recipe, "fedavg", settings, [{"server": {"rounds": 1}}])
        assert point.recipe == asked, settings


def test_the_search_never_sees_a_test_sample():
    recipe = small().point("fedavg", {"local.lr": 0.1}, 10_000, 1).recipe
    problem, plain = prepare(recipe), prepare(load(None, [*SMALL, "seed=10000"]))
    train, test = (problem.federation.dataset.train.inputs, problem.federation.dataset.test.inputs)
    before = plain.federation.dataset
    assert len(train) + len(test) == len(before.train.inputs)
    together = torch.cat([train, test]).flatten(1)
    known = {row.numpy().tobytes() for row in before.train.inputs.flatten(1)}
    assert {row.numpy().tobytes() for row in together} == known


def test_what_is_measured_of_local_models_is_measured_on_validation_samples_too():
    recipe = load(None, [*SMALL, "server.rounds=1", "evaluation.on=validation", 'evaluation.measures=["local"]'])
    record = execute(prepare(recipe)).history[0]
    held = len(prepare(recipe).federation.dataset.test.labels)
    assert (record["accuracy"] * held) == pytest.approx(round(record["accuracy"] * held))
    assert record["local_accuracy_before"] is not None


@pytest.mark.parametrize("split", ["dirichlet", "lda", "iid"])
def test_validation_samples_are_held_out_of_every_client(split):
    options = {"refill": True, "alpha": 0.5} if split == "dirichlet" else {"alpha": 0.5} if split == "lda" else {}
    federation = federate("digits", split=split, clients=8, seed=3, **options)
    held = federation.validating(0.2, seed=1)
    trained = {row.numpy().tobytes() for shard in held.shards for row in held.dataset.train.inputs[shard]}
    scored = {row.numpy().tobytes() for row in held.dataset.test.inputs}
    assert not trained & scored and len(held.dataset.test.labels) > 0.1 * len(federation.dataset.train.labels)
    for shard, old in zip(held.shards, federation.shards, strict=True):
        labels = np.bincount(held.dataset.train.labels[shard], minlength=10)
        assert (labels <= np.bincount(federation.dataset.train.labels[old], minlength=10)).all()
    same = federation.validating(0.2, seed=1)
    assert torch.equal(same.dataset.test.labels, held.dataset.test.labels)


def test_a_client_keeps_a_sample_or_the_split_is_refused():
    federation = federate("digits", split="iid", clients=2, seed=0)
    tiny = replace(federation, shards=(torch.tensor([5]), torch.tensor([7, 8])))
    assert [len(shard) for shard in tiny.validating(0.9, seed=0).shards] == [1, 1]
    shared = replace(federation, shards=(torch.tensor([7]), torch.tensor([7, *range(8, 40)])))
    with pytest.raises(SplitError, match=r"evaluation\.validation = 0\.99"):
        shared.validating(0.99, seed=1)
    single = replace(federation, shards=(torch.tensor([5]), torch.tensor([7])))
    with pytest.raises(SplitError, match="no client has two samples"):
        single.validating(0.5, seed=0)


def test_stages_and_promotions():
    assert [(r.trials, r.rounds) for r in rungs(27, 27, 3)] == [(27, 1), (9, 3), (3, 9), (1, 27)]
    assert [(r.trials, r.rounds) for r in rungs(5, 1, 3)] == [(1, 5)]
    assert spent(rungs(10, 1, 2), 1) == 10
    assert promoted({0: 0.5, 1: 0.7, 2: 0.7, 3: 0.1}, 2) == [1, 2] and promoted({4: 1.0, 2: 1.0}, 1) == [2]


@pytest.mark.parametrize(
    ("methods", "space", "sentence"),
    [
        ((), (), "nothing to search"),
        ((), ("local.lr",), "write it as"),
        ((), ("local.rl=1,2",), "is not a field of a recipe"),
        (("fedsam({rho})",), ("local.lr=0.1",), r"\{rho\} has no values"),
        ((), ("local.lr=0.1,0.1",), "different values"),
        ((), ("server.rounds=5,10",), r"--space server\.rounds: the search sets server\.rounds itself"),
        ((), ("server={rounds = 5},{rounds = 10}",), r"--space server\.rounds: the search sets"),
        ((), ("seed=0,1",), "--space seed: the search sets seed itself; choose it by --seeds"),
        ((), ("evaluation.every=1,2",), r"--space evaluation\.every: the search sets evaluation itself"),
        ((), ("method=fedavg,fedsam",), "--space method: the search sets method itself; choose it by --method"),
        ((), ("method.rho=0.1,0.2",), r"--space method\.rho: the search sets method itself"),
        ((), ("missing.toml",), "cannot be read"),
    ],
)
def test_a_space_that_means_nothing_is_refused(methods, space, sentence):
    with pytest.raises(RecipeError, match=sentence):
        read_space(methods, space)


@pytest.mark.parametrize(("count", "drawn"), [(2, 9), (3, 9), (10, 9), (10, 10)])
def test_combinations_are_drawn_in_the_order_of_their_grid(count, drawn):
    """The grid is that of nested loops, the last axis innermost; numpy draws the same places of it."""
    space = Space(("fedavg",), {"local.lr": [0.1 * k for k in range(1, count)], "local.batch": [*range(count)]})
    grid = [{"local.lr": a, "local.batch": b} for a in space.axes["local.lr"] for b in space.axes["local.batch"]]
    assert space.combinations("fedavg") == len(grid)
    chosen = sorted(numpy_generator(0, "tune fedavg").choice(len(grid), min(drawn, len(grid)), replace=False).tolist())
    assert space.drawn("fedavg", drawn) == [grid[index] for index in chosen]


@pytest.mark.parametrize("axes", [9, 30])
def test_a_grid_that_fits_into_no_memory_can_be_searched(axes):
    space = Space(("fedavg",), {f"model.a{k}": [*range(10)] for k in range(axes)})
    drawn = space.drawn("fedavg", 9)
    assert space.combinations("fedavg") == 10**axes
    assert len({json.dumps(each) for each in drawn}) == 9 and all([*each] == [*space.axes] for each in drawn)


def test_a_space_can_be_a_file(tmp_path):
    path = tmp_path / "space.toml"
    path.write_text('method = "fedsam({rho})"\n[space]\nrho = [0.1, 0.2]\nlocal.lr = [0.1]\n')
    space = read_space((), [str(path)])
    assert space.methods == ("fedsam({rho})",)
    assert space.drawn("fedsam({rho})", 9) == [{"rho": 0.1, "local.lr": 0.1}, {"rho": 0.2, "local.lr": 0.1}]


def test_another_search_in_the_same_directory_is_refused(tmp_path):
    search(small(1, space=("local.lr=0.1",), trials=1), tmp_path, here)
    with pytest.raises(RunError, match="holds another search"):
        search(small(1, space=("local.lr=0.2",), trials=1), tmp_path, here)


def test_the_command_tunes_in_processes_of_its_own(tmp_path, capsys):
    settings = [argument for text in SMALL for argument in ("--set", text)]
    command = [
        "tune",
        "--set",
        "method=fedprox(0.1)",
        "--space",
        "local.lr=0.1",
        "--trials",
        "1",
        "--set",
        "server.rounds=1",
        *settings,
    ]
    app([*command, "--out", str(tmp_path / "t"), "--json"], standalone_mode=False)
    (found,) = json.loads(capsys.readouterr().out)
    assert found["method"] == "fedprox(mu=0.1)", "the recipe's own, if no other is named"
    assert found["best"] == {"local.lr": 0.1} and 0 < found["score"] <= 1
    assert load_sweep(tmp_path / "t" / "tuned.toml").points[0].recipe.local.lr == 0.1
    app([*command, "--out", str(tmp_path / "t")], standalone_mode=False)
    assert "equal budgets" in capsys.readouterr().out


def test_a_search_can_be_read_in_optunas_storage(tmp_path):
    optuna = pytest.importorskip("optuna")
    plan = small(3, space=("local.lr=1e-9,0.2,1e-8",), trials=3)
    found = search(plan, tmp_path / "s", here)
    storage = optuna.storages.InMemoryStorage()
    to_optuna(plan, found, storage, "mine")
    to_optuna(plan, found, storage, "mine")  # nothing is added twice
    study = optuna.load_study(study_name="mine: fedavg", storage=storage)
    assert len(study.trials) == 3 and study.best_params == {"local.lr": 0.2}
    assert study.best_value == found[0].score
    states = sorted(trial.state.name for trial in study.trials)
    assert states == ["COMPLETE", "PRUNED", "PRUNED"]


def test_a_run_that_reached_its_loss_early_is_not_a_failed_one(tmp_path):
    """The best rate is the one that first comes below `server.stop_loss`, and its run ends there."""
    plan = small(space=("local.lr=1e-9,0.2,1e-8",), trials=3)
    server = plan.recipe.server.model_copy(update={"stop_loss": 1.5})
    plan = replace(plan, recipe=plan.recipe.model_copy(update={"server": server}))
    (found,) = search(plan, tmp_path, here)
    run = tmp_path / plan.point("fedavg", {"local.lr": 0.2}, 10_000, 9).slug
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(records) < 9 and records[-1]["train_loss"] < 1.5
    assert found.best == {"local.lr": 0.2} and found.score is not None


def test_trials_whose_directories_would_have_one_name_keep_theirs_in_all_stages(tmp_path):
    plan = small(4, space=("local.clip=1e-20,1e+20",), trials=2, eta=2)
    (found,) = search(plan, tmp_path, here)
    assert found.best == {"local.clip": 1e20} and None not in [s for t in found.trials for s in t.scores.values()]
    lengths = [len((run / "metrics.jsonl").read_text().splitlines()) for run in tmp_path.glob("fedavg*")]
    assert sorted(lengths) == [2, 4], "the promoted run went on"


def test_two_methods_that_become_the_same_are_one_in_the_final_sweep(tmp_path):
    plan = small(1, ("fedsam({rho})", "fedsam(0.1)"), ("rho=0.1", "local.lr=0.1,1e-9"), trials=2)
    first, second = search(plan, tmp_path, here)
    worse = replace(second, best={"local.lr": 1e-9}, score=-1.0)
    (tmp_path / "final.toml").write_text(final_sweep(plan, [first, worse], 2))
    points = load_sweep(tmp_path / "final.toml").points
    assert len(points) == 2 and {point.recipe.local.lr for point in points} == {first.best["local.lr"]}


def test_two_processes_do_not_search_in_one_directory(tmp_path):
    plan = small(1, space=("local.lr=0.1",), trials=1)

    def another(*_):
        search(plan, tmp_path, here)

    with pytest.raises(RunError, match="another process is working on this search"):
        search(plan, tmp_path, another)


NOWHERE = r"--optuna nowhere://x: cannot be opened \(" if find_spec("optuna") else "--optuna needs Optuna: pip install"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--method", "fedsam({rho})", "--space", "rho=0.1,-1"), "rho"),
        (("--space", "local.lr=0.1,-1"), "lr"),
        (("--space", "local.lr=0.1", "--optuna", "nowhere://x"), NOWHERE),
        (("--space", "local.lr=0.1", "--validation", "1"), "validation"),
    ],
)
def test_a_mistake_is_told_before_anything_is_trained(tmp_path, monkeypatch, arguments, sentence):
    monkeypatch.setattr("fedflat.runs.sweep.Jobs.run", lambda *_: pytest.fail("it trained"))
    with pytest.raises(RecipeError, match=sentence):
        app(["tune", *arguments, "--out", str(tmp_path / "t")], standalone_mode=False)


def test_optuna_refuses_the_trials_of_another_space_in_one_sentence(tmp_path):
    pytest.importorskip("optuna")
    storage = f"sqlite:///{tmp_path}/search.db"
    for folder, values in (("a", "0.1"), ("b", "0.1,0.2")):
        plan = small(1, space=(f"local.lr={values}",), trials=1 if folder == "a" else 2)
        found = search(plan, tmp_path / folder, here)
        if folder == "a":
            to_optuna(plan, found, storage, "mine")
    with pytest.raises(RecipeError, match="cannot be written"):
        to_optuna(plan, found, storage, "mine")


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("rate", [0.1, 0.2, 0.3])
def test_a_score_that_is_not_finite_is_that_of_a_failed_trial(tmp_path, odd, rate):
    """Wherever it stands in the grid: it is neither promoted nor the best, and it is not trained again."""
    plan, trained = small(3, space=("local.lr=0.1,0.2,0.3",), trials=3), []

    def scored(sweep, folder):
        for point in sweep.points:
            value = odd if point.recipe.local.lr == rate else 0.5
            trained.append(point.slug)
            (folder / point.slug).mkdir(exist_ok=True)
            (folder / point.slug / "recipe.toml").write_text(point.recipe.to_toml())
            records = ({"round": n + 1, "accuracy": value} for n in range(point.recipe.server.rounds))
            (folder / point.slug / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))

    (found,) = search(plan, tmp_path, scored)
    assert found.best == {"local.lr": 0.2 if rate == 0.1 else 0.1} and found.score == 0.5
    assert [trial.scores for trial in found.trials if trial.settings["local.lr"] == rate] == [{1: None}]
    assert len(trained) == 4 and search(plan, tmp_path, scored) == [found] and len(trained) == 4
    assert "1 failed" in rows([found])[0]["combinations"]


def test_the_table_shows_the_values_that_were_tried_and_marks_a_best_one_at_their_edge():
    def trial(rate, rho):
        return Trial("fedsam({rho})", {"local.lr": rate, "rho": rho, "precision": "bf16"}, {1: 0.5})

    trials = [trial(0.1, 0.02), trial(0.05, 0.1), trial(0.2, 0.02)]
    (row,) = rows([Tuned("fedsam({rho})", trials[0].settings, 0.5, 12, 3, 3, trials)])
    assert row["values tried"] == "local.lr: 0.05, 0.1, 0.2; rho: 0.02, 0.1; precision: bf16"
    assert row["best settings"] == "local.lr = 0.1, rho = 0.02 (edge), precision = bf16"
    (alone,) = rows([Tuned("fedavg", {"local.lr": 0.1}, 0.5, 1, 1, 1, [Trial("fedavg", {"local.lr": 0.1}, {1: 0.5})])])
    assert alone["best settings"] == "local.lr = 0.1", "one value has no range"


def test_the_table_counts_the_trials_that_failed(tmp_path):
    def unless_tiny(sweep, folder):
        here(replace(sweep, points=tuple(p for p in sweep.points if p.recipe.local.lr > 1e-6)), folder)

    (found,) = search(small(1, space=("local.lr=0.1,1e-9",), trials=2), tmp_path, unless_tiny)
    assert rows([found])[0]["combinations"] == "2 of 2, 1 failed"


@pytest.mark.parametrize("metric", ["r2", "mse"])
def test_the_table_shows_the_metric_and_not_the_score_of_which_more_is_better(tmp_path, metric):
    """Nothing is learnt here, so R² is below 0, and so is the score of the squared error."""
    chance = np.random.default_rng(0)
    arrays = {f"x_{part}": chance.normal(size=(40, 3)).astype(np.float32) for part in ("train", "test")}
    np.savez(tmp_path / "arrays.npz", **arrays, y_train=chance.normal(size=40), y_test=chance.normal(size=40))
    settings = ["data=arrays", f"data.dir={tmp_path}/arrays.npz", "split=iid", "split.clients=4", "model.hidden=[4]",
                "server.cohort=2", "engine.name=inline", f"evaluation.metric={metric}"]  # fmt: skip
    plan = Plan(load(None, settings), read_space((), ("local.lr=1e-9",)), 1)
    (found,) = search(plan, tmp_path / "search", here)
    (run,) = (tmp_path / "search").glob("fedavg*")
    value = json.loads((run / "metrics.jsonl").read_text())[metric]
    assert found.score < 0 and found.score == (value if metric == "r2" else -value)
    assert rows([found])[0]["validation"] == f"{value:.4f}"
    assert read_tuned(tmp_path / "search" / "tuned.json") == [found]
