"""How much a file may unpack to: a few kilobytes can declare, and deliver, more than any memory holds."""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from io import SEEK_CUR
from math import prod
from pathlib import Path
from tarfile import GNUTYPE_LONGLINK, GNUTYPE_LONGNAME, SOLARIS_XHDTYPE, XGLTYPE, XHDTYPE, ReadError, TarFile, TarInfo
from typing import IO, Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from fedflat.errors import DataError

MOST = 2**32  # bytes that a published file may unpack to; Tiny-ImageNet, the largest, has 1.4 GB of pixels
MOST_TEXT = 2**24  # bytes of a table, an image file or a header inside an archive
_BLOCK = 2**20


class Readable(Protocol):
    """What gives bytes."""

    def read(self, size: int, /) -> bytes: ...


class TooLargeError(DataError):
    """A file that unpacks to more than is allowed."""


def free_memory() -> int | None:
    """The bytes that processes can still take, where the system tells."""
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1])
    with suppress(OSError, ValueError, AttributeError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def check_size(path: Path, size: int, most: int = 2**62) -> None:
    """Refuse a file that unpacks to more than `most` bytes, or to more than there is memory for."""
    free = free_memory()
    limit = most if free is None else min(most, free)
    if size > limit:
        raise TooLargeError(f"{path} unpacks to {size:,} bytes, where at most {limit:,} are allowed or free")


def read_at_most(path: Path, stream: Readable, most: int) -> bytes:
    """All that is left of a stream, if that is no more than `most` bytes."""
    content = stream.read(most + 1)
    if len(content) > most:
        raise TooLargeError(f"{path} holds something of more than {most:,} bytes, where that is the most")
    return content


def read_exactly(path: Path, stream: Readable, size: int) -> bytearray:
    """The next `size` bytes and no more, counted as they come: fewer are given back if the stream ends before."""
    check_size(path, size, MOST)
    content = bytearray()
    while len(content) < size and (block := stream.read(min(_BLOCK, size - len(content)))):
        content += block
    return content


class Bounded:
    """A stream that gives at most `MOST` bytes."""

    def __init__(self, path: Path, stream: Readable) -> None:
        self._path, self._stream, self._given = path, stream, 0

    def read(self, size: int = _BLOCK) -> bytes:
        block = self._stream.read(size)
        self._given += len(block)
        if self._given > MOST:
            raise TooLargeError(f"{self._path} unpacks to more than {MOST:,} bytes, where that is the most")
        return block


class ShortHeaders(TarInfo):
    """A member of an archive whose extended headers, which tarfile reads as a whole, are of a sensible size."""

    def _proc_member(self, tarfile: TarFile) -> TarInfo:
        extended = (XHDTYPE, XGLTYPE, SOLARIS_XHDTYPE, GNUTYPE_LONGNAME, GNUTYPE_LONGLINK)
        if self.type in extended and self.size > MOST_TEXT:
            raise ReadError(f"a header of {self.size:,} bytes")
        return super()._proc_member(tarfile)  # type: ignore[misc, no-any-return]


def load_npz(
    path: Path, required: Sequence[str] | None = None, optional: Sequence[str] = ()
) -> dict[str, NDArray[Any]]:
    """Arrays of an .npz file, all of them unless they are named; each is as large as it says, and all fit into memory.

    Raises what zipfile and NumPy raise about a damaged file.
    """
    with open(path, "rb") as stream, zipfile.ZipFile(stream) as packed:
        sizes = {info.filename.removesuffix(".npy"): info for info in packed.infolist()}
        names = [*sizes] if required is None else [*required, *(name for name in optional if name in sizes)]
        for name in names:
            if name not in sizes:
                raise DataError(f"{path} has no array {name}; it has {', '.join(sizes) or 'none'}")
        check_size(path, sum(sizes[name].file_size for name in names))
        return {name: _array(path, packed, sizes, name) for name in names}


def _array(path: Path, packed: zipfile.ZipFile, sizes: Mapping[str, zipfile.ZipInfo], name: str) -> NDArray[Any]:
    with packed.open(sizes[name]) as stream:
        old = np.lib.format.read_magic(stream) == (1, 0)
        shape, _, dtype = getattr(np.lib.format, f"read_array_header_{1 if old else 2}_0")(stream)
        if dtype.hasobject:
            raise DataError(f"{path} holds Python objects in {name}, which are pickled and not read")
        declared, there = prod(shape) * dtype.itemsize, sizes[name].file_size - stream.tell()
        if declared != there:
            raise DataError(f"{path} declares {declared:,} bytes for {name} of shape {shape}, but has {there:,}")
    with packed.open(sizes[name]) as stream:
        return np.asarray(np.lib.format.read_array(stream, allow_pickle=False))


def check_matlab(path: Path, stream: IO[bytes]) -> None:
    """Count what the elements of a MATLAB 5 file unpack to, before anybody makes room for what they declare."""
    unpacked, checked = 0, 0
    order: Literal["little", "big"] = "big" if stream.read(128)[126:] == b"MI" else "little"
    while len(tag := stream.read(8)) == 8:
        kind, size = int.from_bytes(tag[:4], order), int.from_bytes(tag[4:], order)
        if kind != 15:  # not compressed: no larger than the file
            stream.seek(size, SEEK_CUR)
            continue
        unpacking = zlib.decompressobj()
        while size and (block := stream.read(min(_BLOCK, size))):
            size -= len(block)
            while block:
                unpacked += len(unpacking.decompress(block, _BLOCK))
                block = unpacking.unconsumed_tail
                if unpacked - checked > 16 * _BLOCK:
                    check_size(path, unpacked, MOST)
                    checked = unpacked
    stream.seek(0)
