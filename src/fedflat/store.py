"""Vectors of many clients in sparse files that processes share by mapping them."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedflat.local import Vectors

LINE = 64  # elements; so that every row begins on a cache line, and kernels see one alignment in every process


class Table:
    """Rows of one size in a sparse file: a row takes room once it is written to, and is zero before."""

    def __init__(self, path: Path, rows: int, size: int, dtype: torch.dtype) -> None:
        self._spec = (path, rows, size, dtype)
        stride = -(-size // LINE) * LINE
        flat = torch.from_file(str(path), shared=True, size=max(rows * stride, 1), dtype=dtype)
        self._rows = flat[: rows * stride].view(rows, stride)[:, :size]

    def __reduce__(self) -> Any:
        return Table, self._spec

    def __getitem__(self, row: int) -> Tensor:
        return self._rows[row]


class Tables:
    """Named tables with the same rows, in one directory."""

    def __init__(self, directory: Path, name: str, rows: int, sizes: Mapping[str, int], dtype: torch.dtype) -> None:
        self._tables = {
            key: Table(directory / f"{name}.{key}", rows, size, dtype) for key, size in sizes.items() if size
        }

    def __contains__(self, name: str) -> bool:
        return name in self._tables

    def __getitem__(self, row: int) -> Vectors:
        return {name: table[row] for name, table in self._tables.items()}

    def write(self, row: int, vectors: Mapping[str, Tensor]) -> None:
        for name, table in self._tables.items():
            table[row].copy_(vectors[name])


class Memory:
    """What each client keeps between rounds, and whether it has taken part at all."""

    def __init__(self, directory: Path, clients: int, sizes: Mapping[str, int], dtype: torch.dtype) -> None:
        self._vectors = Tables(directory, "memory", clients, sizes, dtype)
        self._seen = Table(directory / "seen", 1, clients, torch.bool)

    def __getitem__(self, client: int) -> Vectors | None:
        """The client's vectors, or None before its first round."""
        return self._vectors[client] if bool(self._seen[0][client]) else None

    def keep(self, client: int, vectors: Vectors) -> None:
        self._vectors.write(client, vectors)
        self._seen[0][client] = True


class Scratch:
    """A directory for shared files that goes when it is closed: in memory if that has room, else among temporary files.

    Its name holds the process id, so that what a killed process left behind is found and removed by the next one.
    """

    def __init__(self, size: int, memory: Path = Path("/dev/shm")) -> None:
        roomy = memory.is_dir() and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 1.1 * size
        root = memory if roomy else Path(tempfile.gettempdir())
        _sweep(root)
        self.path = Path(tempfile.mkdtemp(prefix=f"fedflat-{os.getpid()}-", dir=root))

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def _sweep(root: Path) -> None:
    for left in root.glob("fedflat-*-*"):
        owner = left.name.split("-")[1]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists() and Path("/proc/self").exists():
            shutil.rmtree(left, ignore_errors=True)
