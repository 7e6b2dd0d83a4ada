"""Each data set loads as its publishers describe it; a user's mistake gives one sentence."""

import gzip
import hashlib
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import savemat

from fedflat import federate, train
from fedflat.errors import DataError, RecipeError
from fedflat.federation.datasets import DATASETS, Official, load
from fedflat.federation.formats import CINIC10_CLASSES
from fedflat.federation.places import data_directory

REAL = Path(os.environ.get("FEDFLAT_DATA") or Path(__file__).parents[3] / "shared" / "data")


def real(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not (REAL / name).is_dir(), reason=f"{name} is not on this machine")


def with_sizes(monkeypatch: pytest.MonkeyPatch, name: str, train: int, test: int) -> None:
    """Let a small file pass for the published one."""
    source = DATASETS[name]
    assert isinstance(source, Official)
    monkeypatch.setitem(DATASETS, name, replace(source, sizes=(train, test)))


def check_statistics(inputs: torch.Tensor, mean: tuple[float, ...], std: tuple[float, ...], tolerance: float) -> None:
    shades = torch.arange(256).double() / 255
    for channel, (m, s) in enumerate(zip(mean, std, strict=True)):
        counts = sum(torch.bincount(part.flatten(), minlength=256) for part in inputs[:, channel].split(5000))
        share = counts / counts.sum()
        average = (share * shades).sum()
        assert average.item() == pytest.approx(m, abs=tolerance)
        assert (share * (shades - average) ** 2).sum().sqrt().item() == pytest.approx(s, abs=tolerance)


# Published sets


def test_digits_are_split_by_class_and_always_alike():
    digits, again = load("digits"), load("digits")
    assert torch.equal(digits.train.inputs, again.train.inputs)
    assert digits.train.inputs.dtype == torch.uint8
    assert digits.train.inputs.min() == 0
    assert digits.train.inputs.max() == 255
    train, test = (torch.bincount(part.labels, minlength=10) for part in (digits.train, digits.test))
    assert int((train + test).sum()) == 1797
    assert torch.equal(test, (train + test) // 5)
    check_statistics(digits.train.inputs, digits.mean, digits.std, 1e-3)


def test_digits_are_those_of_scikit_learn():
    from sklearn.datasets import load_digits

    bunch, digits = load_digits(), load("digits")
    for digit in range(10):
        pixels = torch.from_numpy(bunch.images[bunch.target == digit])
        ours = [part.inputs[part.labels == digit, 0] for part in (digits.train, digits.test)]
        test = torch.arange(len(pixels)) % 5 == 4
        assert all(
            torch.equal(mine, (theirs * 255 / 16).round().to(torch.uint8))
            for mine, theirs in zip(ours, (pixels[~test], pixels[test]), strict=True)
        )


@real("mnist")
def test_mnist_comes_with_the_writers_of_its_digits():
    mnist = load("mnist", REAL)
    assert (mnist.shape, mnist.classes, len(mnist.train), len(mnist.test)) == ((1, 28, 28), 10, 60_000, 10_000)
    assert torch.bincount(mnist.test.labels).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    check_statistics(mnist.train.inputs, mnist.mean, mnist.std, 1e-4)
    if (REAL / "mnist" / "writers.npz").exists():
        writers = [set(part.groups.tolist()) for part in (mnist.train, mnist.test) if part.groups is not None]
        assert [len(part) for part in writers] == [539, 297]
        assert not writers[0] & writers[1]


@real("fashion-mnist")
def test_fashion_mnist_has_as_many_of_each_class():
    fashion = load("fashion-mnist", REAL)
    assert torch.bincount(fashion.train.labels).tolist() == [6000] * 10
    assert torch.bincount(fashion.test.labels).tolist() == [1000] * 10
    assert fashion.train.groups is None
    check_statistics(fashion.train.inputs, fashion.mean, fashion.std, 1e-4)


@real("cifar10")
def test_cifar10_written_back_has_the_published_check_sum():
    cifar = load("cifar10", REAL)
    assert torch.bincount(cifar.train.labels).tolist() == [5000] * 10
    records = torch.cat([cifar.test.labels[:, None].to(torch.uint8), cifar.test.inputs.flatten(1)], dim=1)
    assert hashlib.md5(records.numpy().tobytes()).hexdigest() == "803d5f7f4d78ea53de84dbe85f74fb6d"
    check_statistics(cifar.train.inputs, cifar.mean, cifar.std, 1e-6)


def test_cifar100_takes_the_fine_labels_of_its_full_sized_files(tmp_path):
    folder = tmp_path / "cifar100" / "cifar-100-binary"
    folder.mkdir(parents=True)
    for name, count in (("train.bin", 50_000), ("test.bin", 10_000)):
        with (folder / name).open("wb") as stream:
            stream.truncate(count * 3074)  # a sparse file of zeros …
            stream.seek((count - 1) * 3074)
            stream.write(bytes([19, 99]) + bytes([5]) * 3072)  # … but for its last record
    cifar = load("cifar100", tmp_path)
    assert (cifar.shape, cifar.classes, len(cifar.train), len(cifar.test)) == ((3, 32, 32), 100, 50_000, 10_000)
    for part in (cifar.train, cifar.test):
        assert part.labels.unique(return_counts=True)[1].tolist() == [len(part) - 1, 1]
        assert part.labels[-1] == 99
        assert (part.inputs[-1] == 5).all()


def test_svhn_reads_both_parts(tmp_path, monkeypatch):
    (tmp_path / "svhn").mkdir()
    for part, count in (("train", 3), ("test", 2)):
        content = {"X": np.full((32, 32, 3, count), 9, np.uint8), "y": np.full((count, 1), 10, np.uint8)}
        savemat(tmp_path / "svhn" / f"{part}_32x32.mat", content)
    with pytest.raises(DataError, match="svhn holds 3 training images of svhn where 73257 were published"):
        load("svhn", tmp_path)
    with_sizes(monkeypatch, "svhn", 3, 2)
    svhn = load("svhn", tmp_path)
    assert svhn.test.labels.tolist() == [0, 0]
    assert svhn.shape == (3, 32, 32)


@pytest.mark.parametrize("inside", ["", "CINIC-10"])
def test_cinic10_may_be_unpacked_with_or_without_its_folder(tmp_path, monkeypatch, inside):
    for part in ("train", "test"):
        for name in CINIC10_CLASSES:
            folder = tmp_path / "cinic10" / inside / part / name
            folder.mkdir(parents=True)
            Image.new("RGB", (32, 32), (1, 2, 3)).save(folder / "a.png")
    with_sizes(monkeypatch, "cinic10", 10, 10)
    cinic = load("cinic10", tmp_path)
    assert cinic.train.labels.tolist() == list(range(10))
    assert cinic.test.inputs[0, :, 0, 0].tolist() == [1, 2, 3]


def test_tiny_imagenet_has_its_validation_part_for_testing(tmp_path, monkeypatch):
    root = tmp_path / "tiny-imagenet" / "tiny-imagenet-200"
    for folder in ("train/n01/images", "val/images"):
        (root / folder).mkdir(parents=True)
        Image.new("L", (64, 64), 7).save(root / folder / "a.JPEG")
    (root / "wnids.txt").write_text("n00\nn01\n")
    (root / "val" / "val_annotations.txt").write_text("a.JPEG\tn00\t0\t0\t1\t1\n")
    with_sizes(monkeypatch, "tiny-imagenet", 1, 1)
    tiny = load("tiny-imagenet", tmp_path)
    assert (tiny.train.labels.tolist(), tiny.test.labels.tolist(), tiny.shape) == ([1], [0], (3, 64, 64))


MEDMNIST = {
    name: source for name, source in DATASETS.items() if name.endswith("mnist") and name[:5] not in ("mnist", "fashi")
}


@pytest.mark.parametrize("name", MEDMNIST)
def test_medmnist_has_a_mean_for_each_channel(tmp_path, monkeypatch, name):
    source = MEDMNIST[name]
    assert isinstance(source, Official)
    colour = (3,) if len(source.mean) == 3 else ()
    (tmp_path / name).mkdir()
    content = {f"{part}_images": np.zeros((1, 28, 28, *colour), np.uint8) for part in ("train", "val", "test")}
    content |= {f"{part}_labels": np.array([[source.classes - 1]]) for part in ("train", "val", "test")}
    np.savez(tmp_path / name / f"{name}.npz", **content)
    with_sizes(monkeypatch, name, 2, 1)
    med = load(name, tmp_path)
    assert med.shape == (len(med.mean), 28, 28)
    assert med.mean == med.std == (0.5,) * len(med.mean)
    assert med.train.labels.tolist() == [med.classes - 1] * 2


# Where they are looked for


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.tobytes()


def write_mnist(folder: Path, packed: bool) -> None:
    folder.mkdir(parents=True)
    for part, count in (("train", 3), ("t10k", 2)):
        for kind, array in (
            ("images-idx3", np.zeros((count, 28, 28), np.uint8)),
            ("labels-idx1", np.arange(count, dtype=np.uint8)),
        ):
            content = idx(array)
            file = folder / f"{part}-{kind}-ubyte{'.gz' if packed else ''}"
            file.write_bytes(gzip.compress(content) if packed else content)


def test_the_directory_is_argument_then_environment_then_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDFLAT_DATA", str(tmp_path / "environment"))
    assert data_directory(tmp_path / "argument") == tmp_path / "argument"
    assert data_directory() == tmp_path / "environment"
    assert data_directory("~") == Path.home()
    monkeypatch.delenv("FEDFLAT_DATA")
    assert data_directory().name == "fedflat"


@pytest.mark.parametrize("packed", [True, False])
def test_mnist_from_the_environments_directory(tmp_path, monkeypatch, packed):
    write_mnist(tmp_path / "mnist", packed)
    with_sizes(monkeypatch, "mnist", 3, 2)
    monkeypatch.setenv("FEDFLAT_DATA", str(tmp_path))
    mnist = load("mnist")
    assert mnist.train.labels.tolist() == [0, 1, 2]
    assert mnist.train.groups is None
    np.savez(
        tmp_path / "mnist" / "writers.npz", train_writer=np.array([4, 4, 5], np.int16), test_writer=np.array([6, 7])
    )
    groups = load("mnist").train.groups
    assert groups is not None
    assert groups.dtype == torch.int64
    assert groups.tolist() == [4, 4, 5]
    np.savez(tmp_path / "mnist" / "writers.npz", train_writer=np.array([4, 4]), test_writer=np.array([6, 7]))
    with pytest.raises(DataError, match=r"writers.npz names 2 \+ 2 writers, one for each of 3 \+ 2 images is expected"):
        load("mnist")


def test_fashion_mnist_is_also_found_where_debian_puts_it(tmp_path, monkeypatch):
    source = DATASETS["fashion-mnist"]
    assert isinstance(source, Official)
    assert source.elsewhere == Path("/usr/share/datasets/fashion-mnist")
    write_mnist(tmp_path / "debian", packed=True)
    monkeypatch.setitem(DATASETS, "fashion-mnist", replace(source, sizes=(3, 2), elsewhere=tmp_path / "debian"))
    assert len(load("fashion-mnist", tmp_path / "mine").train) == 3
    (tmp_path / "mine" / "fashion-mnist").mkdir(parents=True)
    with pytest.raises(DataError, match="mine"):
        load("fashion-mnist", tmp_path / "mine")


def test_an_unknown_name_gives_the_nearest():
    with pytest.raises(RecipeError, match=r"there is no data set 'cifar-10'; did you mean cifar10\?"):
        load("cifar-10")


# A user's own arrays


def own(path: Path, **changes: np.ndarray | None) -> Path:
    content = {
        "x_train": np.zeros((4, 1, 5, 5), np.uint8),
        "y_train": np.array([0, 1, 2, 1]),
        "x_test": np.zeros((2, 1, 5, 5), np.uint8),
        "y_test": np.array([0, 3]),
    } | changes
    np.savez(path / "own.npz", **{name: array for name, array in content.items() if array is not None})
    return path / "own.npz"


def test_own_images(tmp_path):
    data = load("arrays", own(tmp_path, groups_train=np.array([8, 8, 9, 9])))
    assert (data.shape, data.classes, data.mean, data.std) == ((1, 5, 5), 4, (0.5,), (0.5,))
    assert data.train.groups is not None
    assert data.train.groups.tolist() == [8, 8, 9, 9]
    assert data.test.groups is None


def test_own_images_without_a_channel_axis_get_one(tmp_path):
    assert load("arrays", own(tmp_path, x_train=np.zeros((4, 5, 5), np.uint8))).shape == (1, 5, 5)


def test_own_numbers_become_single_precision_and_keep_their_scale(tmp_path):
    rows = np.arange(12.0).reshape(4, 3)
    data = load("arrays", own(tmp_path, x_train=rows, x_test=rows[:2]))
    assert data.train.inputs.dtype == torch.float32
    assert data.train.inputs.tolist() == rows.tolist()
    assert (data.shape, data.mean, data.std) == ((3,), (0.0,), (1.0,))


@pytest.mark.parametrize(
    ("labels", "task", "outputs"),
    [
        (np.linspace(-1, 1, 6), "regression", 1),
        (np.linspace(-1, 1, 12).reshape(6, 2), "regression", 2),
        (np.eye(6, 3), "multi-label", 3),
    ],
)
def test_own_floating_labels_are_values_to_predict_or_several_labels(tmp_path, labels, task, outputs):
    path = own(tmp_path, y_train=labels[:4], y_test=labels[4:])
    data = load("arrays", path)
    assert (data.task, data.classes) == (task, outputs)
    torch.testing.assert_close(data.train.labels, torch.tensor(labels[:4], dtype=torch.float32))
    record = train(federate("arrays", "iid", 2, directory=path), rounds=1, engine="inline").history[-1]
    assert {"regression": "r2", "multi-label": "map"}[task] in record


def test_own_statistics_are_per_channel_or_for_all(tmp_path):
    images = {"x_train": np.zeros((4, 3, 5, 5), np.uint8), "x_test": np.zeros((2, 3, 5, 5), np.uint8)}
    data = load("arrays", own(tmp_path, **images, mean=np.array([0.1, 0.2, 0.3]), std=np.array(0.25)))
    assert data.mean == pytest.approx((0.1, 0.2, 0.3))
    assert data.std == (0.25, 0.25, 0.25)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"x_test": None, "y_test": None}, "own.npz has no array x_test; it has x_train, y_train"),
        ({"y_train": np.array([0, 1])}, "own.npz has y_train as 2 × int64; an integer for each of 4 samples"),
        ({"y_train": np.zeros(4)}, "own.npz has labels of different shape or type in y_train and y_test"),
        (
            {"y_train": np.zeros((4, 2, 2))},
            r"own.npz has y_train of shape \(4, 2, 2\); a number or a row for each of 4",
        ),
        ({"y_train": np.array([0, 1, np.nan, 2])}, "own.npz has a number in y_train that is not finite"),
        ({"y_test": np.array([0, -1])}, "own.npz has the label -1 in y_test; labels count from 0"),
        ({"groups_test": np.array([1])}, "own.npz has groups_test as 1 × int64"),
        ({"x_train": np.zeros((4, 32, 32, 3), np.uint8)}, r"store images as \(N, C, H, W\)"),
        (
            {"x_train": np.zeros((4, 5), np.int64)},
            "own.npz has x_train as int64, 2 axes; store uint8 images or floating",
        ),
        ({"x_train": np.zeros(4)}, r"own.npz has x_train of shape \(4,\); one row per sample"),
        ({"x_train": np.zeros((0, 1, 5, 5), np.uint8)}, "and at least one"),
        ({"x_train": np.full((4, 3), np.nan)}, "own.npz has a number in x_train that is not finite"),
        ({"x_train": np.zeros((4, 1, 6, 5), np.uint8)}, "different shape or type in x_train and x_test"),
        ({"mean": np.zeros(3)}, "own.npz has mean of 3 numbers; one for each of 1 channels"),
        ({"std": np.array([0.0])}, "own.npz has a std that is not positive"),
    ],
)
def test_own_arrays_with_a_fault_are_named(tmp_path, changes, fault):
    with pytest.raises(DataError, match=fault):
        load("arrays", own(tmp_path, **changes))


def test_own_arrays_need_a_path(tmp_path):
    with pytest.raises(DataError, match=r"needs the path of an .npz file"):
        load("arrays")
    with pytest.raises(DataError, match=r"nothing.npz is missing"):
        load("arrays", tmp_path / "nothing.npz")
