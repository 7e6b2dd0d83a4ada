"""Results as a person meets them: text, table, picture, file."""

import json
import sys
from dataclasses import is_dataclass

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from torch import nn

import fedflat
from fedflat import flatness
from fedflat.errors import RecipeError, RunError
from fedflat.shown import Rows, Shown

X, Y = torch.randn(20, 4, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 3


@pytest.fixture(scope="module")
def results():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    seen = flatness.look(model, (X, Y), k=2, products=6, steps=4, by_layer=True)
    return {
        "look": seen,
        "spectrum": flatness.spectrum(model, (X, Y), k=2, products=6),
        "landscape": flatness.landscape(model, (X, Y), points=3),
        "curve": flatness.landscape(model, (X, Y), directions="random", dimensions=1, points=3),
        "sharpness": flatness.sharpness(model, (X, Y), directions=2),
        "duality": flatness.duality(model, (X, Y), (X + 0.1, Y)),
        "compare": flatness.compare({"a": model, "<b>": seen}, (X, Y), k=2, products=6),
    }


NAMES = ("look", "spectrum", "landscape", "curve", "sharpness", "duality", "compare")


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


@pytest.mark.parametrize("name", NAMES)
def test_a_result_prints_itself_and_shows_html(name, results):
    text, markup = repr(results[name]), results[name]._repr_html_()
    assert len(text) < 3000 and "tensor(" not in text and "\n" in text
    assert markup.count("<table>") == markup.count("</table>") == 1 and "<b>" not in markup


@pytest.mark.parametrize("name", NAMES)
def test_the_table_is_a_frame_with_pandas_and_a_list_without(name, results, monkeypatch):
    frame = results[name].table()
    assert type(frame).__name__ == "DataFrame"
    monkeypatch.setitem(sys.modules, "pandas", None)
    rows = results[name].table()
    assert isinstance(rows, list) and len(rows) == len(frame)
    assert [*rows[0]] == [*frame.columns]


@pytest.mark.parametrize("name", NAMES)
def test_a_plot_takes_the_users_axes_or_makes_its_own(name, results):
    _, mine = plt.subplots()
    assert results[name].plot(ax=mine) is mine and mine.has_data()
    assert results[name].plot().has_data()
    with pytest.raises(RecipeError, match="ax is a str"):
        results[name].plot(ax="here")


def test_a_landscape_on_axes_with_three_dimensions_is_a_surface(results):
    axes = plt.figure().add_subplot(projection="3d")
    results["landscape"].plot(axes)
    assert len(axes.collections) == 1


@pytest.mark.parametrize("name", NAMES)
def test_a_saved_result_is_read_again_as_it_was(name, results, tmp_path):
    path = tmp_path / ("result.npz" if name in ("landscape", "curve") else "result.json")
    results[name].save(path)
    again = flatness.load(path)
    assert type(again) is type(results[name]) and repr(again) == repr(results[name])
    if name in ("landscape", "curve"):
        assert np.array_equal(again.values, results[name].values)
    if name == "look":
        assert torch.equal(again.spectrum.density.nodes[0], results[name].spectrum.density.nodes[0])
    assert type(type(results[name]).load(path)) is type(results[name])


def test_a_file_that_is_none_of_ours_is_refused_in_a_sentence(results, tmp_path):
    path = tmp_path / "result.json"
    results["sharpness"].save(path)
    whole = json.loads(path.read_text())
    wrong = [
        "", "[]", "{}", '{"fedflat": "Path"}', '{"fedflat": []}', "[" * 100_000,
        json.dumps(whole | {"rho": "0.05"}), json.dumps(whole | {"rho": None}), json.dumps(whole | {"more": 1}),
        json.dumps({k: v for k, v in whole.items() if k != "loss"}), json.dumps(whole | {"samples": True}),
    ]  # fmt: skip
    for text in wrong:
        path.write_text(text)
        with pytest.raises(RunError, match=r"result\.json"):
            flatness.load(path)
    with pytest.raises(RunError, match="cannot be read"):
        flatness.load(tmp_path / "nowhere.json")
    path.write_text(json.dumps(whole | {"average_error": "nan"}))
    assert "–" in repr(flatness.Sharpness.load(path))
    with pytest.raises(RunError, match="holds a Sharpness, not a Spectrum"):
        flatness.Spectrum.load(path)


def test_every_result_uses_the_common_text():
    """A dataclass writes a repr of its own unless it is told not to."""
    result = fedflat.Result
    kinds = [*Shown._kinds.values()]
    assert len(kinds) >= 6 and all(is_dataclass(kind) for kind in kinds)
    assert all("__repr__" not in vars(kind) for kind in kinds if kind is not result)


def test_without_matplotlib_the_sentence_says_how_to_get_it(results, monkeypatch):
    for name in ("matplotlib", "matplotlib.figure", "matplotlib.pyplot"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(RecipeError, match=r"pip install 'fedflat\[plot\]'"):
        results["look"].plot()
    assert "<img" not in results["landscape"]._repr_html_()


def test_long_tables_are_cut():
    assert repr(Rows({"n": n} for n in range(100))).endswith("… and 70 more")
