"""Files of every format that fedflat reads, spoilt as trees, arrays or bytes, and read by the real readers."""

import gzip
import io
import json
import shutil
import struct
import tarfile
import tomllib
import zipfile
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import numpy as np
import tomli_w

from fedflat.federation import partition
from fedflat.federation.formats import read_cifar, read_cinic10, read_idx, read_medmnist, read_svhn
from fedflat.flower.journal import Journal
from fedflat.flower.policy import read_policy
from fedflat.flower.tally import DiskBook
from fedflat.methods import parse
from fedflat.recipe import load
from fedflat.runs import load_sweep, trajectory
from fuzzing.mutators import odd_array, spoilt_bytes, spoilt_json, spoilt_tree
from fuzzing.targets import Target

Arrays = Mapping[str, np.ndarray[Any, Any]]
METHOD = parse("fedavg")


class File:
    """One file, which `spoilt` writes anew for each case and `read` reads."""

    share, name = 0.03, "file"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / self.name

    def case(self, chance: Random) -> str:
        self.path.write_bytes(self.spoilt(chance))
        self.read(self.path)
        return "result"

    def spoilt(self, chance: Random) -> bytes:
        raise NotImplementedError

    def read(self, path: Path) -> None:
        raise NotImplementedError


MONSTERS = [b"x=" + b"[" * 50_000, b"a." * 50_000 + b"b=1", b"x=" + b"9" * 6000, b"\xff", b"x='" + b"y" * 10**6]


def spoilt_toml(chance: Random, text: str) -> bytes:
    """A TOML text: of a spoilt tree, or itself spoilt."""
    if chance.random() < 0.7:
        try:
            return tomli_w.dumps(spoilt_tree(chance, tomllib.loads(text))).encode("utf-8", "surrogatepass")
        except (TypeError, AttributeError, RecursionError, ValueError):  # TOML has no null, and a table at the top
            pass
    if chance.random() < 0.05:
        return chance.choice(MONSTERS)
    return spoilt_bytes(chance, text.encode())


class RecipeFile(File):
    """A recipe: its fields, and the grammar of its method."""

    share, name = 0.06, "recipe.toml"
    texts: ClassVar = [load(name).to_toml() for name in ("default", "smoo", "sol", "man")]

    def spoilt(self, chance: Random) -> bytes:
        return spoilt_toml(chance, chance.choice(self.texts))

    def read(self, path: Path) -> None:
        parse(load(path).method)


class SweepFile(File):
    """A sweep of recipes."""

    share, name = 0.05, "sweep.toml"
    text = """
preset = "sol"
[local]
lr = 0.1
[grid]
method = ["fedavg", "fedsam(0.1)"]
seed = [0, 1]
"split.alpha" = [0.1, 0.5]
"""

    def spoilt(self, chance: Random) -> bytes:
        return spoilt_toml(chance, self.text)

    def read(self, path: Path) -> None:
        load_sweep(path)


class PolicyFile(File):
    """A client's policy."""

    share, name = 0.05, "policy.toml"
    text = """
recipe = "sha256:00"
code = ["a.b:C"]
ledger = "x"
[answers]
train = 5
hessian = 0
curvature = 2
min_samples = 3
[privacy]
part = "local_dp"
clip = 0.5
noise = 8.0
epsilon = 10.0
delta = 1e-5
"""

    def spoilt(self, chance: Random) -> bytes:
        return spoilt_toml(chance, self.text)

    def read(self, path: Path) -> None:
        read_policy(path)


class LedgerFile(File):
    """A client's ledger."""

    share, name = 0.06, "client-0.json"
    tree: ClassVar = {"answers": {"train": 3}, "refused": {"hessian": 1}, "spent": 0.5, "recipes": {"f" * 16: "0" * 64},
                      "last": "x"}  # fmt: skip

    def spoilt(self, chance: Random) -> bytes:
        return spoilt_json(chance, self.tree)

    def read(self, path: Path) -> None:
        path.chmod(0o600)  # a ledger that others can open is refused before it is read
        with DiskBook(path.parent, 0).opened() as tally:
            tally.agree("e" * 16, "1" * 64)
            tally.spend(read_policy(None), "train", METHOD)


class JournalFile(File):
    """The journal of a deployment's server."""

    share, name = 0.06, "deployment.json"
    tree: ClassVar = {"run": "f" * 16, "sizes": {"0": 5, "1": 7}, "marks": {"0": [[3, "0" * 64]]}, "discarded": 0}

    def spoilt(self, chance: Random) -> bytes:
        return spoilt_json(chance, self.tree)

    def read(self, path: Path) -> None:
        journal = Journal(path.parent)
        assert all(type(n) is int and n > 0 for n in journal.sizes.values())
        journal.mark(0, 9)
        journal.start(2)


def npz(arrays: Arrays) -> bytes:
    """The bytes of an .npz file."""
    packed = io.BytesIO()
    np.savez(packed, **dict(arrays))
    return packed.getvalue()


def spoilt_npz(chance: Random, arrays: Arrays) -> bytes:
    """An .npz file with one array spoilt, gone or under another name; or its bytes spoilt."""
    if chance.random() < 0.4:
        return spoilt_bytes(chance, npz(arrays))
    arrays, name, how = dict(arrays), chance.choice([*arrays]), chance.randrange(6)
    if how == 0:
        del arrays[name]
    elif how == 1:
        arrays["other"] = arrays.pop(name)
    else:
        arrays[name] = odd_array(chance, arrays[name]) if arrays[name].dtype.kind != "U" else np.zeros(3)
    return npz(arrays)


class SplitFile(File):
    """A saved partition."""

    share, name = 0.06, "split.npz"
    arrays: ClassVar = {"indices": np.arange(30), "offsets": np.array([0, 10, 20, 30])}

    def spoilt(self, chance: Random) -> bytes:
        return spoilt_npz(chance, self.arrays)

    def read(self, path: Path) -> None:
        shards = partition.load(path)
        assert shards and all(shard.dtype.kind in "iu" for shard in shards)


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


class TrajectoryFile(File):
    """A recorded trajectory."""

    share, name = 0.03, "trajectory.npz"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        arrays = {"initial": np.zeros(6), "weights": np.zeros((2, 6)), "participants": np.ones((2, 2), np.int64),
                  "inputs_0": np.zeros((3, 2)), "inputs_1": np.zeros((3, 2)), "labels_0": np.arange(3) % 2,
                  "labels_1": np.arange(3) % 2}  # fmt: skip
        self.arrays = {**arrays, "recipe": np.array("{}")}

    def spoilt(self, chance: Random) -> bytes:
        return spoilt_npz(chance, self.arrays)

    def read(self, path: Path) -> None:
        trajectory.check_arrays(trajectory.read(path), 6)


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

    share, name = 0.05, "train_32x32.mat"

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

    share, name = 0.04, "cifar.tar.gz"
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

    share, name = 0.04, "cinic.zip"

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


class RunFile(File):
    """A file of a run's directory, read by those who read it."""

    share, name = 0.05, "run"
    files: tuple[str, ...] = ()

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        from fuzzing.runs import small_run

        self.sound = small_run(folder / "sound")
        self.contents = {name: (self.sound / name).read_bytes() for name in self.files}
        shutil.copytree(self.sound, self.path)

    def case(self, chance: Random) -> str:
        from fuzzing.runs import readers

        name = chance.choice(self.files)
        (self.path / name).write_bytes(self.of(chance, name, self.contents[name]))
        try:
            return chance.choice(readers(self.files))(self.path)
        finally:
            for each, content in self.contents.items():
                (self.path / each).write_bytes(content)

    def of(self, chance: Random, name: str, content: bytes) -> bytes:
        if name.endswith(".safetensors"):
            return spoilt_tensors(chance, content)
        if name.endswith(".toml"):
            return spoilt_toml(chance, content.decode())
        if name.endswith(".jsonl"):
            lines = content.splitlines()
            place = chance.randrange(len(lines))
            lines[place] = spoilt_json(chance, json.loads(lines[place]))
            return b"\n".join(lines) + chance.choice([b"\n", b""])
        return spoilt_json(chance, json.loads(content))


def spoilt_tensors(chance: Random, content: bytes) -> bytes:
    """A safetensors file with another header, or spoilt bytes."""
    if chance.random() < 0.4:
        return spoilt_bytes(chance, content)
    length = int.from_bytes(content[:8], "little")
    header = spoilt_json(chance, json.loads(content[8 : 8 + length]))
    return len(header).to_bytes(8, "little") + header + content[8 + length :]


class CheckpointFile(RunFile):
    """A checkpoint: its manifest, forged or damaged, and its tensors."""

    share = 0.05

    def __init__(self, folder: Path) -> None:
        self.files = ("checkpoints/00000002.json", "checkpoints/00000002.server.safetensors",
                      "checkpoints/00000002.memory.0.safetensors")  # fmt: skip
        super().__init__(folder)

    def of(self, chance: Random, name: str, content: bytes) -> bytes:
        spoilt = super().of(chance, name, content)
        if chance.random() < 0.6:
            from fuzzing.runs import resealed

            return resealed(self.path, name, spoilt)
        return spoilt


class MetricsFile(RunFile):
    """The records of a run's rounds."""

    share, files = 0.05, ("metrics.jsonl",)


class ModelFile(RunFile):
    """A run's model, summary and recipe."""

    share, files = 0.05, ("model.safetensors", "summary.json", "recipe.toml")

    def of(self, chance: Random, name: str, content: bytes) -> bytes:
        spoilt = super().of(chance, name, content)
        if name == "model.safetensors" and chance.random() < 0.7:
            from fuzzing.runs import with_model

            with_model(self.path, spoilt)
        return spoilt


FILES: dict[str, type[Target]] = {
    "recipe": RecipeFile,
    "sweep": SweepFile,
    "policy": PolicyFile,
    "ledger": LedgerFile,
    "deployment.json": JournalFile,
    "split": SplitFile,
    "npz": MedmnistFile,
    "trajectory": TrajectoryFile,
    "idx": IdxFile,
    "gzip": GzipFile,
    "mat": MatFile,
    "tar": TarFile,
    "zip": ZipFile,
    "checkpoint": CheckpointFile,
    "metrics": MetricsFile,
    "model": ModelFile,
}
