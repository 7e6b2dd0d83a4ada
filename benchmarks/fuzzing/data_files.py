"""Files of data sets in every format that fedflat reads, spoilt as arrays or bytes."""

import gzip
import io
import struct
import tarfile
import zipfile
from pathlib import Path
from random import Random
from typing import ClassVar

import numpy as np

from fedflat.federation.formats import read_cifar, read_cinic10, read_idx, read_medmnist, read_svhn
from fuzzing.files import File, spoilt_npz
from fuzzing.mutators import spoilt_bytes
from fuzzing.targets import Target


class MedmnistFile(File):
    """A data set as .npz."""

    share, name = 0.06, "bloodmnist.npz"
    arrays: ClassVar = {f"{part}_{what}": np.zeros((4, 8, 8, 3) if what == "images" else (4, 1), np.uint8)
              for part in ("train", "val", "test") for what in ("images", "labels")}  # fmt: skip

    def spoilt(self, chance: Random) -> bytes:
        return spoilt_npz(chance, self.arrays)

    def read(self, path: Path) -> None:
        for images, labels in read_medmnist(path, 8):
            assert images.dtype == np.uint8 and len(images) == len(labels)


class IdxFile(File):
    """Images in IDX, plain or gzipped."""

    share, name = 0.06, "images-idx3-ubyte"
    content = b"\0\0\x08\x03" + struct.pack(">3I", 5, 4, 4) + bytes(80)

    def spoilt(self, chance: Random) -> bytes:
        return spoilt_bytes(chance, self.content)

    def read(self, path: Path) -> None:
        assert read_idx(path).dtype == np.uint8


class GzipFile(IdxFile):
    """The same, gzipped: the content or the compressed bytes are spoilt."""

    share, name = 0.06, "images-idx3-ubyte.gz"

    def spoilt(self, chance: Random) -> bytes:
        if chance.random() < 0.5:
            return gzip.compress(spoilt_bytes(chance, self.content), 1)
        return spoilt_bytes(chance, gzip.compress(self.content, 1))


class MatFile(File):
    """SVHN's MATLAB file."""

    share, name = 0.06, "train_32x32.mat"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        from scipy.io import savemat

        self.contents = []
        for packed in (False, True):
            file = io.BytesIO()
            arrays = {"X": np.zeros((32, 32, 3, 1), np.uint8), "y": np.array([[10]], np.uint8)}
            savemat(file, arrays, do_compression=packed)
            self.contents.append(file.getvalue())

    def spoilt(self, chance: Random) -> bytes:
        content = chance.choice(self.contents)
        if chance.random() < 0.7:  # most of it are pixels
            return spoilt_bytes(chance, content[:300]) + content[300:]
        return spoilt_bytes(chance, content)

    def read(self, path: Path) -> None:
        read_svhn(path)


class TarFile(File):
    """CIFAR's archive."""

    share, name = 0.05, "cifar.tar.gz"
    counts: ClassVar = {"data_batch_1.bin": 2, "test_batch.bin": 1}

    def archive(self) -> bytes:
        plain = io.BytesIO()
        with tarfile.open(fileobj=plain, mode="w") as archive:
            for name, count in self.counts.items():
                info = tarfile.TarInfo(f"cifar/{name}")
                info.size = 3073 * count
                archive.addfile(info, io.BytesIO(bytes(info.size)))
        return plain.getvalue()

    def spoilt(self, chance: Random) -> bytes:
        content = self.archive()
        if chance.random() < 0.7:
            return gzip.compress(spoilt_bytes(chance, content[:600]) + content[600:], 1)
        return spoilt_bytes(chance, gzip.compress(content, 1))

    def read(self, path: Path) -> None:
        images, labels = read_cifar(path, self.counts, 1, 10)
        assert len(images) == len(labels) == 3


class ZipFile(File):
    """CINIC-10 as a zip of images."""

    share, name = 0.05, "cinic.zip"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        from PIL import Image

        image, packed = io.BytesIO(), io.BytesIO()
        Image.new("RGB", (32, 32)).save(image, "PNG")
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
            for name in ("train/cat/a.png", "test/dog/b.png"):
                archive.writestr(name, image.getvalue())
        self.content = packed.getvalue()

    def spoilt(self, chance: Random) -> bytes:
        return spoilt_bytes(chance, self.content)

    def read(self, path: Path) -> None:
        for images, labels in read_cinic10(path):
            assert len(images) == len(labels)


DATA_FILES: dict[str, type[Target]] = {
    "npz": MedmnistFile,
    "idx": IdxFile,
    "gzip": GzipFile,
    "mat": MatFile,
    "tar": TarFile,
    "zip": ZipFile,
}
