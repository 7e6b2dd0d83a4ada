"""A run on disk: its recipe, its metrics, its model; whatever is written is there as a whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from io import FileIO
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load as from_safetensors
from safetensors.torch import save as safetensors_bytes
from torch import Tensor

from fedflat.errors import RecipeError, RunError
from fedflat.recipe import Recipe, validated
from fedflat.vector import Network

if sys.platform != "win32":
    import fcntl

Record = dict[str, Any]
WHOLE = ("recipe.toml", "model.safetensors", "summary.json")
GO_ON = "make room, then `fedflat resume` it"


class RunFolder:
    """The directory of a run that is going on: this process alone writes there, until it is closed.

    recipe.toml is there at once, metrics.jsonl grows round by round, and the model and summary.json come at the end.
    """

    def __init__(self, path: Path, recipe: Recipe, resume: bool = False) -> None:
        self.path, self.recipe = path, recipe
        if not resume:
            refuse_taken(path)
        elif (path / "recipe.toml").exists():
            refuse_other(path, recipe)
        with written_to(path, "choose another --out"):
            path.mkdir(parents=True, exist_ok=True)
            self._lock = (path / ".lock").open("a")
        try:
            self._claim()
            with written_to(path, "choose another --out"):
                self._metrics = self._begun()
        except BaseException:
            self._lock.close()
            raise
        self._digest = hashlib.sha256()

    def _claim(self) -> None:
        """A record lock: it goes with this process however it ends, and no child inherits it."""
        if sys.platform == "win32":
            return
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RunError(
                f"{self.path}: another process is working on this run; wait for it or choose another --out"
            ) from None

    def _begun(self) -> FileIO:
        """The metrics' file, in a directory without what a process that was killed left half-written."""
        for left in (left for name in WHOLE for left in self.path.glob(f".{name}.[0-9]*")):
            left.unlink()
        write_whole(self.path / "recipe.toml", self.recipe.to_toml().encode())
        (self.path / "metrics.jsonl").touch()
        return (self.path / "metrics.jsonl").open("r+b", buffering=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._metrics.close()
        self._lock.close()

    def append(self, record: Record) -> None:
        """A record as a line: all of it, or none."""
        line = json.dumps(record).encode() + b"\n"
        end, rest = self._metrics.tell(), line
        with written_to(self.path, GO_ON):
            try:
                while rest := rest[self._metrics.write(rest) :]:
                    pass
            except OSError:
                self._metrics.truncate(end)
                raise
        self._digest.update(line)

    def mark(self) -> Record:
        """How far the metrics have come, for a checkpoint; they are on the disk when this returns."""
        with written_to(self.path, GO_ON):
            os.fsync(self._metrics.fileno())
        return {"bytes": self._metrics.tell(), "sha256": self._digest.hexdigest()}

    def agrees(self, mark: Record) -> bool:
        """Whether the metrics on disk begin as they did when the mark was made."""
        before = self._before(mark)
        return len(before) == int(mark["bytes"]) and hashlib.sha256(before).hexdigest() == str(mark["sha256"])

    def rewind(self, mark: Record) -> list[Record]:
        """Cut the metrics off after a mark, and give back the records before it."""
        before = self._before(mark)
        with written_to(self.path, GO_ON):
            self._metrics.truncate()
        self._digest = hashlib.sha256(before)
        return [json.loads(line) for line in before.splitlines()]

    def _before(self, mark: Record) -> bytes:
        try:
            self._metrics.seek(0)
            return self._metrics.read(mark["bytes"])
        except OSError as error:
            raise RunError(f"{self._metrics.name}: cannot be read ({error.strerror}); begin anew elsewhere") from None

    def finish(self, network: Network, summary: Record) -> None:
        tensors = {n: t.detach().contiguous() for n, t in network.module.state_dict().items()}
        # One key only: safetensors writes several in no fixed order, and equal runs shall be equal files.
        blob = safetensors_bytes(tensors, {"fedflat": json.dumps({"model": self.recipe.model.name})})
        versions = {"fedflat": version("fedflat"), "torch": torch.__version__, "python": platform.python_version()}
        digest = hashlib.sha256(blob).hexdigest()
        text = json.dumps({**summary, "model_sha256": digest, "versions": versions}, indent=2)
        with written_to(self.path, GO_ON):
            write_whole(self.path / "model.safetensors", blob)
            write_whole(self.path / "summary.json", text.encode() + b"\n")


@contextmanager
def written_to(path: Path, advice: str) -> Iterator[None]:
    """A disk that is full, broken or closed to us, in one sentence."""
    try:
        yield
    except OSError as error:
        raise RunError(f"{path}: cannot be written ({error.strerror}); {advice}") from None


def refuse_taken(path: Path) -> None:
    """A directory that holds a round of a run is never written over."""
    metrics = path / "metrics.jsonl"
    if metrics.exists() and metrics.stat().st_size:
        raise RunError(f"{path}: already holds a run; go on with it by `fedflat resume {path}` or choose another --out")


def refuse_other(path: Path, recipe: Recipe) -> None:
    """A run goes on with the recipe that it began with, or its numbers would mean nothing."""
    metrics = path / "metrics.jsonl"
    done = read_whole(metrics).count(b"\n") if metrics.exists() else 0
    if done > recipe.server.rounds:
        raise RunError(f"{path}: has done {done} rounds already; set server.rounds to that or more")
    before, now = read_recipe(path).essentials(), recipe.essentials()
    for section, old in before.items():
        new, name = now[section], section
        if old != new and isinstance(old, dict):
            field = next(key for key in {**old, **new} if old.get(key) != new.get(key))
            old, new, name = old.get(field), new.get(field), f"{section}.{field}"
        if old != new:
            raise RunError(f"{path}: was begun with {name} = {old!r}, not {new!r}; resume it as it was, or begin anew")


def write_whole(path: Path, content: bytes) -> None:
    """All or nothing, even if the power goes: written aside, synced, renamed."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with aside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def read_whole(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise RunError(f"{path}: cannot be read ({error.strerror})") from None


def sync_directory(path: Path) -> None:
    """Names, too, reach the disk only when they are synced."""
    if sys.platform == "win32":
        return
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def beside(run: Path, name: str) -> Path:
    """Where something about a run is written; about a checkpoint, in the run's directory with the round in its name."""
    return run.parent.parent / f"{run.stem}-{name}" if run.suffix == ".json" else run / name


def read_recipe(directory: Path) -> Recipe:
    """The recipe of a run, as it lies in its directory; of a checkpoint, that of its run."""
    path = (directory.parent.parent if directory.suffix == ".json" else directory) / "recipe.toml"
    if not path.is_file():
        raise RunError(f"{directory}: no run is here (no recipe.toml); give a directory that `fedflat run` wrote")
    try:
        # Not `recipe.load`: what a run wrote is complete, and the default recipe must not fill in what it left open.
        return validated(tomllib.loads(path.read_text("utf-8")))
    except RecipeError as error:
        raise RecipeError(f"{path}: {error}") from None
    except (OSError, ValueError) as error:
        raise RunError(f"{path}: cannot be read ({error})") from None


def read_model(directory: Path) -> dict[str, Tensor]:
    """The model of a finished run."""
    path = Path(directory) / "model.safetensors"
    if not path.is_file():
        raise RunError(
            f"{directory}: the run is not finished (no model.safetensors); let `fedflat resume {directory}` finish it, "
            "or give one of its checkpoints"
        )
    try:
        return from_safetensors(read_whole(path))
    except SafetensorError as error:
        raise RunError(f"{path}: not a readable safetensors file ({error})") from None
