"""Arrays of numbers in a MATLAB 5 file, as SVHN has them.

SciPy's reader is not used here: an element of an unknown type crashes its process (seen with SciPy 1.17), and an
untrusted file must cause no more than an error message.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedflat.federation.sizes import MOST, check_size, read_exactly

MATRIX, COMPRESSED = 14, 15
HEADER = 128
STORED = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
CLASSES = {6: "f8", 7: "f4", 8: "i1", 9: "u1", 10: "i2", 11: "u2", 12: "i4", 13: "u4", 14: "i8", 15: "u8"}
COMPLEX = 0x800  # a flag of an array
_BLOCK = 2**20
Order = Literal["little", "big"]


def read_matlab(path: Path, stream: IO[bytes]) -> dict[str, NDArray[Any]]:
    """Return the arrays of numbers in a MATLAB 5 file by name; anything else in it is skipped.

    Raises:
        ValueError: it is not such a file, or damaged.
        TooLargeError: it unpacks to more than is allowed.
    """
    header = stream.read(HEADER)
    if header[126:] not in (b"IM", b"MI"):
        raise ValueError("it is not a MATLAB 5 file")
    order: Order = "little" if header[126:] == b"IM" else "big"
    found: dict[str, NDArray[Any]] = {}
    while len(tag := stream.read(8)) == 8:
        kind, size = int.from_bytes(tag[:4], order), int.from_bytes(tag[4:], order)
        content = read_exactly(path, stream, size)
        if len(content) < size:
            raise ValueError(f"an element of {size:,} bytes ends after {len(content):,}")
        if kind == COMPRESSED:
            ((kind, content),) = [*_elements(_unpacked(path, content), order)][:1] or [(0, bytearray())]
        if kind == MATRIX and (array := _array(content, order)):
            found[array[0]] = array[1]
    return found


def _unpacked(path: Path, packed: bytearray) -> bytearray:
    """A compressed element, checked for its size while it is unpacked."""
    content, unpacking, rest = bytearray(), zlib.decompressobj(), bytes(packed)
    while rest:
        content += unpacking.decompress(rest, _BLOCK)
        rest = unpacking.unconsumed_tail
        check_size(path, len(content), MOST)
    return content


def _elements(content: bytearray, order: Order) -> Iterator[tuple[int, bytearray]]:
    """Type and content of each element: a tag of eight bytes, or of four if the content has at most four."""
    at = 0
    while at + 8 <= len(content):
        kind, size = (int.from_bytes(content[at + k : at + k + 4], order) for k in (0, 4))
        if small := kind >> 16:
            kind, size, start = kind & 0xFFFF, small, at + 4
        else:
            start = at + 8
        if (small and size > 4) or start + size > len(content):
            raise ValueError(f"an element of {size:,} bytes goes beyond its end")
        yield kind, content[start : start + size]
        at = start + (4 if small else -(-size // 8) * 8)


def _array(content: bytearray, order: Order) -> tuple[str, NDArray[Any]] | None:
    """Name and values of an array: flags, lengths, name, values by column; None if it does not hold real numbers."""
    parts = [*_elements(content, order)][:4]
    if len(parts) < 4 or len(parts[0][1]) != 8 or len(parts[1][1]) % 4:
        return None
    (_, flags), (_, lengths), (_, name), (stored, values) = parts
    word, sign = int.from_bytes(flags[:4], order), "<" if order == "little" else ">"
    kind = CLASSES.get(word & 0xFF)
    if kind is None or word & COMPLEX or stored not in STORED:
        return None
    shape = tuple(int.from_bytes(lengths[k : k + 4], order, signed=True) for k in range(0, len(lengths), 4))
    numbers = np.frombuffer(values, f"{sign}{STORED[stored]}") if len(values) % int(STORED[stored][1]) == 0 else None
    if numbers is None or min(shape, default=0) < 0 or prod(shape) != len(numbers):
        raise ValueError(f"an array of shape {shape} has {len(values):,} bytes")
    with np.errstate(all="ignore"):  # labels that are not finite are refused by those who read labels
        return bytes(name).decode("latin-1"), numbers.astype(kind).reshape(shape, order="F")
