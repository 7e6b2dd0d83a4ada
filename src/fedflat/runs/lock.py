"""A lock on a run's directory: one process may write to it, until it ends."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Self

from fedflat.errors import RunError
from fedflat.files import changeable

if sys.platform != "win32":
    import fcntl

_directories: set[int] = set()


def busy(path: Path) -> bool:
    """Whether another process works on a directory; False if it cannot be opened."""
    try:
        RunLock(path).close()
    except RunError:
        return True
    except OSError:
        return False
    return False


class RunLock:
    """A lock on the directory itself, which lasts as long as the directory, and a record lock on `.lock` inside.

    The first cannot be removed by deleting a file. The second also works between machines that share the directory if
    their file system does not lock directories, and is the one that fedflat 0.1 uses. Forked workers inherit neither.
    """

    def __init__(self, path: Path, what: str = "run") -> None:
        self.path, self.what = path, what
        self._directory = -1
        self._file: FileIO | None = None
        if sys.platform == "win32":
            return
        self._directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        _directories.add(self._directory)
        try:
            self._claim_directory()
            self._file = self._claimed_file()
        except BaseException:
            self.close()
            raise

    def _claim_directory(self) -> None:
        try:
            fcntl.flock(self._directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._taken() from None
        except OSError:
            pass  # some network file systems cannot lock directories: `.lock` must do

    def _claimed_file(self) -> FileIO:
        file = changeable(self.path / ".lock")
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            raise self._taken() from None
        return file

    def _taken(self) -> RunError:
        return RunError(
            f"{self.path}: another process is working on this {self.what}; wait for it or choose another --out"
        )

    def check(self) -> None:
        """Refuse to write to a directory that has replaced ours; lock a deleted `.lock` again."""
        if self._file is None:
            return
        if not _same(self.path, self._directory):
            raise RunError(f"{self.path}: was moved or replaced while the run wrote to it; move it back and resume it")
        if not _same(self.path / ".lock", self._file.fileno()):
            self._file.close()
            self._file = self._claimed_file()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        if self._directory >= 0:
            _directories.discard(self._directory)
            with suppress(OSError):
                fcntl.flock(self._directory, fcntl.LOCK_UN)  # also for a worker that is just being forked
            os.close(self._directory)
            self._directory = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _same(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except OSError:
        return False


def _let_go() -> None:
    """Close the server's locks in a forked worker: they must be free once the server is gone."""
    for descriptor in _directories:
        with suppress(OSError):
            os.close(descriptor)
    _directories.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)
