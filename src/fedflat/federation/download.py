"""Downloads the official files of a data set, resumes interrupted downloads and checks the published sums."""

import hashlib
import http.client
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from fedflat.errors import DataError, RecipeError, nearest
from fedflat.federation.places import data_directory
from fedflat.federation.sizes import MOST

Progress = Callable[[str, int, int | None], None]
"""Called with the file's name, the bytes that are there, and the bytes that there will be (if the server says)."""

_BLOCK = 1 << 18
_TIMEOUT = 30.0  # seconds without a byte


@dataclass(frozen=True)
class Remote:
    """An official file and its published MD5 or SHA-256 sum."""

    address: str
    md5: str = ""
    sha256: str = ""

    @property
    def file(self) -> str:
        """The file's name.

        >>> Remote("https://zenodo.org/records/1/files/pathmnist.npz?download=1", "").file
        'pathmnist.npz'
        """
        return urlsplit(self.address).path.rpartition("/")[2]


def _idx(base: str, *sums: str) -> tuple[Remote, ...]:
    names = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
    return tuple(Remote(f"{base}/{name}-ubyte.gz", md5) for name, md5 in zip(names, sums, strict=True))


def _medmnist(name: str, md5: str) -> tuple[Remote, ...]:
    return (Remote(f"https://zenodo.org/records/10519652/files/{name}.npz?download=1", md5),)


_TORONTO = "https://www.cs.toronto.edu/~kriz"
_AG_NEWS = "https://raw.githubusercontent.com/mhjabreel/CharCnn_Keras/master/data/ag_news_csv"
_STANFORD = "http://ufldl.stanford.edu/housenumbers"
_EDINBURGH = "https://datashare.ed.ac.uk/bitstream/handle/10283/3192"
_MEDMNIST = {
    "bloodmnist": "7053d0359d879ad8a5505303e11de1dc",
    "breastmnist": "750601b1f35ba3300ea97c75c52ff8f6",
    "dermamnist": "0744692d530f8e62ec473284d019b0c7",
    "octmnist": "c68d92d5b585d8d81f7112f81e2d0842",
    "organamnist": "68e3f8846a6bd62f0c9bf841c0d9eacc",
    "organcmnist": "b9ceb9546e10131b32923c5bbeaea2b1",
    "organsmnist": "9ab87b696fb54e2a387ebe992d6ed5f1",
    "pathmnist": "a8b06965200029087d5bd730944a56c1",
    "pneumoniamnist": "28209eda62fecd6e6a2d98b1501bb15f",
    "tissuemnist": "ebe78ee8b05294063de985d821c1c34b",
}
REMOTES: dict[str, tuple[Remote, ...]] = {
    "mnist": _idx(
        "https://ossci-datasets.s3.amazonaws.com/mnist",
        "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "d53e105ee54ea40749a09fcbcd1e9432",
        "9fb629c4189551a2d022fa330f9573f3",
        "ec29112dd5afa0611ce80d1b7f02629c",
    ),
    "fashion-mnist": _idx(
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
        "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "25c81989df183df01b3e8a0aad5dffbe",
        "bef4ecab320f06d8554ea6380940ec79",
        "bb300cfdad3c16e7a12a480ee83cd310",
    ),
    "cifar10": (Remote(f"{_TORONTO}/cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530"),),
    "cifar100": (Remote(f"{_TORONTO}/cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8"),),
    "svhn": (
        Remote(f"{_STANFORD}/train_32x32.mat", "e26dedcc434d2e4c54c9b2d4a06d8373"),
        Remote(f"{_STANFORD}/test_32x32.mat", "eb5a983be6a315427106f1b164d9cef3"),
    ),
    "cinic10": (Remote(f"{_EDINBURGH}/CINIC-10.tar.gz", "6ee4d0c996905fe93221de577967a372"),),
    "shakespeare": (
        Remote(
            "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
            sha256="86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
        ),
    ),
    "ag-news": (
        Remote(f"{_AG_NEWS}/train.csv", "b1a00f826fdfbd249f79597b59e1dc12"),
        Remote(f"{_AG_NEWS}/test.csv", "d52ea96a97a2d943681189a97654912d"),
    ),
    "tiny-imagenet": (Remote("http://cs231n.stanford.edu/tiny-imagenet-200.zip", "90528d7ca1a48142e341f4ef8d21d0de"),),
} | {name: _medmnist(name, md5) for name, md5 in _MEDMNIST.items()}


def get(name: str, directory: Path | str | None = None, progress: Progress | None = None) -> Path:
    """Fetch the files of a data set that are not there yet, and return its folder in the data directory.

    Args:
        name: the name of the data set.
        directory: the data directory; by default that of `data_directory`.
        progress: called with a file's name, the bytes so far and the total, if it is known.

    Raises:
        RecipeError: the data set has no files to fetch.
    """
    if name not in REMOTES:
        raise RecipeError(f"there are no files to fetch for {name!r}; {nearest(name, REMOTES)}")
    folder = data_directory(directory) / name
    for remote in REMOTES[name]:
        if not (folder / remote.file).exists():
            fetch(remote, folder / remote.file, progress or _silent)
    return folder


def fetch(remote: Remote, target: Path, progress: Progress) -> None:
    """Download into `target.part`, continuing an interrupted attempt; rename the file once its check sum is right."""
    part = target.with_name(target.name + ".part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _transfer(remote, part, progress)
        kind, published = ("SHA-256", remote.sha256) if remote.sha256 else ("MD5", remote.md5)
        with part.open("rb") as stream:
            digest = partial(hashlib.sha256 if remote.sha256 else hashlib.md5, usedforsecurity=False)
            found = hashlib.file_digest(stream, digest).hexdigest()
        if found != published:
            bad = part.replace(target.with_name(target.name + ".bad"))
            raise DataError(
                f"{remote.address} came with {kind} sum {found} instead of {published}, and is set aside as {bad}"
            )
        part.replace(target)
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise DataError(
            f"{remote.address} could not be fetched ({reason}): try again, or put that file in {target.parent} by hand"
        ) from error


def _transfer(remote: Remote, part: Path, progress: Progress) -> None:
    done = part.stat().st_size if part.exists() else 0
    headers = {"User-Agent": "fedflat", "Accept-Encoding": "identity"} | ({"Range": f"bytes={done}-"} if done else {})
    try:
        response = urllib.request.urlopen(urllib.request.Request(remote.address, headers=headers), timeout=_TIMEOUT)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416 and done:  # nothing is left to send: the check sum tells whether the part is whole
            return
        raise
    with response:
        resumed = response.status == 206
        done = done if resumed else 0
        total = None if response.length is None else done + response.length
        with part.open("ab" if resumed else "wb") as sink:
            progress(remote.file, done, total)
            while block := response.read(_BLOCK):
                sink.write(block)
                done += len(block)
                if done > MOST:
                    raise ConnectionError(f"it sends more than {MOST:,} bytes")
                progress(remote.file, done, total)
    if total is not None and done < total:
        raise ConnectionError(f"the connection broke off after {done} of {total} bytes, which are kept")


def _silent(file: str, done: int, total: int | None) -> None:
    """A progress bar that shows nothing."""
