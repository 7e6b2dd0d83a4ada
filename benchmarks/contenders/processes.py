"""The age, memory and end of processes. Without torch: who maps its libraries takes a part of them."""

import ctypes
import os
import signal
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

ADOPT = 36  # PR_SET_CHILD_SUBREAPER of Linux


def age() -> float:
    """Seconds since this process was started, so that its imports count."""
    ticks = int(_stat("self")[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def pss_mb(process: int | None = None) -> float:
    """The proportional memory of a process (this one if none is named) and all that descend from it."""
    return sum(map(_pss_kb, _family(process or os.getpid()))) / 1024


def _family(process: int) -> set[str]:
    """A process and all that descend from it."""
    parents: dict[str, str] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[folder.name] = _stat(folder.name)[1]
        except OSError:  # it has ended meanwhile
            continue
    family = {str(process)}
    while more := {child for child, parent in parents.items() if parent in family} - family:
        family |= more
    return family


def adopt() -> None:
    """Let this process inherit descendants whose parent ends before them, so that `end_family` finds them."""
    ctypes.CDLL(None).prctl(ADOPT, 1, 0, 0, 0)


def first_to_end() -> None:
    """Let this process and its children be ended first when memory runs out, and not the one that measures them."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def descendants() -> set[str]:
    """All processes that descend from this one."""
    return _family(os.getpid()) - {str(os.getpid())}


def end_family(spared: Collection[str] = ()) -> None:
    """End all that descend from this process, except for those named."""
    while family := descendants() - {*spared}:
        for process in family:
            with suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)
            with suppress(ChildProcessError):  # a grandchild; it becomes a child when its parent is gone
                os.waitpid(int(process), 0)


def cpu_seconds() -> float:
    """The processor time of this process and all that descend from it, with those that have ended."""
    ticks = sum(sum(map(int, _stat(process)[11:15])) for process in _family(os.getpid()))
    return ticks / os.sysconf("SC_CLK_TCK")


def _stat(process: str) -> list[str]:
    """The fields after the name: state, parent, …, with the start time at 19."""
    return Path("/proc", process, "stat").read_text().rpartition(")")[2].split()


def _pss_kb(process: str) -> int:
    try:
        lines = Path("/proc", process, "smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
