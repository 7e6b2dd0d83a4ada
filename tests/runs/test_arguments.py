"""What does not fit is refused by one sentence before the first round: arguments, model, loss and data in Python."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedflat
from fedflat.errors import DataError, RecipeError
from fedflat.models import Network
from fedflat.runs.first_pass import first_pass
from fedflat.tasks import find_task

X, Y = np.zeros((20, 3), np.float32), np.arange(20) % 2


@pytest.fixture(scope="module")
def federation():
    return fedflat.federate("digits", clients=5, alpha=1.0)


def net(outputs=10):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, outputs))


class Nameless(fedflat.Metric):
    @classmethod
    def of(cls, outputs, labels):
        return cls()

    @property
    def value(self):
        return 0.0


class Wordy(Nameless):
    name, __dataclass_fields__ = "wordy", {}

    @property
    def value(self):
        return "good"


class OfMany(Wordy):
    name = "of_many"

    @property
    def value(self):
        return 1 / 0  # as a metric that needs more samples than the first pass has


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, x):
        return self.net(x), x


def spoilt():
    model = net()
    model[1].weight.data[0, 0] = math.inf
    return model


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (dict(model=nn.Linear(3, 10)), r"model: it cannot process inputs of shape \(4, 1, 8, 8\)"),
        (dict(model=net(5)), r"loss: it cannot be computed from outputs and labels of shape \(4, 5\).*Target 9"),
        (dict(loss=nn.MSELoss()), r"loss: it cannot be computed from outputs and labels of shape \(4, 10\)"),
        (dict(task=find_task("classification(metric=fedflat.tasks:RSquared)")),
         r"metric r2: it cannot be computed from outputs and labels of shape \(4, 10\)"),
    ],
)  # fmt: skip
def test_a_model_loss_or_metric_that_does_not_fit_the_data_is_refused(federation, given, sentence):
    with pytest.raises(DataError, match=sentence):
        fedflat.train(federation, rounds=1, **given)


def test_a_metric_has_a_name_and_a_number_that_may_need_more_samples(federation):
    with pytest.raises(RecipeError, match=r'^task: metric Nameless has no name; give it one, as in name = "mae"$'):
        fedflat.Task(F.cross_entropy, (Nameless,))
    with pytest.raises(RecipeError, match=r"^metric wordy: its value is a str; it must be one number$"):
        fedflat.train(federation, task=fedflat.Task(F.cross_entropy, (Wordy,)), rounds=1)
    first_pass(Network(net()), fedflat.Task(F.cross_entropy, (OfMany,)), federation)


@pytest.mark.parametrize("labels", [torch.rand(40), (torch.rand(40, 2) > 0.5).float()], ids=["values", "labels"])
def test_the_accuracy_of_each_class_is_not_measured_where_there_are_no_classes(labels):
    samples = fedflat.Samples(torch.rand(40, 3), labels)
    task = "regression" if labels.ndim == 1 else "multi-label"
    data = fedflat.Dataset("hours", samples, samples, 2 if labels.ndim > 1 else 1, (), (), task=task)
    with pytest.raises(RecipeError, match=f"^evaluation.measures: classes .* not for the task {task} on hours$"):
        fedflat.train(fedflat.federate(data, "iid", 2), rounds=1, measures=["classes"])


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (dict(model=nn.Linear), r"the model is the class Linear; give an instance, Linear\(…\)"),
        (dict(model=Pair()), "model: it returns a tuple"),
        (dict(model=spoilt()), "model: its weights are not finite before the first round"),
        (dict(model=nn.Sequential(nn.Flatten(), nn.LazyLinear(10))), "model: it has lazy layers"),
        (
            dict(model=nn.Sequential(nn.Flatten(), nn.Linear(64, 10, device="meta"))),
            "model: it is on torch's meta device",
        ),
        (dict(loss=lambda outputs, labels: None), "loss: it returns a NoneType; it must return a tensor of one number"),
        (dict(loss=nn.CrossEntropyLoss(reduction="none")), "loss: it returns a tensor of 4 numbers; it must return"),
        (dict(task=F.mse_loss), "the task is a function"),
        (dict(callbacks=print), "callbacks is a builtin_function_or_method; give a list"),
        (dict(out=3), "out is of type int; give the path"),
    ],
)
def test_an_argument_of_another_kind_is_refused(federation, given, sentence):
    with pytest.raises(RecipeError, match=sentence):
        fedflat.train(federation, rounds=1, **given)


def test_the_first_pass_changes_neither_the_generator_nor_the_model(federation):
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 10))
    before, state = torch.get_rng_state(), {name: value.clone() for name, value in model.state_dict().items()}
    fedflat.train(federation, model, rounds=1, engine="inline")
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_every_input_needs_a_label():
    with pytest.raises(DataError, match="data: 20 inputs with 10 labels"):
        fedflat.federate(X, Y[:10], split="iid", clients=2)


class Wards(fedflat.Dataset):
    def __init__(self, directory):
        train, test = (fedflat.Samples(torch.tensor(X), torch.tensor(Y), torch.arange(20) % 4) for _ in range(2))
        super().__init__("wards", train, test, classes=2, mean=(0.0,), std=(1.0,))


def test_a_data_set_of_ones_own_class_is_taken_as_it_is_in_a_recipe():
    federation = fedflat.federate(Wards(None), "natural")
    assert federation.clients == 4 and fedflat.train(federation, rounds=1).history


def test_lists_and_a_split_by_name_are_told_apart():
    with pytest.raises(RecipeError, match="make the data arrays"):
        fedflat.federate(X.tolist(), Y.tolist(), split="iid", clients=2)


def test_a_split_is_saved_under_a_name_by_which_a_recipe_knows_it(federation, tmp_path):
    with pytest.raises(DataError, match=r"a split is saved as \.npz"):
        federation.save(tmp_path / "split.txt")


def test_the_cell_that_is_not_a_number_is_named(tmp_path):
    (tmp_path / "wards.csv").write_text("age,ill\n31,yes\n40,no\nold,no\n")
    with pytest.raises(DataError, match="row 3 of column 'age' holds 'old', which is not a number"):
        fedflat.federate(str(tmp_path / "wards.csv"), label="ill", split="iid", clients=2)


def test_a_metric_that_no_round_has_is_an_error_in_last_too(federation):
    result = fedflat.train(federation, net(), rounds=1)
    assert result.last("accuracy") == result.accuracy == result.last()
    with pytest.raises(RecipeError, match="there is no metric 'acuracy'; did you mean accuracy"):
        result.last("acuracy")
    hours = fedflat.train(fedflat.federate(X, X[:, 0], split="iid", clients=2), rounds=1)
    assert math.isnan(hours.accuracy)


def test_flatness_refuses_no_eigenvalue_and_a_loss_that_is_not_a_function():
    data = (torch.rand(9, 64), torch.zeros(9).long())
    with pytest.raises(RecipeError, match=r"k is 1\.5; it must be a whole number"):
        fedflat.flatness.look(net(), data, k=1.5)
    with pytest.raises(RecipeError, match="k = 0: ask for at least one eigenvalue"):
        fedflat.flatness.look(net(), data, k=0)
    with pytest.raises(RecipeError, match="loss: is a str; give a function"):
        fedflat.flatness.look(net(), data, loss="cross-entropy")


def test_tables_and_figures_take_lists_of_results_and_name_methods_by_what_is_not_default(federation):
    results = {m: fedflat.train(federation, "mlp", m, rounds=1) for m in ("fedavg", "feddyn + man(0.2)")}
    assert "Result of feddyn + man(zeta=0.2) after 1 rounds" in repr(results["feddyn + man(0.2)"])
    assert str(fedflat.report.table(list(results.values()))) == str(fedflat.report.table(*results.values()))
    assert len(fedflat.report.plot(results).axes[0].lines) == 2
    with pytest.raises(RecipeError, match="one is of type int; give directories of runs"):
        fedflat.report.plot([3])
    assert next(iter(results["fedavg"].to_frame())) == "round"


def test_a_notebook_shows_a_table_once(federation, monkeypatch):
    shown = []
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setattr("rich.jupyter.display", lambda *given: shown.append(given))
    table = fedflat.report.table(fedflat.train(federation, net(), rounds=1))
    assert "accuracy_last" in repr(table) and shown == []
