"""Readers of the official file formats. Each returns arrays, or raises a `DataError` that names the file and its fault.

Images are uint8 (N, C, H, W), labels int64 (N,). Nothing is unpickled, so the "python version" of CIFAR is not read.
"""

import gzip
import io
import os
import re
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from fedflat.errors import DataError
from fedflat.federation.matlab import read_matlab
from fedflat.federation.pictures import check_pillow, picture
from fedflat.federation.sizes import (
    MOST_TEXT,
    Bounded,
    ShortHeaders,
    load_npz,
    read_at_most,
    read_exactly,
)
from fedflat.files import opened

Images = NDArray[np.uint8]
Labels = NDArray[np.int64]
Labelled = tuple[Images, Labels]
Split = tuple[Labelled, Labelled]

CINIC10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_CHUNK = 1000  # CIFAR records per read: 3 MB, so that memory holds little beside the final array


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn what a parser raises about a damaged file into one sentence."""
    try:
        yield
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing") from error
    except KeyError as error:
        raise DataError(f"{path} has no entry {error}") from error
    except (OSError, EOFError, ValueError, RuntimeError, zlib.error, tarfile.TarError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} cannot be read and may be incomplete or damaged: {error}") from error


def is_cut_short(path: Path) -> bool:
    """Whether an archive (.gz, .zip, .npz) ends before its content does: gzip is read to the end."""
    if path.suffix in (".zip", ".npz"):
        return not zipfile.is_zipfile(path)
    if path.suffix != ".gz":
        return False
    try:
        with opened(path) as stream, gzip.open(stream) as unpacked:
            while unpacked.read(2**20):
                pass
    except (OSError, EOFError, zlib.error):
        return True
    return False


def find(folder: Path, *names: str) -> Path:
    """The first of `names` that is in the folder of a data set."""
    for name in names:
        if (folder / name).exists():
            return folder / name
    raise DataError(f"{names[0]} is expected in {folder}, and `fedflat data get {folder.name}` fetches it")


def find_tree(folder: Path, archive: str, root: str, marker: str) -> Path:
    """The unpacked directory that holds the file `marker` (`folder/root` or `folder` itself), else the archive."""
    for place in (folder / root, folder):
        if (place / marker).exists():
            return place
    return find(folder, archive)


def check_labels(path: Path, labels: NDArray[Any], samples: int, classes: int) -> Labels:
    """Labels as int64 (N,), one per sample and each in 0 … classes − 1."""
    if labels.size != samples:
        raise DataError(f"{path} has {labels.size} labels for {samples} images")
    if labels.dtype.kind not in "iufb":
        raise DataError(f"{path} has labels of {labels.dtype}, where numbers are expected")
    flat = labels.reshape(samples).astype(np.int64)
    if samples and not 0 <= flat.min() <= flat.max() < classes:
        raise DataError(f"{path} has a label outside 0 … {classes - 1}: {flat.min()} … {flat.max()}")
    return flat


def stored(path: Path) -> Iterator[tuple[str, Callable[[], IO[bytes]]]]:
    """Name and opener of each file in a directory, .zip or .tar.gz; open each one before asking for the next."""
    if path.is_dir():
        for place, _, files in os.walk(path):
            for file in map(Path(place).joinpath, files):
                yield file.relative_to(path).as_posix(), partial(_open, file)
    elif path.suffix == ".zip":
        with opened(path) as stream, zipfile.ZipFile(stream) as packed:
            for info in packed.infolist():
                yield info.filename, partial(packed.open, info)
    else:
        # tarfile's own "r|gz" does not compare the check sum at the end of the gzip stream; GzipFile does.
        with opened(path) as stream, gzip.open(stream) as unpacked:
            plain: Any = Bounded(path, unpacked)
            with tarfile.open(fileobj=plain, mode="r|", tarinfo=ShortHeaders) as archive:
                while (member := archive.next()) is not None:
                    yield member.name, partial(_extract, archive, member)
                    vars(archive)["members"].clear()  # a cache, which would grow by one header per image
            while plain.read():
                pass


def _open(file: Path) -> IO[bytes]:
    return opened(file)


def _extract(archive: tarfile.TarFile, member: tarfile.TarInfo) -> IO[bytes]:
    return archive.extractfile(member) or io.BytesIO()


# IDX -----------------------------------------------------------------------------------------------------------------


def read_idx(path: Path) -> Images:
    """An IDX file of bytes, plain or gzipped: 0, 0, type 8, number of axes, each length as big-endian uint32, data."""
    with reading(path), opened(path) as file, gzip.open(file) if path.suffix == ".gz" else file as stream:
        head = stream.read(4)
        if len(head) < 4 or head[:3] != b"\0\0\x08":
            raise DataError(f"{path} is not an IDX file of bytes: it begins with {head.hex(' ') or 'nothing'}")
        lengths = stream.read(4 * head[3])
        shape = tuple(int.from_bytes(lengths[at : at + 4], "big") for at in range(0, 4 * head[3], 4))
        content = read_exactly(path, stream, prod(shape))
        if len(lengths) < 4 * head[3] or len(content) < prod(shape):
            there = len(head) + len(lengths) + len(content)
            raise DataError(f"{path} has {there} bytes where its header {shape} asks for more")
        if stream.read(1):
            raise DataError(f"{path} has more than the {prod(shape)} bytes that its header {shape} asks for")
        if 0 in shape:  # NumPy refuses an empty array whose other axes are huge
            raise DataError(f"{path} has no data: its header asks for {shape}")
    return np.frombuffer(content, np.uint8).reshape(shape)


def read_idx_pair(images: Path, labels: Path, classes: int) -> Labelled:
    """The images (N, H, W) of one IDX file with the labels (N,) of another."""
    pixels = read_idx(images)
    if pixels.ndim != 3:
        raise DataError(f"{images} has {pixels.ndim} axes where images have 3")
    return pixels[:, None], check_labels(labels, read_idx(labels), len(pixels), classes)


# CIFAR binary version ------------------------------------------------------------------------------------------------


def read_cifar(path: Path, counts: Mapping[str, int], label_bytes: int, classes: int) -> Labelled:
    """The records of the files named in `counts`, in that order, each read straight into its place.

    A record is `label_bytes` labels, of which the last is the finest, then 1024 bytes each of red, green and blue.

    Args:
        path: the directory or the archive.
        counts: the number of records in each file.
        label_bytes: number of labels in a record.
        classes: number of classes of the last label.
    """
    ends = np.cumsum(list(counts.values()))
    place = {file: slice(end - counts[file], end) for file, end in zip(counts, ends, strict=True)}
    images = np.empty((sum(counts.values()), 3, 32, 32), np.uint8)
    labels = np.empty(len(images), np.int64)
    with reading(path):
        for name, open_it in stored(path):
            if at := place.pop(name.rpartition("/")[2], None):
                with open_it() as stream:
                    _fill(f"{path}: {name}", stream, images[at], labels[at], label_bytes)
    if place:
        raise DataError(f"{next(iter(place))} is missing in {path}")
    return images, check_labels(path, labels, len(images), classes)


def _fill(name: str, stream: IO[bytes], images: Images, labels: Labels, label_bytes: int) -> None:
    record = label_bytes + 3072
    for start in range(0, len(images), _CHUNK):
        rows = slice(start, min(start + _CHUNK, len(images)))
        chunk = np.frombuffer(stream.read(record * (rows.stop - start)), np.uint8)
        if len(chunk) < record * (rows.stop - start):
            raise DataError(f"{name} is truncated: {record * start + len(chunk)} of {record * len(images)} bytes")
        records = chunk.reshape(-1, record)
        labels[rows] = records[:, label_bytes - 1]
        images[rows] = records[:, label_bytes:].reshape(-1, 3, 32, 32)
    if stream.read(1):
        raise DataError(f"{name} is longer than the {record * len(images)} bytes of {len(images)} records")


def find_cifar(folder: Path, name: str, root: str, marker: str) -> Path:
    """The binary version of CIFAR, packed or unpacked; an error if only the pickled version is there."""
    pickled = [
        file for file in (f"{name}-python.tar.gz", f"{name}-python", f"{name}-batches-py") if (folder / file).exists()
    ]
    try:
        return find_tree(folder, f"{name}-binary.tar.gz", root, marker)
    except DataError as error:
        if not pickled:
            raise
        raise DataError(
            f"{folder / pickled[0]} is the python version, which is pickled and not read; {error}"
        ) from None


# MATLAB and NumPy containers -----------------------------------------------------------------------------------------


def read_svhn(path: Path) -> Labelled:
    """SVHN's cropped digits: X (32, 32, 3, N) and y (N, 1) of a MATLAB 5 file, where the label 10 means the digit 0."""
    with reading(path), opened(path) as stream:
        content = read_matlab(path, stream)
        pixels, labels = content["X"], content["y"]
    if pixels.ndim != 4 or pixels.shape[:3] != (32, 32, 3) or pixels.dtype != np.uint8:
        raise DataError(
            f"{path} has X of shape {pixels.shape}, {pixels.dtype}, where (32, 32, 3, N), uint8 is expected"
        )
    digits = check_labels(path, labels, pixels.shape[3], 11) % 10
    return np.ascontiguousarray(pixels.transpose(3, 2, 0, 1)), digits


def read_npz(path: Path, required: Sequence[str], optional: Sequence[str] = ()) -> dict[str, NDArray[Any]]:
    """The named arrays of an .npz file; pickled ones are refused."""
    with reading(path):
        with opened(path) as stream:
            if stream.read(6) == np.lib.format.MAGIC_PREFIX:
                raise DataError(f"{path} is a single array where an .npz of {', '.join(required)} is expected")
        return load_npz(path, required, optional)


def read_medmnist(path: Path, classes: int) -> Split:
    """A MedMNIST .npz: images (N, H, W) or (N, H, W, 3), labels (N, 1); its validation part joins the training part."""
    parts = {part: (f"{part}_images", f"{part}_labels") for part in ("train", "val", "test")}
    content = read_npz(path, [name for pair in parts.values() for name in pair])

    def labelled(*names: str) -> Labelled:
        images = [_channels_first(path, content[parts[name][0]]) for name in names]
        labels = [
            check_labels(path, content[parts[name][1]], len(pixels), classes)
            for name, pixels in zip(names, images, strict=True)
        ]
        return np.ascontiguousarray(np.concatenate(images)), np.concatenate(labels)

    with reading(path):  # parts may differ in their shapes
        return labelled("train", "val"), labelled("test")


def _channels_first(path: Path, images: NDArray[Any]) -> Images:
    if images.dtype != np.uint8 or images.ndim not in (3, 4) or images.shape[3:] not in ((), (3,)):
        raise DataError(f"{path} has images of shape {images.shape}, {images.dtype}; (N, H, W[, 3]), uint8 is expected")
    return images[:, None] if images.ndim == 3 else images.transpose(0, 3, 1, 2)


# Image folders -------------------------------------------------------------------------------------------------------


def read_images(path: Path, names: Sequence[str], side: int) -> Images:
    """The named PNG or JPEG files of a directory or archive as RGB, in the order of `names`."""
    check_pillow(path)
    place = {name: at for at, name in enumerate(names)}
    images = np.empty((len(names), 3, side, side), np.uint8)
    for name, open_it in stored(path):
        if name in place:
            try:
                with open_it() as stream, picture(read_at_most(path, stream, MOST_TEXT)) as image:
                    if image.size != (side, side):  # the size in its header, before any pixel is decoded
                        raise ValueError(f"it has {image.width} × {image.height}")
                    images[place[name]] = np.asarray(image.convert("RGB")).transpose(2, 0, 1)
            except Exception as error:  # Pillow raises SyntaxError and struct.error too
                raise DataError(f"{path}: {name} is not an image of {side} × {side} pixels: {error}") from error
    return images


def read_cinic10(path: Path) -> Split:
    """CINIC-10: {train, test}/<class>/*.png; its validation part is left out, as FedSoL does."""
    parts: dict[str, dict[str, int]] = {"train": {}, "test": {}}
    with reading(path):
        for name in sorted(name for name, _ in stored(path)):
            if found := re.search(r"(?:^|/)(train|test)/([^/]+)/[^/.][^/]*\.png$", name):
                if found[2] not in CINIC10_CLASSES:
                    raise DataError(f"{path}: {name} belongs to no class of CINIC-10")
                parts[found[1]][name] = CINIC10_CLASSES.index(found[2])
        return _decode(path, parts["train"], parts["test"], 32)


def read_tiny_imagenet(path: Path) -> Split:
    """Tiny-ImageNet: train/<wnid>/images/*.JPEG, and as test part val/images/*.JPEG by val/val_annotations.txt.

    Classes are numbered in the sorted order of wnids.txt.
    """
    with reading(path):
        tables = {
            name.rpartition("/")[2]: _table(path, opened) for name, opened in stored(path) if name.endswith(".txt")
        }
        number = {row[0]: at for at, row in enumerate(sorted(tables["wnids.txt"]))}
        of_file = {row[0]: row[1] for row in tables["val_annotations.txt"]}
        train, test = {}, {}
        for name in sorted(name for name, _ in stored(path)):
            if found := re.search(r"(?:^|/)train/(n\d+)/images/[^/.][^/]*\.JPEG$", name):
                train[name] = number[found[1]]
            elif found := re.search(r"(?:^|/)val/images/([^/.][^/]*\.JPEG)$", name):
                test[name] = number[of_file[found[1]]]
        return _decode(path, train, test, 64)


def _table(path: Path, open_it: Callable[[], IO[bytes]]) -> list[list[str]]:
    with open_it() as stream:
        return [line.split() for line in read_at_most(path, stream, MOST_TEXT).decode().splitlines() if line.strip()]


def _decode(path: Path, train: Mapping[str, int], test: Mapping[str, int], side: int) -> Split:
    images = read_images(path, [*train, *test], side)  # one pass, as an archive can only be read from its beginning
    labels = np.array([*train.values(), *test.values()], np.int64)
    return (images[: len(train)], labels[: len(train)]), (images[len(train) :], labels[len(train) :])
