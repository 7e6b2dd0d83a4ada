"""A function in a process of its own that is forked: it has its modules already, where a new one would import torch."""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path


@dataclass(frozen=True)
class Done:
    """How a process ended (a negative code is a signal) and what it said."""

    returncode: int
    stdout: str
    stderr: str


def forked(function: Callable[[], object], timeout: float = 120, cwd: Path | None = None, **environment: str) -> Done:
    """Call a function in a forked process, with these changes to its environment, and wait for its end."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.12 on: of forks beside threads
            pid = os.fork()
        if not pid:
            os._exit(_called(function, (out.fileno(), errors.fileno()), cwd, environment))
        code = _ended(pid, timeout)
        out.seek(0)
        errors.seek(0)
        return Done(code, out.read().decode(), errors.read().decode())


def fedflat(*words: str, **how: str | float | Path) -> Done:
    """The command line in a forked process."""
    return forked(lambda: command(*words), **how)


def command(*words: str) -> None:
    """The command line in this process, which it ends."""
    from fedflat.cli import main

    sys.argv = ["fedflat", *words]
    main()


class Command:
    """`fedflat …` at work in a forked process and a group of its own; all that it says goes to the file `said`."""

    def __init__(self, folder: Path, *words: str, **environment: str) -> None:
        self.said = folder / f"said-{time.monotonic_ns()}.txt"
        self._process = get_context("fork").Process(target=self._main, args=(folder, words, environment))
        self._process.start()

    def _main(self, folder: Path, words: tuple[str, ...], environment: dict[str, str]) -> None:
        os.setsid()
        os.chdir(folder)
        os.environ.update(environment)
        sys.stdout = sys.stderr = self.said.open("w", buffering=1)
        command(*map(str, words))

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def runs(self) -> bool:
        return self._process.is_alive()

    def signal(self, number: int) -> None:
        """As they come: an interrupt from the terminal to all processes, the others to the one that was started."""
        (os.killpg if number == signal.SIGINT else os.kill)(self.pid, number)

    def ended(self, patience: float = 120) -> tuple[int | None, str]:
        """The exit code (None if it runs on), and all that was said."""
        self._process.join(patience)
        return self._process.exitcode, self.said.read_text()

    def close(self) -> None:
        self._process.kill()
        self._process.join()


def until(condition: Callable[[], object], patience: float = 120) -> None:
    """Wait until it is so."""
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def without_fedflat(code: str, folder: Path) -> Done:
    """Run code in a forked process in which fedflat cannot be imported, as on a machine that has torch alone."""

    def run() -> None:
        for name in [name for name in sys.modules if name.partition(".")[0] == "fedflat"]:
            del sys.modules[name]
        sys.modules["fedflat"] = None  # type: ignore[assignment]
        sys.path.insert(0, "")
        exec(compile(code, "card.py", "exec"), {"__name__": "__main__"})

    return forked(run, cwd=folder)


def unshare_mounts() -> None:
    """Give this process mounts of its own, in a user namespace where it may make some.

    Raises:
        OSError: this user may not.
    """
    libc, new_mounts, new_user = ctypes.CDLL(None, use_errno=True), 0x20000, 0x10000000
    user, group = os.getuid(), os.getgid()
    if libc.unshare(new_user | new_mounts):
        raise OSError(ctypes.get_errno(), "unshare")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True, capture_output=True)


def mount(options: str, folder: str | Path) -> None:
    """Mount a tmpfs there, or mount it anew with other options."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(folder)], check=True, capture_output=True)


def may_mount() -> bool:
    """Whether this user may mount a disk in a namespace of its own."""
    return shutil.which("mount") is not None and forked(unshare_mounts).returncode == 0


def _called(
    function: Callable[[], object], files: tuple[int, int], cwd: Path | None, environment: dict[str, str]
) -> int:
    """In the child: what the function leads to as an exit code."""
    try:
        for target, file in zip((1, 2), files, strict=True):
            os.dup2(file, target)
        sys.stdout, sys.stderr = (os.fdopen(file, "w", buffering=1, closefd=False) for file in (1, 2))
        warnings.resetwarnings()
        os.environ.update(environment)
        if cwd:
            os.chdir(cwd)
        function()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _ended(pid: int, timeout: float) -> int:
    """The exit code of a child, or an error if it does not end."""
    end = time.monotonic() + timeout
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise TimeoutError(f"process {pid} has not ended after {timeout:g} s")
        time.sleep(0.01)
