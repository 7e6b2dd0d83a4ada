"""A run on disk: its recipe, metrics and model. Files are written atomically."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections import Counter
from collections.abc import Callable
from importlib.metadata import version
from io import FileIO
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load as from_safetensors
from safetensors.torch import save as safetensors_bytes
from torch import Tensor, nn

from fedflat.errors import RecipeError, RunError
from fedflat.files import changeable, private_directory, read_whole, write_whole, written_to
from fedflat.models import Network
from fedflat.recipe import Recipe, read_table, validated
from fedflat.runs.lock import RunLock
from fedflat.runs.record import read_record, read_summary

Record = dict[str, Any]
WHOLE = ("recipe.toml", "model.safetensors", "summary.json")
GO_ON = "make room, then `fedflat resume` it"
DAMAGED = "metrics.damaged.jsonl"


class RunFolder:
    """The directory of a running experiment, to which only this process writes until it is closed.

    recipe.toml is written at the start, metrics.jsonl grows round by round, and the model and summary.json are written
    at the end.
    """

    def __init__(
        self,
        path: Path,
        recipe: Recipe,
        resume: bool = False,
        completed: Callable[[Recipe], Recipe] = lambda recipe: recipe,
        lock: RunLock | None = None,
        back_to: int | None = None,
    ) -> None:
        """Start or resume a run.

        Args:
            path: the run's directory.
            recipe: the recipe of the run, with every default filled in.
            resume: whether the directory may already hold rounds of this run.
            completed: fills in the defaults of a recipe written by an earlier version.
            lock: a lock that the caller already holds.
            back_to: the round that a resumed run returns to.
        """
        self.path, self.recipe = path, recipe
        self._refuse(resume, back_to, completed)
        with written_to(path, "choose another --out"):
            private_directory(path)
            self._lock, self._own = lock or RunLock(path), lock is None
        try:
            self._refuse(resume, back_to, completed)  # again: another process may have written before it unlocked
            with written_to(path, "choose another --out"):
                self._metrics = self._begun()
        except BaseException:
            self._let_go()
            raise
        self._digest = hashlib.sha256()

    def _refuse(self, resume: bool, back_to: int | None, completed: Callable[[Recipe], Recipe]) -> None:
        if not resume:
            refuse_taken(self.path)
        elif (self.path / "recipe.toml").exists():
            refuse_other(self.path, self.recipe, completed(read_recipe(self.path)), back_to)

    def _let_go(self) -> None:
        if self._own:
            self._lock.close()

    def _begun(self) -> FileIO:
        """The metrics file, after removing half-written files of a killed process."""
        for left in (left for name in WHOLE for left in self.path.glob(f".{name}.[0-9]*")):
            left.unlink()
        write_whole(self.path / "recipe.toml", self.recipe.to_toml().encode())
        return self._opened()

    def _opened(self) -> FileIO:
        """Open the metrics to change them in place. If the file has another hard link, that keeps the old content."""
        path = self.path / "metrics.jsonl"
        file = changeable(path)
        if os.fstat(file.fileno()).st_nlink > 1:
            file.close()
            write_whole(path, read_whole(path))
            file = changeable(path)
        return file

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._metrics.close()
        self._let_go()

    def append(self, record: Record) -> None:
        """Append a record as a line, all of it or nothing."""
        self._check()
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

    def _check(self) -> None:
        """Check that the directory is still ours."""
        with written_to(self.path, GO_ON):
            self._lock.check()

    def mark(self) -> Record:
        """Sync the metrics to disk and return their current extent, for a checkpoint."""
        with written_to(self.path, GO_ON):
            os.fsync(self._metrics.fileno())
        return {"bytes": self._metrics.tell(), "sha256": self._digest.hexdigest()}

    def agrees(self, mark: Record) -> bool:
        """Whether the metrics on disk still begin as they did at the mark."""
        before = self._before(mark)
        return len(before) == int(mark["bytes"]) and hashlib.sha256(before).hexdigest() == str(mark["sha256"])

    def rewind(self, mark: Record) -> list[Record]:
        """Cut the metrics off after a mark, and return the records before it."""
        before = self._before(mark)
        with written_to(self.path, GO_ON):
            self._metrics.truncate()
        self._digest = hashlib.sha256(before)
        return [json.loads(line) for line in before.splitlines()]

    def salvage(self, round: int) -> list[Record]:
        """Recover the readable records of damaged metrics up to a round; the damaged file is kept as `DAMAGED`."""
        content = read_whole(self.path / "metrics.jsonl")
        lines = dict[int, bytes]()
        for line in content.splitlines():
            record = read_record(line)
            if record and record["round"] <= round:
                lines.setdefault(record["round"], line)
        kept = b"".join(lines[at] + b"\n" for at in sorted(lines))
        with written_to(self.path, GO_ON):
            write_whole(self.path / DAMAGED, content)
            write_whole(self.path / "metrics.jsonl", kept)
            self._metrics.close()
            self._metrics = self._opened()
        self._metrics.seek(len(kept))
        self._digest = hashlib.sha256(kept)
        return [json.loads(line) for line in kept.splitlines()]

    def _before(self, mark: Record) -> bytes:
        try:
            self._metrics.seek(0)
            return self._metrics.read(mark["bytes"])
        except OSError as error:
            raise RunError(
                f"{self._metrics.name}: cannot be read ({error.strerror}); start again in another directory"
            ) from None

    def finish(self, network: Network, summary: Record) -> None:
        self._check()
        tensors = whole_model(network.module)
        # One key only: safetensors writes several keys in no fixed order, and equal runs must give equal files.
        blob = safetensors_bytes(tensors, {"fedflat": json.dumps({"model": self.recipe.model.name})})
        versions = {"fedflat": version("fedflat"), "torch": torch.__version__, "python": platform.python_version()}
        digest = hashlib.sha256(blob).hexdigest()
        digests = {"model_sha256": digest, "base_sha256": network.base_digest}
        text = json.dumps({**summary, **parameters(network.module), **digests, "versions": versions}, indent=2)
        with written_to(self.path, GO_ON):
            write_whole(self.path / "model.safetensors", blob)
            write_whole(self.path / "summary.json", text.encode() + b"\n")


def parameters(module: nn.Module) -> Record:
    """Return how many parameters a module has, and how many of them are trained."""
    sizes = [(each.numel(), each.requires_grad) for each in module.parameters()]
    return {"parameters_trained": sum(n for n, trained in sizes if trained), "parameters": sum(n for n, _ in sizes)}


def whole_model(module: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of a model with its frozen weights; a tied tensor has a copy for each of its names."""
    tensors = {name: tensor.detach().contiguous() for name, tensor in module.state_dict().items()}
    places = Counter(tensor.data_ptr() for tensor in tensors.values())
    return {name: tensor.clone() if places[tensor.data_ptr()] > 1 else tensor for name, tensor in tensors.items()}


def refuse_taken(path: Path) -> None:
    """Refuse to overwrite a directory that holds a round of a run."""
    metrics = path / "metrics.jsonl"
    if metrics.exists() and metrics.stat().st_size:
        raise RunError(f"{path}: already holds a run; continue it with `fedflat resume {path}` or choose another --out")


def refuse_other(path: Path, recipe: Recipe, begun: Recipe, back_to: int | None = None) -> None:
    """Refuse to resume a run with another recipe than it began with."""
    metrics = path / "metrics.jsonl"
    done = read_whole(metrics).count(b"\n") if metrics.exists() else 0
    done = done if back_to is None else min(done, back_to)
    if done > recipe.server.rounds:
        raise RunError(f"{path}: has done {done} rounds already; set server.rounds to that or more")
    if begun.task is None:  # runs of 0.1 are classifications and do not say so
        evaluation = begun.evaluation.model_copy(update={"metric": begun.metric})
        begun = begun.model_copy(update={"task": "classification", "evaluation": evaluation})
    before, now = begun.essentials(), recipe.essentials()
    for section, old in before.items():
        new, name = now[section], section
        if old != new and isinstance(old, dict):
            field = next(key for key in {**old, **new} if old.get(key) != new.get(key))
            old, new, name = old.get(field), new.get(field), f"{section}.{field}"
        if old != new:
            raise RunError(
                f"{path}: was begun with {name} = {old!r}, not {new!r}; resume it as it was, or start a new run"
            )


def refuse_other_base(path: Path, recorded: str, base: str) -> None:
    """Refuse to continue on another base, by comparing the digests of the frozen weights."""
    if recorded != base:
        recorded = recorded if isinstance(recorded, str) else "of no known form"
        was, now = (f"the base {digest[:12]}…" if digest else "no frozen weights" for digest in (recorded, base))
        raise RunError(
            f"{path}: was trained on {was}, and this model has {now}; "
            "give it the frozen weights that the run began with, or start a new run"
        )


def beside(run: Path, name: str) -> Path:
    """Return where to write a file about a run; for a checkpoint, in the run's directory with the round in its name."""
    return run.parent.parent / f"{run.stem}-{name}" if run.suffix == ".json" else run / name


def read_recipe(directory: Path) -> Recipe:
    """Read the recipe of a run from its directory; for a checkpoint, that of its run.

    Raises:
        RunError: if there is no run, or its recipe cannot be read.
    """
    path = (directory.parent.parent if directory.suffix == ".json" else directory) / "recipe.toml"
    if not path.is_file():
        raise RunError(f"{directory}: no run is here (no recipe.toml); give a directory that `fedflat run` wrote")
    try:
        # Not `recipe.load`: a run's recipe is complete, and the default recipe must not fill in missing values.
        table = read_table(path)
    except RecipeError as error:
        raise RunError(str(error)) from None
    try:
        return validated(table)
    except RecipeError as error:
        raise RecipeError(f"{path}: {error}") from None


def read_model(directory: Path) -> dict[str, Tensor]:
    """Read the model of a finished run."""
    path = Path(directory) / "model.safetensors"
    if not path.is_file():
        raise RunError(
            f"{directory}: the run is not finished (no model.safetensors); let `fedflat resume {directory}` finish it, "
            "or give one of its checkpoints"
        )
    content = read_whole(path)
    if hashlib.sha256(content).hexdigest() != read_summary(Path(directory))["model_sha256"]:
        raise RunError(
            f"{path}: is not the model that summary.json describes (model_sha256); "
            f"let `fedflat resume {directory}` write it again, or take it from a backup"
        )
    try:
        return from_safetensors(content)
    except SafetensorError as error:
        raise RunError(f"{path}: not a readable safetensors file ({error})") from None
