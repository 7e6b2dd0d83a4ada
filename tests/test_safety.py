"""Nothing that the package reads can run code, and a disk that fails takes nothing with it."""

import ast
import errno
import hashlib
import io
import json
import os
import pickle
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

import fedflat
from fedflat import FedflatError, federate, train
from fedflat.errors import RunError
from fedflat.files import write_whole
from fedflat.recipe import load
from fedflat.runs.build import prepare
from fedflat.runs.experiment import execute
from fedflat.runs.folder import read_model

SOURCE = Path(fedflat.__file__).parent
MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
NAMES = {"eval", "exec", "torch.load", "torch.serialization.load", "pandas.read_pickle", "allow_pickle"}
NAMES |= {f"yaml.{name}" for name in ("load", "load_all", "full_load", "full_load_all", "unsafe_load")}


def offences(source: str) -> list[str]:
    """What a source uses that can run code from a file."""
    nodes = [*ast.walk(ast.parse(source))]
    known = {short: full for node in nodes for short, full in _imported(node).items()}
    uses = [use for node in nodes for use in [*_imported(node).values(), _used(node, known)]]
    return [use for use in uses if use in NAMES or use.partition(".")[0] in MODULES]


def _imported(node: ast.AST) -> dict[str, str]:
    """The names that an import makes known, each with what it stands for."""
    match node:
        case ast.Import(names=names):
            return {a.asname or a.name: a.name for a in names}
        case ast.ImportFrom(module=module, names=names):
            return {a.asname or a.name: f"{module}.{a.name}" for a in names}
    return {}


def _used(node: ast.AST, known: dict[str, str]) -> str:
    match node:
        case ast.Name() | ast.Attribute():
            return _dotted(node, known)
        case ast.Call(func=called, args=[ast.Constant(value=str(module)), *_]):
            return module if _dotted(called, known).endswith(("import_module", "__import__")) else ""
        case ast.keyword(arg="allow_pickle", value=value):
            return "" if isinstance(value, ast.Constant) and value.value is False else "allow_pickle"
    return ""


def _dotted(node: ast.AST, known: dict[str, str]) -> str:
    """A name in full, whatever it was imported as."""
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value, known)}.{node.attr}"
    return known.get(node.id, node.id) if isinstance(node, ast.Name) else ""


def test_no_file_of_the_package_can_run_what_it_reads():
    files = sorted(SOURCE.rglob("*.py"))
    assert SOURCE / "runs/checkpoint.py" in files
    assert {str(file): offences(file.read_text("utf-8")) for file in files} == {str(file): [] for file in files}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import pickle as harmless",
        "from pickle import loads",
        "def f():\n    from joblib import load",
        "import dill.source",
        "importlib.import_module('pickle')",
        "__import__('marshal')",
        "eval('1')",
        "run = exec",
        "import torch\ntorch.load(path)",
        "import torch as t\nt.load(path)",
        "from torch import load\nload(path)",
        "from torch import serialization as s\ns.load(path)",
        "import yaml\nyaml.load(text, yaml.Loader)",
        "np.load(path, allow_pickle=True)",
        "np.load(path, allow_pickle=trusted)",
    ],
)
def test_the_scan_sees(source):
    assert offences(source)


@pytest.mark.parametrize(
    "source",
    [
        "import ast\nast.literal_eval(text)",
        "model.eval()",
        "np.load(path, allow_pickle=False)",
        "import yaml\nyaml.safe_load(text)",
        "from safetensors.torch import load\nload(content)",
        "from fedflat.recipe import load\nload(path)",
        "'pickle is only a word here'",
    ],
)
def test_the_scan_lets_pass(source):
    assert not offences(source)


class Bomb:
    """What would leave a file behind if it were unpickled."""

    def __init__(self, fuse: Path) -> None:
        self._fuse = fuse

    def __reduce__(self):
        return Path.touch, (self._fuse,)


def test_the_bomb_would_go_off(tmp_path):
    pickle.loads(pickle.dumps(Bomb(tmp_path / "fuse")))
    assert (tmp_path / "fuse").exists()


def test_a_pickle_under_the_name_of_a_model_is_refused_and_does_not_run(tmp_path):
    train(federate("digits", "iid", 2), rounds=1, engine="inline", out=tmp_path, model_hidden=[8])
    bomb = pickle.dumps(Bomb(tmp_path / "fuse"))
    (tmp_path / "model.safetensors").write_bytes(bomb)
    with pytest.raises(FedflatError, match=r"model\.safetensors: is not the model that summary\.json describes"):
        read_model(tmp_path)
    forged = json.loads((tmp_path / "summary.json").read_text()) | {"model_sha256": hashlib.sha256(bomb).hexdigest()}
    (tmp_path / "summary.json").write_text(json.dumps(forged))
    with pytest.raises(FedflatError, match=r"model\.safetensors: not a readable safetensors file"):
        read_model(tmp_path)
    assert not (tmp_path / "fuse").exists()


def test_pickled_objects_in_a_split_are_refused_and_do_not_run(tmp_path):
    np.savez(tmp_path / "split.npz", np.array([Bomb(tmp_path / "fuse")], dtype=object))
    with pytest.raises(FedflatError, match=r"split\.npz"):
        federate("digits", str(tmp_path / "split.npz"))
    assert not (tmp_path / "fuse").exists()


TINY = ["method=scaffold", "model.hidden=[8]", "split.clients=6", "server.cohort=2", "server.rounds=2", "local.steps=2",
        "checkpoint.every=1", "engine=inline"]  # fmt: skip
ERRORS = (errno.ENOSPC, errno.EIO, errno.EROFS, errno.EACCES)
outcome = runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "crash.py"))["outcome"]


def settle(folder, resume=False):
    problem = prepare(load(None, TINY))
    execute(problem, folder, resume=resume, warn=pytest.fail)


class Disk:
    """A disk that takes so many steps (a write, a sync, a renaming) in a folder, and then fails for good.

    A write that fails has put half of its bytes there.
    """

    def __init__(self, patch, folder, steps=10**6, number=errno.EIO):
        self.taken, self._steps, self._number = 0, steps, number
        replace, fsync, opened, fdopen = os.replace, os.fsync, Path.open, os.fdopen
        disk = self

        class File(io.FileIO):
            def write(self, content):
                if disk.taken >= steps:
                    super().write(content[: len(content) // 2])
                disk.step()
                return super().write(content)

        def open_(path, mode="r", buffering=-1, **rest):
            if folder not in path.parents or not {*mode} & {*"w+"}:
                return opened(path, mode, buffering, **rest)
            file = File(path, mode.replace("b", ""))
            return file if buffering == 0 else io.BufferedWriter(file)

        def fdopen_(descriptor, mode="r", *rest):
            return io.BufferedWriter(File(descriptor, "w")) if mode == "wb" else fdopen(descriptor, mode, *rest)

        patch.setattr(Path, "open", open_)
        patch.setattr(os, "fdopen", fdopen_)
        patch.setattr("fedflat.files.FileIO", File)
        patch.setattr(os, "fsync", lambda file: self.step() or fsync(file))
        patch.setattr(os, "replace", lambda *names: self.step() or replace(*names))

    def step(self):
        if self.taken >= self._steps:
            raise OSError(self._number, os.strerror(self._number))
        self.taken += 1


def test_a_file_has_its_old_content_until_the_new_one_is_on_the_disk(tmp_path, monkeypatch):
    path, seen, fsync = tmp_path / "file", [], os.fsync
    path.write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", lambda file: seen.append(path.read_bytes()) or fsync(file))
    write_whole(path, b"new")
    assert seen == [b"old", b"new"]  # when its bytes are synced, and when its name is


def check_whole(folder):
    """Every file that bears its final name can be read from beginning to end, and nothing else lies about."""
    for path in folder.rglob("*"):
        assert path.name == ".lock" or not path.name.startswith(".")
        if path.suffix == ".safetensors":
            load_file(path)
        elif path.suffix == ".json":
            json.loads(path.read_text())
        elif path.suffix == ".jsonl":
            assert all(json.loads(line)["cohort"] for line in path.read_text().splitlines())


def test_a_disk_that_fails_at_any_step_stops_the_run_in_one_sentence_and_loses_nothing(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        disk = Disk(patch, tmp_path / "whole")
        settle(tmp_path / "whole")
    assert disk.taken > 30
    for steps in range(disk.taken):
        folder, number = tmp_path / str(steps), ERRORS[steps % len(ERRORS)]
        with pytest.MonkeyPatch.context() as patch:
            Disk(patch, folder, steps, number)
            with pytest.raises(RunError, match=rf"^{folder}.*: cannot be written \({os.strerror(number)}\); "):
                settle(folder)
        check_whole(folder)
        settle(folder, resume=True)
        assert outcome(folder) == outcome(tmp_path / "whole")


ON_A_DISK = """
import shutil, subprocess, sys
from pathlib import Path
from fedflat.runs.manifest import verified
from fedflat.errors import RunError
from fedflat.runs.build import prepare
from fedflat.recipe import load
from fedflat.runs.experiment import execute

def mount(options):
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(disk)], check=True)

def attempt(*more):
    problem = prepare(load(None, [*settings, *more]))
    try:
        execute(problem, disk / "run", resume=True)
    except RunError as error:
        print(error)

disk, copy, settings = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
mount("size=40k")
attempt()
verified(max(disk.glob("run/checkpoints/*.json")))
mount("remount,size=1m")
attempt()
shutil.copytree(disk, copy)
mount("remount,ro")
attempt("server.rounds=9")
"""


def test_a_real_disk_that_is_full_or_read_only_does_the_same(tmp_path):
    disk, alone = tmp_path / "disk", ["unshare", "--map-root-user", "--mount"]
    disk.mkdir()
    attempt = [*alone, "mount", "-t", "tmpfs", "none", disk]
    if not shutil.which("unshare") or subprocess.run(attempt, capture_output=True, check=False).returncode:
        pytest.skip("no disk can be mounted here")
    script = [*alone, sys.executable, "-c", ON_A_DISK, disk, tmp_path / "copy", *TINY]
    done = subprocess.run(script, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    full, closed = done.stdout.splitlines()
    assert full.startswith(f"{disk}/run") and "cannot be written (No space left on device); " in full
    assert closed == f"{disk}/run: cannot be written (Read-only file system); choose another --out"
    settle(tmp_path / "whole")
    assert outcome(tmp_path / "copy/run") == outcome(tmp_path / "whole")
