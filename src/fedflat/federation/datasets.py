"""The data sets by name: where their files are, and how they become tensors.

They are in one directory, with a folder per data set that holds its official files, packed or unpacked::

    cifar10/cifar-10-binary.tar.gz      mnist/train-images-idx3-ubyte.gz …      pathmnist/pathmnist.npz
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedflat.errors import DataError, FedflatError, RecipeError, nearest
from fedflat.federation import formats
from fedflat.federation.arrays import read_arrays
from fedflat.federation.corpora import Cut, ag_news, json_lines, plain_text, shakespeare
from fedflat.federation.dataset import Dataset, Samples
from fedflat.federation.decoded import decoded_once
from fedflat.federation.formats import Labelled, Split
from fedflat.federation.hub_data import hub_folder
from fedflat.federation.places import data_directory, expanded
from fedflat.trusted import named_class

Source = Callable[[Path | None], Dataset]
"""Makes a data set out of the data directory."""


def load(name: str, directory: Path | str | None = None, **cut: Any) -> Dataset:
    """The data set of that name, from the data directory (see `data_directory`).

    For the name `arrays`, `directory` is the path of an .npz file (see `read_arrays`), and for `text` and `jsonl` that
    of the user's own text. `cut` says how a text becomes samples (`corpora.Cut`); other data sets ignore it.

    >>> digits = load("digits")
    >>> digits.shape, digits.classes, len(digits.train), len(digits.test)
    ((1, 8, 8), 10, 1442, 355)
    """
    place = None if directory is None else expanded(directory)
    where = data_directory(place).absolute()
    if name in CORPORA:
        how = Cut(**cut)
        return decoded_once(lambda: CORPORA[name](place, how), name, where, how)
    if ":" in name:
        return _of_class(name, place)
    if name not in DATASETS:
        path = ", and no CSV file or folder of images there" if {*name} & {*"/\\."} else ""
        raise RecipeError(f"there is no data set {name!r}{path}; {nearest(name, known_datasets())}")
    return decoded_once(lambda: DATASETS[name](place), name, where)


def known_datasets() -> list[str]:
    """The names of all data sets."""
    return [*DATASETS, *CORPORA]


def _of_class(path: str, place: Path | None) -> Dataset:
    """A data set of the user's own code: the trusted subclass of `Dataset` at `package.module:Name`.

    It is made with the recipe's `data.dir`, a path or None.
    """
    made: Callable[[Path | None], Dataset] = named_class(path, Dataset, "data.name")
    try:
        return made(place).plain()
    except FedflatError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise DataError(f"data.name = {path!r}: could not be made ({type(error).__name__}: {error})") from error


def whereabouts(name: str, directory: Path | None = None) -> str | None:
    """A text that says where a data set comes from, or None if its folder is missing or empty.

    Raises:
        DataError: one of its archives is cut short.
    """
    source = DATASETS.get(name)
    if isinstance(source, Official) or name in ("shakespeare", "ag-news"):
        folder = source.folder(directory) if isinstance(source, Official) else data_directory(directory) / name
        files = [p for p in folder.iterdir() if p.suffix not in (".part", ".bad")] if folder.is_dir() else []
        if broken := next(filter(formats.is_cut_short, files), None):
            raise DataError(f"{broken} is incomplete; delete it, then run `fedflat data get {name}`")
        return str(folder) if files else None
    own = {"digits": "comes with scikit-learn", "arrays": "your own .npz file: data.dir = its path"}
    own["datasets"] = "your own folder of Hugging Face's datasets: data.dir = its path"
    return own.get(name, "your own text: data.dir = its path")


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
    # A row has 64 pixels and the digit. scikit-learn itself is not imported: that takes longer than importing torch.
    package = find_spec("sklearn")
    file = Path((package and package.origin) or "").parent / "datasets" / "data" / "digits.csv.gz"
    if not file.exists():
        raise DataError("the data set digits is a file of scikit-learn (datasets/data/digits.csv.gz), which is missing")
    rows = np.loadtxt(file, delimiter=",")
    images = np.rint(rows[:, :64].reshape(-1, 1, 8, 8) * (255 / 16)).astype(np.uint8)
    labels = rows[:, 64].astype(np.int64)
    test = np.zeros(len(labels), bool)
    for digit in range(10):
        test[np.flatnonzero(labels == digit)[4::5]] = True
    train, held_out = ((images[rows], labels[rows]) for rows in (~test, test))
    return Dataset("digits", _samples(train), _samples(held_out), 10, (0.305,), (0.376,))


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
CORPORA: dict[str, Callable[[Path | None, Cut], Dataset]] = {
    "shakespeare": shakespeare,
    "ag-news": ag_news,
    "text": plain_text,
    "jsonl": json_lines,
    "datasets": hub_folder,
}
OWNED = ("shakespeare", "text")  # their owners are roles or files
