"""A client's memory between messages: the version that the server counts on, or none, and never another."""

import hashlib
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedflat.errors import RunError

found = pytest.importorskip("fedflat.flower.shelf")
DiskShelf, StateShelf, Mark, MemoryLostError = found.DiskShelf, found.StateShelf, found.Mark, found.MemoryLostError
keep, recall = found.keep, found.recall
ABOUT = {"run": "ab12", "client": "3"}


@pytest.fixture(params=["disk", "state"])
def shelf(request, tmp_path):
    return DiskShelf(tmp_path, "ab12", 3) if request.param == "disk" else StateShelf({})


def memory(round):
    return {"control": torch.full((5,), float(round)), "dual": torch.arange(5.0) * round}


def same(found, expected):
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def test_what_was_kept_comes_back(shelf):
    mark = keep(shelf, 7, memory(7), ABOUT, None)
    found, forgiven = recall(shelf, mark, anew=False)
    assert same(found, memory(7)) and forgiven == ""


def test_the_mark_is_the_digest_of_what_lies_there(shelf):
    mark = keep(shelf, 7, memory(7), ABOUT, None)
    assert mark == Mark(7, hashlib.sha256(shelf.read(7)).hexdigest())


def test_equal_memory_of_equal_rounds_has_equal_marks(tmp_path):
    marks = {keep(DiskShelf(tmp_path / name, "ab12", 3), 7, memory(7), ABOUT, None) for name in "ab"}
    assert len(marks) == 1


def test_a_client_whose_upload_was_never_merged_begins_with_nothing(shelf):
    keep(shelf, 0, memory(0), ABOUT, None)
    assert recall(shelf, None, anew=False) == (None, "")
    keep(shelf, 1, memory(1), ABOUT, None)
    assert shelf.rounds() == [1]


def test_an_upload_that_was_not_merged_is_forgotten(shelf):
    merged = keep(shelf, 3, memory(3), ABOUT, None)
    keep(shelf, 4, memory(4), ABOUT, merged)
    found, _ = recall(shelf, merged, anew=False)
    assert same(found, memory(3))
    keep(shelf, 5, memory(5), ABOUT, merged)
    assert shelf.rounds() == [3, 5]


def test_a_server_that_asks_for_a_version_that_is_gone_does_not_cost_the_others(shelf):
    merged = keep(shelf, 3, memory(3), ABOUT, None)
    with pytest.raises(MemoryLostError, match="memory of round 1 is missing"):
        recall(shelf, Mark(1, "0" * 64), anew=False)
    assert same(recall(shelf, merged, anew=False)[0], memory(3))


@given(st.lists(st.booleans(), min_size=1, max_size=12))
def test_whichever_rounds_are_merged_the_last_merged_one_counts_and_two_are_kept(merges):
    shelf, mark = StateShelf({}), None
    for round, merged in enumerate(merges):
        found, _ = recall(shelf, mark, anew=False)
        assert (found is None) if mark is None else same(found, memory(mark.round))
        offered = keep(shelf, round, memory(round), ABOUT, mark)
        assert len(shelf.rounds()) <= 2
        mark = offered if merged else mark


@pytest.mark.parametrize("loss", ["missing", "not the one it stored then"])
def test_a_version_that_is_lost_or_another_is_refused_or_forgiven(shelf, loss):
    mark = keep(shelf, 3, memory(3), ABOUT, None)
    if loss == "missing":
        shelf.drop(3)
    else:
        keep(shelf, 3, memory(2), ABOUT, mark)
    advice = 'restore it, or set deployment.memory = "anew" to start without memory'
    with pytest.raises(MemoryLostError, match=f"^its memory of round 3 is {loss}; {advice}$"):
        recall(shelf, mark, anew=False)
    assert recall(shelf, mark, anew=True) == (None, f"its memory of round 3 is {loss}; it started without memory")


@given(st.data())
def test_no_byte_can_change_unnoticed(data):
    shelf = StateShelf({})
    mark = keep(shelf, 3, memory(3), ABOUT, None)
    blob = bytearray(shelf.read(3))
    place = data.draw(st.integers(0, len(blob) - 1))
    blob[place] ^= data.draw(st.integers(1, 255))
    shelf.write(3, bytes(blob))
    with pytest.raises(MemoryLostError, match="not the one"):
        recall(shelf, mark, anew=False)


def test_files_lie_by_run_and_client_and_nothing_half_written_beside_them(tmp_path):
    keep(DiskShelf(tmp_path, "ab12", 3), 12, memory(12), ABOUT, None)
    assert [file.relative_to(tmp_path) for file in tmp_path.rglob("*") if file.is_file()] == [
        Path("ab12/client-3/00000012.safetensors")
    ]


def test_a_run_cannot_lead_out_of_the_directory(tmp_path):
    for name in "../other", "", "a/b", "..":
        with pytest.raises(RunError, match="cannot be the name of a directory"):
            DiskShelf(tmp_path, name, 3)


def test_a_directory_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"cannot be written .*the node's `memory` directory must be writable"):
        keep(DiskShelf(tmp_path / "file", "ab12", 3), 0, memory(0), ABOUT, None)
