"""What crosses the wire: known sizes on the way down, short lines of plain text on the way up."""

from io import BytesIO

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedflat.errors import printable
from fedflat.methods import CATALOGUE
from fedflat.recipe import load
from fedflat.rounds import first_state, view

flwr = pytest.importorskip("flwr.app")
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


@pytest.mark.parametrize(
    ("descr", "shape", "body", "why"),
    [("|V0", (10**8,), b"", "has entries of no bytes in delta"),
     ("|S0", (10**8,), b"", "has entries of no bytes in delta"),
     ("<f4", (10**12,), bytes(16), "declares 4,000,000,000,000 bytes for delta"),
     ("<f4", (-4,), bytes(16), "declares -16 bytes for delta"),
     ("|O", (4,), bytes(16), "holds Python objects in delta")],
)  # fmt: skip
def test_an_array_that_declares_what_it_does_not_have_is_not_unpacked(descr, shape, body, why):
    """By a header of 128 bytes a client could otherwise keep the server busy for ever, and a server its clients."""
    header = BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": descr, "fortran_order": False, "shape": shape})
    array = flwr.Array("float32", (4,), "numpy.ndarray", header.getvalue() + body)
    record = flwr.RecordDict({"vectors": flwr.ArrayRecord({"delta": array})})
    with pytest.raises(messages.UnfitError) as error:
        messages.read_vectors(record, 100)
    assert error.value.args[0] == "shape" and why in error.value.args[1]


def test_nor_is_an_archive_in_the_place_of_an_array():
    packed = BytesIO()
    np.savez_compressed(packed, delta=np.zeros(10**6, np.uint8))
    record = flwr.RecordDict(
        {"vectors": flwr.ArrayRecord({"delta": flwr.Array("float32", (4,), "numpy.ndarray", packed.getvalue())})}
    )
    with pytest.raises(messages.UnfitError, match="cannot be unpacked"):
        messages.read_vectors(record, 10**6)
