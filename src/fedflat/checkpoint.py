"""Checkpoints: what a run needs to go on as if nothing had happened.

A checkpoint is a JSON manifest that names its files with their SHA-256; the files are written once and never changed.

    00000012.json                       round, recipe, metrics so far, and the digests of what follows
    00000012.server.safetensors         the global weights and what the server keeps beside them
    00000012.memory.0.safetensors       memory of the clients that changed since the last checkpoint; those of the
    00000010.memory.0.safetensors       others are where they were written last

Everything drawn at random follows from the seed, the round and the client, so the round is the only counter. The
manifest is written last: without it the other files are nothing, and with it they are all on the disk.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from safetensors.numpy import save as safetensors_bytes
from safetensors.torch import load as from_safetensors

from fedflat.errors import RunError
from fedflat.folder import Record, sync_directory, write_whole, written_to
from fedflat.recipe import Recipe
from fedflat.rule import Vectors
from fedflat.state import ServerState
from fedflat.store import Memory

SCHEMA = 1
SHARE = 0.03  # of a run's time, at most, goes into checkpoints that nobody asked for
BUNDLE = 64 * 2**20  # bytes of client memory in one file, as long as more than one client fits in


class DamagedError(Exception):
    """A checkpoint that cannot be used: which of its files, and why."""


@dataclass(frozen=True)
class Checkpoint:
    """A manifest whose files have been checked."""

    folder: Path
    manifest: Record

    @property
    def round(self) -> int:
        return int(self.manifest["round"])

    def state(self, first: ServerState) -> ServerState:
        """The server's state, in place of the one before round 0."""
        tensors = from_safetensors((self.folder / self.manifest["server"]["file"]).read_bytes())
        tensors = {name: tensor.to(first.weights.device) for name, tensor in tensors.items()}
        vectors = {name: tensors[f"state.{name}"] for name in first.vectors}
        weights, buffers = tensors["weights"], tensors["buffers"]
        return replace(first, weights=weights, buffers=buffers, vectors=vectors, round=self.round)

    def memory(self) -> Iterator[tuple[int, Vectors]]:
        """Each client that has taken part, with what it keeps."""
        for name, bundle in self.manifest["memory"].items():
            tensors = from_safetensors((self.folder / name).read_bytes())
            for client in bundle["clients"]:
                start = f"{client}."
                yield client, {key.removeprefix(start): t for key, t in tensors.items() if key.startswith(start)}


class Checkpoints:
    """Those of a run: the last two, and the best."""

    def __init__(self, directory: Path, recipe: Recipe) -> None:
        self._folder = directory / "checkpoints"
        self._fingerprint = fingerprint(recipe)
        self._every = recipe.checkpoint.every
        self._begun, self._spent = time.perf_counter(), 0.0
        self._memory: Record = {}
        self._useless: set[Path] = set()

    def due(self, round: int) -> bool:
        """Whether to save after this round: every so many, or whenever saving has cost little of the time so far."""
        if self._every:
            return round % self._every == 0
        return self._spent <= SHARE * (time.perf_counter() - self._begun)

    def save(self, state: ServerState, memory: Memory | None, metrics: Record, accuracy: float | None) -> None:
        """All that the run is after a round, on the disk when this returns."""
        begun = time.perf_counter()
        with written_to(self._folder, "the checkpoints before it are whole; make room, then `fedflat resume` the run"):
            if not self._folder.exists():
                self._folder.mkdir()
                sync_directory(self._folder.parent)
            vectors = {f"state.{name}": vector for name, vector in state.vectors.items()}
            tensors = {"weights": state.weights, "buffers": state.buffers, **vectors}
            manifest: Record = {
                "schema": SCHEMA,
                "fedflat": version("fedflat"),
                "round": state.round,
                "recipe": self._fingerprint,
                "accuracy": accuracy,
                "metrics": metrics,
                "server": self._write(f"{state.round:08}.server.safetensors", tensors),
                "memory": self._memory_of(memory, state.round) if memory and memory.names else {},
            }
            path = self._folder / f"{state.round:08}.json"
            write_whole(path, _text(manifest))
            self._useless.discard(path)
            self._memory = manifest["memory"]
            if memory:
                memory.changed.clear()
            self._keep_few()
        self._spent += time.perf_counter() - begun

    def _write(self, name: str, tensors: Vectors) -> Record:
        # The same bytes as from safetensors.torch, which leaves cycles behind that pile up until they are collected.
        blob = safetensors_bytes({key: tensor.detach().cpu().contiguous().numpy() for key, tensor in tensors.items()})
        write_whole(self._folder / name, blob)
        return {"file": name, "sha256": hashlib.sha256(blob).hexdigest()}

    def _memory_of(self, memory: Memory, round: int) -> Record:
        """The clients' memory: new files for those that changed, the old ones for the rest.

        As in a log, rows that were written anew stay in the old files. When these hold more than twice the rows that
        count, the oldest file's are written anew too, and it goes.
        """
        moving = set(memory.changed)
        kept = {name: {**b, "clients": sorted({*b["clients"]} - moving)} for name, b in self._memory.items()}
        kept = {name: bundle for name, bundle in kept.items() if bundle["clients"]}
        live = len(moving) + sum(len(bundle["clients"]) for bundle in kept.values())
        while kept and len(moving) + sum(bundle["rows"] for bundle in kept.values()) > 2 * live:
            moving |= {*kept.pop(min(kept))["clients"]}
        order, rows = sorted(moving), _rows_of_bundle(memory, moving)
        for number, clients in enumerate(order[i : i + rows] for i in range(0, len(order), rows)):
            vectors = {f"{client}.{name}": v for client in clients for name, v in (memory[client] or {}).items()}
            written = self._write(f"{round:08}.memory.{number}.safetensors", vectors)
            memory.release(clients)
            kept[written["file"]] = {"sha256": written["sha256"], "rows": len(clients), "clients": clients}
        return kept

    def _keep_few(self) -> None:
        """Remove all but the last two checkpoints and the best, and what no manifest names.

        Those that this run could not go on from do not count: they would push out the ones that it can.
        """
        manifests = {}
        for path in {*_manifests(self._folder)} - self._useless:
            with suppress(DamagedError):
                manifests[path] = _read(path)
        scored = [path for path, m in manifests.items() if m.get("accuracy") is not None]
        best = max(scored, key=lambda path: (manifests[path]["accuracy"], -manifests[path]["round"]), default=None)
        few = {*sorted(manifests)[-2:], *([best] if best else [])}
        named = {name for path in few for name in _files(manifests[path])} | {path.name for path in few}
        for path in self._folder.iterdir():
            if path.name not in named:
                path.unlink()

    def newest(self, usable: Callable[[Record], bool], warn: Callable[[str], None]) -> Checkpoint | None:
        """The newest checkpoint that is whole, and whose mark in the metrics is usable; the others are named."""
        found = sorted(_manifests(self._folder), reverse=True)
        for path in found:
            try:
                checkpoint = verified(path)
                if checkpoint.manifest["recipe"] != self._fingerprint:
                    raise DamagedError(f"{path}: is of another recipe than this run's recipe.toml")
                if not usable(checkpoint.manifest["metrics"]):
                    raise DamagedError(f"{path}: metrics.jsonl is not the one that it was written beside")
            except DamagedError as damage:
                warn(f"{damage}; the checkpoint before it is taken")
                self._useless.add(path)
                continue
            self._memory = checkpoint.manifest["memory"]
            return checkpoint
        if found:
            raise RunError(f"{self._folder}: none of the {len(found)} checkpoints can be used; begin anew elsewhere")
        return None


def verified(path: Path) -> Checkpoint:
    """The checkpoint of a manifest, once the digest of every file has been compared."""
    manifest = _read(path)
    if manifest.get("schema") != SCHEMA:
        raise DamagedError(f"{path}: has schema {manifest.get('schema')!r}, and this version of fedflat reads {SCHEMA}")
    if manifest.pop("sha256", None) != hashlib.sha256(_canonical(manifest)).hexdigest():
        raise DamagedError(f"{path}: is damaged")
    for name, digest in _files(manifest).items():
        try:
            with (path.parent / name).open("rb") as file:
                right = hashlib.file_digest(file, "sha256").hexdigest() == digest
        except OSError as error:
            raise DamagedError(f"{path.parent / name}: cannot be read ({error.strerror})") from None
        if not right:
            raise DamagedError(f"{path.parent / name}: is damaged")
    return Checkpoint(path.parent, manifest)


def fingerprint(recipe: Recipe) -> str:
    """A digest of all that the numbers of a run depend on."""
    return hashlib.sha256(json.dumps(recipe.essentials(), sort_keys=True, default=str).encode()).hexdigest()


def _rows_of_bundle(memory: Memory, clients: Iterable[int]) -> int:
    row = next((memory[client] for client in clients), None) or {}
    size = sum(vector.numel() * vector.element_size() for vector in row.values())
    return max(1, BUNDLE // max(size, 1))


def _manifests(folder: Path) -> list[Path]:
    return [path for path in folder.glob("*.json") if not path.name.startswith(".")]


def _files(manifest: Record) -> dict[str, str]:
    """The files of a checkpoint with their digests."""
    with suppress(KeyError, TypeError, AttributeError):
        server, memory = manifest["server"], manifest["memory"]
        return {server["file"]: server["sha256"], **{name: bundle["sha256"] for name, bundle in memory.items()}}
    return {}


def _canonical(manifest: Record) -> bytes:
    return json.dumps(manifest, sort_keys=True).encode()


def _text(manifest: Record) -> bytes:
    """The manifest with a digest of itself."""
    return _canonical({**manifest, "sha256": hashlib.sha256(_canonical(manifest)).hexdigest()}) + b"\n"


def _read(path: Path) -> Any:
    """A manifest, to the byte as it was written."""
    try:
        content = path.read_bytes()
        manifest = json.loads(content)
    except (OSError, ValueError) as error:
        raise DamagedError(f"{path}: cannot be read ({error})") from None
    if not isinstance(manifest, dict) or _canonical(manifest) + b"\n" != content:
        raise DamagedError(f"{path}: is damaged")
    return manifest
