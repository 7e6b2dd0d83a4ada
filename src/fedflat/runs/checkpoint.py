"""Checkpoints: everything that a run needs to resume as if it had not been interrupted.

A checkpoint is a JSON manifest that names its files with their SHA-256; the files are written once and never changed.

    00000012.json                       round, recipe, metrics so far, the digest of the frozen weights, and the
                                        digests of the files below
    00000012.server.safetensors         the global trained weights and the rest of the server's state
    00000012.memory.0.safetensors       memory of the clients that changed since the last checkpoint; the memory
    00000010.memory.0.safetensors       of the others stays in the file where it was last written

All random draws depend only on the seed, the round and the client, so the round is the only counter. The manifest is
written last: without it the other files are ignored, and once it exists they are all on disk.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from safetensors.numpy import save as safetensors_bytes

from fedflat.errors import RunError
from fedflat.files import private_directory, sync_directory, write_whole, written_to
from fedflat.local import Vectors
from fedflat.recipe import Recipe
from fedflat.rounds import ClientMemory, ServerState
from fedflat.runs.folder import Record
from fedflat.runs.manifest import (
    SCHEMA,
    Checkpoint,
    DamagedError,
    files_of,
    is_ours,
    manifest_text,
    manifests,
    read_manifest,
    verified,
    well_formed,
)

SHARE = 0.03  # largest share of a run's time spent on checkpoints if no interval is set
BUNDLE = 64 * 2**20  # bytes of client memory per file, unless a single client needs more


class Checkpoints:
    """The checkpoints of a run: the last two, the best, and one for every n-th round if the recipe says so."""

    def __init__(self, directory: Path, recipe: Recipe, base: str | None = "") -> None:
        """Open the checkpoints of a run.

        `base` is the digest of the model's frozen weights, which must match the checkpoints; None skips the check.
        """
        self._folder = directory / "checkpoints"
        if self._folder.is_symlink():  # it could point to the checkpoints of another run, which would be removed
            raise RunError(f"{self._folder}: is a symbolic link; put the directory itself there")
        self._fingerprint, self._base = fingerprint(recipe), base
        self._every, self._keep = recipe.checkpoint.every, recipe.checkpoint.keep
        self._rank = recipe.rank
        self._begun, self._spent = time.perf_counter(), 0.0
        self._memory: Record = {}
        self._useless: set[Path] = set()

    def due(self, round: int) -> bool:
        """Whether to save after this round: at a fixed interval, or whenever saving has taken little time so far."""
        if self._stays(round):
            return True
        if self._every:
            return round % self._every == 0
        return self._spent <= SHARE * (time.perf_counter() - self._begun)

    def _stays(self, round: int) -> bool:
        return bool(self._keep) and round % self._keep == 0

    def save(self, state: ServerState, memory: ClientMemory | None, metrics: Record, score: float | None) -> None:
        """Save everything that the run needs after a round; it is on disk when this returns.

        `score` is the value of the metric that the recipe follows; it decides which checkpoint is the best.
        """
        begun = time.perf_counter()
        with written_to(self._folder, "the checkpoints before it are whole; make room, then `fedflat resume` the run"):
            if not self._folder.exists():
                private_directory(self._folder)
                sync_directory(self._folder.parent)
            vectors = {f"state.{name}": vector for name, vector in state.vectors.items()}
            tensors = {"weights": state.weights, "buffers": state.buffers, **vectors}
            manifest: Record = {
                "schema": SCHEMA,
                "fedflat": version("fedflat"),
                "round": state.round,
                "recipe": self._fingerprint,
                "base": self._base,
                "accuracy": score,  # or another metric of the task; the name is that of fedflat 0.1
                "metrics": metrics,
                "server": self._write(f"{state.round:08}.server.safetensors", tensors),
                "memory": self._memory_of(memory, state.round) if memory and memory.names else {},
            }
            path = self._folder / f"{state.round:08}.json"
            write_whole(path, manifest_text(manifest))
            self._useless.discard(path)
            self._memory = manifest["memory"]
            if memory:
                memory.changed.clear()
            self._keep_few()
        self._spent += time.perf_counter() - begun

    def _write(self, name: str, tensors: Vectors) -> Record:
        # The same bytes as from safetensors.torch, which leaves reference cycles that accumulate until collected.
        blob = safetensors_bytes({key: tensor.detach().cpu().contiguous().numpy() for key, tensor in tensors.items()})
        write_whole(self._folder / name, blob)
        return {"file": name, "sha256": hashlib.sha256(blob).hexdigest()}

    def _memory_of(self, memory: ClientMemory, round: int) -> Record:
        """Save the clients' memory: new files for clients that changed, existing files for the rest.

        As in a log, outdated rows stay in the old files. When the files hold more than twice the current rows, the
        current rows of the oldest file are also rewritten, and it is removed.
        """
        moving = set(memory.changed)
        kept = {name: {**b, "clients": sorted({*b["clients"]} - moving)} for name, b in self._memory.items()}
        kept = {name: bundle for name, bundle in kept.items() if bundle["clients"]}
        live = len(moving) + sum(len(bundle["clients"]) for bundle in kept.values())
        while kept and len(moving) + sum(bundle["rows"] for bundle in kept.values()) > 2 * live:
            moving |= {*kept.pop(min(kept))["clients"]}
        order, rows = sorted(moving), _rows_of_bundle(memory, moving)
        for number, clients in enumerate(order[i : i + rows] for i in range(0, len(order), rows)):
            with memory.reading(clients) as found:
                vectors = {f"{client}.{name}": v for client, own in found.items() for name, v in own.items()}
                written = self._write(f"{round:08}.memory.{number}.safetensors", vectors)
            kept[written["file"]] = {"sha256": written["sha256"], "rows": len(clients), "clients": clients}
        return kept

    def _keep_few(self) -> None:
        """Remove all but the checkpoints to keep (see the class), and files that no manifest names.

        Checkpoints that this run cannot resume from do not count; they would displace the usable ones.
        """
        found = {}
        for path in {*manifests(self._folder)} - self._useless:
            with suppress(DamagedError):
                if well_formed(manifest := read_manifest(path)):
                    found[path] = manifest
        scored = {path: m["accuracy"] for path, m in found.items() if m.get("accuracy") is not None}
        best = max(scored, key=lambda path: (self._rank(scored[path]), -found[path]["round"]), default=None)
        stay = (path for path, manifest in found.items() if self._stays(manifest["round"]))
        few = {*sorted(found)[-2:], *([best] if best else []), *stay}
        named = {name for path in few for name in files_of(found[path])} | {path.name for path in few}
        for path in self._folder.iterdir():
            if path.name not in named and is_ours(path) and not path.is_dir():
                path.unlink()

    def newest(
        self, usable: Callable[[Record], bool], warn: Callable[[str], None], back_to: int | None = None
    ) -> Checkpoint | None:
        """Return the newest intact checkpoint, preferably one whose mark in the metrics is usable; report the others.

        Args:
            usable: whether a mark agrees with the metrics on disk.
            warn: called with a warning for each checkpoint that is passed over.
            back_to: accept only the checkpoint of this round.

        Returns:
            The checkpoint, or None if there are none.

        Raises:
            RunError: if none of the checkpoints can be used.
        """
        found = sorted(manifests(self._folder), reverse=True)
        if back_to is not None:
            found = [path for path in found if int(path.stem) == back_to] or _no_such_round(found, back_to)
        doubtful: list[Checkpoint] = []
        for path in found:
            try:
                checkpoint = verified(path)
                comparable = checkpoint.manifest["schema"] == SCHEMA
                if comparable and checkpoint.manifest["recipe"] != self._fingerprint:
                    raise DamagedError(f"{path}: is of another recipe than this run's recipe.toml")
            except DamagedError as damage:
                warn(f"{damage}; {'it cannot be gone back to' if back_to else 'the checkpoint before it is taken'}")
                self._useless.add(path)
                continue
            if usable(checkpoint.manifest["metrics"]):
                for other in doubtful:
                    name = self._folder / f"{other.round:08}.json"
                    self._useless.add(name)
                    trouble = f"{name}: metrics.jsonl is not the one that it was written beside"
                    warn(f"{trouble}; the checkpoint before it is taken")
                return self._taken(checkpoint)
            doubtful.append(checkpoint)
        if doubtful:  # its weights are intact; only records of earlier rounds are damaged
            return self._taken(doubtful[0])
        if found:
            raise RunError(
                f"{self._folder}: none of the {len(found)} checkpoints can be used; start again in another directory"
            )
        return None

    def _taken(self, checkpoint: Checkpoint) -> Checkpoint:
        if self._base is not None:
            checkpoint.check_base(self._base)
        self._memory = checkpoint.manifest["memory"]
        return checkpoint

    def forget_after(self, round: int) -> None:
        """Remove the checkpoints after the round that the run has returned to, the newest first."""
        with written_to(self._folder, "make room, then `fedflat resume` the run"):
            for path in sorted(manifests(self._folder), reverse=True):
                if int(path.stem) > round and not path.is_dir():
                    path.unlink()
            sync_directory(self._folder)


def _no_such_round(found: list[Path], round: int) -> list[Path]:
    rounds = ", ".join(str(int(path.stem)) for path in reversed(found))
    raise RunError(f"--from {round}: no checkpoint of that round is kept; there are those of {rounds or 'none'}")


def fingerprint(recipe: Recipe) -> str:
    """Return a digest of everything that the numbers of a run depend on."""
    return hashlib.sha256(json.dumps(recipe.essentials(), sort_keys=True, default=str).encode()).hexdigest()


def _rows_of_bundle(memory: ClientMemory, clients: Iterable[int]) -> int:
    row = next((memory[client] for client in clients), None) or {}
    size = sum(vector.numel() * vector.element_size() for vector in row.values())
    return max(1, BUNDLE // max(size, 1))
