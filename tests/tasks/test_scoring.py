"""Metrics over chunks equal the metric over all samples, by scikit-learn and by the definition."""

import math
import re
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import get_args

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import average_precision_score, r2_score

from fedflat import Metric, Samples, federate, train
from fedflat.errors import RecipeError
from fedflat.recipe.settings import Measure
from fedflat.tasks import TASKS, Accuracy, MeanAveragePrecision, Perplexity, RSquared, Task, find_task
from fedflat.tasks.task import TAKEN


def in_chunks(metric, outputs, labels, size=7):
    parts = zip(outputs.split(size), labels.split(size), strict=True)
    return reduce(add, (metric.of(z, y) for z, y in parts)).value


@pytest.fixture
def chance():
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("offset", [0.0, 1e6])
@pytest.mark.parametrize("targets", [1, 3])
def test_r2_is_scikit_learns(chance, targets, offset):
    y = torch.randn(50, targets, generator=chance, dtype=torch.float64) + offset
    z = y + 0.3 * torch.randn(50, targets, generator=chance, dtype=torch.float64)
    assert in_chunks(RSquared, z, y) == pytest.approx(r2_score(y, z), rel=1e-9)
    assert math.isnan(in_chunks(RSquared, z[:1], y[:1]))


def test_mean_average_precision_is_scikit_learns_also_with_ties(chance):
    z = torch.randint(0, 6, (60, 4), generator=chance).float()
    y = (torch.rand(60, 4, generator=chance) < 0.3).float()
    expected = average_precision_score(y, z, average="macro")
    assert in_chunks(MeanAveragePrecision, z, y) == pytest.approx(expected, rel=1e-12)
    y[:, 1] = 0  # a label that no sample has is left out
    expected = np.mean([average_precision_score(y[:, k], z[:, k]) for k in (0, 2, 3)])
    assert in_chunks(MeanAveragePrecision, z, y) == pytest.approx(expected, rel=1e-12)


def test_token_metrics_count_the_labels_that_are_not_ignored(chance):
    z = torch.randn(20, 5, 6, generator=chance, dtype=torch.float64)
    y = torch.randint(0, 6, (20, 5), generator=chance)
    y[torch.rand(20, 5, generator=chance) < 0.4] = -100
    here = y != -100
    assert in_chunks(Perplexity, z, y) == pytest.approx(math.exp(F.cross_entropy(z[here], y[here])), rel=1e-12)
    assert in_chunks(Accuracy, z, y) == float((z.argmax(-1) == y)[here].double().mean())
    loss = TASKS["next-token"].loss
    assert float(loss(z, y)) == pytest.approx(float(F.cross_entropy(z[here], y[here])), rel=1e-12)
    assert loss.counted(y) == int(here.sum())


@pytest.mark.parametrize(("arguments", "sentence"), [
    ((F.l1_loss, RSquared, "values"), "metrics must be a tuple of classes that inherit from fedflat.Metric"),
    ((F.l1_loss, (F.l1_loss,), "values"), "metrics must be a tuple of classes that inherit from fedflat.Metric"),
    ((F.l1_loss, (RSquared,), "value"), "output = 'value' is unknown; did you mean values?"),
    (("l1", (RSquared,), "values"), "the loss is 'l1', not a function of outputs and labels"),
])  # fmt: skip
def test_a_task_made_of_the_wrong_things_is_refused(arguments, sentence):
    with pytest.raises(RecipeError, match=f"^task: {re.escape(sentence)}$"):
        Task(*arguments)


def test_a_task_of_ones_own_on_other_labels_says_what_its_output_may_be():
    with pytest.raises(RecipeError, match="floating targets, which digits does not have; its output is 'values', and "):
        Task(F.l1_loss, (RSquared,), "values").check("digits", torch.arange(3))
    with pytest.raises(RecipeError, match=r"^task = 'regression': needs floating targets, which digits does not have$"):
        TASKS["regression"].check("digits", torch.arange(3))


def test_a_task_without_metrics_or_of_an_unknown_name_is_refused():
    with pytest.raises(RecipeError, match="at least one metric"):
        Task(F.l1_loss, ())
    with pytest.raises(RecipeError, match="there is no such task"):
        find_task("regresion")
    with pytest.raises(RecipeError, match="is code from outside of fedflat"):
        find_task("os:system")


@dataclass(frozen=True)
class Found(Metric):
    """The share of the samples of class 9 that are found, by NumPy; not defined without such samples."""

    name = "found"
    hits: int
    count: int

    @classmethod
    def of(cls, outputs, labels):
        there = labels == 9
        return cls(int((outputs.argmax(1) == labels)[there].sum()), int(there.sum()))

    @property
    def value(self):
        return np.float32(self.hits / self.count)


def test_a_metric_of_ones_own_may_be_a_number_of_numpy_and_undefined_for_some_samples(digits, tmp_path):
    task, settings = Task(F.cross_entropy, (Found,)), dict(rounds=1, cohort=2, engine="inline")
    assert 0 <= train(digits, task=task, out=tmp_path, **settings).history[0]["found"] <= 1
    test = digits.dataset.test
    rest = replace(digits.dataset, test=Samples(test.inputs[test.labels < 9], test.labels[test.labels < 9]))
    without = train(replace(digits, dataset=rest, tests=None), task=task, **settings)
    assert without.history[0]["found"] is None


def test_no_metric_takes_the_name_of_another_field_of_a_record(digits):
    measures = [name for name in get_args(Measure) if name not in ("proximal", "lambda", "cosine")]
    settings = dict(rounds=1, cohort=2, engine="inline", sharpness=1, sharpness_samples=20, stop_loss=1e-9)
    (record,) = train(digits, measures=measures, **settings).history
    own = {name for name in record if name == "accuracy" or name.startswith("local_accuracy")}
    assert own and {*record} - own <= TAKEN
    for name in sorted(TAKEN):
        with pytest.raises(RecipeError, match=rf"^task: '{name}' cannot be the name of a metric; take a word of its"):
            Task(F.cross_entropy, (type("Own", (Found,), {"name": name}),))


def test_less_of_an_error_is_better_and_its_target_is_reached_from_above(chance):
    x = torch.randn(90, 3, generator=chance)
    data = federate(x, x @ torch.tensor([1.0, -2.0, 3.0]), split="iid", clients=3)
    settings = dict(rounds=5, cohort=3, lr=0.05, engine="inline", metric="mse")
    errors = [record["mse"] for record in train(data, **settings).history]
    assert errors[-1] < errors[2] < errors[0]
    summary = train(data, target=errors[2], **settings).summary
    assert summary["mse_best"] == min(errors)
    assert summary["rounds_to_target"] == 1 + next(k for k, error in enumerate(errors) if error <= errors[2])
