"""Vectors of many clients in mapped files: what is kept, what it takes, and what happens when there is no room."""

import os
import pickle
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedflat.engine import store
from fedflat.engine.store import FREED, LINE, Memory, Scratch, Table, Tables
from fedflat.errors import RunError
from forking import command, forked, may_mount, mount, unshare_mounts

MB = 2**20
linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")


def on_disk(*paths):
    """Bytes that files really take."""
    return sum(path.stat().st_blocks * 512 for path in paths)


def resident(kind="RssFile"):
    """Bytes of mapped files that this process holds."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith(kind)))


# --------------------------------------------------------------------------------------------------------------------
# Tables
# --------------------------------------------------------------------------------------------------------------------

WRITES = st.lists(st.tuples(st.integers(0, 9), st.floats(-10, 10, width=32), st.booleans(), st.booleans()), max_size=30)


@given(st.integers(1, 3 * LINE), WRITES)
@settings(max_examples=60, deadline=None)
def test_a_row_holds_what_was_last_written_to_it_however_and_zero_before(size, writes):
    expected = torch.zeros(10, size)
    with tempfile.TemporaryDirectory() as folder:
        table = Table(Path(folder) / "rows", 10, size, torch.float32, sparse=True)
        for row, value, mapped, released in writes:
            vector = torch.linspace(value, -value, size)
            expected[row] = vector
            table[row].copy_(vector) if mapped else table.store(row, vector)
            if released:
                table.release(row)
        assert all(torch.equal(table[row], expected[row]) for row in range(10))


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize(("dtype", "gaps"), [(torch.float32, False), (torch.float32, True), (torch.float64, False)])
def test_a_row_is_written_whole_and_alone_whatever_its_size_and_the_vectors_form(
    tmp_path, monkeypatch, large, dtype, gaps
):
    size, stored, real = FREED // 4 if large else 100, [], Table.store
    monkeypatch.setattr(Table, "store", lambda *given: stored.append(True) or real(*given))
    table = Tables(tmp_path / "rows", 3, {"delta": size}, torch.float32, sparse=True)
    vector = torch.arange(2 * size, dtype=dtype)[::2] if gaps else torch.arange(size, dtype=dtype)
    table.write(1, {"delta": vector})
    assert torch.equal(table[1]["delta"], vector.float())
    assert not table[0]["delta"].any() and not table[2]["delta"].any()
    assert bool(stored) == (large and dtype == torch.float32), "a vector of another type is converted"


@linux
def test_a_large_row_that_is_freed_takes_no_room_until_it_is_written_again(tmp_path):
    table, vector = Table(tmp_path / "rows", 3, FREED // 4 + 5, torch.float32, sparse=True), torch.ones(FREED // 4 + 5)
    for row in range(3):
        table[row].copy_(vector)
    full = on_disk(tmp_path / "rows")
    table.free(1)
    assert on_disk(tmp_path / "rows") <= full - FREED + 2 * 4096
    assert torch.equal(table[0], vector)
    assert torch.equal(table[2], vector)
    table.reserve(1)
    table[1].copy_(vector)
    assert torch.equal(table[1], vector)
    assert on_disk(tmp_path / "rows") == full


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bool])
def test_every_row_begins_on_a_cache_line(tmp_path, dtype):
    table = Table(tmp_path / "rows", 5, 7, dtype)
    assert {table[row].data_ptr() % 64 for row in range(5)} == {0}
    assert table[3].shape == (7,)


def test_a_table_sent_to_another_process_is_the_same_rows(tmp_path):
    ours = Table(tmp_path / "rows", 3, 5, torch.float64)
    theirs = pickle.loads(pickle.dumps(ours))
    theirs[1].fill_(2.5)
    assert ours[1].tolist() == [2.5] * 5
    ours.store(2, torch.arange(5.0, dtype=torch.float64))
    assert theirs[2].tolist() == [0, 1, 2, 3, 4]


def test_a_sparse_table_takes_room_only_for_the_rows_that_are_written(tmp_path):
    path, size = tmp_path / "rows", 64 * 1024
    table = Table(path, 1_000_000, size, torch.float32, sparse=True)
    assert path.stat().st_size == 1_000_000 * size * 4
    assert on_disk(path) < MB
    for row in (0, 77, 999_999):
        table.store(row, torch.full((size,), float(row)))
    assert 3 * size * 4 <= on_disk(path) < 3 * size * 4 + MB
    assert [float(table[row][-1]) for row in (0, 76, 77, 999_999)] == [0, 0, 77, 999_999]


def test_other_tables_have_their_room_from_the_beginning(tmp_path):
    Tables(tmp_path / "sent", 4, {"weights": 50_000, "nothing": 0}, torch.float32)
    assert [path.name for path in tmp_path.iterdir()] == ["sent.weights"]
    assert on_disk(tmp_path / "sent.weights") >= 4 * 50_000 * 4


@linux
def test_released_tables_are_still_on_the_disk_but_no_longer_in_this_process(tmp_path):
    tables = Tables(tmp_path / "upload", 50, {"delta": MB // 4}, torch.float32, sparse=True)
    for row in range(50):
        tables.write(row, {"delta": torch.full((MB // 4,), float(row))})
    held = resident()
    tables.release()
    assert held - resident() >= 45 * MB
    assert [float(tables[row]["delta"].mean()) for row in (0, 7, 49)] == [0, 7, 49]


# --------------------------------------------------------------------------------------------------------------------
# Client memory
# --------------------------------------------------------------------------------------------------------------------

SIZES = {"drift": 5, "control": 5}
KEPT = st.lists(st.tuples(st.integers(0, 6), st.floats(-10, 10, width=32)), max_size=20)


def vectors(value):
    return {"drift": torch.full((5,), value), "control": torch.full((5,), -value)}


@given(KEPT)
@settings(max_examples=40, deadline=None)
def test_a_client_has_what_it_kept_last_and_nothing_before_its_first_round(kept):
    with tempfile.TemporaryDirectory() as folder:
        memory = Memory(Path(folder), 7, SIZES, torch.float32)
        for client, value in kept:
            memory.keep(client, vectors(value))
            memory.release([client])
        last = dict(kept)
        for client in range(7):
            found = memory[client]
            assert (found is None) == (client not in last)
            if found:
                assert all(torch.equal(found[name], v) for name, v in vectors(last[client]).items())
        assert memory.changed == set(last)


def test_what_a_checkpoint_held_is_there_again_and_is_not_news(tmp_path):
    memory = Memory(tmp_path, 4, SIZES, torch.float32)
    memory.restore([(1, vectors(3.0)), (2, vectors(4.0))])
    assert [memory[client] is None for client in range(4)] == [True, False, False, True]
    assert memory[2]["control"].tolist() == [-4.0] * 5
    assert memory.changed == set()


def test_several_clients_are_read_within_a_context_and_let_go_after_it(tmp_path, monkeypatch):
    memory, gone = Memory(tmp_path, 3, SIZES, torch.float32), list[int]()
    memory.keep(1, vectors(2.0))
    monkeypatch.setattr(memory, "release", gone.extend)
    with memory.reading([0, 1]) as found:
        assert found[0] == {} and {name: row.tolist() for name, row in found[1].items()} == {
            name: row.tolist() for name, row in vectors(2.0).items()
        }
        assert not gone
    assert gone == [0, 1]


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="space cannot be reserved here")
def test_space_is_reserved_once_for_a_row_that_is_never_freed_and_each_time_for_others(tmp_path, monkeypatch):
    reserved = list[int]()
    monkeypatch.setattr(os, "posix_fallocate", lambda file, start, size: reserved.append(size))
    for size, times in (100, 1), (FREED, 2):
        table = Table(tmp_path / f"{size}", 2, size, torch.uint8, sparse=True)
        reserved.clear()
        for _ in range(2):
            table.reserve(1)
        assert len(reserved) == times


def test_stateless_clients_take_no_room_but_are_known(tmp_path):
    memory = Memory(tmp_path, 3, {"buffers": 0}, torch.float32)
    memory.keep(1, {})
    assert (memory[0], memory[1], memory.names) == (None, {}, ())
    assert [path.name for path in tmp_path.iterdir()] == ["seen"]


@linux
@pytest.mark.parametrize("releasing", [True, False])
def test_a_process_holds_the_rows_that_it_has_not_released(tmp_path, releasing):
    size, clients = MB // 4, 100
    memory = Memory(tmp_path, 100_000, {"control": size}, torch.float32)
    before = resident()
    for client in range(0, 100_000, 100_000 // clients):
        memory.keep(client, {"control": torch.ones(size)})
        assert float(memory[client]["control"].sum()) == size
        if releasing:
            memory.release([client])
    grown, touched = resident() - before, clients * MB
    assert grown < 8 * MB if releasing else grown >= touched
    assert touched <= on_disk(tmp_path / "memory.control") < 1.1 * touched


# --------------------------------------------------------------------------------------------------------------------
# No room
# --------------------------------------------------------------------------------------------------------------------


@linux
def test_a_row_that_cannot_be_written_names_the_client_and_changes_nothing_else(tmp_path):
    memory = Memory(tmp_path, 100, SIZES, torch.float32)
    memory.keep(3, vectors(1.0))
    memory.changed.clear()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50 * LINE * 4, before[1]))  # rows from 50 on cannot be written
    try:
        with pytest.raises(RunError, match=r"^client 60: its memory cannot be kept \(File too large\); make room or"):
            memory.keep(60, vectors(2.0))
        with pytest.raises(RunError, match=r"no room for the clients' vectors \(File too large\); make room or"):
            Table(tmp_path / "another", 100, 5, torch.float32)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert memory[60] is None
    assert memory[3]["drift"].tolist() == [1.0] * 5
    assert memory.changed == set()


def run_on_a_small_disk(tmp_path, size, engine):
    """`fedflat run` where temporary files and shared memory have this much room, or a skip where nobody may mount.

    A vector of this mlp takes 0.22 MB. Each of the 20 clients keeps one; the pool has three for the server, one more
    once a model is evaluated, and twelve for the uploads of a cohort of four.
    """
    if not may_mount():
        pytest.skip("this user may not mount a disk")
    disk = tmp_path / "disk"
    disk.mkdir()
    settings = [f"engine={engine}", "engine.workers=2", "method=scaffold", "model.hidden=[200, 200]",
                "split.clients=20", "server.rounds=40", "server.cohort=4"]  # fmt: skip
    overrides = [word for setting in settings for word in ("--set", setting)]

    def run():
        unshare_mounts()
        for folder in (disk, "/dev/shm"):
            mount(f"size={size}", folder)
        tempfile.tempdir = None  # it is found anew, by TMPDIR
        command("run", *overrides, "--out", str(tmp_path / "run"))

    done = forked(run, TMPDIR=str(disk))
    return done.returncode, " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("engine", "size", "what"),
    [
        ("inline", "2m", r"client \d+: its memory cannot be kept"),
        ("pool", "4600k", r"client \d+: its memory cannot be kept"),
        ("pool", "4250k", "no room for the model to evaluate"),
        ("pool", "2m", r"client \d+: no room for its upload"),
    ],
)
def test_a_disk_that_fills_up_ends_the_run_with_a_sentence_and_not_with_a_signal(tmp_path, engine, size, what):
    code, errors = run_on_a_small_disk(tmp_path, size, engine)
    assert code == 6, errors
    sentence = rf"fedflat: {what} \(No space left on device\); make room or set TMPDIR elsewhere"
    assert re.fullmatch(sentence, errors), errors


# --------------------------------------------------------------------------------------------------------------------
# Where it lies
# --------------------------------------------------------------------------------------------------------------------


def test_a_scratch_folder_goes_when_it_is_closed(tmp_path):
    with closing(Scratch(1000, memory=tmp_path)) as scratch:
        Memory(scratch.path, 3, SIZES, torch.float32).keep(0, vectors(1.0))
        assert scratch.path.parent == tmp_path
    assert not [*tmp_path.iterdir()]


ELSEWHERE = ["unshare", "--kill-child", "--map-root-user", "--pid", "--fork", "--mount-proc"]
AT_WORK = """
import sys, time
from pathlib import Path
from fedflat.engine.store import Scratch
scratch = Scratch(0, memory=Path(sys.argv[1]))
print(scratch.path.name, flush=True)
time.sleep(60)
"""


def test_a_scratch_folder_that_cannot_be_claimed_goes_at_once(tmp_path, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "_claimed", full)
    with pytest.raises(RunError, match="No space left on device"):
        Scratch(0, tmp_path)
    assert [*tmp_path.iterdir()] == []


def at_work(folder):
    """Another process with a scratch folder of its own, and that folder's name."""
    names, name = get_context("fork").Pipe(duplex=False)

    def work():
        scratch = Scratch(0, memory=folder)
        name.send(scratch.path.name)
        time.sleep(60)

    process = get_context("fork").Process(target=work)
    process.start()
    return process, names.recv()


def at_work_in_a_container(folder):
    """The same in a namespace of processes of its own."""
    command = [*ELSEWHERE, sys.executable, "-c", AT_WORK, folder]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    return process, process.stdout.readline().strip()


def test_what_a_killed_process_left_is_swept_and_what_a_living_one_has_is_not(tmp_path):
    (killed, left), (living, used) = at_work(tmp_path), at_work(tmp_path)
    killed.kill()
    killed.join()
    for name in (f"fedflat-{killed.pid}-of-0.1", "fedflat-notes-c", "other"):
        (tmp_path / name).mkdir()
    with closing(Scratch(0, memory=tmp_path)) as scratch:
        there = {path.name for path in tmp_path.iterdir()} - {scratch.path.name}
    living.kill()
    living.join()
    assert left not in there
    assert there == {used, f"fedflat-{killed.pid}-of-0.1", "fedflat-notes-c", "other"}


def test_the_folder_of_a_process_in_another_container_is_left_alone(tmp_path):
    if not shutil.which("unshare") or subprocess.run([*ELSEWHERE, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no namespace of processes can be made here")
    mine = Scratch(0, memory=tmp_path)
    other, name = at_work_in_a_container(tmp_path)  # it sees no process of ours, and we none of its numbers
    with closing(mine), closing(Scratch(0, memory=tmp_path)):
        there = {path.name for path in tmp_path.iterdir()}
    other.kill()
    other.communicate()
    assert {mine.path.name, name} <= there


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes")
def test_a_pipe_under_the_name_of_an_owner_keeps_nobody_waiting(tmp_path):
    """Every user may write to /dev/shm, and knows which name is opened there."""
    (tmp_path / "fedflat-1-theirs").mkdir()
    os.mkfifo(tmp_path / "fedflat-1-theirs" / f"owner-{store._system()}")
    assert forked(lambda: Scratch(0, tmp_path).close(), timeout=60).returncode == 0


def test_the_folder_of_another_machine_is_left_alone(tmp_path, monkeypatch):
    """Locks may not reach from one machine to another: there nothing tells a living process from a dead one."""
    theirs = tmp_path / "fedflat-1-theirs"
    theirs.mkdir()
    (theirs / "owner-0f3c-another-boot").touch()
    ours = tmp_path / "fedflat-1-ours"
    ours.mkdir()
    (ours / f"owner-{store._system()}").touch()
    with closing(Scratch(0, memory=tmp_path)):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["fedflat-1-theirs"]


def test_nobody_else_may_look_into_the_clients_memory(tmp_path):
    with closing(Scratch(0, memory=tmp_path)) as scratch:
        assert scratch.path.stat().st_mode & 0o077 == 0


ROW = torch.zeros(3)


@pytest.mark.parametrize(
    ("client", "vectors"),
    [(5, {"drift": ROW}), (-1, {"drift": ROW}), ("0", {"drift": ROW}), (0, {}), (0, {"drift": ROW[:2]}),
     (0, {"drift": ROW.double()})],
)  # fmt: skip
def test_memory_of_another_form_is_not_taken_from_a_checkpoint(tmp_path, client, vectors):
    memory = Memory(tmp_path, 5, {"drift": 3}, torch.float32)
    with pytest.raises(RunError, match="the checkpoint's memory of client"):
        memory.restore([(client, vectors)])


def test_memory_that_does_not_fit_into_memory_goes_among_the_temporary_files(tmp_path):
    free = shutil.disk_usage(tmp_path).free
    with closing(Scratch(2 * free, memory=tmp_path)) as scratch:
        assert scratch.path.parent == Path(tempfile.gettempdir())
