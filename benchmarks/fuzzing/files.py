"""Recipes, policies, ledgers, splits and tables, spoilt as trees, arrays or bytes, and read by the real readers."""

import io
import json
import tomllib
import zipfile
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import numpy as np
import tomli_w

from fedflat.federation import partition
from fedflat.flower.identity import read_agreed
from fedflat.flower.journal import Journal
from fedflat.flower.policy import read_policy
from fedflat.flower.tally import DiskBook
from fedflat.methods import parse
from fedflat.recipe import load
from fedflat.report.pivot import table
from fedflat.runs import load_sweep, trajectory
from fuzzing.mutators import odd_array, odd_header, spoilt_bytes, spoilt_json, spoilt_tree
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

    share, name = 0.06, "sweep.toml"
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


class ResultsFile(File):
    """The results of a sweep, from which tables are made."""

    share, name = 0.03, "results.jsonl"
    rows: ClassVar = [{"method": method, "seed": seed, "split.alpha": 0.1, "scale": "full", "lambda1": 2.5,
                       "accuracy_last": 0.5 + seed / 9,
                       "asked": {"method": method, "seed": seed, "split": {"alpha": 0.1}}}
                      for method in ("fedavg", "fedsam(0.1)") for seed in (0, 1, 2)]  # fmt: skip

    def spoilt(self, chance: Random) -> bytes:
        lines = [json.dumps(row).encode() for row in self.rows]
        place = chance.randrange(len(lines))
        lines[place] = spoilt_json(chance, self.rows[place])
        return b"\n".join(lines)

    def read(self, path: Path) -> None:
        sheet = table(path.parent)
        for form in ("markdown", "latex", "csv", "html"):
            assert sheet.write(form)


class PolicyFile(File):
    """A client's policy."""

    share, name = 0.06, "policy.toml"
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


class AgreedFile(File):
    """The samples that a server agreed on with its clients."""

    share, name = 0.03, "samples.toml"

    def spoilt(self, chance: Random) -> bytes:
        return spoilt_toml(chance, "0 = 120\n1 = 80\n2 = 1000\n")

    def read(self, path: Path) -> None:
        found = read_agreed(path.parent, 3)
        assert found and found.keys() == {0, 1, 2} and all(type(n) is int and n > 0 for n in found.values())


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


def _with_odd_header(chance: Random, arrays: Arrays) -> bytes:
    packed, odd = io.BytesIO(), chance.choice([*arrays])
    with zipfile.ZipFile(packed, "w") as archive:
        for name, array in arrays.items():
            member = io.BytesIO()
            np.save(member, array)
            archive.writestr(f"{name}.npy", odd_header(chance) if name == odd else member.getvalue())
    return packed.getvalue()


def spoilt_npz(chance: Random, arrays: Arrays) -> bytes:
    """An .npz file with one array spoilt, gone or under another name; or its bytes spoilt."""
    if chance.random() < 0.4:
        return spoilt_bytes(chance, npz(arrays))
    if chance.random() < 0.1:
        return _with_odd_header(chance, arrays)
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


class TrajectoryFile(File):
    """A recorded trajectory."""

    share, name = 0.05, "trajectory.npz"

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


FILES: dict[str, type[Target]] = {
    "recipe": RecipeFile,
    "sweep": SweepFile,
    "results.jsonl": ResultsFile,
    "policy": PolicyFile,
    "ledger": LedgerFile,
    "samples.toml": AgreedFile,
    "deployment.json": JournalFile,
    "split": SplitFile,
    "trajectory": TrajectoryFile,
}
