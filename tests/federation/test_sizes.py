"""Bombs: files that are small, and declare or unpack to more than any memory holds."""

import gzip
import io
import os
import resource
import struct
import subprocess
import sys
import tarfile
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedflat.errors import DataError, FedflatError
from fedflat.federation import formats, partition, sizes
from fedflat.federation.datasets import load
from fedflat.flatness import Landscape
from fedflat.runs.trajectory import read as read_trajectory

ALLOWED = 2**23  # bytes that the readers of these tests may take
BOMB = 2**27


@pytest.fixture(autouse=True)
def little_memory(monkeypatch):
    """A machine with 8 MB left, and a process that is killed by no bomb of ours but may not follow it far."""
    monkeypatch.setattr(sizes, "free_memory", lambda: ALLOWED)
    monkeypatch.setattr(sizes, "MOST", ALLOWED)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 0.75 * BOMB / 1024


def zeros(stream, size):
    for _ in range(size >> 20):
        stream.write(bytes(1 << 20))


@pytest.mark.parametrize("declared", [(60_000, 28, 28), (2**31, 2, 2), (0,), (2**32 - 1,) * 200])
def test_a_gzip_bomb_is_unpacked_no_further_than_it_declares_and_is_allowed(tmp_path, declared):
    path = tmp_path / "train-images-idx3-ubyte.gz"
    with gzip.open(path, "wb") as stream:
        stream.write(bytes([0, 0, 8, len(declared)]) + b"".join(struct.pack(">I", n) for n in declared))
        zeros(stream, BOMB)
    assert path.stat().st_size < 2**20
    with pytest.raises(DataError, match=r"idx3-ubyte\.gz (unpacks to|has more than)"):
        formats.read_idx(path)


def npz_bomb(path, names, size=BOMB, shape=None, dtype="<i8"):
    """Arrays of zeros that take a few kilobytes each; the header may say another shape than there are bytes for."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for name in names:
            with packed.open(f"{name}.npy", "w", force_zip64=True) as stream:
                array = {"descr": dtype, "fortran_order": False, "shape": shape or (size // 8,)}
                np.lib.format.write_array_header_1_0(stream, array)
                zeros(stream, size)
    return path


READERS = {
    "arrays": (("x_train", "y_train", "x_test", "y_test"), lambda path: load("arrays", path)),
    "split": (("indices", "offsets"), partition.load),
    "landscape": (("axes", "values", "centre"), Landscape.load),
    "trajectory": (("recipe", "weights"), read_trajectory),
    "medmnist": ([f"{part}_{what}" for part in ("train", "val", "test") for what in ("images", "labels")],
                 lambda path: formats.read_medmnist(path, 3)),
}  # fmt: skip


@pytest.mark.parametrize("kind", READERS)
def test_an_npz_bomb_is_refused_by_what_it_declares_before_it_is_unpacked(tmp_path, kind):
    names, read = READERS[kind]
    path = npz_bomb(tmp_path / "bomb.npz", names, size=BOMB // len(names) >> 20 << 20)
    assert path.stat().st_size < 2**23
    with pytest.raises(FedflatError, match=r"bomb\.npz"):
        read(path)


@pytest.mark.parametrize("kind", READERS)
def test_an_array_that_declares_more_than_it_has_gets_no_room(tmp_path, kind):
    names, read = READERS[kind]
    path = npz_bomb(tmp_path / "liar.npz", names, size=2**20, shape=(2**40,))
    with pytest.raises(FedflatError, match=r"liar\.npz"):
        read(path)


@pytest.mark.parametrize("kind", READERS)
def test_entries_of_no_bytes_are_not_counted_to_the_end(tmp_path, kind):
    """A header could declare 10¹⁸ such entries, and NumPy would copy them for a hundred years."""
    names, read = READERS[kind]
    path = npz_bomb(tmp_path / "empty.npz", names, size=0, dtype="|V0", shape=(10**8,))
    with pytest.raises(FedflatError, match=r"empty\.npz"):
        read(path)


def test_an_archive_that_goes_on_and_on_is_given_up(tmp_path):
    path = tmp_path / "cifar-10-binary.tar.gz"
    with gzip.open(path, "wb") as stream:
        info = tarfile.TarInfo("cifar-10-batches-bin/readme.html")
        info.size = BOMB
        stream.write(info.tobuf())
        zeros(stream, info.size)
    with pytest.raises(DataError, match="unpacks to more than"):
        formats.read_cifar(path, {"data_batch_1.bin": 10}, 1, 10)


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME], ids=["pax", "gnu"])
def test_a_header_of_an_archive_is_not_read_whatever_its_size(tmp_path, kind, monkeypatch):
    monkeypatch.setattr(sizes, "MOST", 2**40)
    path = tmp_path / "cifar-10-binary.tar.gz"
    with gzip.open(path, "wb") as stream:
        info = tarfile.TarInfo("x")
        info.size, info.type = BOMB, kind
        stream.write(info.tobuf(tarfile.GNU_FORMAT))
        zeros(stream, info.size)
    with pytest.raises(DataError, match="a header of"):
        formats.read_cifar(path, {"data_batch_1.bin": 10}, 1, 10)


def test_a_matlab_bomb_is_counted_before_room_is_made(tmp_path):
    packer = zlib.compressobj(9)
    header = struct.pack("<IIIIII", 14, BOMB, 6, 8, 9, 0)
    content = packer.compress(header)
    for _ in range(BOMB >> 20):
        content += packer.compress(bytes(1 << 20))
    content += packer.flush()
    path = tmp_path / "train_32x32.mat"
    path.write_bytes(b"MATLAB 5.0 MAT-file".ljust(124) + b"\x00\x01IM" + struct.pack("<II", 15, len(content)) + content)
    with pytest.raises(DataError, match=r"train_32x32\.mat unpacks to"):
        formats.read_svhn(path)


def test_an_image_of_another_size_is_refused_before_its_pixels_are_unpacked(tmp_path):
    file = io.BytesIO()
    Image.new("L", (4000, 4000)).save(file, "png")
    place = tmp_path / "CINIC-10/train/cat/bomb.png"
    place.parent.mkdir(parents=True)
    place.write_bytes(file.getvalue())
    with pytest.raises(DataError, match=r"bomb\.png is not an image of 32 × 32 pixels: it has 4000 × 4000"):
        formats.read_images(tmp_path / "CINIC-10", ["train/cat/bomb.png"], 32)


def test_a_table_in_an_archive_has_its_limit_too(tmp_path):
    path = tmp_path / "tiny-imagenet-200.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed, packed.open("wnids.txt", "w") as stream:
        zeros(stream, BOMB)
    with pytest.raises(DataError, match="more than the allowed 16,777,216 bytes"):
        formats.read_tiny_imagenet(path)


def test_honest_files_of_any_kind_are_read_as_ever(tmp_path):
    arrays = {"a": np.arange(6).reshape(2, 3), "b": np.array("text"), "c": np.zeros((0, 4), np.float32),
              "d": np.asfortranarray(np.random.default_rng(0).random((3, 5))), "ö": np.array(1.5)}  # fmt: skip
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "honest.npz", **arrays)
        read = sizes.load_npz(tmp_path / "honest.npz")
        assert read.keys() == arrays.keys()
        assert all(np.array_equal(read[name], arrays[name]) and read[name].dtype == arrays[name].dtype for name in read)


def test_where_the_system_tells_how_much_is_free(monkeypatch):
    monkeypatch.undo()
    assert 2**20 < sizes.free_memory() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_under_a_real_limit_of_memory_a_bomb_still_ends_in_a_sentence(tmp_path):
    npz_bomb(tmp_path / "bomb.npz", ("indices", "offsets"), size=2**28)
    script = f"""
import resource
from pathlib import Path
from fedflat.federation import partition, sizes
sizes.free_memory = lambda: {ALLOWED}
resource.setrlimit(resource.RLIMIT_DATA, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 + 2**27,) * 2)
try:
    partition.load(Path({str(tmp_path / "bomb.npz")!r}))
except Exception as error:
    print(type(error).__name__, error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("TooLargeError"), done.stdout + done.stderr
    assert Path(tmp_path / "bomb.npz").stat().st_size < 2**23
