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
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.numpy import save as safetensors_bytes
from safetensors.torch import load as from_safetensors

from fedflat.errors import RunError
from fedflat.local import Vectors
from fedflat.recipe import Recipe
from fedflat.rounds import Memory, ServerState
from fedflat.runs.folder import Record, private_directory, refuse_other_base, sync_directory, write_whole, written_to

SCHEMA, READABLE = 2, (1, 2)  # 1: version 0.1, whose recipes had fewer fields
MANIFEST = re.compile(r"\d{8,}\.json")
TENSORS = re.compile(r"\d{8,}\.(server|memory\.\d+)\.safetensors")
LEFT = re.compile(r"\.\d{8,}\.(json|(server|memory\.\d+)\.safetensors)\.\d+")  # half-written by a killed process
SHARE = 0.03  # largest share of a run's time spent on checkpoints if no interval is set
BUNDLE = 64 * 2**20  # bytes of client memory per file, unless a single client needs more


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

    def check_base(self, base: str) -> None:
        """Refuse a model whose frozen weights differ from those that this checkpoint was trained on."""
        # A manifest without a digest was written before bases existed, so its model had no frozen weights.
        refuse_other_base(self.folder / f"{self.round:08}.json", self.manifest.get("base", ""), base)

    def state(self, first: ServerState) -> ServerState:
        """The server's state, based on the state before round 0."""
        tensors = {name: t.to(first.weights.device) for name, t in self._read(self.manifest["server"]["file"]).items()}
        expected = {"weights": first.weights, "buffers": first.buffers}
        expected |= {f"state.{name}": vector for name, vector in first.vectors.items()}
        for name, vector in expected.items():
            if name not in tensors and self.manifest["schema"] == 1:
                tensors[name] = vector  # version 0.1 did not store it
            found = tensors.get(name)
            if found is None or (found.shape, found.dtype) != (vector.shape, vector.dtype):
                raise RunError(f"{self._name}: its {name} does not fit the recipe's model and method")
            if name == "weights" and not found.is_meta and not bool(found.isfinite().all()):
                raise RunError(f"{self._name}: its weights are not finite; go back to an earlier one by --from ROUND")
        vectors = {name: tensors[f"state.{name}"] for name in first.vectors}
        weights, buffers = tensors["weights"], tensors["buffers"]
        return replace(first, weights=weights, buffers=buffers, vectors=vectors, round=self.round)

    def memory(self) -> Iterator[tuple[int, Vectors]]:
        """Yield each client that has taken part, with its memory."""
        for name, bundle in self.manifest["memory"].items():
            tensors = self._read(name)
            for client in bundle["clients"]:
                start = f"{client}."
                yield client, {key.removeprefix(start): t for key, t in tensors.items() if key.startswith(start)}

    @property
    def _name(self) -> Path:
        return self.folder / f"{self.round:08}.json"

    def _read(self, name: str) -> Vectors:
        try:
            return dict(from_safetensors((self.folder / name).read_bytes()))
        except (OSError, SafetensorError) as error:
            raise RunError(f"{self.folder / name}: cannot be read ({error})") from None


class Checkpoints:
    """The checkpoints of a run: the last two, the best, and that of every n-th round if the recipe says so."""

    def __init__(self, directory: Path, recipe: Recipe, base: str | None = "") -> None:
        """Open the checkpoints of a run; `base` is None if there is no model whose frozen weights must be theirs."""
        self._folder = directory / "checkpoints"
        self._fingerprint, self._base = fingerprint(recipe), base
        self._every, self._keep = recipe.checkpoint.every, recipe.checkpoint.keep
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

    def save(self, state: ServerState, memory: Memory | None, metrics: Record, accuracy: float | None) -> None:
        """Save everything that the run needs after a round; it is on disk when this returns."""
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
        # The same bytes as from safetensors.torch, which leaves reference cycles that accumulate until collected.
        blob = safetensors_bytes({key: tensor.detach().cpu().contiguous().numpy() for key, tensor in tensors.items()})
        write_whole(self._folder / name, blob)
        return {"file": name, "sha256": hashlib.sha256(blob).hexdigest()}

    def _memory_of(self, memory: Memory, round: int) -> Record:
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
            vectors = {f"{client}.{name}": v for client in clients for name, v in (memory[client] or {}).items()}
            written = self._write(f"{round:08}.memory.{number}.safetensors", vectors)
            memory.release(clients)
            kept[written["file"]] = {"sha256": written["sha256"], "rows": len(clients), "clients": clients}
        return kept

    def _keep_few(self) -> None:
        """Remove all but the checkpoints to keep (see the class), and files that no manifest names.

        Checkpoints that this run cannot resume from do not count; they would displace the usable ones.
        """
        found = {}
        for path in {*manifests(self._folder)} - self._useless:
            with suppress(DamagedError):
                if _well_formed(manifest := _read(path)):
                    found[path] = manifest
        scored = [path for path, m in found.items() if m.get("accuracy") is not None]
        best = max(scored, key=lambda path: (found[path]["accuracy"], -found[path]["round"]), default=None)
        stay = (path for path, manifest in found.items() if self._stays(manifest["round"]))
        few = {*sorted(found)[-2:], *([best] if best else []), *stay}
        named = {name for path in few for name in _files(found[path])} | {path.name for path in few}
        for path in self._folder.iterdir():
            if path.name not in named and _ours(path) and not path.is_dir():
                path.unlink()

    def newest(
        self, usable: Callable[[Record], bool], warn: Callable[[str], None], back_to: int | None = None
    ) -> Checkpoint | None:
        """Return the newest intact checkpoint, preferably one whose mark in the metrics is usable; report the others.

        With `back_to`, only the checkpoint of that round is accepted.
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
            raise RunError(f"{self._folder}: none of the {len(found)} checkpoints can be used; begin anew elsewhere")
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


def checkpoint_rounds(directory: Path) -> list[int]:
    """Return the rounds of a run that have a checkpoint, intact or not."""
    return sorted(int(path.stem) for path in manifests(directory / "checkpoints"))


def _no_such_round(found: list[Path], round: int) -> list[Path]:
    rounds = ", ".join(str(int(path.stem)) for path in reversed(found))
    raise RunError(f"--from {round}: no checkpoint of that round is kept; there are those of {rounds or 'none'}")


def verified(path: Path) -> Checkpoint:
    """Read a manifest and verify the digest of every file."""
    manifest = _read(path)
    if manifest.get("schema") not in READABLE:
        raise DamagedError(f"{path}: has schema {manifest.get('schema')!r}, and this version of fedflat reads 1 and 2")
    if manifest.pop("sha256", None) != hashlib.sha256(_canonical(manifest)).hexdigest():
        raise DamagedError(f"{path}: is damaged")
    if not _well_formed(manifest):
        raise DamagedError(f"{path}: is not of the form of a checkpoint")
    for name, digest in _files(manifest).items():
        if not TENSORS.fullmatch(name):
            raise DamagedError(f"{path}: names {name!r}, which is not a file of a checkpoint")
        try:
            with (path.parent / name).open("rb") as file:
                right = hashlib.file_digest(file, "sha256").hexdigest() == digest
        except OSError as error:
            raise DamagedError(f"{path.parent / name}: cannot be read ({error.strerror})") from None
        if not right:
            raise DamagedError(f"{path.parent / name}: is damaged")
    return Checkpoint(path.parent, manifest)


def fingerprint(recipe: Recipe) -> str:
    """Return a digest of everything that the numbers of a run depend on."""
    return hashlib.sha256(json.dumps(recipe.essentials(), sort_keys=True, default=str).encode()).hexdigest()


def _rows_of_bundle(memory: Memory, clients: Iterable[int]) -> int:
    row = next((memory[client] for client in clients), None) or {}
    size = sum(vector.numel() * vector.element_size() for vector in row.values())
    return max(1, BUNDLE // max(size, 1))


def manifests(folder: Path) -> list[Path]:
    """The manifests in a directory of checkpoints, in no order."""
    return [path for path in folder.glob("*.json") if MANIFEST.fullmatch(path.name)]


def _ours(path: Path) -> bool:
    """Whether a name is that of a checkpoint file; all other files are the user's."""
    return any(kind.fullmatch(path.name) for kind in (MANIFEST, TENSORS, LEFT))


def _files(manifest: Record) -> dict[str, str]:
    """The files of a checkpoint with their digests."""
    with suppress(KeyError, TypeError, AttributeError):
        server, memory = manifest["server"], manifest["memory"]
        return {server["file"]: server["sha256"], **{name: bundle["sha256"] for name, bundle in memory.items()}}
    return {}


def _well_formed(manifest: Record) -> bool:
    """Whether a manifest with a valid digest has all fields of a checkpoint."""
    try:
        marks, server, memory = manifest["metrics"], manifest["server"], manifest["memory"]
        bundles = [(bundle["sha256"], bundle["rows"], *bundle["clients"]) for bundle in memory.values()]
        texts = [manifest["recipe"], marks["sha256"], server["file"], server["sha256"], *(b[0] for b in bundles)]
        counts = [manifest["round"], marks["bytes"], *(number for bundle in bundles for number in bundle[1:])]
        score = manifest["accuracy"]
    except (KeyError, TypeError, AttributeError):
        return False
    whole = all(type(text) is str for text in texts) and all(type(count) is int and count >= 0 for count in counts)
    return whole and (score is None or type(score) in (int, float))


def _canonical(manifest: Record) -> bytes:
    return json.dumps(manifest, sort_keys=True).encode()


def _text(manifest: Record) -> bytes:
    """The manifest with a digest of itself."""
    return _canonical({**manifest, "sha256": hashlib.sha256(_canonical(manifest)).hexdigest()}) + b"\n"


def _read(path: Path) -> Any:
    """Read a manifest and check that it is byte for byte as written."""
    try:
        content = path.read_bytes()
        manifest = json.loads(content)
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedError(f"{path}: cannot be read ({error})") from None
    if not isinstance(manifest, dict) or _canonical(manifest) + b"\n" != content:
        raise DamagedError(f"{path}: is damaged")
    return manifest
