"""The data sets of the papers, and a user's own arrays, as tensors: who may hold what comes later, in the partition.

They lie in one directory, a folder per data set with its official files, packed or unpacked::

    cifar10/cifar-10-binary.tar.gz      mnist/train-images-idx3-ubyte.gz …      pathmnist/pathmnist.npz
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from platformdirs import user_cache_dir
from torch import Tensor

from fedflat.errors import DataError, RecipeError, nearest
from fedflat.federation import formats
from fedflat.federation.formats import Labelled, Split
from fedflat.randomness import generator
from fedflat.tokens import IGNORED, PADDING, is_tokens


@dataclass(frozen=True)
class Samples:
    """Inputs with labels and perhaps their natural owners (N,).

    Inputs are uint8 images (N, C, H, W), floating numbers (N, …), or token ids (N, T) of another integer type, padded
    with −1. Labels are classes (N,), classes of every token (N, T), of which −100 do not count, or floating targets.
    """

    inputs: Tensor
    labels: Tensor
    groups: Tensor | None = None

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.labels) or (self.groups is not None and len(self.groups) != len(self.labels)):
            raise DataError(f"samples: {len(self.inputs)} inputs with {len(self.labels)} labels; give one for each")
        if self.labels.dtype != torch.int64 and not self.labels.is_floating_point():
            raise DataError(f"samples: labels are {self.labels.dtype}; make them int64 classes, or floating targets")
        if is_tokens(self.inputs) and self.inputs.ndim != 2:
            raise DataError(
                f"samples: token ids have the shape {tuple(self.inputs.shape)}; give one row for each sample"
            )

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: str) -> "Samples":
        """The same samples in the memory of another device."""
        return replace(self, inputs=self.inputs.to(device), labels=self.labels.to(device))


@dataclass(frozen=True)
class Dataset:
    """A training and a test part.

    Attributes:
        name: the name of the data set.
        train: the training samples.
        test: the test samples.
        classes: the number of classes, or of the targets of a sample.
        mean: mean of each channel, of inputs scaled to [0, 1].
        std: standard deviation of each channel.
        vocabulary: the number of tokens, if the inputs are token ids.
        task: the task that the labels are for (`fedflat.tasks`), unless a recipe says otherwise.
    """

    name: str
    train: Samples
    test: Samples
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    vocabulary: int = 0
    task: str = "classification"

    def __post_init__(self) -> None:
        for part in (self.train, self.test):
            if not len(part):
                raise DataError(f"{self.name}: it needs at least one training and one test sample")
            if part.labels.dtype == torch.int64:
                self._check_classes(part.labels.reshape(len(part), -1))
            if is_tokens(part.inputs):
                self._check_tokens(part.inputs)

    def _check_classes(self, labels: Tensor) -> None:
        counts = labels != IGNORED
        if not bool((((labels >= 0) & (labels < self.classes)) | ~counts).all()):
            raise DataError(f"{self.name}: labels must be classes from 0 to {self.classes - 1}")
        if not bool(counts.any(dim=1).all()):
            sample = int(counts.any(dim=1).int().argmin())
            raise DataError(f"{self.name}: all labels of sample {sample} are {IGNORED}, so it teaches nothing")

    def _check_tokens(self, tokens: Tensor) -> None:
        low, high = int(tokens.min()), int(tokens.max())
        if not PADDING <= low <= high < self.vocabulary:
            raise DataError(
                f"{self.name}: token ids go from {low} to {high}, where 0 to {self.vocabulary - 1} are known and "
                f"{PADDING} is padding"
            )
        here = tokens >= 0
        if not bool(here[:, 0].all()) or not bool((here[:, 1:] <= here[:, :-1]).all()):
            raise DataError(f"{self.name}: a sample has padding before a token; pad rows of tokens at their end")

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        return tuple(self.train.inputs.shape[1:])

    def limited(self, size: int, seed: int) -> "Dataset":
        """With at most so many training samples, drawn by the seed; the test part is whole."""
        drawn = torch.randperm(len(self.train), generator=generator(seed, "limit"))[:size].sort().values
        groups = None if self.train.groups is None else self.train.groups[drawn]
        return replace(self, train=Samples(self.train.inputs[drawn], self.train.labels[drawn], groups))


Source = Callable[[Path | None], Dataset]
"""Makes a data set out of the data directory."""


def load(name: str, directory: Path | str | None = None) -> Dataset:
    """The data set of that name, from the data directory (see `data_directory`).

    For the name `arrays`, `directory` is the path of an .npz file (see `read_arrays`).

    >>> digits = load("digits")
    >>> digits.shape, digits.classes, len(digits.train), len(digits.test)
    ((1, 8, 8), 10, 1442, 355)
    """
    if name not in DATASETS:
        raise RecipeError(f"there is no data set {name!r}; {nearest(name, DATASETS)}")
    return DATASETS[name](None if directory is None else Path(directory).expanduser())


def data_directory(directory: Path | str | None = None) -> Path:
    """The argument, else the environment variable FEDFLAT_DATA, else the user's cache folder."""
    return Path(directory or os.environ.get("FEDFLAT_DATA") or user_cache_dir("fedflat")).expanduser()


def whereabouts(name: str, directory: Path | None = None) -> str | None:
    """In words where a data set comes from, or None if its folder is not there or holds nothing whole."""
    source = DATASETS[name]
    if isinstance(source, Official):
        folder = source.folder(directory)
        files = [p for p in folder.iterdir() if p.suffix not in (".part", ".bad")] if folder.is_dir() else []
        return str(folder) if files else None
    return "comes with scikit-learn" if name == "digits" else "your own .npz file: data.dir = its path"


def _samples(labelled: Labelled, groups: NDArray[Any] | None = None) -> Samples:
    inputs, labels = map(torch.from_numpy, labelled)
    return Samples(inputs, labels, None if groups is None else torch.from_numpy(groups.astype(np.int64)))


# Official files ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Official:
    """A published data set: how its folder is read, and how many samples it must hold.

    A file writers.npz beside the official ones gives the natural owner of each image: train_writer and test_writer.
    """

    name: str
    read: Callable[[Path], Split]
    sizes: tuple[int, int]
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    elsewhere: Path | None = None

    def folder(self, directory: Path | None) -> Path:
        """Where its files are, or should be."""
        folder = data_directory(directory) / self.name
        installed = self.elsewhere and self.elsewhere.is_dir() and not folder.is_dir()
        return self.elsewhere if self.elsewhere and installed else folder

    def __call__(self, directory: Path | None) -> Dataset:
        folder = self.folder(directory)
        split = self.read(folder)
        for part, (_, labels), size in zip(("training", "test"), split, self.sizes, strict=True):
            if len(labels) != size:
                raise DataError(
                    f"{folder} holds {len(labels)} {part} images of {self.name} where {size} were published"
                )
        train, test = map(_samples, split, _writers(folder / "writers.npz", self.sizes))
        return Dataset(self.name, train, test, self.classes, self.mean, self.std)


def _writers(path: Path, sizes: tuple[int, int]) -> Sequence[NDArray[Any] | None]:
    if not path.exists():
        return None, None
    writers = list(formats.read_npz(path, ["train_writer", "test_writer"]).values())
    if [writer.shape for writer in writers] != [(size,) for size in sizes]:
        raise DataError(
            f"{path} names {' + '.join(str(writer.size) for writer in writers)} writers, one for each of "
            f"{sizes[0]} + {sizes[1]} images is expected"
        )
    return writers


def _mnist(folder: Path) -> Split:
    def part(name: str) -> Labelled:
        images = formats.find(folder, f"{name}-images-idx3-ubyte.gz", f"{name}-images-idx3-ubyte")
        labels = formats.find(folder, f"{name}-labels-idx1-ubyte.gz", f"{name}-labels-idx1-ubyte")
        return formats.read_idx_pair(images, labels, 10)

    return part("train"), part("t10k")


def _cifar10(folder: Path) -> Split:
    path = formats.find_cifar(folder, "cifar-10", "cifar-10-batches-bin", "test_batch.bin")
    counts = {f"data_batch_{batch}.bin": 10_000 for batch in range(1, 6)} | {"test_batch.bin": 10_000}
    images, labels = formats.read_cifar(path, counts, 1, 10)
    return (images[:50_000], labels[:50_000]), (images[50_000:], labels[50_000:])


def _cifar100(folder: Path) -> Split:
    path = formats.find_cifar(folder, "cifar-100", "cifar-100-binary", "test.bin")
    images, labels = formats.read_cifar(path, {"train.bin": 50_000, "test.bin": 10_000}, 2, 100)
    return (images[:50_000], labels[:50_000]), (images[50_000:], labels[50_000:])


def _svhn(folder: Path) -> Split:
    train, test = (formats.find(folder, f"{part}_32x32.mat") for part in ("train", "test"))
    return formats.read_svhn(train), formats.read_svhn(test)


def _cinic10(folder: Path) -> Split:
    return formats.read_cinic10(formats.find_tree(folder, "CINIC-10.tar.gz", "CINIC-10", "train"))


def _tiny_imagenet(folder: Path) -> Split:
    return formats.read_tiny_imagenet(
        formats.find_tree(folder, "tiny-imagenet-200.zip", "tiny-imagenet-200", "wnids.txt")
    )


def _medmnist(name: str, channels: int, classes: int, train: int, test: int) -> Official:
    def read(folder: Path) -> Split:
        return formats.read_medmnist(formats.find(folder, f"{name}.npz"), classes)

    return Official(name, read, (train, test), classes, (0.5,) * channels, (0.5,) * channels)


# Sets without official files -----------------------------------------------------------------------------------------


def _digits(_: Path | None) -> Dataset:
    """scikit-learn's 8 × 8 digits with 0 … 16 stretched to 0 … 255; every fifth sample of a class is for testing."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = np.rint(bunch.images[:, None] * (255 / 16)).astype(np.uint8)
    labels = bunch.target.astype(np.int64)
    test = np.zeros(len(labels), bool)
    for digit in range(10):
        test[np.flatnonzero(labels == digit)[4::5]] = True
    train, held_out = ((images[rows], labels[rows]) for rows in (~test, test))
    return Dataset("digits", _samples(train), _samples(held_out), 10, (0.305,), (0.376,))


def read_arrays(path: Path | None) -> Dataset:
    """A user's own .npz: x_train, y_train, x_test, y_test, and perhaps groups_train, groups_test, mean and std.

    Inputs are uint8 images (N, C, H, W) or (N, H, W), or floating numbers (N, …); labels count from 0.
    Without `mean` and `std`, images are mapped to [−1, 1] (.5, .5) and floating numbers stay as they are (0, 1).
    """
    if path is None:
        raise DataError("the data set arrays needs the path of an .npz file as its directory")
    content = formats.read_npz(
        path, ["x_train", "y_train", "x_test", "y_test"], ["groups_train", "groups_test", "mean", "std"]
    )
    train, test = (_own_samples(path, content, part) for part in ("train", "test"))
    if train.inputs.shape[1:] != test.inputs.shape[1:] or train.inputs.dtype != test.inputs.dtype:
        raise DataError(f"{path} has inputs of different shape or type in x_train and x_test")
    channels = train.inputs.shape[1] if train.inputs.ndim == 4 else 1
    usual = (0.5, 0.5) if train.inputs.dtype == torch.uint8 else (0.0, 1.0)
    mean, std = (
        _statistic(path, content, name, channels, value) for name, value in zip(("mean", "std"), usual, strict=True)
    )
    if min(std) <= 0:
        raise DataError(f"{path} has a std that is not positive")
    classes = 1 + max(int(train.labels.max()), int(test.labels.max()))
    if classes > len(train) + len(test):
        raise DataError(f"{path} has the label {classes - 1}, which makes more classes than samples; count them from 0")
    return Dataset("arrays", train, test, classes, mean, std)


def _own_samples(path: Path, content: dict[str, NDArray[Any]], part: str) -> Samples:
    inputs = _own_inputs(path, f"x_{part}", content[f"x_{part}"])
    labels = _own_integers(path, f"y_{part}", content[f"y_{part}"], len(inputs))
    groups = content.get(f"groups_{part}")
    owners = None if groups is None else _own_integers(path, f"groups_{part}", groups, len(inputs))
    if labels.min() < 0:
        raise DataError(f"{path} has the label {labels.min()} in y_{part}; labels count from 0")
    return Samples(
        torch.from_numpy(inputs), torch.from_numpy(labels), None if owners is None else torch.from_numpy(owners)
    )


def _own_inputs(path: Path, name: str, inputs: NDArray[Any]) -> NDArray[Any]:
    if inputs.ndim < 2 or not inputs.size:
        raise DataError(f"{path} has {name} of shape {inputs.shape}; one row per sample is expected, and at least one")
    if inputs.dtype == np.uint8 and inputs.ndim in (3, 4):
        images = inputs[:, None] if inputs.ndim == 3 else inputs
        if images.shape[1] > 4 and images.shape[3] <= 4:
            raise DataError(f"{path} has {name} of shape {images.shape}; store images as (N, C, H, W)")
        return np.ascontiguousarray(images)
    if not np.issubdtype(inputs.dtype, np.floating):
        raise DataError(
            f"{path} has {name} as {inputs.dtype}, {inputs.ndim} axes; store uint8 images or floating numbers"
        )
    if not np.isfinite(inputs).all():
        raise DataError(f"{path} has a number in {name} that is not finite")
    return np.ascontiguousarray(inputs, np.float32)


def _own_integers(path: Path, name: str, values: NDArray[Any], samples: int) -> NDArray[np.int64]:
    if not np.issubdtype(values.dtype, np.integer) or values.size != samples:
        raise DataError(
            f"{path} has {name} as {values.size} × {values.dtype}; an integer for each of {samples} samples is expected"
        )
    return values.reshape(samples).astype(np.int64)


def _statistic(
    path: Path, content: dict[str, NDArray[Any]], name: str, channels: int, usual: float
) -> tuple[float, ...]:
    values = content.get(name, np.array(usual)).ravel()
    if values.size not in (1, channels) or not np.isfinite(values).all():
        raise DataError(f"{path} has {name} of {values.size} numbers; one for each of {channels} channels is expected")
    return tuple(float(value) for value in np.broadcast_to(values, channels))


# The table -----------------------------------------------------------------------------------------------------------

_CIFAR10 = (0.49139968, 0.48215827, 0.44653124), (0.24703233, 0.24348505, 0.26158768)
_CIFAR100 = (0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)
_SVHN = (0.4376821, 0.4437697, 0.47280442), (0.19803012, 0.20101562, 0.19703614)
_CINIC10 = (0.47889522, 0.47227842, 0.43047404), (0.24205776, 0.23828046, 0.25874835)
_IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_DEBIAN = Path("/usr/share/datasets/fashion-mnist")

_OFFICIAL = (
    Official("mnist", _mnist, (60_000, 10_000), 10, (0.1307,), (0.3081,)),
    Official("fashion-mnist", _mnist, (60_000, 10_000), 10, (0.2860,), (0.3530,), _DEBIAN),
    Official("cifar10", _cifar10, (50_000, 10_000), 10, *_CIFAR10),
    Official("cifar100", _cifar100, (50_000, 10_000), 100, *_CIFAR100),
    Official("svhn", _svhn, (73_257, 26_032), 10, *_SVHN),
    Official("cinic10", _cinic10, (90_000, 90_000), 10, *_CINIC10),
    Official("tiny-imagenet", _tiny_imagenet, (100_000, 10_000), 200, *_IMAGENET),
    _medmnist("bloodmnist", 3, 8, 11_959 + 1_712, 3_421),
    _medmnist("breastmnist", 1, 2, 546 + 78, 156),
    _medmnist("dermamnist", 3, 7, 7_007 + 1_003, 2_005),
    _medmnist("octmnist", 1, 4, 97_477 + 10_832, 1_000),
    _medmnist("organamnist", 1, 11, 34_561 + 6_491, 17_778),
    _medmnist("organcmnist", 1, 11, 12_975 + 2_392, 8_216),
    _medmnist("organsmnist", 1, 11, 13_932 + 2_452, 8_827),
    _medmnist("pathmnist", 3, 9, 89_996 + 10_004, 7_180),
    _medmnist("pneumoniamnist", 1, 2, 4_708 + 524, 624),
    _medmnist("tissuemnist", 1, 8, 165_466 + 23_640, 47_280),
)
DATASETS: dict[str, Source] = {"digits": _digits, "arrays": read_arrays} | {source.name: source for source in _OFFICIAL}
