"""One process writes to a run: whatever is deleted, moved or begun a second time."""

import multiprocessing
import os
import shutil
from contextlib import closing

import pytest

from fedflat.errors import RunError
from fedflat.recipe import load
from fedflat.runs.build import prepare
from fedflat.runs.experiment import execute
from fedflat.runs.lock import RunLock

TINY = ["model.hidden=[8]", "split.clients=4", "server.cohort=2", "server.rounds=3", "local.steps=1", "engine=inline",
        "checkpoint.every=1"]  # fmt: skip
FORK = multiprocessing.get_context("fork")


def settle(folder, *changes, callbacks=(), resume=False):
    problem = prepare(load(None, [*TINY, *changes]))
    return execute(problem, folder, callbacks, resume=resume)


def elsewhere(function, *arguments):
    """What another process gets from a call: the sentence of its error, or None."""
    answers = FORK.SimpleQueue()

    def call():
        try:
            answers.put(function(*arguments) and None)
        except RunError as error:
            answers.put(str(error))

    process = FORK.Process(target=call)
    process.start()
    process.join()
    return answers.get()


def test_a_second_one_is_refused_in_another_process_and_in_this_one(tmp_path):
    with RunLock(tmp_path):
        assert "another process is working on this run" in elsewhere(RunLock, tmp_path)
        with pytest.raises(RunError, match="another process is working on this run"):
            RunLock(tmp_path)
        assert "another process is working on this run" in elsewhere(RunLock, tmp_path)
    with RunLock(tmp_path):
        pass


def test_deleting_the_lock_file_admits_nobody(tmp_path):
    with RunLock(tmp_path) as lock:
        (tmp_path / ".lock").unlink()
        assert "another process is working on this run" in elsewhere(RunLock, tmp_path)
        lock.check()
        assert (tmp_path / ".lock").exists()


def test_where_directories_cannot_be_locked_the_first_process_sees_the_second(tmp_path, monkeypatch):
    import fcntl

    def unsupported(*_):
        raise OSError(9, "Bad file descriptor")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    lock = RunLock(tmp_path)
    assert "another process is working" in elsewhere(RunLock, tmp_path)
    (tmp_path / ".lock").unlink()
    begun, done = FORK.Event(), FORK.Event()

    def intrude():
        with RunLock(tmp_path):
            begun.set()
            done.wait(60)

    intruder = FORK.Process(target=intrude)
    intruder.start()
    assert begun.wait(60)
    with closing(lock), pytest.raises(RunError, match="another process is working on this run"):
        lock.check()
    done.set()
    intruder.join()


def test_a_run_whose_directory_was_replaced_stops_and_writes_nothing_there(tmp_path):
    def replaced(record):
        if record["round"] == 1:
            shutil.move(tmp_path / "run", tmp_path / "moved")
            (tmp_path / "run").mkdir()

    with pytest.raises(RunError, match="was moved or replaced while the run wrote to it"):
        settle(tmp_path / "run", "checkpoint.every=100", callbacks=[replaced])
    assert not [*(tmp_path / "run").iterdir()]


def test_a_run_whose_lock_is_deleted_still_keeps_a_second_one_out_and_ends(tmp_path):
    said = []

    def attack(record):
        (tmp_path / "run/.lock").unlink()
        said.append(elsewhere(lambda: settle(tmp_path / "run", resume=True)))

    settle(tmp_path / "run", callbacks=[attack])
    assert len(said) == 3 and all("another process is working on this run" in each for each in said)


def test_a_fork_of_the_process_does_not_keep_the_lock(tmp_path):
    lock, done = RunLock(tmp_path), FORK.Event()
    child = FORK.Process(target=done.wait, args=(60,))
    child.start()
    lock.close()
    with RunLock(tmp_path):
        done.set()
    child.join()


def test_what_was_written_before_the_lock_was_free_is_seen(tmp_path, monkeypatch):
    """Between the first look and the lock another process may have begun and ended a run here."""
    from fedflat.runs import folder

    settle(tmp_path / "other")

    class Late(RunLock):
        def __init__(self, path):
            shutil.copytree(tmp_path / "other", path, dirs_exist_ok=True)
            super().__init__(path)

    monkeypatch.setattr(folder, "RunLock", Late)
    with pytest.raises(RunError, match="already holds a run"):
        settle(tmp_path / "run")


def modes(folder):
    return {path.relative_to(folder): path.stat().st_mode & 0o777 for path in [folder, *folder.rglob("*")]}


def test_a_run_is_for_its_owner_alone(tmp_path):
    before = os.umask(0o000)
    try:
        settle(tmp_path / "deep/run", "method=scaffold")
    finally:
        os.umask(before)
    found = modes(tmp_path / "deep/run")
    assert len(found) > 8
    assert not {path: oct(mode) for path, mode in found.items() if mode & 0o077}
