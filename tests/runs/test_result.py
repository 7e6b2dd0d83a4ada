"""The result of a training, as a person in a notebook meets it."""

import subprocess
import sys

import matplotlib.pyplot as plt
import pytest
import torch
from torch import nn

import fedflat
from fedflat.errors import RecipeError, RunError


@pytest.fixture(scope="module")
def result(digits, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "one"
    return fedflat.train(digits, rounds=2, lr=0.1, engine="inline", out=out)


def test_the_text_is_one_short_line_with_the_last_accuracy(result):
    assert len(repr(result)) < 300 and f"accuracy {result.accuracy:.4f}" in repr(result) and "\n" not in repr(result)
    assert '<img alt="" src="data:image/png' in result._repr_html_()


def test_a_plot_shows_the_metric_on_the_users_axes(result):
    _, axes = plt.subplots()
    assert result.plot(ax=axes, metric="local_loss") is axes and axes.get_ylabel() == "local_loss"
    assert [tuple(point) for point in axes.get_lines()[0].get_xydata()] == result.curve("local_loss")
    plt.close("all")


def test_a_misspelt_metric_gets_a_suggestion(result):
    for ask in (result.curve, lambda name: result.plot(metric=name)):
        with pytest.raises(RecipeError, match=r"no metric 'acuracy'; did you mean accuracy\?"):
            ask("acuracy")
    with pytest.raises(RecipeError, match="there is no metric 3; known: accuracy"):
        result.curve(3)


@pytest.mark.parametrize(
    ("lr", "best", "reached", "kept"),
    [(0.1, 5, 3, ["00000004", "00000005"]), (1.05, 1, None, ["00000001", "00000004", "00000005"])],
    ids=["falls", "rises"],
)
def test_of_an_error_the_lowest_value_is_the_best_and_reaches_the_target(tmp_path, lr, best, reached, kept):
    """y = 3x for x = ±1 and a model wx: after r rounds of one step the error is 9 (1 − 2η)^2r."""
    inputs = torch.tensor([1.0, -1.0]).repeat(4)[:, None]
    samples = fedflat.Samples(inputs, 3 * inputs[:, 0])
    data = fedflat.Dataset("line", samples, samples, 1, (), (), task="regression")
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    settings = dict(rounds=5, lr=lr, batch=0, cohort=2, metric="mse", target=2.5, checkpoint_every=1, engine="inline")
    result = fedflat.train(fedflat.federate(data, "iid", 2), model, **settings, epochs=1, out=tmp_path / "run")
    assert [value for _, value in result.curve("mse")] == pytest.approx(
        [9 * (1 - 2 * lr) ** (2 * r) for r in range(1, 6)]
    )
    found = result.summary
    assert (found["mse_best_round"], found["rounds_to_target"]) == (best, reached)
    assert found["mse_best"] == min(value for _, value in result.curve("mse"))
    assert sorted(path.stem for path in (tmp_path / "run/checkpoints").glob("*.json")) == kept


def test_every_round_is_a_row(result, monkeypatch):
    frame = result.to_frame()
    assert list(frame["accuracy"]) == [value for _, value in result.curve("accuracy")]
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert [row["round"] for row in result.to_frame()] == [1, 2]


def test_a_run_is_read_again(result, digits):
    again = fedflat.Result.load(result.directory, digits)
    assert again.history == result.history and repr(again) == repr(result)
    found = [each.flatness(samples=50, k=1, products=6).spectrum.eigenvalues[0] for each in (again, result)]
    assert found[0] == found[1]
    assert (
        fedflat.Result.load(result.directory).flatness(samples=50, k=1, products=6).spectrum.eigenvalues[0] == found[0]
    )
    with pytest.raises(RunError, match="saved while it trains"):
        result.save("elsewhere")


def test_the_namespace_is_there_before_torch_is_loaded():
    there = "'flatness' in dir(fedflat) and 'torch' not in sys.modules"
    code = f"import fedflat, sys; assert {there}; fedflat.flatness.look"
    subprocess.run([sys.executable, "-c", code], check=True)
