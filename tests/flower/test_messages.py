"""What crosses the wire: known sizes on the way down, short lines of plain text on the way up."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedflat.errors import printable
from fedflat.methods import CATALOGUE
from fedflat.recipe import load
from fedflat.rounds import first_state, view

pytest.importorskip("flwr")
messages = pytest.importorskip("fedflat.flower.messages")
own_problem = pytest.importorskip("fedflat.flower.own").own_problem


@pytest.mark.parametrize("name", CATALOGUE)
def test_a_client_knows_what_its_method_is_sent(name):
    options = '(entropy="system")' if "dp" in name.split("_") else ""
    recipe = load(None, [f"method={name}{options}", "split.clients=3", "model.hidden=[4]"])
    problem = own_problem(recipe, -1, 10, None, dict.fromkeys(range(3), 1))
    sent = problem.method.broadcast(view(problem, first_state(problem)))
    content = messages.content(sent, {})
    found = messages.read_exactly(content, messages.sent_sizes(problem), torch.float32)
    assert found.keys() == sent.keys() and all(torch.equal(found[name], sent[name]) for name in sent)


@given(st.text(max_size=2000), st.integers(1, 400))
def test_a_text_from_elsewhere_is_a_short_printable_line(text, most):
    shown = printable(text, most)
    assert len(shown) <= most and "\n" not in shown and "\x1b" not in shown
    assert shown.isprintable()


ANYTHING = st.one_of(st.none(), st.booleans(), st.floats(), st.text(), st.integers())


@given(ANYTHING, st.integers(0, 9), st.integers(10, 99))
def test_a_whole_number_is_in_its_range_or_refused(value, low, high):
    if type(value) is int and low <= value <= high:
        assert messages.whole({"n": value}, "n", low, high) == value
    else:
        with pytest.raises(messages.UnfitError):
            messages.whole({"n": value}, "n", low, high)
