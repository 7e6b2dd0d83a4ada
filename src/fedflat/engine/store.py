"""Vectors of many clients in sparse files that processes share through memory mapping."""

from __future__ import annotations

import mmap
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from fedflat.errors import RunError
from fedflat.files import opened
from fedflat.local import Vectors

if sys.platform != "win32":
    import fcntl

ADVICE = "make room or set TMPDIR elsewhere"
FREED = 2**22  # bytes; freeing a smaller row is not worth the time
LINE = 64  # elements; every row starts on a cache line, so kernels see one alignment in every process


class Table:
    """Rows of one size in a mapped file, initially zero. In a sparse file a row only takes space once it is written."""

    def __init__(self, path: Path, rows: int, size: int, dtype: torch.dtype, sparse: bool = False) -> None:
        self._spec = (path, rows, size, dtype, sparse)
        self._reserved: set[int] = set()  # rows whose space stays, as they are never freed
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
        """Reserve disk space before a row is written through the mapping, where a full disk would kill the process."""
        if hasattr(os, "posix_fallocate") and row not in self._reserved:
            with self._spec[0].open("r+b") as file:
                os.posix_fallocate(file.fileno(), row * self._bytes, self._bytes)
            if self._bytes < FREED:
                self._reserved.add(row)

    def free(self, row: int) -> None:
        """Free the space of a large row for every process; it is allocated again on the next write."""
        start, stop = -(-row * self._bytes // mmap.PAGESIZE), (row + 1) * self._bytes // mmap.PAGESIZE
        if hasattr(mmap, "MADV_REMOVE") and self._bytes >= FREED:
            with suppress(OSError):  # not every file system supports this
                self._map.madvise(mmap.MADV_REMOVE, start * mmap.PAGESIZE, (stop - start) * mmap.PAGESIZE)

    def write(self, row: int, vector: Tensor) -> None:
        """Write a row: a large one with file I/O, because reserved space is filled with zeros first."""
        if self._bytes >= FREED and (vector.shape, vector.dtype) == (self._rows[row].shape, self._rows.dtype):
            self.store(row, vector)
        else:
            self.reserve(row)
            self._rows[row].copy_(vector)

    def store(self, row: int, vector: Tensor) -> None:
        """Write a row with file I/O: a full disk raises an error; writing to the mapping would kill the process."""
        with self._spec[0].open("r+b") as file:
            file.seek(row * self._bytes)
            file.write(vector.contiguous().cpu().view(torch.uint8).numpy().data)

    def release(self, row: int | None = None) -> None:
        """Drop a row's pages, or all pages, from this process but not from the file."""
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
            self._tables[name].write(row, vectors[name])

    def free(self, row: int, name: str) -> None:
        self._tables[name].free(row)

    def release(self) -> None:
        """Drop all pages from this process, not from the files."""
        for table in self._tables.values():
            table.release()


class Memory:
    """The memory that each client keeps between rounds, and whether it has taken part.

    A process holds only the rows that it has not yet released, regardless of the number of clients.
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

    @contextmanager
    def reading(self, clients: Sequence[int]) -> Iterator[dict[int, Vectors]]:
        """Return the vectors of these clients, which this process holds only within this context."""
        try:
            yield {client: self[client] or {} for client in clients}
        finally:
            self.release(clients)

    def keep(self, client: int, vectors: Vectors) -> None:
        try:
            for name, table in self._tables.items():
                table.store(client, vectors[name])
        except OSError as error:
            raise RunError(f"client {client}: its memory cannot be kept ({error.strerror}); {ADVICE}") from None
        self._seen[0][client] = True
        self.changed.add(client)

    def restore(self, kept: Iterable[tuple[int, Vectors]]) -> None:
        """Load the memory from a checkpoint.

        Raises:
            RunError: if it does not fit the recipe's method and clients.
        """
        for client, vectors in kept:
            self._check(client, vectors)
            self.keep(client, vectors)
            self.release([client])
        self.changed.clear()

    def _check(self, client: int, vectors: Vectors) -> None:
        """Check that vectors from a file have the expected form."""
        wanted = {name: (table[0].shape, table[0].dtype) for name, table in self._tables.items()}
        known = isinstance(client, int) and 0 <= client < len(self._seen[0])
        if not known or {name: (vector.shape, vector.dtype) for name, vector in vectors.items()} != wanted:
            raise RunError(f"the checkpoint's memory of client {client!r} does not fit the recipe's method and clients")

    def release(self, clients: Iterable[int] | None = None) -> None:
        """Drop these clients' rows, or all rows, from this process."""
        for client in (None,) if clients is None else clients:
            for table in self._tables.values():
                table.release(client)


class Scratch:
    """A directory for shared files, removed on close: in memory if there is room, else among temporary files.

    A file in it stays locked while its process lives, and carries the name of the running system. The next process can
    therefore find and remove what a killed process left behind, and leaves files of other containers or machines alone.

    Args:
        size: the bytes that the files may take.
        memory: a directory in memory.
    """

    def __init__(self, size: int, memory: Path = Path("/dev/shm")) -> None:
        roomy = memory.is_dir() and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 1.1 * size
        try:
            root, self.in_memory = memory if roomy else Path(tempfile.gettempdir()), roomy
            _sweep(root)
            self.path = Path(tempfile.mkdtemp(prefix=f"fedflat-{os.getpid()}-", dir=root))
            with ExitStack() as made:  # removed at once if it cannot be claimed
                made.callback(shutil.rmtree, self.path, ignore_errors=True)
                self._owner = _claimed(self.path)
                made.pop_all()
        except OSError as error:
            raise RunError(f"no room for the clients' vectors ({error.strerror}); {ADVICE}") from None

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._owner.close()


def _system() -> str:
    """An identifier of the running system: locks hold between its processes, in any container."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return platform.node() or "unknown"


def _claimed(directory: Path) -> IO[bytes]:
    """Create the owner's file, locked before it gets its name: an unlocked file means that its process is gone."""
    aside = directory / "new"
    file = aside.open("wb")
    if sys.platform != "win32":
        fcntl.flock(file, fcntl.LOCK_EX)
    aside.rename(directory / f"owner-{_system()}")
    return file


def _sweep(root: Path) -> None:
    """Remove what killed processes of this system and user left behind."""
    if sys.platform == "win32":
        return
    for left in root.glob(f"fedflat-*/owner-{_system()}"):
        with suppress(OSError), opened(left) as owner:  # does not block if another user put a pipe there
            if os.fstat(owner.fileno()).st_uid == os.getuid():
                fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left.parent, ignore_errors=True)
