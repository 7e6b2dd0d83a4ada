"""What glibc does with memory that torch has freed; elsewhere nothing of this happens."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from typing import TypeVar

Each = TypeVar("Each")
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # the options' numbers in malloc.h


def _glibc(function: str, *arguments: int) -> None:
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            getattr(ctypes.CDLL(None), function)(*arguments)


def keep_freed_memory(below: int = 32 * 2**20) -> None:
    """Keep what a step frees for the next one, instead of handing it back and zeroing it anew every time.

    Without it every step of a convolutional net faults its activations' pages in again, and MAN's most of all. Blocks
    that are not `below` this many bytes still come and go as mappings of their own.
    """
    _glibc("mallopt", TRIM_THRESHOLD, 2**31 - 1)
    _glibc("mallopt", MMAP_THRESHOLD, below)


def give_freed_memory_back() -> None:
    """Hand the pages between what is still in use back to the system, until they are needed again."""
    _glibc("malloc_trim", 0)


def first_step_apart(batches: Iterator[Each]) -> Iterator[Each]:
    """The batches, with large blocks outside of the heap until the second one.

    What torch keeps for good it makes in a process's first step. If that came to lie between the activations, they
    would not fit into the same places again.
    """
    keep_freed_memory(below=2**16)
    try:
        yield from islice(batches, 1)
    finally:
        keep_freed_memory()
    yield from batches
