"""A data set that several processes share: decoded once, mapped by all, equal to the one in the files."""

import os
import sys
from dataclasses import fields
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

from fedflat.federation import datasets
from fedflat.federation.dataset import Dataset, Samples
from fedflat.federation.datasets import load
from fedflat.federation.decoded import DECODED_FOLDER

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="processes share files by locks of POSIX")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A shared folder, and the number of times that each data set was read."""
    read, digits = [], datasets.DATASETS["digits"]
    monkeypatch.setitem(datasets.DATASETS, "digits", lambda place: read.append(place) or digits(place))
    monkeypatch.setenv(DECODED_FOLDER, str(tmp_path))
    tmp_path.chmod(0o700)
    return tmp_path, read


def parts(dataset):
    for part in (dataset.train, dataset.test):
        yield from (getattr(part, field.name) for field in fields(Samples))


def same(one: Dataset, other: Dataset) -> bool:
    pairs = zip(parts(one), parts(other), strict=True)
    equal = all(a is b is None or (a.dtype == b.dtype and torch.equal(a, b)) for a, b in pairs)
    facts = [field.name for field in fields(Dataset) if field.name not in ("train", "test")]
    return equal and all(getattr(one, fact) == getattr(other, fact) for fact in facts)


def test_a_data_set_is_read_once_and_then_mapped(folder, monkeypatch):
    path, read = folder
    first, second = load("digits"), load("digits")
    assert len(read) == 1
    monkeypatch.delenv(DECODED_FOLDER)
    assert same(load("digits"), first) and same(first, second) and len(read) == 2
    mapped = Path("/proc/self/maps")
    if mapped.exists():
        assert str(next(path.glob("*.safetensors"))) in mapped.read_text()


def test_texts_are_shared_by_how_they_are_cut(folder, tmp_path):
    path, _ = folder
    text = tmp_path / "mine.txt"
    text.write_text("to be or not to be, that is the question. " * 60)
    long, short = (load("text", text, window=window) for window in (20, 10))
    assert long.shape != short.shape
    again = load("text", text, window=20)
    assert same(again, long) and again.vocabulary == long.vocabulary and len([*path.glob("*.safetensors")]) == 2


def test_a_folder_that_others_can_write_to_is_not_used(folder):
    path, read = folder
    path.chmod(0o777)
    load("digits")
    load("digits")
    assert len(read) == 2 and not [*path.iterdir()]


def test_a_damaged_file_or_a_full_disk_costs_only_time(folder, monkeypatch):
    path, read = folder
    whole = load("digits")
    stored = next(path.glob("*.safetensors"))
    damaged = path / "damaged"
    damaged.write_bytes(stored.read_bytes()[:100])
    damaged.rename(stored)
    assert same(load("digits"), whole) and len(read) == 2
    stored.unlink()
    monkeypatch.setattr("fedflat.federation.decoded._store", lambda *_: os.stat(path / "gone"))
    assert same(load("digits"), whole)


def test_processes_at_the_same_time_read_it_once(folder):
    path, read = folder
    fork = get_context("fork")
    start, said = fork.Barrier(2), fork.Queue()

    def look():
        start.wait(60)
        total = load("digits").train.inputs.sum().item()
        said.put((total, len(read)))

    several = [fork.Process(target=look) for _ in range(2)]
    for process in several:
        process.start()
    totals, reads = zip(*(said.get(timeout=60) for _ in several), strict=True)
    for process in several:
        process.join()
    assert {*totals} == {load("digits").train.inputs.sum().item()}
    assert sorted(reads) == [0, 1]
    assert len([*path.glob("*.safetensors")]) == 1
