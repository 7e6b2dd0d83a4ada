"""Vectors of many clients in sparse files that processes share by mapping them."""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedflat.errors import RunError
from fedflat.rule import Vectors

ADVICE = "make room or set TMPDIR elsewhere"
FREED = 2**22  # bytes; a smaller row is not worth the time that it takes to give it back
LINE = 64  # elements; so that every row begins on a cache line, and kernels see one alignment in every process


class Table:
    """Rows of one size in a mapped file: zero at first, and if it is sparse a row takes room once it is written to."""

    def __init__(self, path: Path, rows: int, size: int, dtype: torch.dtype, sparse: bool = False) -> None:
        self._spec = (path, rows, size, dtype, sparse)
        stride = -(-size // LINE) * LINE
        self._bytes = stride * dtype.itemsize
        try:
            with path.open("ab") as file:
                file.truncate(max(rows * self._bytes, 1))
            with path.open("r+b") as file:
                self._map = mmap.mmap(file.fileno(), 0)
            for row in () if sparse else range(rows):
                self.reserve(row)
        except OSError as error:
            raise RunError(f"{path.parent}: no room for the clients' vectors ({error.strerror}); {ADVICE}") from None
        flat = torch.frombuffer(self._map, dtype=dtype, count=rows * stride)
        self._rows = flat.view(rows, stride)[:, :size]

    def __reduce__(self) -> Any:
        return Table, self._spec

    def __getitem__(self, row: int) -> Tensor:
        return self._rows[row]

    def reserve(self, row: int) -> None:
        """Room on the disk before a row is written through the mapping, where a full disk would kill the process."""
        if hasattr(os, "posix_fallocate"):
            with self._spec[0].open("r+b") as file:
                os.posix_fallocate(file.fileno(), row * self._bytes, self._bytes)

    def free(self, row: int) -> None:
        """Give a large row's room back, for every process; it takes room anew once it is written to."""
        start, stop = -(-row * self._bytes // mmap.PAGESIZE), (row + 1) * self._bytes // mmap.PAGESIZE
        if hasattr(mmap, "MADV_REMOVE") and self._bytes >= FREED:
            with suppress(OSError):  # where the file system cannot, it stays
                self._map.madvise(mmap.MADV_REMOVE, start * mmap.PAGESIZE, (stop - start) * mmap.PAGESIZE)

    def store(self, row: int, vector: Tensor) -> None:
        """Write a row as files are written: on a full disk that is an error, where touching the mapping would kill."""
        with self._spec[0].open("r+b") as file:
            file.seek(row * self._bytes)
            file.write(vector.contiguous().cpu().view(torch.uint8).numpy().data)

    def release(self, row: int | None = None) -> None:
        """Forget a row's pages, or all, in this process, not in the file: it holds only the rows that it works on."""
        if hasattr(mmap, "MADV_DONTNEED"):
            start, stop = (0, len(self._map)) if row is None else (row * self._bytes, (row + 1) * self._bytes)
            start -= start % mmap.PAGESIZE
            self._map.madvise(mmap.MADV_DONTNEED, start, stop - start)


class Tables:
    """Named tables with the same rows, in one directory."""

    def __init__(
        self, path: Path, rows: int, sizes: Mapping[str, int], dtype: torch.dtype, sparse: bool = False
    ) -> None:
        self._tables = {
            name: Table(path.with_name(f"{path.name}.{name}"), rows, size, dtype, sparse)
            for name, size in sizes.items()
            if size
        }

    def __contains__(self, name: str) -> bool:
        return name in self._tables

    def __getitem__(self, row: int) -> Vectors:
        return {name: table[row] for name, table in self._tables.items()}

    def write(self, row: int, vectors: Mapping[str, Tensor]) -> None:
        for name in self._tables.keys() & vectors.keys():
            self._tables[name].reserve(row)
            self._tables[name][row].copy_(vectors[name])

    def free(self, row: int, name: str) -> None:
        self._tables[name].free(row)

    def release(self) -> None:
        """Forget all pages in this process, not in the files."""
        for table in self._tables.values():
            table.release()


class Memory:
    """What each client keeps between rounds, and whether it has taken part at all.

    However many clients there are, a process holds no more than the rows that it has not yet released.
    """

    def __init__(self, directory: Path, clients: int, sizes: Mapping[str, int], dtype: torch.dtype) -> None:
        self._tables = {
            name: Table(directory / f"memory.{name}", clients, n, dtype, sparse=True) for name, n in sizes.items() if n
        }
        self._seen = Table(directory / "seen", 1, clients, torch.bool)
        self.changed: set[int] = set()

    def __getitem__(self, client: int) -> Vectors | None:
        """The client's vectors, or None before its first round."""
        return {name: table[client] for name, table in self._tables.items()} if bool(self._seen[0][client]) else None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._tables)

    def keep(self, client: int, vectors: Vectors) -> None:
        try:
            for name, table in self._tables.items():
                table.store(client, vectors[name])
        except OSError as error:
            raise RunError(f"client {client}: its memory cannot be kept ({error.strerror}); {ADVICE}") from None
        self._seen[0][client] = True
        self.changed.add(client)

    def restore(self, kept: Iterable[tuple[int, Vectors]]) -> None:
        """What a checkpoint holds, as if it had been kept in this run."""
        for client, vectors in kept:
            self.keep(client, vectors)
            self.release([client])
        self.changed.clear()

    def release(self, clients: Iterable[int]) -> None:
        """These clients' turns are over: their rows need not stay in this process."""
        for client in clients:
            for table in self._tables.values():
                table.release(client)


class Scratch:
    """A directory for shared files that goes when it is closed: in memory if that has room, else among temporary files.

    Its name holds the process id, so that what a killed process left behind is found and removed by the next one.
    """

    def __init__(self, size: int, memory: Path = Path("/dev/shm")) -> None:
        roomy = memory.is_dir() and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 1.1 * size
        try:
            root, self.in_memory = memory if roomy else Path(tempfile.gettempdir()), roomy
            _sweep(root)
            self.path = Path(tempfile.mkdtemp(prefix=f"fedflat-{os.getpid()}-", dir=root))
        except OSError as error:
            raise RunError(f"no room for the clients' vectors ({error.strerror}); {ADVICE}") from None

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def _sweep(root: Path) -> None:
    for left in root.glob("fedflat-*-*"):
        owner = left.name.split("-")[1]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists() and Path("/proc/self").exists():
            shutil.rmtree(left, ignore_errors=True)
