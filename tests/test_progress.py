"""A bar appears when something takes long, where somebody can see it, and goes away again."""

import io
import sys
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from fedflat import progress as bars
from fedflat.flatness import Objective


@pytest.fixture
def terminal(monkeypatch):
    """What a terminal of 100 columns shows, with bars from the first moment on."""
    screen = io.StringIO()
    monkeypatch.setattr(bars, "WAIT", 0.0)
    monkeypatch.setattr(bars, "PAUSE", 0.0)
    monkeypatch.setattr(bars, "Console", lambda **_: Console(file=screen, force_terminal=True, width=100))
    return screen


def test_nested_bars_stand_below_each_other(terminal):
    with bars.progress("layers", total=2) as outer:
        for _ in bars.track(range(3), "probes"):
            pass
        outer.advance("fc1")
    shown = terminal.getvalue()
    assert "layers" in shown and "probes" in shown and "3/3" in shown and "1/2" in shown and "fc1" in shown
    assert not bars._display.bars and bars._display._screen is None


def test_nothing_is_shown_within_two_seconds(terminal, monkeypatch):
    monkeypatch.setattr(bars, "WAIT", 2.0)
    assert list(bars.track(range(3), "quick")) == [0, 1, 2]
    assert not terminal.getvalue()


def test_nothing_is_shown_where_nobody_looks(monkeypatch, capfd):
    monkeypatch.setattr(bars, "WAIT", 0.0)
    list(bars.track(range(3), "silent"))
    assert capfd.readouterr() == ("", "")


def test_a_bar_ends_with_an_error(terminal):
    with pytest.raises(ZeroDivisionError), bars.progress("broken") as bar:
        bar.reach(1 // 0)
    assert not bars._display.bars and bars._display._screen is None


def test_a_notebook_shows_html_that_disappears(monkeypatch):
    IPython = pytest.importorskip("IPython")
    sent = []
    monkeypatch.setattr(bars, "WAIT", 0.0)
    monkeypatch.setattr(bars, "PAUSE", 0.0)
    monkeypatch.setattr(IPython, "get_ipython", lambda: SimpleNamespace(kernel=1))
    monkeypatch.setitem(sys.modules, "IPython", IPython)
    for name in ("display", "update"):
        monkeypatch.setattr(f"IPython.display.DisplayHandle.{name}", lambda _, what: sent.append(what.data))
    list(bars.track(range(2), "<b>"))
    assert 'max="2" value="1"' in sent[0] and "&lt;b&gt;" in sent[0] and sent[-1] == ""


def test_a_product_over_many_batches_is_a_sign_of_life_within_its_bar(terminal):
    x = torch.ones(6, 2)
    objective = Objective(torch.nn.Linear(2, 1), torch.nn.functional.mse_loss, [(x, x[:, :1])] * 3)
    with bars.progress("Lanczos"):
        objective.product(torch.ones(3))
    assert "Lanczos" in terminal.getvalue() and "batch 2 of 3" in terminal.getvalue()


def test_outside_of_a_bar_and_in_a_forked_process_a_beat_is_silent(terminal):
    bars.beat("alone")
    with bars.progress("of the parent") as bar:
        bar.process += 1
        bars.beat("of the child")
    assert not terminal.getvalue()
