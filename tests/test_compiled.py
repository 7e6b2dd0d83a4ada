"""Libraries in C: compiled once, kept where nobody else can write, and replaced by torch where they cannot be had."""

import os
import shutil
import stat
from pathlib import Path

import pytest
import torch

from fedflat import compiled

pytestmark = pytest.mark.skipif(not shutil.which("cc"), reason="there is no C compiler")
library = compiled.library.__wrapped__  # without its cache


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The user's cache, empty."""
    monkeypatch.setattr(compiled, "user_cache_path", lambda _: tmp_path / "cache")
    monkeypatch.delenv("FEDFLAT_COMPILER", raising=False)
    return tmp_path / "cache" / "compiled"


@pytest.fixture
def commands(monkeypatch):
    """The commands that the compiler has been given."""
    seen, run = [], compiled._run
    monkeypatch.setattr(compiled, "_run", lambda command: seen.append(command) or run(command))
    return seen


def entries(folder):
    return sorted(path.name for path in folder.iterdir())


def test_it_is_compiled_once_and_kept_for_the_user_alone(folder, commands):
    assert library("chain", torch.float32).chain
    assert library("chain", torch.float32).chain
    assert len(commands) == 1 and commands[0][0].endswith("cc") and "-DREAL=float" in commands[0]
    assert len(entries(folder)) == 1
    made = Path(commands[0][commands[0].index("-o") + 1])
    assert made.parent.parent == folder, "others would find half a library under its name"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert library("chain", torch.float64).chain
    assert len(commands) == len(entries(folder)) == 2


def test_another_processor_compiler_or_source_gets_its_own(folder, commands, monkeypatch, tmp_path):
    library("chain", torch.float32)
    with monkeypatch.context() as patch:
        patch.setattr(compiled, "_processor", lambda: "another")
        library("chain", torch.float32)
    other = tmp_path / "other-cc"
    other.write_text('#!/bin/sh\nexec cc "$@"\n')
    other.chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setenv("FEDFLAT_COMPILER", str(other))
        assert library("chain", torch.float32).chain
    with monkeypatch.context() as patch:
        patch.setattr(compiled, "FLAGS", (*compiled.FLAGS, "-g"))
        library("chain", torch.float32)
    assert len(commands) == len(entries(folder)) == 4


def test_a_new_version_of_the_source_or_of_the_compiler_gets_its_own(tmp_path):
    source, compiler = tmp_path / "some.c", tmp_path / "cc"

    def digest(text, time):
        source.write_text(text)
        compiler.touch()
        os.utime(compiler, (time, time))
        return compiled._digest(source, [str(compiler), str(source)])

    assert digest("one", 1) == digest("one", 1)
    assert len({digest("one", 1), digest("two", 1), digest("one", 2)}) == 3


def test_a_folder_in_which_nothing_can_be_written_is_not_needed(folder, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False if Path(path) == folder else mode)
    assert library("chain", torch.float32).chain
    assert not entries(folder)


@pytest.mark.parametrize("compiler", ["/no/such/compiler", "false"])
def test_a_named_compiler_that_does_not_work_is_told(folder, monkeypatch, compiler):
    monkeypatch.setenv("FEDFLAT_COMPILER", compiler)
    with pytest.warns(UserWarning, match=f"^FEDFLAT_COMPILER = '{compiler}' compiles nothing here, so torch"):
        assert library("chain", torch.float32) is None
    assert not folder.exists() or not entries(folder)


def test_without_a_compiler_there_is_none_and_nothing_to_tell(folder, commands, monkeypatch):
    monkeypatch.setenv("FEDFLAT_COMPILER", "")
    assert library("chain", torch.float32) is None
    monkeypatch.delenv("FEDFLAT_COMPILER")
    monkeypatch.setattr(compiled.shutil, "which", lambda _: None)
    assert library("chain", torch.float32) is None
    assert not commands


def test_there_is_none_for_other_types(folder, commands):
    assert library("chain", torch.float16) is None
    assert not commands


def test_a_compiler_that_hangs_is_given_up(folder, monkeypatch, tmp_path):
    slow = tmp_path / "slow-cc"
    slow.write_text('#!/bin/sh\nsleep 5\nexec cc "$@"\n')
    slow.chmod(0o755)
    monkeypatch.setenv("FEDFLAT_COMPILER", str(slow))
    monkeypatch.setattr(compiled, "PATIENCE", 0.1)
    with pytest.warns(UserWarning, match="slow-cc' compiles nothing here"):
        assert library("chain", torch.float32) is None
    assert not entries(folder)


@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_a_folder_in_which_others_can_write_is_not_used(folder, commands, mode):
    folder.mkdir(parents=True)
    folder.chmod(mode)
    assert library("chain", torch.float32).chain
    assert not entries(folder), "what is there could be somebody else's code"
    library("chain", torch.float32)
    assert len(commands) == 2


def test_a_folder_of_somebody_else_is_not_used(folder, monkeypatch):
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    assert library("chain", torch.float32).chain
    assert not entries(folder)


@pytest.mark.parametrize("above", [0, 1])
def test_a_folder_that_others_can_replace_is_not_used(folder, commands, above):
    """Who can write to a folder above can put another one in its place, between the look at it and its use."""
    folder.mkdir(parents=True, mode=0o700)
    folder.parents[above].chmod(0o777)
    assert library("chain", torch.float32).chain
    assert not entries(folder)
    for mode in (0o1777, 0o775):  # only owners may move what is in a folder like /tmp; the group is the user's own
        folder.parents[above].chmod(mode)
        library("chain", torch.float32)
    assert len(entries(folder)) == 1 and len(commands) == 2


def test_without_a_home_there_is_no_cache(monkeypatch, tmp_path, commands):
    """For a user without an entry and without HOME, platformdirs does not expand `~`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compiled, "user_cache_path", lambda _: Path("~", ".cache", "fedflat"))
    assert library("chain", torch.float32).chain
    assert not entries(tmp_path)


def test_what_is_kept_needs_no_room_for_temporary_files(folder, commands, monkeypatch):
    library("chain", torch.float32)

    def full(*_, **__):
        raise FileNotFoundError

    monkeypatch.setattr(compiled.tempfile, "TemporaryDirectory", full)
    assert library("chain", torch.float32).chain
    assert len(commands) == 1


def test_a_cache_that_cannot_be_made_is_not_needed(folder):
    folder.parent.write_text("a file")
    assert library("chain", torch.float32).chain


def test_a_damaged_library_is_none(folder, monkeypatch):
    monkeypatch.setattr(compiled, "_digest", lambda *_: "0")
    folder.mkdir(parents=True, mode=0o700)
    (folder / "chain-0.so").write_bytes(b"no library")
    assert library("chain", torch.float32) is None


def test_the_name_tells_processors_apart(monkeypatch):
    def read(text):
        monkeypatch.setattr(Path, "read_text", lambda *_: text)
        return compiled._processor()

    one = read("processor\t: 0\nmodel name\t: A\nflags\t\t: avx2\nprocessor\t: 1\nmodel name\t: A\nflags\t\t: avx2\n")
    assert one == read("processor\t: 0\nmodel name\t: A\nflags\t\t: avx2\n")
    assert one != read("processor\t: 0\nmodel name\t: A\nflags\t\t: avx2 avx512f\n")

    def missing(*_):
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", missing)
    assert compiled._processor()
