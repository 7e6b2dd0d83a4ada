"""The readers give back what the official formats say, and name the file and the fault when it does not fit."""

import gzip
import io
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from PIL import Image
from scipy.io import loadmat, savemat

from fedflat.errors import DataError
from fedflat.federation import formats
from fedflat.federation.matlab import read_matlab

bytes_of_any_shape = arrays(np.uint8, array_shapes(min_dims=0, max_dims=4, max_side=6))


def idx(array: np.ndarray) -> bytes:
    lengths = np.array(array.shape, ">u4").tobytes()
    return bytes([0, 0, 8, array.ndim]) + lengths + array.tobytes()


def random_images(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def pack(folder: Path, archive: Path, prefix: str, reverse: bool = False) -> Path:
    """Pack a directory, its files in or against the order of their names."""
    files = sorted((file for file in folder.rglob("*") if file.is_file()), reverse=reverse)
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive, "w") as packed:
            for file in files:
                packed.write(file, prefix + file.relative_to(folder).as_posix())
    else:
        with tarfile.open(archive, "w:gz") as tar:
            for file in files:
                tar.add(file, prefix + file.relative_to(folder).as_posix())
    return archive


def same(one: formats.Split, other: formats.Split) -> bool:
    pairs = zip((*one[0], *one[1]), (*other[0], *other[1]), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


# IDX


@given(bytes_of_any_shape, st.booleans())
@settings(max_examples=60, deadline=None)
def test_idx_of_any_shape_is_read_back_plain_and_gzipped(array, packed):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "some-idx.gz" if packed else "some-idx")
        path.write_bytes(gzip.compress(idx(array)) if packed else idx(array))
        read = formats.read_idx(path)
    assert read.shape == array.shape
    assert np.array_equal(read, array)


@given(bytes_of_any_shape, st.booleans(), st.data())
@settings(max_examples=60, deadline=None)
def test_idx_cut_anywhere_is_refused(array, packed, data):
    whole = gzip.compress(idx(array)) if packed else idx(array)
    cut = data.draw(st.integers(0, len(whole) - 1))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "some-idx.gz" if packed else "some-idx")
        path.write_bytes(whole[:cut])
        with pytest.raises(DataError, match="some-idx"):
            formats.read_idx(path)


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (idx(np.zeros((2, 3), np.uint8)) + b"\0", "has more than the 6 bytes that its header"),
        (b"\0\0\x0d\1\0\0\0\1\0\0\0\0", "not an IDX file of bytes: it begins with 00 00 0d 01"),
        (b"\0\0\x08\4" + 4 * b"\0" + 12 * b"\xff", "has no data: its header asks for"),
        (b"", "begins with nothing"),
        (
            b"\0\0\x08\3\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff",
            "unpacks to 79,228,162,458,924,105,385,300,197,375 bytes",
        ),
    ],
)
def test_idx_with_a_fault_is_named(tmp_path, content, fault):
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(DataError, match=fault):
        formats.read_idx(tmp_path / "x")


def test_idx_images_and_labels_must_agree(tmp_path):
    images, labels = tmp_path / "images", tmp_path / "labels"
    images.write_bytes(idx(random_images(3, 4, 5)))
    labels.write_bytes(idx(np.array([2, 0, 1], np.uint8)))
    pixels, numbers = formats.read_idx_pair(images, labels, classes=3)
    assert pixels.shape == (3, 1, 4, 5)
    assert numbers.dtype == np.int64
    assert numbers.tolist() == [2, 0, 1]
    with pytest.raises(DataError, match=r"labels has a label outside 0 … 1: 0 … 2"):
        formats.read_idx_pair(images, labels, classes=2)
    labels.write_bytes(idx(np.array([2, 0], np.uint8)))
    with pytest.raises(DataError, match="labels has 2 labels for 3 images"):
        formats.read_idx_pair(images, labels, classes=3)
    with pytest.raises(DataError, match="labels has 1 axes where images have 3"):
        formats.read_idx_pair(labels, labels, classes=3)
    with pytest.raises(DataError, match="nowhere is missing"):
        formats.read_idx(tmp_path / "nowhere")


# CIFAR

COUNTS = {"one.bin": 1500, "two.bin": 2}


@pytest.fixture
def cifar(tmp_path):
    """A CIFAR-100 directory: coarse label, fine label, red, green and blue planes; 1500 records cross a chunk's end."""
    images, fine = random_images(1502, 3, 32, 32), np.arange(1502) % 100
    records = np.column_stack([fine // 5, fine, images.reshape(1502, -1)]).astype(np.uint8)
    folder = tmp_path / "cifar-100-binary"
    folder.mkdir()
    (folder / "one.bin").write_bytes(records[:1500].tobytes())
    (folder / "two.bin").write_bytes(records[1500:].tobytes())
    (folder / "fine_label_names.txt").write_text("apple\n")
    return folder, images, fine


def test_cifar_is_the_same_unpacked_and_packed_in_any_order(cifar, tmp_path):
    folder, images, fine = cifar
    archives = [pack(folder, tmp_path / f"{order}.tar.gz", "cifar-100-binary/", order) for order in (False, True)]
    for path in (folder, *archives):
        pixels, labels = formats.read_cifar(path, COUNTS, label_bytes=2, classes=100)
        assert np.array_equal(pixels, images)
        assert np.array_equal(labels, fine)
        assert pixels.flags.c_contiguous


def test_cifar10_has_one_label_byte(tmp_path):
    record = bytes([7]) + bytes([1]) * 1024 + bytes([2]) * 1024 + bytes([3]) * 1024
    (tmp_path / "test_batch.bin").write_bytes(record)
    pixels, labels = formats.read_cifar(tmp_path, {"test_batch.bin": 1}, label_bytes=1, classes=10)
    assert labels.tolist() == [7]
    assert [np.unique(plane).tolist() for plane in pixels[0]] == [[1], [2], [3]]


def test_cifar_with_a_fault_is_named(cifar, tmp_path):
    folder, *_ = cifar
    archive = pack(folder, tmp_path / "c.tar.gz", "")
    with pytest.raises(DataError, match="has a label outside 0 … 98: 0 … 99"):
        formats.read_cifar(folder, COUNTS, 2, 99)
    with pytest.raises(DataError, match=r"two.bin is longer than the 3074 bytes of 1 records"):
        formats.read_cifar(folder, COUNTS | {"two.bin": 1}, 2, 100)
    with pytest.raises(DataError, match=r"two.bin is truncated: 6148 of 9222 bytes"):
        formats.read_cifar(archive, COUNTS | {"two.bin": 3}, 2, 100)
    (folder / "two.bin").unlink()
    with pytest.raises(DataError, match=r"two.bin is missing in .*cifar-100-binary"):
        formats.read_cifar(folder, COUNTS, 2, 100)


@pytest.mark.parametrize("share", [0, 0.01, 0.5, 0.999])
def test_a_truncated_archive_is_refused(cifar, tmp_path, share):
    whole = pack(cifar[0], tmp_path / "c.tar.gz", "").read_bytes()
    (tmp_path / "c.tar.gz").write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(DataError, match=r"c.tar.gz"):
        formats.read_cifar(tmp_path / "c.tar.gz", COUNTS, 2, 100)


def test_an_archive_with_a_wrong_check_sum_is_refused(cifar, tmp_path):
    archive = pack(cifar[0], tmp_path / "c.tar.gz", "")
    content = bytearray(archive.read_bytes())
    content[-8] ^= 1  # the CRC of a gzip stream is in its last eight bytes
    archive.write_bytes(content)
    with pytest.raises(DataError, match=r"c.tar.gz cannot be read.*CRC"):
        formats.read_cifar(archive, COUNTS, 2, 100)


def test_the_pickled_cifar_is_not_read(tmp_path):
    folder = tmp_path / "cifar10"
    folder.mkdir()
    (folder / "cifar-10-python.tar.gz").touch()
    expected = (
        r"cifar-10-python.tar.gz is the python version, which is pickled and not read; cifar-10-binary.tar.gz is exp"
    )
    with pytest.raises(DataError, match=expected):
        formats.find_cifar(folder, "cifar-10", "cifar-10-batches-bin", "test_batch.bin")


# MATLAB and NumPy containers


def test_svhn_counts_the_digit_zero_as_ten(tmp_path):
    images = random_images(4, 3, 32, 32)
    path = tmp_path / "train_32x32.mat"
    savemat(
        path, {"X": images.transpose(2, 3, 1, 0), "y": np.array([[10], [1], [9], [10]], np.uint8)}, do_compression=True
    )
    pixels, labels = formats.read_svhn(path)
    assert np.array_equal(pixels, images)
    assert labels.tolist() == [0, 1, 9, 0]


def test_svhn_with_a_fault_is_named(tmp_path):
    path = tmp_path / "a.mat"
    good, label = np.zeros((32, 32, 3, 2), np.uint8), np.ones((2, 1), np.uint8)
    for content, fault in [
        ({"X": good[0], "y": label}, r"a.mat has X of shape \(32, 3, 2\)"),
        ({"X": good, "y": label[:1]}, "a.mat has 1 labels for 2 images"),
        ({"X": good, "y": label * 11}, "a.mat has a label outside 0 … 10: 11 … 11"),
        ({"X": good}, "a.mat has no entry 'y'"),
    ]:
        savemat(path, content)
        with pytest.raises(DataError, match=fault):
            formats.read_svhn(path)
    savemat(path, {"X": good, "y": label})
    whole = path.read_bytes()
    for cut in (0, 100, len(whole) // 2):
        path.write_bytes(whole[:cut])
        with pytest.raises(DataError, match=r"a.mat"):
            formats.read_svhn(path)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", ["u1", "i1", "u2", "i4", "i8", "u8", "f4", "f8"])
def test_arrays_of_a_matlab_file_are_those_that_scipy_reads(kind, packed, tmp_path):
    path, shape = tmp_path / "a.mat", (2, 3, 4)
    array = np.arange(24).reshape(shape).astype(kind)
    savemat(path, {"X": array, "a_longer_name": array[:1, :1, 0], "text": "no numbers"}, do_compression=packed)
    with path.open("rb") as stream:
        found = read_matlab(path, stream)
    expected = loadmat(path)
    assert found.keys() == {"X", "a_longer_name"}
    for name, values in found.items():
        assert values.dtype == expected[name].dtype and np.array_equal(values, expected[name])


def test_an_element_of_no_known_type_is_a_sentence_and_not_the_end_of_the_process(tmp_path):
    """SciPy's reader follows a null pointer here; the fuzzer found it."""
    path = tmp_path / "a.mat"
    savemat(path, {"X": np.zeros((32, 32, 3, 1), np.uint8), "y": np.ones((1, 1), np.uint8)})
    content = bytearray(path.read_bytes())
    at = content.index(b"X\0\0\0") + 4
    content[at : at + 8] = bytes(8)
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"a\.mat"):
        formats.read_svhn(path)


@pytest.mark.parametrize("colour", [(), (3,)])
def test_medmnist_joins_validation_to_training(tmp_path, colour):
    images = random_images(6, 28, 28, *colour)
    parts = {"train": slice(0, 3), "val": slice(3, 5), "test": slice(5, 6)}
    content = {f"{part}_images": images[rows] for part, rows in parts.items()}
    content |= {f"{part}_labels": np.arange(6, dtype=np.uint8)[rows, None] for part, rows in parts.items()}
    np.savez(tmp_path / "m.npz", **content)
    train, test = formats.read_medmnist(tmp_path / "m.npz", classes=6)
    expected = images.transpose(0, 3, 1, 2) if colour else images[:, None]
    assert np.array_equal(train[0], expected[:5])
    assert train[0].flags.c_contiguous
    assert train[1].tolist() == [0, 1, 2, 3, 4]
    assert np.array_equal(test[0], expected[5:])
    assert test[1].tolist() == [5]
    with pytest.raises(DataError, match=r"m.npz has a label outside 0 … 3"):
        formats.read_medmnist(tmp_path / "m.npz", classes=4)


def test_npz_with_a_fault_is_named(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, x=np.array([{"a": 1}], dtype=object))
    with pytest.raises(DataError, match=r"a.npz holds Python objects in x, which are pickled and not read"):
        formats.read_npz(path, ["x"])
    np.savez(path, x=np.zeros(1000))
    with pytest.raises(DataError, match=r"a.npz has no array y; it has x"):
        formats.read_npz(path, ["y"])
    whole = path.read_bytes()
    for cut in (0, 1, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(DataError, match=r"a.npz"):
            formats.read_npz(path, ["x"])
    with path.open("wb") as stream:
        np.save(stream, np.zeros(3))
    with pytest.raises(DataError, match=r"a.npz is a single array where an .npz of x is expected"):
        formats.read_npz(path, ["x"])
    np.savez(
        path, **{f"{part}_{what}": np.zeros(3) for part in ("train", "val", "test") for what in ("images", "labels")}
    )
    with pytest.raises(DataError, match=r"a.npz has images of shape \(3,\), float64"):
        formats.read_medmnist(path, classes=2)


# Image folders


def save_image(path: Path, pixels: np.ndarray, **options: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, **options)


@pytest.fixture
def cinic(tmp_path):
    """Two images of each class in each part; the value of every pixel tells which one it is."""
    folder = tmp_path / "CINIC-10"
    for p, part in enumerate(("train", "valid", "test")):
        for c, name in enumerate(formats.CINIC10_CLASSES):
            for i in range(2):
                save_image(folder / part / name / f"n{i}.png", np.full((32, 32, 3), 100 * p + 10 * i + c, np.uint8))
    return folder


def test_cinic10_is_the_same_unpacked_and_packed_in_any_order(cinic, tmp_path):
    (cinic / "train" / "bird" / "._n0.png").write_bytes(b"what macOS leaves")
    split = formats.read_cinic10(cinic)
    for part, base in zip(split, (0, 200), strict=True):
        images, labels = part
        assert labels.tolist() == [c for c in range(10) for _ in range(2)]
        assert images.shape == (20, 3, 32, 32)
        assert images[:, 0, 0, 0].tolist() == [base + 10 * i + c for c in range(10) for i in range(2)]
    for prefix in ("", "./", "CINIC-10/"):
        assert same(split, formats.read_cinic10(pack(cinic, tmp_path / "CINIC-10.tar.gz", prefix, reverse=True)))


def test_cinic10_with_a_fault_is_named(cinic, tmp_path):
    save_image(cinic / "train" / "zebra" / "a.png", np.zeros((32, 32, 3), np.uint8))
    with pytest.raises(DataError, match=r"train/zebra/a.png belongs to no class of CINIC-10"):
        formats.read_cinic10(cinic)
    (cinic / "train" / "zebra" / "a.png").unlink()
    save_image(cinic / "train" / "cat" / "n0.png", np.zeros((8, 8, 3), np.uint8))
    with pytest.raises(DataError, match=r"train/cat/n0.png is not an image of 32 × 32 pixels"):
        formats.read_cinic10(cinic)
    (cinic / "train" / "cat" / "n0.png").write_bytes((cinic / "train" / "cat" / "n1.png").read_bytes()[:60])
    with pytest.raises(DataError, match=r"CINIC-10.tar.gz: train/cat/n0.png is not an image"):
        formats.read_cinic10(pack(cinic, tmp_path / "CINIC-10.tar.gz", ""))


def test_images_without_pillow_say_what_to_install(cinic, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(DataError, match=r"need Pillow: pip install 'fedflat\[images\]'"):
        formats.read_cinic10(cinic)


@pytest.fixture
def tiny(tmp_path):
    """Classes n02 and n01, in this order in wnids.txt; one of the JPEG files is grey."""
    folder = tmp_path / "tiny-imagenet-200"
    for wnid, shade in (("n01", 50), ("n02", 200)):
        for i in range(2):
            pixels = np.full((64, 64) if i else (64, 64, 3), shade + i, np.uint8)
            save_image(folder / "train" / wnid / "images" / f"{wnid}_{i}.JPEG", pixels, format="JPEG", quality=100)
        (folder / "train" / wnid / f"{wnid}_boxes.txt").write_text(f"{wnid}_0.JPEG\t0\t0\t62\t62\n")
    save_image(folder / "val" / "images" / "val_0.JPEG", np.full((64, 64, 3), 90, np.uint8), format="JPEG", quality=100)
    (folder / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn02\t0\t32\t44\t62\n")
    (folder / "wnids.txt").write_text("n02\nn01\n")
    save_image(folder / "test" / "images" / "test_0.JPEG", np.zeros((64, 64), np.uint8), format="JPEG")
    return folder


def test_tiny_imagenet_is_the_same_unpacked_and_zipped(tiny, tmp_path):
    train, test = split = formats.read_tiny_imagenet(tiny)
    assert train[1].tolist() == [0, 0, 1, 1]
    assert test[1].tolist() == [1]
    assert train[0].shape == (4, 3, 64, 64)
    assert np.abs(train[0].mean((1, 2, 3)) - [50, 51, 200, 201]).max() <= 1  # JPEG may round
    assert np.abs(test[0].mean() - 90) <= 1
    for prefix in ("", "tiny-imagenet-200/"):
        archive = pack(tiny, tmp_path / "tiny-imagenet-200.zip", prefix, reverse=True)
        assert same(split, formats.read_tiny_imagenet(archive))


def test_tiny_imagenet_with_a_fault_is_named(tiny, tmp_path):
    archive = pack(tiny, tmp_path / "t.zip", "")
    archive.write_bytes(archive.read_bytes()[:-30])
    with pytest.raises(DataError, match=r"t.zip cannot be read"):
        formats.read_tiny_imagenet(archive)
    (tiny / "wnids.txt").write_text("n02\n")
    with pytest.raises(DataError, match=r"tiny-imagenet-200 has no entry 'n01'"):
        formats.read_tiny_imagenet(tiny)
    (tiny / "wnids.txt").unlink()
    with pytest.raises(DataError, match=r"tiny-imagenet-200 has no entry 'wnids.txt'"):
        formats.read_tiny_imagenet(tiny)


def test_a_grey_image_has_three_equal_channels(tmp_path):
    buffer = io.BytesIO()
    Image.fromarray(random_images(32, 32)).save(buffer, "PNG")
    (tmp_path / "a.png").write_bytes(buffer.getvalue())
    image = formats.read_images(tmp_path, ["a.png"], 32)[0]
    assert all(np.array_equal(plane, random_images(32, 32)) for plane in image)
