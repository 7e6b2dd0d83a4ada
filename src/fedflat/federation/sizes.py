"""Limits on what a file may unpack to: a few kilobytes can expand to more than the memory of any machine."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping, Sequence
from io import BytesIO
from math import prod
from pathlib import Path
from tarfile import GNUTYPE_LONGLINK, GNUTYPE_LONGNAME, SOLARIS_XHDTYPE, XGLTYPE, XHDTYPE, ReadError, TarFile, TarInfo
from typing import IO, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fedflat.errors import DataError
from fedflat.files import free_memory, opened, write_whole

MOST = 2**32  # bytes that a published file may unpack to; Tiny-ImageNet, the largest, has 1.4 GB of pixels
MOST_TEXT = 2**24  # bytes of a table, an image file or a header inside an archive
_BLOCK = 2**20


class Readable(Protocol):
    """A stream of bytes."""

    def read(self, size: int, /) -> bytes: ...


class TooLargeError(DataError):
    """A file that unpacks to more than is allowed."""


def check_size(path: Path, size: int, most: int = 2**62) -> None:
    """Refuse a file that unpacks to more than `most` bytes, or to more than there is memory for."""
    free = free_memory()
    limit = most if free is None else min(most, free)
    if size > limit:
        raise TooLargeError(f"{path} unpacks to {size:,} bytes, where at most {limit:,} are allowed or free")


def read_at_most(path: Path, stream: Readable, most: int) -> bytes:
    """Read the rest of a stream, up to `most` bytes."""
    content = stream.read(most + 1)
    if len(content) > most:
        raise TooLargeError(f"{path} holds more than the allowed {most:,} bytes")
    return content


def read_exactly(path: Path, stream: Readable, size: int) -> bytearray:
    """Read the next `size` bytes, or fewer if the stream ends before."""
    check_size(path, size, MOST)
    content = bytearray()
    while len(content) < size and (block := stream.read(min(_BLOCK, size - len(content)))):
        content += block
    return content


class Bounded:
    """A stream that returns at most `MOST` bytes."""

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
    """Read arrays of an .npz file, all of them or those that are named.

    Before it is read, each array is checked to have the size that the file declares, and all to fit into memory.
    Raises what zipfile and NumPy raise about a damaged file.
    """
    with opened(path) as stream, zipfile.ZipFile(stream) as packed:
        sizes = {info.filename.removesuffix(".npy"): info for info in packed.infolist()}
        names = [*sizes] if required is None else [*required, *(name for name in optional if name in sizes)]
        for name in names:
            if name not in sizes:
                raise DataError(f"{path} has no array {name}; it has {', '.join(sizes) or 'none'}")
        check_size(path, sum(sizes[name].file_size for name in names))
        return {name: _array(path, packed, sizes, name) for name in names}


def save_npz(path: str | os.PathLike[str], /, **arrays: Any) -> None:
    """Write arrays as a compressed .npz file, all of it or nothing."""
    content = BytesIO()
    np.savez_compressed(content, **arrays)
    write_whole(Path(path), content.getvalue(), public=True)


def check_array(stream: IO[bytes], size: int, source: object, name: str) -> None:
    """Check the header of an array in NumPy's format before NumPy reads the array.

    Args:
        stream: the array, from its first byte on.
        size: how many bytes it has, with its header.
        source: the file or message that it is from, for an error.
        name: the name of the array.

    Raises:
        DataError: if it holds objects, does not have the bytes that it declares, or has entries of no bytes. Of those
            a header can declare 10¹⁸, and NumPy copies them one by one.
    """
    old = np.lib.format.read_magic(stream) == (1, 0)
    shape, _, dtype = getattr(np.lib.format, f"read_array_header_{1 if old else 2}_0")(stream)
    if dtype.hasobject:
        raise DataError(f"{source} holds Python objects in {name}, which are pickled and not read")
    declared, there = prod(shape) * dtype.itemsize, size - stream.tell()
    if declared != there:
        raise DataError(f"{source} declares {declared:,} bytes for {name} of shape {shape}, but has {there:,}")
    if not dtype.itemsize:
        raise DataError(f"{source} has entries of no bytes in {name}")


def _array(path: Path, packed: zipfile.ZipFile, sizes: Mapping[str, zipfile.ZipInfo], name: str) -> NDArray[Any]:
    with packed.open(sizes[name]) as stream:
        check_array(stream, sizes[name].file_size, path, name)
    with packed.open(sizes[name]) as stream:
        return np.asarray(np.lib.format.read_array(stream, allow_pickle=False))
