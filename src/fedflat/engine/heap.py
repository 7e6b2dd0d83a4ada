"""Settings of glibc's allocator for memory that torch frees; they have no effect on other systems."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from typing import ClassVar

from torch import Tensor

from fedflat.local import Batch, Vectors
from fedflat.rounds import Feed, Problem, Questions, Worker

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # option numbers from malloc.h


def _glibc(function: str, *arguments: int) -> None:
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            getattr(ctypes.CDLL(None), function)(*arguments)


def keep_freed_memory(below: int = 32 * 2**20) -> None:
    """Keep the memory that a step frees for the next step, instead of returning and zeroing it every time.

    Without this, every step of a convolutional network page-faults its activations in again, most of all with MAN.

    Args:
        below: size in bytes; blocks of this size or larger still get mappings of their own.
    """
    _glibc("mallopt", TRIM_THRESHOLD, 2**31 - 1)
    _glibc("mallopt", MMAP_THRESHOLD, below)


class HeapSizes(ctypes.Structure):
    """The result of glibc's mallinfo2; the first field is the size of the heap in bytes."""

    _fields_: ClassVar = [(name, ctypes.c_size_t) for name in ("heap", *(f"unused{k}" for k in range(9)))]


class Trim:
    """Returns unused pages between blocks in use to the system, as long as the heap reaches new sizes.

    Blocks of the first clients do not fit into the holes that others left, so the heap grows at first. When it does not
    grow any more, the next client needs the same pages again, and to fault them in would take 5 % of the time of a
    large network.
    """

    def __init__(self) -> None:
        self._largest = 0

    def __call__(self) -> None:
        size = _heap_size()
        if size is None or size > self._largest:
            _glibc("malloc_trim", 0)
        self._largest = max(self._largest, size or 0)


def _heap_size() -> int | None:
    """Return the size of the heap in bytes; None if the C library does not tell."""
    with suppress(OSError, AttributeError):
        report = ctypes.CDLL(None).mallinfo2
        report.restype = HeapSizes
        return int(report().heap)
    return None


class FirstStepApart:
    """Passes batches on; during a worker's first step, large blocks are allocated outside the heap.

    In a process's first step torch makes its permanent allocations. If they were placed between the activations, those
    of later steps would not fit into the same places.
    """

    def __init__(self) -> None:
        self._new = True

    def __call__(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        if self._new:
            self._new = False
            keep_freed_memory(below=2**16)
            try:
                yield from islice(batches, 1)
            finally:
                keep_freed_memory()
        yield from batches


def settled_worker(
    problem: Problem,
    question: Questions | None = None,
    stage: Tensor | None = None,
    first: Vectors | None = None,
    feed: Feed = iter,
) -> Worker:
    """Create a worker and keep freed memory for its next step; the arguments are those of `Worker`."""
    keep_freed_memory()
    apart = FirstStepApart()
    return Worker(problem, question, stage, first, lambda batches: feed(apart(batches)))
