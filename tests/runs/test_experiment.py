"""Runs: what they write, what they count, and the library in a few lines."""

import json
from dataclasses import dataclass, replace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from fedflat import Dataset, Federation, FedflatError, Part, Samples, federate, option, train
from fedflat.errors import RecipeError, RunError
from fedflat.recipe import Server, load
from fedflat.rounds.cohort import draw_cohort
from fedflat.runs.build import prepare
from fedflat.runs.experiment import execute

QUICK = ["server.rounds=3", "engine=inline"]


def test_a_run_directory_holds_recipe_metrics_summary_and_model(tmp_path):
    problem = prepare(load(None, [*QUICK, "evaluation.target=0.2"]))
    recipe = problem.recipe
    result = execute(problem, tmp_path / "run")
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert records == result.history
    assert [record["round"] for record in records] == [1, 2, 3]
    assert set(records[0]) >= {
        "accuracy",
        "loss",
        "local_loss",
        "consistency",
        "cohort",
        "bytes_down",
        "bytes_up",
        "seconds",
    }
    assert load(tmp_path / "run/recipe.toml") == recipe
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    accuracies = [record["accuracy"] for record in records]
    assert summary["accuracy_last"] == accuracies[-1]
    assert summary["accuracy_best"] == max(accuracies)
    assert summary["accuracy_mean_of_last_10"] == pytest.approx(sum(accuracies) / 3)
    assert summary["rounds_to_target"] == next(r["round"] for r in records if r["accuracy"] >= 0.2)
    tensors = load_file(tmp_path / "run/model.safetensors")
    assert all(torch.equal(tensors[name], tensor) for name, tensor in result.model.state_dict().items())
    hidden = [p.name for p in (tmp_path / "run").iterdir() if p.name.startswith(".")]
    assert hidden == [".lock"]


def test_a_repeated_recipe_repeats_the_run_to_the_bit(tmp_path):
    digests = []
    for name in "ab":
        problem = prepare(load(None, QUICK))
        execute(problem, tmp_path / name)
        digests.append(json.loads((tmp_path / name / "summary.json").read_text())["model_sha256"])
    problem = prepare(load(tmp_path / "a/recipe.toml"))
    execute(problem, tmp_path / "c")
    digests.append(json.loads((tmp_path / "c/summary.json").read_text())["model_sha256"])
    assert len(set(digests)) == 1


def test_a_directory_with_a_run_is_not_written_over(tmp_path):
    problem = prepare(load(None, QUICK))
    execute(problem, tmp_path)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(RunError, match="already holds a run"):
        execute(problem, tmp_path)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def test_bytes_are_counted_from_what_is_sent(digits):
    result = train(digits, method="fedavg", rounds=1, cohort=3, engine="inline")
    parameters = sum(p.numel() for p in result.model.parameters())
    assert result.history[0]["bytes_down"] == result.history[0]["bytes_up"] == 3 * 4 * parameters


def test_the_printed_recipe_shows_defaults_of_split_model_and_method():
    recipe = prepare(load(None, ["split=lda", "split.alpha=0.5", "method=fedsam", "model=lenet64", "model=mlp"])).recipe
    text = recipe.to_toml()
    for line in ("min_size = 10", 'method = "fedsam(rho=0.1)"', "hidden = [200, 200]", "workers = ", "mean = ["):
        assert line in text


def test_evaluation_every_n_rounds_and_always_after_the_last(digits):
    result = train(digits, rounds=5, every=2, engine="inline")
    assert [round for round, _ in result.curve("accuracy")] == [2, 4, 5]


@pytest.mark.parametrize("on", ["test", "train"])
def test_a_run_stops_after_the_first_evaluation_whose_training_loss_is_below_stop_loss(digits, on):
    settings = dict(model_hidden=[16], lr=0.3, epochs=1, engine="inline", evaluation_every=2, evaluation_on=on)
    losses = dict(train(digits, rounds=8, stop_loss=1e-9, **settings).curve("train_loss"))
    assert [*losses] == [2, 4, 6, 8] and sorted(losses.values(), reverse=True) == [*losses.values()]
    bound = (losses[4] + losses[6]) / 2
    result = train(digits, rounds=8, stop_loss=bound, **settings)
    assert dict(result.curve("train_loss")) == {round: losses[round] for round in (2, 4, 6)}
    with torch.no_grad():
        inputs, labels = digits.dataset.train.inputs, digits.dataset.train.labels
        assert losses[6] == pytest.approx(float(nn.functional.cross_entropy(result.model(inputs), labels)), rel=1e-5)
    facts = {name: result.summary[name] for name in ("rounds", "train_loss_last", "stop_loss", "stopped")}
    assert facts == {"rounds": 6, "train_loss_last": losses[6], "stop_loss": bound, "stopped": True}
    never = train(digits, rounds=2, stop_loss=1e-9, **settings).summary
    assert (never["stopped"], never["rounds"]) == (False, 2)
    assert "stopped" not in train(digits, rounds=1, engine="inline").summary


def test_inputs_can_stay_in_the_unit_interval():
    problem = prepare(load(None, [*QUICK, "data.normalise=false"]))
    recipe = problem.recipe
    for part in ("train", "test"):
        inputs, _ = problem.federation.held_out(part, 0, 50)
        assert (float(inputs.min()), float(inputs.max())) == (0.0, 1.0)
    assert (recipe.data.mean, recipe.data.std) == ([0.0], [1.0])
    assert prepare(recipe).recipe == recipe
    assert not load(None, ["data.normalise=false", "data=mnist"]).data.normalise


def test_a_uniform_cohort_is_exact_and_a_bernoulli_cohort_varies_about_the_same_mean():
    uniform = [draw_cohort(Server(cohort=0.1), 100, 0, t) for t in range(300)]
    assert all(len(set(cohort)) == 10 for cohort in uniform)
    sizes = [len(draw_cohort(Server(cohort=0.1, sampling="bernoulli"), 100, 0, t)) for t in range(300)]
    assert 9.4 < sum(sizes) / 300 < 10.6
    assert min(sizes) < 8 < 12 < max(sizes)
    assert all(draw_cohort(Server(cohort=1, sampling="bernoulli"), 2, 0, t) for t in range(50))


def test_a_cohort_larger_than_the_federation_is_named(digits):
    with pytest.raises(RecipeError, match=r"server\.cohort = 9: there are only 8 clients"):
        train(digits, cohort=9, rounds=1)


def test_an_unknown_setting_is_named_with_the_nearest(digits):
    with pytest.raises(RecipeError, match=r"no setting 'epoch'; did you mean epochs\?"):
        train(digits, epoch=3)


@dataclass(frozen=True)
class Noise(Part):
    """A user's own part: a constant pull in every step."""

    size: float = option(0.0, "size of the pull", low=0)

    def plan(self, rule, sent, memory):
        return replace(rule, pull=torch.full_like(sent["weights"], self.size))


def test_a_users_own_part_model_data_and_callback_take_a_few_lines():
    chance = torch.Generator().manual_seed(0)
    x = torch.randn(60, 4, generator=chance)
    samples = Samples(x, (x[:, 0] > 0).long())
    federation = federate(Dataset("mine", samples, samples, 2, (), ()), "iid", 3)
    rounds = []
    result = train(federation, nn.Linear(4, 2), Noise(0.0), rounds=20, lr=0.5, engine="inline",
                   callbacks=[lambda record: rounds.append(record["round"])])  # fmt: skip
    assert rounds == list(range(1, 21))
    assert result.accuracy > 0.9
    shifted = train(federation, nn.Linear(4, 2), Noise(1.0), rounds=1, engine="inline")
    assert shifted.model.weight.mean() < 0


def test_a_saved_split_can_be_trained_on(tmp_path, digits):
    from fedflat.federation import partition

    partition.save(tmp_path / "split.npz", [shard.numpy() for shard in digits.shards])
    recipe = prepare(load(None, [f"split={tmp_path / 'split.npz'}"])).recipe
    federation = federate("digits", str(tmp_path / "split.npz"))
    assert recipe.split.clients == federation.clients == digits.clients
    assert all(torch.equal(a, b) for a, b in zip(federation.shards, digits.shards, strict=True))
    partition.save(tmp_path / "far.npz", [digits.shards[0].numpy() + 10_000])
    with pytest.raises(FedflatError, match=r"far\.npz: not a split of the 1442 training samples of digits"):
        federate("digits", str(tmp_path / "far.npz"))


def test_training_in_float64_is_training_in_float64(digits):
    result = train(digits, rounds=1, precision="float64", engine="inline")
    assert next(result.model.parameters()).dtype == torch.float64


def test_a_federation_by_hand_is_one_too(digits):
    federation = Federation(digits.dataset, (torch.arange(0, 50), torch.arange(50, 60)))
    history = train(federation, rounds=1, cohort=2, batch=0, engine="inline").history
    assert history[0]["cohort"] == [0, 1]


def test_a_model_without_parameters_is_refused(digits):
    with pytest.raises(FedflatError, match="no parameters"):
        train(digits, nn.Flatten(), rounds=1)


@pytest.mark.parametrize(
    ("method", "model", "sentence"),
    [
        ("local_dp", "all", 'evaluation.model = "all" uploads change, which LocalPrivacy does not protect'),
        ("swa", "all", 'WeightAveraging and evaluation.model = "all" both say which model to evaluate'),
        ("swa", "active", 'WeightAveraging and evaluation.model = "active" both say which model to evaluate'),
        ("central_dp", "active", 'evaluation.model = "active" looks at the updates on the server, which Central'),
    ],
)
def test_a_refused_model_to_evaluate_is_named_by_its_field(method, model, sentence):
    with pytest.raises(RecipeError) as caught:
        prepare(load(None, [f"method={method}", f"evaluation.model={model}"]))
    assert str(caught.value).startswith(f"method: {sentence}")
