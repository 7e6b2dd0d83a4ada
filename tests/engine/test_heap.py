"""The allocator's settings: when freed memory goes back to the system."""

import subprocess
import sys
from contextlib import closing

import pytest

from fedflat import models
from fedflat.engine import heap
from fedflat.engine.pool import START, Pool
from fedflat.methods.parser import parse
from fedflat.models.vector import Network
from fedflat.recipe import Local
from fedflat.rounds.server import conduct, first_state
from fedflat.rounds.setup import Problem


@pytest.fixture
def trims(monkeypatch):
    """The arguments of all calls of malloc_trim."""
    calls = []
    monkeypatch.setattr(heap, "_glibc", lambda *call: calls.append(call))
    return calls


def test_memory_goes_back_only_when_the_heap_is_larger_than_ever(trims, monkeypatch):
    sizes = iter([100, 100, 90, 110, 105, 110, 111])
    monkeypatch.setattr(heap, "_heap_size", lambda: next(sizes))
    trim = heap.Trim()
    counts = []
    for _ in range(7):
        trim()
        counts.append(len(trims))
    assert counts == [1, 1, 1, 2, 2, 2, 3]
    assert set(trims) == {("malloc_trim", 0)}


def test_memory_always_goes_back_if_the_size_of_the_heap_is_unknown(trims, monkeypatch):
    monkeypatch.setattr(heap, "_heap_size", lambda: None)
    trim = heap.Trim()
    trim()
    trim()
    assert len(trims) == 2


GROWTH = """
from fedflat.engine import heap
before = heap._heap_size()
blocks = [bytearray(50_000) for _ in range(4_000)]  # too small for mappings of their own
print(0 if before is None else heap._heap_size() - before)
"""


def test_the_size_of_the_heap_follows_what_is_allocated():
    """In a process of its own: the threads of a test runner have other heaps."""
    grown = int(subprocess.run([sys.executable, "-c", GROWTH], capture_output=True, text=True, check=True).stdout)
    if not grown:
        pytest.skip("this C library does not tell the size of its heap")
    assert 100e6 < grown < 300e6


@pytest.mark.skipif(START != "fork", reason="a forked worker has the heap that is planted here")
@pytest.mark.parametrize(("hidden", "expected"), [((2000, 500), [1, 1, 2, 2]), ((8,), [0, 0, 0, 0])])
def test_a_worker_trims_a_large_models_heap_only_after_clients_with_which_it_has_grown(
    digits, tmp_path, monkeypatch, hidden, expected
):
    sizes, trims = iter([2**50, 2**50, 2**51, 2**51]), tmp_path / "trims"
    trims.touch()

    def glibc(function, *_):
        if function == "malloc_trim":
            with trims.open("a") as file:
                file.write("x")

    monkeypatch.setattr(heap, "_heap_size", lambda: next(sizes))
    monkeypatch.setattr(heap, "_glibc", glibc)
    network, counts = Network(models.build("mlp", (1, 8, 8), 10, hidden=hidden)), []
    problem = Problem.of(digits, network, parse("fedavg"), Local(steps=1))
    state = first_state(problem)
    with closing(Pool(problem, state, slots=1, workers=1)) as engine:
        for client in range(4):
            state, _ = conduct(problem, state, engine, [client])
            counts.append(len(trims.read_text()))
    assert counts == expected
