"""Personalisation: who is tested on what, where a client's walk leads, and what a run's directory says of it."""

import hashlib
import json
import math
import shutil
from copy import deepcopy
from dataclasses import asdict, replace
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

import forking
from fedflat import Augment, Dataset, Federation, Samples, train
from fedflat.cli import app
from fedflat.engine import Pool
from fedflat.errors import FedflatError, RecipeError, RunError, TrainingError
from fedflat.federation.augment import normalise
from fedflat.federation.batching import batch_indices
from fedflat.methods.chain import Method
from fedflat.methods.parser import parse
from fedflat.models import build
from fedflat.models.vector import Network
from fedflat.randomness import generator
from fedflat.recipe import Local, load
from fedflat.rounds.setup import Problem
from fedflat.runs.build import prepare
from fedflat.runs.experiment import execute
from fedflat.runs.loading import last_lr, load_run
from fedflat.runs.neighbours import Mixture, Neighbours, nearest_labels
from fedflat.runs.personal import ALONE, Personal, by_name, personalise, save, summary
from fedflat.tasks import TASKS

SIZE = 40  # of the digits' test part there are about 35 samples of a class


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Finished runs of FedAvg and FedBABU on 20 very different clients."""
    folder = tmp_path_factory.mktemp("runs")
    for method in ("fedavg", "fedbabu"):
        problem = prepare(load(None, ["server.rounds=8", "local.lr_decay=0.9", "engine=inline", f"method={method}"]))
        execute(problem, folder / method)
    return folder


@pytest.fixture
def fedavg(runs):
    return load_run(runs / "fedavg")


def walk(problem, **settings):
    """The results, and the weights at which each client's walk ended."""
    ends = []

    def watch(clients):
        for client in clients:
            yield client
            ends.append(problem.network.weights.clone())

    return personalise(problem, problem.network.weights, **settings, watch=watch), ends


def accuracies(problem, weights, size):
    """Each client's accuracy on its label-matched test samples, the long way."""
    data, module = problem.federation.dataset, problem.network.module
    problem.network.weights.copy_(weights)
    inputs = normalise(data.test.inputs, data.mean, data.std)
    hits = module.eval()(inputs).argmax(1) == data.test.labels
    return [float(hits[chosen].double().mean()) for chosen in problem.federation.local_tests(problem.seed, size)]


def test_fine_tuning_raises_the_mean_accuracy_of_very_different_clients(fedavg):
    one, five = summary(personalise(fedavg, fedavg.network.weights, (1, 5), size=SIZE))
    assert one["accuracy_before"] < one["accuracy_after"] < five["accuracy_after"]
    assert five["accuracy_after"] > five["accuracy_before"] + 0.03
    assert five["accuracy_after_std"] < five["accuracy_before_std"]


def test_no_epochs_and_no_adaptation_are_the_global_model(fedavg):
    expected = accuracies(fedavg, fedavg.network.weights.clone(), SIZE)
    for setting in ({"epochs": (0,)}, {"how": "none"}):
        results = personalise(fedavg, fedavg.network.weights, **setting, size=SIZE)
        assert [result.accuracy_after for result in results] == pytest.approx(expected)
        assert all(result.accuracy_before == result.accuracy_after for result in results)


@pytest.mark.parametrize("how", ["finetune", "local"])
def test_the_walk_is_plain_sgd_with_the_recipes_settings(digits, how):
    """Against torch's own optimiser: momentum lives on from epoch to epoch, and the method's parts rest."""
    local = Local(batch=20, lr=0.05, momentum=0.7, weight_decay=0.01, clip=1.0, clip_mode="official", epochs=9, steps=2)
    federation = replace(digits, augment=Augment(crop=1, flip=0.5), dtype=torch.float64)
    problem = Problem.of(federation, net(torch.float64), parse("fedbabu + fedsam"), local, seed=3)
    start = problem.network.weights.clone()
    _, ends = walk(problem, epochs=(3,), how=how, lr=0.02)

    module = deepcopy(problem.network.module)
    nn.utils.vector_to_parameters(start.clone(), module.parameters())
    sgd = torch.optim.SGD(module.parameters(), lr=0.02, momentum=0.7, weight_decay=0.01)
    for epoch in range(3):
        for group in sgd.param_groups:
            group["lr"] = 0.02 * (ALONE**epoch if how == "local" else 1.0)
        order, chance = (generator(3, purpose, epoch, 5) for purpose in ("personal", "personal augment"))
        for indices in batch_indices(federation.shards[5], 20, -(-federation.samples(5) // 20), order):
            inputs, labels = federation.batch(indices, chance)
            sgd.zero_grad()
            F.cross_entropy(module(inputs), labels).backward()
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            sgd.step()
    assert torch.allclose(ends[5], nn.utils.parameters_to_vector(module.parameters()), atol=1e-10)
    assert torch.equal(problem.network.weights, start)


def net(dtype=torch.float32, *between):
    torch.manual_seed(0)
    return Network(nn.Sequential(nn.Flatten(), nn.Linear(64, 12), *between, nn.ReLU(), nn.Linear(12, 10)), dtype)


@pytest.mark.parametrize("how", ["finetune", "perfedavg", "knn", "local"])
def test_one_epoch_and_four_more_are_five(digits, how):
    problem = Problem.of(digits, net(), Method(), Local(batch=16, lr=0.05, momentum=0.9))
    together, ends = walk(problem, epochs=(5, 1), how=how)
    ones, _ = walk(problem, epochs=(1,), how=how)
    fives, alone = walk(problem, epochs=(5,), how=how)
    assert together == [result for pair in zip(ones, fives, strict=True) for result in pair]
    assert all(map(torch.equal, ends, alone))


def test_results_are_the_same_again_and_in_any_order_of_clients(digits):
    """With batch statistics, which every client must begin from the global model's."""
    problem = Problem.of(digits, net(torch.float32, nn.BatchNorm1d(12)), Method(), Local(batch=0, lr=0.1))
    problem.network.buffers.add_(0.25)
    weights, buffers = problem.network.weights.clone(), problem.network.buffers.clone()
    results = [personalise(problem, weights, (0, 2), watch=watch) for watch in (iter, iter, reversed)]
    assert results[0] == results[1] == sorted(results[2], key=lambda r: (r.client, r.epochs))
    assert torch.equal(problem.network.weights, weights) and torch.equal(problem.network.buffers, buffers)
    assert not problem.network.module.training


class Dense:
    """A client's walk by hand: the network of `net` in NumPy, its gradient by the chain rule, SGD as in the books."""

    def __init__(self, problem, client):
        self.local, self.w = problem.recipe.local, problem.network.weights.numpy().copy()
        data, shard = problem.federation.dataset, problem.federation.shards[client]
        self.x = np.asarray(normalise(data.train.inputs[shard], data.mean, data.std, torch.float64)).reshape(-1, 64)
        self.y = data.train.labels[shard].numpy()
        self.batches = [slice(at, at + self.local.batch) for at in range(0, len(self.y), self.local.batch)]

    def layers(self, w):
        a, b, c = 12 * 64, 12 * 64 + 12, 12 * 64 + 12 + 120
        return w[:a].reshape(12, 64), w[a:b], w[b:c].reshape(10, 12), w[c:]

    def forward(self, w, x):
        """The features and the logits."""
        first, bias, head, last = self.layers(w)
        features = np.maximum(x @ first.T + bias, 0.0)
        return features, features @ head.T + last

    def gradient(self, w, batch):
        x, y = self.x[batch], self.y[batch]
        features, logits = self.forward(w, x)
        p = np.exp(logits - logits.max(1, keepdims=True))
        out = (p / p.sum(1, keepdims=True) - np.eye(10)[y]) / len(y)
        back = out @ self.layers(w)[2] * (features > 0)
        return np.concatenate([(back.T @ x).ravel(), back.sum(0), (out.T @ features).ravel(), out.sum(0)])

    def sgd(self, epochs, lr, decay=1.0):
        m, wd, v = self.local.momentum, self.local.weight_decay, 0.0
        for epoch in range(epochs):
            for batch in self.batches:
                v = m * v + self.gradient(self.w, batch) + wd * self.w
                self.w = self.w - lr * decay**epoch * v
        return self.w

    def meta(self, pairs, lr, beta):
        m, wd, v, stream = self.local.momentum, self.local.weight_decay, 0.0, cycle(self.batches)
        for _ in range(pairs):
            v = m * v + self.gradient(self.w, next(stream)) + wd * self.w
            ahead = self.w - lr * v
            v = m * v + self.gradient(ahead, next(stream)) + wd * self.w
            self.w = self.w - beta * v
        return self.w


@pytest.fixture
def unshuffled(digits):
    local = Local(batch=20, lr=0.1, epochs=3, momentum=0.9, weight_decay=0.01)
    method = parse("perfedavg(outer_lr=0.03)")
    return Problem.of(replace(digits, dtype=torch.float64), net(torch.float64), method, local, shuffle=False)


@pytest.mark.parametrize(
    ("how", "by_hand"),
    [
        ("local", lambda dense, length: dense.sgd(4, 0.05, 0.99)),
        ("finetune", lambda dense, length: dense.sgd(4, 0.05)),
        ("knn", lambda dense, length: dense.sgd(4, 0.05)),
        ("perfedavg", lambda dense, length: dense.meta(4 * math.ceil(length / 3), 0.05, 0.03)),
    ],
)
def test_every_walk_is_the_one_by_hand(unshuffled, how, by_hand):
    _, ends = walk(unshuffled, epochs=(1, 4), how=how, lr=0.05)
    for client in (0, 3):
        dense = Dense(unshuffled, client)
        np.testing.assert_allclose(ends[client], by_hand(dense, len(dense.batches)), atol=1e-11)


def test_per_fedavg_goes_on_with_the_methods_own_meta_steps_or_the_default_ones(unshuffled):
    for method, beta in (("perfedavg(outer_lr=0.2)", 0.2), ("fedsam", 0.01)):
        problem = replace(unshuffled, method=parse(method))
        _, ends = walk(problem, epochs=(2,), how="perfedavg", lr=0.05)
        dense = Dense(problem, 1)
        expected = dense.meta(2 * math.ceil(len(dense.batches) / 3), 0.05, beta)
        np.testing.assert_allclose(ends[1], expected, atol=1e-11)


@pytest.mark.parametrize("mix_with", ["probabilities", "logits"])
def test_knn_after_an_epoch_is_the_one_by_hand(unshuffled, mix_with):
    """Fine-tuned, compared with the stored samples and mixed, all in NumPy."""
    rule = Neighbours(k=4, mix=0.6, scale=0.5, capacity=10_000, mix_with=mix_with)
    results = personalise(unshuffled, unshuffled.network.weights, (1,), "knn", neighbours=rule, size=SIZE, lr=0.05)
    data = unshuffled.federation.dataset
    for client, chosen in enumerate(unshuffled.federation.local_tests(0, SIZE)):
        dense = Dense(unshuffled, client)
        w = dense.sgd(1, 0.05)
        asked = np.asarray(normalise(data.test.inputs[chosen], data.mean, data.std, torch.float64)).reshape(-1, 64)
        keys, (queries, logits) = dense.forward(w, dense.x)[0], dense.forward(w, asked)
        own = logits if mix_with == "logits" else np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        near = np.array([slow_knn(query, keys, dense.y, 10, rule) for query in queries])
        answers = (0.6 * near + 0.4 * own).argmax(1)
        assert results[client].accuracy_after == np.mean(answers == data.test.labels[chosen].numpy())


@pytest.mark.parametrize("mix_with", ["probabilities", "logits"])
def test_a_mixture_answers_with_its_neighbours_and_its_score(unshuffled, mix_with):
    rule = Neighbours(k=4, mix=0.6, scale=0.5, capacity=10_000, mix_with=mix_with)
    dense, mixture = Dense(unshuffled, 2), Mixture(unshuffled, 2, rule)
    data = unshuffled.federation.dataset
    asked = normalise(data.test.inputs[:30], data.mean, data.std, torch.float64)
    keys, (queries, logits) = dense.forward(dense.w, dense.x)[0], dense.forward(dense.w, asked.numpy().reshape(-1, 64))
    own = logits if mix_with == "logits" else np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    expected = np.array([slow_knn(query, keys, dense.y, 10, rule) for query in queries])
    near, scores = mixture.answers(asked)
    np.testing.assert_allclose(near, expected, atol=1e-12)
    np.testing.assert_allclose(scores, 0.6 * expected + 0.4 * own, atol=1e-12)
    np.testing.assert_allclose(mixture(asked), scores if mix_with == "logits" else scores.log(), atol=1e-12)


def slow_knn(query, keys, labels, classes, rule):
    order = sorted(range(len(keys)), key=lambda j: sum((query - keys[j]) ** 2))[: rule.k]
    p = np.zeros(classes)
    for j in order:
        p[labels[j]] += np.exp(-sum((query - keys[j]) ** 2) / (len(query) * rule.scale))
    return p / p.sum()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(1, 5), st.integers(1, 9), st.floats(0.1, 4))
def test_nearest_labels_are_those_of_a_search_by_hand(seed, stored, dim, k, scale):
    chance = np.random.default_rng(seed)
    keys, queries, labels = (
        chance.normal(size=(stored, dim)),
        chance.normal(size=(3, dim)),
        chance.integers(4, size=stored),
    )
    rule = Neighbours(k=k, scale=scale)
    found = nearest_labels(*map(torch.from_numpy, (queries, keys, labels)), 4, rule)
    expected = [slow_knn(query, keys, labels, 4, rule) for query in queries]
    np.testing.assert_allclose(found, expected, atol=1e-12)


def test_neighbours_that_are_far_away_still_answer():
    found = nearest_labels(torch.tensor([[1e4]]), torch.tensor([[0.0], [1.0]]), torch.tensor([0, 1]), 2, Neighbours())
    assert found.tolist() == [[0.0, 1.0]]


def test_without_a_share_of_the_neighbours_the_answers_are_the_models(digits):
    problem = Problem.of(digits, net(), Method(), Local())
    for mix_with in ("probabilities", "logits"):
        rule = Neighbours(mix=0.0, mix_with=mix_with)
        plain = personalise(problem, problem.network.weights, (0,), "knn", neighbours=rule)
        assert all(result.accuracy_after == result.accuracy_before for result in plain)


def test_a_store_is_a_random_subset_of_the_capacity(digits):
    problem = Problem.of(digits, net(), Method(), Local())
    labels = [Mixture(problem, client, Neighbours(capacity=30))._labels for client in (0, 0, 1)]
    assert [len(some) for some in labels] == [30, 30, 30]
    assert torch.equal(labels[0], labels[1])
    assert set(labels[0].tolist()) <= set(digits.dataset.train.labels[digits.shards[0]].tolist())


def test_the_head_of_fedbabu_is_its_initial_one_until_it_is_fine_tuned(runs):
    problem = load_run(runs / "fedbabu")
    initial, head = prepare(problem.recipe).network.weights, problem.network.head
    moved = problem.network.weights != initial
    assert not moved[head].any() and moved[: head.start].float().mean() > 0.5
    results, ends = walk(problem, epochs=(1,), size=SIZE)
    assert all((end[head] != initial[head]).any() for end in ends)
    assert len(results) == len(ends) == 20


def test_test_samples_have_the_label_distribution_of_the_clients_own(fedavg):
    counts, labels = fedavg.federation.counts(), fedavg.federation.dataset.test.labels
    available = labels.bincount(minlength=10).numpy()
    tests = fedavg.federation.local_tests(fedavg.seed, SIZE)
    results = personalise(fedavg, fedavg.network.weights, how="none", size=SIZE)
    for row, chosen, result in zip(counts, tests, results, strict=True):
        expected = np.minimum(available, SIZE * row // row.sum())
        assert labels[chosen].bincount(minlength=10).tolist() == expected.tolist()
        assert len(chosen.unique()) == len(chosen) == result.test_samples
        assert result.samples == row.sum()


def test_clients_without_test_samples_are_left_out_of_the_mean(fedavg):
    results = personalise(fedavg, fedavg.network.weights, (1,), size=2)
    [row] = summary(results)
    absent = [result for result in results if result.test_samples == 0]
    assert absent and row["left_out"] == len(absent) == 20 - row["clients"]
    assert all(result.accuracy_before is result.accuracy_after is None for result in absent)
    values = [result.accuracy_after for result in results if result.test_samples]
    assert (row["accuracy_after"], row["accuracy_after_std"]) == (
        pytest.approx(np.mean(values)),
        pytest.approx(np.std(values)),
    )


def test_summary_of_nobody_has_no_mean():
    nobody = [
        Personal(client, 1, samples=5, test_samples=0, accuracy_before=None, accuracy_after=None) for client in (0, 1)
    ]
    assert summary(nobody)[0] == {
        "epochs": 1, "clients": 0, "left_out": 2, "accuracy_before": None, "accuracy_before_std": None,
        "accuracy_after": None, "accuracy_after_std": None,
    }  # fmt: skip


def test_a_loaded_run_is_the_model_it_ended_with_and_its_last_learning_rate(runs):
    problem = load_run(runs / "fedavg")
    recipe = problem.recipe
    for name, tensor in load_file(runs / "fedavg/model.safetensors").items():
        assert torch.equal(problem.network.module.state_dict()[name], tensor)
    assert torch.equal(problem.network.weights, problem.network.layout.flatten(problem.network.module.state_dict()))
    assert recipe == load(runs / "fedavg/recipe.toml")
    assert last_lr(recipe) == pytest.approx(0.1 * 0.9**7)
    assert last_lr(recipe, rounds=3) == pytest.approx(0.1 * 0.9**2)


def test_a_run_whose_federation_is_nowhere_is_loaded_with_it(digits, tmp_path):
    result = train(replace(digits, origin=None), "mlp", rounds=1, engine="inline", out=tmp_path)
    (tmp_path / "split.npz").unlink()
    with pytest.raises(RunError, match="its federation was made in Python"):
        load_run(tmp_path)
    problem = load_run(tmp_path, digits)
    assert all(map(torch.equal, problem.network.module.parameters(), result.model.parameters()))


def damaged(path, name):
    """Ways for a run's directory to be wrong."""
    model = path / "model.safetensors"
    tensors = load_file(model)
    first = next(iter(tensors))
    if name == "shape":
        save_file({**tensors, first: tensors[first][:-1].clone()}, model)
    elif name == "missing tensor":
        save_file({n: t for n, t in tensors.items() if n != first}, model)
    elif name == "extra tensor":
        save_file({**tensors, "more": tensors[first].clone()}, model)
    elif name == "cut":
        model.write_bytes(model.read_bytes()[:-100])
    elif name == "no safetensors":
        model.write_bytes(b"PK\x03\x04 nothing of the kind")
    elif name == "unfinished":
        model.unlink()
    elif name == "no toml":
        (path / "recipe.toml").write_bytes(b"\xff\xfe = [")
    elif name == "no recipe":
        (path / "recipe.toml").write_text("[local]\nlr = -1.0\n")
    elif name == "no data":
        recipe = (path / "recipe.toml").read_text().replace('"digits"', '"digitz"')
        (path / "recipe.toml").write_text(recipe)
    elif name == "no run":
        shutil.rmtree(path)


def renew_digest(run):
    """So that the model itself is looked at: one with another digest is refused before."""
    if (run / "summary.json").exists() and (run / "model.safetensors").exists():
        digest = hashlib.sha256((run / "model.safetensors").read_bytes()).hexdigest()
        summary = json.loads((run / "summary.json").read_text()) | {"model_sha256": digest}
        (run / "summary.json").write_text(json.dumps(summary))


@pytest.mark.parametrize(
    ("name", "kind", "sentence"),
    [
        ("shape", RunError, r"does not fit the recipe's model mlp: \S+ is \(.*\), but should be \("),
        ("missing tensor", RunError, "is nothing, but should be"),
        ("extra tensor", RunError, r"more is \(.*\), but should be nothing"),
        ("cut", RunError, "model.safetensors: not a readable safetensors file"),
        ("no safetensors", RunError, "model.safetensors: not a readable safetensors file"),
        ("unfinished", RunError, "the run is not finished"),
        ("no toml", RunError, "cannot be read"),
        ("no recipe", RecipeError, r"recipe\.toml: local\.lr = -1\.0"),
        ("no data", FedflatError, "run: .*did you mean digits"),
        ("no run", RunError, "no run is here"),
    ],
)
def test_a_damaged_run_is_one_sentence(runs, tmp_path, name, kind, sentence):
    shutil.copytree(runs / "fedavg", tmp_path / "run")
    damaged(tmp_path / "run", name)
    renew_digest(tmp_path / "run")
    with pytest.raises(kind, match=sentence) as caught:
        load_run(tmp_path / "run")
    assert "\n" not in str(caught.value) and str(tmp_path / "run") in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"epochs": (1, -1)}, r"epochs = -1, 1: must be whole numbers, 0 or more"),
        ({"epochs": ()}, "epochs = nothing"),
        ({"epochs": (5,), "how": "none"}, "does not train"),
        ({"how": "fintune"}, r"did you mean finetune\?"),
        ({"size": 0}, "size = 0"),
        ({"lr": 0.0}, "lr = 0.0: must be a number above 0"),
        ({"how": "local", "lr_decay": math.nan}, "lr_decay = nan: must be a number above 0"),
        ({"weights": torch.zeros(3)}, r"3 numbers, but the model has \d+ trained parameters"),
    ],
)
def test_settings_that_cannot_be_are_named(fedavg, settings, sentence):
    with pytest.raises(RecipeError, match=sentence):
        personalise(fedavg, **{"weights": fedavg.network.weights, **settings})


@pytest.mark.parametrize("setting", [{"k": 0}, {"mix": 1.5}, {"scale": 0.0}, {"capacity": 0}, {"mix": float("nan")}])
def test_settings_of_the_neighbours_that_cannot_be_are_named(setting):
    with pytest.raises(RecipeError, match=f"{next(iter(setting))} = .*must be"):
        Neighbours(**setting)


def test_what_neighbours_are_mixed_with_is_known():
    with pytest.raises(RecipeError, match=r"mix_with = 'logit'.*did you mean logits\?"):
        Neighbours(mix_with="logit")


def test_labels_that_are_no_classes_are_refused(regression):
    problem = Problem.of(regression, Network(nn.Linear(3, 1), torch.float64), Method(), Local(), loss=F.mse_loss)
    with pytest.raises(RecipeError, match="regression: its labels are not class indices"):
        personalise(problem, problem.network.weights)


def test_neighbours_are_refused_where_samples_have_no_class(regression):
    federation, network = replace(regression, tests=regression.shards), Network(nn.Linear(3, 1), torch.float64)
    problem = Problem.of(federation, network, Method(), Local(), task=TASKS["regression"])
    with pytest.raises(RecipeError, match=r'^how = "knn": .* samples of regression have no class in the task regress'):
        personalise(problem, network.weights, how="knn")
    tokens = torch.arange(12).reshape(4, 3) % 5
    samples = Samples(tokens, tokens)
    texts = Dataset("texts", samples, samples, 5, (), (), vocabulary=5, task="next-token")
    shards = (torch.arange(4),)
    network = Network(build("gpt", (3,), 5, vocabulary=5, per_token=True, width=4, heads=2, layers=1))
    problem = Problem.of(Federation(texts, shards, tests=shards), network, Method(), Local(), task=TASKS["next-token"])
    with pytest.raises(RecipeError, match=r"samples of texts have no class in the task next-token$"):
        personalise(problem, network.weights, how="knn")


def test_clients_with_test_samples_of_their_own_are_judged_by_the_metric_of_the_task(regression):
    federation = replace(regression, tests=regression.shards)
    problem = Problem.of(
        federation, Network(nn.Linear(3, 1), torch.float64), Method(), Local(), task=TASKS["regression"]
    )
    results = personalise(problem, problem.network.weights, epochs=(3,), lr=0.1)
    for result, shard in zip(results, regression.shards, strict=True):
        x, y = (part[shard] for part in (federation.dataset.test.inputs, federation.dataset.test.labels))
        r2 = 1 - float((problem.network.module(x).detach() - y).square().sum() / (y - y.mean()).square().sum())
        assert result.accuracy_before == pytest.approx(r2)
        assert result.accuracy_before < result.accuracy_after <= 1


def test_a_client_whose_metric_is_not_defined_is_left_out_of_the_mean(regression):
    """R² of one test sample does not exist; the mean over the others does."""
    tests = (regression.shards[0][:1], *regression.shards[1:])
    network = Network(nn.Linear(3, 1), torch.float64)
    problem = Problem.of(replace(regression, tests=tests), network, Method(), Local(), task=TASKS["regression"])
    results = personalise(problem, network.weights, epochs=(1,), lr=0.1)
    assert results[0].test_samples == 1 and results[0].accuracy_before is results[0].accuracy_after is None
    (row,) = summary(results)
    assert (row["clients"], row["left_out"]) == (len(results) - 1, 1)
    assert row["accuracy_after"] == pytest.approx(np.mean([result.accuracy_after for result in results[1:]]))


def test_another_metric_than_the_accuracy_is_written_under_its_own_name_too(tmp_path):
    """Readers of earlier files find `accuracy_after` as before, and a file of a classification is what it was."""
    (tmp_path / "run").mkdir()
    found = [Personal(0, 1, 20, 10, 0.25, 0.5), Personal(1, 1, 20, 0, None, None)]
    plain = [asdict(result) for result in found]
    named = [{**row, "metric": "r2", "r2_before": row["accuracy_before"], "r2_after": row["accuracy_after"]}
             for row in plain]  # fmt: skip
    for metric, expected in (("accuracy", plain), ("r2", named)):
        lines = save(tmp_path / "run", "finetune", found, metric).read_text().splitlines()
        assert [json.loads(line) for line in lines] == expected
    (row,) = summary(found)
    row = by_name(row, "r2")
    assert (
        (row["r2_after"], row["r2_after_std"], row["metric"]) == (row["accuracy_after"], 0.0, "r2") == (0.5, 0.0, "r2")
    )


def test_a_walk_that_leaves_the_finite_numbers_names_the_client(digits):
    problem = Problem.of(digits, net(), Method(), Local(lr=1e12))
    with pytest.raises(TrainingError, match=r"client \d: its model is no longer finite"):
        personalise(problem, problem.network.weights)


def test_a_file_that_cannot_be_written_is_one_sentence_and_leaves_the_old_one(fedavg, tmp_path):
    results = personalise(fedavg, fedavg.network.weights, how="none")
    (tmp_path / "personal-none.jsonl").mkdir()
    with pytest.raises(RunError, match=r"personal-none\.jsonl: cannot be written"):
        save(tmp_path, "none", results)


@pytest.fixture
def copies(runs, tmp_path, monkeypatch):
    shutil.copytree(runs, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def personalize(*arguments):
    app(["personalize", *arguments], standalone_mode=False)


def test_the_command_gives_a_row_for_each_run_and_epochs_and_writes_every_client(copies):
    arguments = ["fedavg", "fedbabu", "--epochs", "1", "2", "--epochs", "0", "--size", "3", "--json"]
    done = forking.fedflat("personalize", *arguments)
    assert done.returncode == 0, done.stderr
    assert [(row["run"], row["how"], row["epochs"]) for row in json.loads(done.stdout)] == [
        (run, "finetune", epochs) for run in ("fedavg", "fedbabu") for epochs in (0, 1, 2)
    ]
    lines = [json.loads(line) for line in (copies / "fedavg/personal-finetune.jsonl").read_text().splitlines()]
    assert [(line["client"], line["epochs"]) for line in lines] == [(i, e) for i in range(20) for e in (0, 1, 2)]
    problem = load_run(copies / "fedavg")
    recipe = problem.recipe
    again = personalise(problem, problem.network.weights, (0, 1, 2), size=3, lr=last_lr(recipe))
    assert lines == [asdict(result) for result in again]
    assert not [path for path in (copies / "fedavg").iterdir() if path.name.startswith(".personal")]


@pytest.mark.parametrize("how", ["finetune", "local"])
def test_a_run_of_an_accelerator_with_graphs_is_adapted_on_the_processor(copies, how):
    options = ["--how", how, "--epochs", "1", "--size", "20", "--workers", "1"]
    personalize("fedavg", *options)
    here = (copies / f"fedavg/personal-{how}.jsonl").read_text()
    path = copies / "fedavg/recipe.toml"
    engine = load(str(path)).engine.model_copy(update={"name": "auto", "device": "cuda", "graph": True})
    path.write_text(load(str(path)).model_copy(update={"engine": engine}).to_toml())
    assert load_run(copies / "fedavg").recipe.engine.graph
    personalize("fedavg", *options)
    assert (copies / f"fedavg/personal-{how}.jsonl").read_text() == here


def test_the_command_hands_on_its_options(copies):
    personalize("fedavg", "--how", "perfedavg", "--epochs", "1", "--size", "20", "--lr", "0.03")
    personalize("fedavg", "--how", "knn", "--epochs", "1", "--size", "20", "--mix-with", "logits", "--mix", "0.9")
    personalize("fedavg", "--how", "local", "--epochs", "3", "--size", "20", "--lr", "0.2", "--lr-decay", "0.5")
    problem = load_run(copies / "fedavg")
    recipe = problem.recipe
    initial = prepare(recipe).network.weights
    knn = {"neighbours": Neighbours(mix=0.9, mix_with="logits"), "lr": last_lr(recipe)}
    for how, start, epochs, options in (
        ("perfedavg", problem.network.weights, 1, {"lr": 0.03}),
        ("knn", problem.network.weights, 1, knn),
        ("local", initial, 3, {"lr": 0.2, "lr_decay": 0.5}),
    ):
        written = (copies / f"fedavg/personal-{how}.jsonl").read_text().splitlines()
        again = personalise(problem, start, (epochs,), how, size=20, **options)
        assert [json.loads(line) for line in written] == [asdict(result) for result in again]


def test_the_command_names_the_metric_that_a_run_follows(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows = [{"text": f"fox {n} and the lazy dog", "client": n % 2} for n in range(24)]
    Path("texts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    recipe = ["data.name=jsonl", "data.dir=texts.jsonl", "data.window=8", "data.predict=all", "split.name=natural",
              "split.clients=0", "model.name=gpt", "model.width=8", "model.heads=2", "model.layers=1",
              "server.rounds=1", "engine=inline", "evaluation.metric=perplexity"]  # fmt: skip
    execute(prepare(load(None, recipe)), Path("run"))
    personalize("run", "--epochs", "1", "--json")
    (row,) = json.loads(capsys.readouterr().out)
    lines = [json.loads(line) for line in Path("run/personal-finetune.jsonl").read_text().splitlines()]
    assert row["metric"] == "perplexity" and row["perplexity_after"] == row["accuracy_after"] > 1
    assert [line["perplexity_before"] for line in lines] == [line["accuracy_before"] for line in lines]


def test_local_only_training_begins_with_the_common_initial_weights(copies, capsys):
    personalize("fedavg", "fedbabu", "--how", "local", "--epochs", "1", "--size", "3")
    shown = capsys.readouterr().out
    assert "±" in shown and "fedbabu: clients left out, for want of test samples: " in shown
    files = [(copies / run / "personal-local.jsonl").read_text() for run in ("fedavg", "fedbabu")]
    assert files[0] == files[1]
    problem = prepare(load(copies / "fedavg/recipe.toml"))
    initial = accuracies(problem, problem.network.weights.clone(), 3)
    before = [json.loads(line)["accuracy_before"] for line in files[0].splitlines()]
    assert [math.nan if x is None else x for x in before] == pytest.approx(initial, nan_ok=True)


def test_runs_are_looked_at_before_the_first_is_worked_on(copies, capsys):
    (copies / "fedbabu/model.safetensors").unlink()
    with pytest.raises(RunError, match=r"^fedbabu: the run is not finished"):
        personalize("fedavg", "fedbabu")
    assert not list(copies.glob("*/personal-*")) and capsys.readouterr().out == ""


class Shaken(nn.Module):
    """Dropout, and batch statistics whose weights are counted by an integer buffer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(12, momentum=None)
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), norm, nn.ReLU(), nn.Dropout(0.3), nn.Linear(12, 10))

    def forward(self, x):
        return self.net(x)


@pytest.fixture
def pools(monkeypatch):
    """The number of workers of every pool in which clients adapt."""
    started = []
    monkeypatch.setattr("fedflat.runs.personal.Pool", lambda *how: started.append(how[3]) or Pool(*how))
    return started


@pytest.mark.parametrize("how", ["finetune", "perfedavg", "knn", "local"])
def test_workers_change_no_bit(digits, pools, how):
    problem = Problem.of(digits, Network(Shaken()), parse("fedavg"), Local(batch=0, lr=0.05, momentum=0.5), seed=3)
    start, seen = problem.network.weights.clone(), []
    for workers in (1, 2, 3):
        torch.manual_seed(workers)
        torch.rand(workers)
        seen.append(personalise(problem, start, (0, 2), how, size=SIZE, workers=workers))
        assert torch.equal(problem.network.weights, start)
    assert pools == [2, 3], "one worker is this process"
    assert seen[0] == seen[1] == seen[2]
    assert [result.client for result in seen[0]] == [client for client in range(digits.clients) for _ in range(2)]


def test_a_client_that_diverges_in_a_worker_is_named(digits, pools):
    problem = Problem.of(digits, net(), parse("fedavg"), Local(batch=20, lr=0.05))
    with pytest.raises(TrainingError, match=r"client \d: its model is no longer finite; the learning rate 1e\+30"):
        personalise(problem, problem.network.weights.clone(), (1,), lr=1e30, size=SIZE, workers=2)
    assert pools == [2]
