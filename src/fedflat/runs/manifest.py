"""Manifests of checkpoints: which files belong to one, and whether they are as they were written.

See `checkpoint.py` for what the files hold. A manifest is JSON with sorted keys and a digest of itself.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as from_safetensors

from fedflat.errors import RunError
from fedflat.files import opened, read_bytes
from fedflat.local import Vectors
from fedflat.rounds import NORMS, ServerState
from fedflat.runs.folder import Record, refuse_other_base

SCHEMA, READABLE = 2, (1, 2)  # 1: version 0.1, whose recipes had fewer fields
MANIFEST = re.compile(r"\d{8,}\.json")
TENSORS = re.compile(r"\d{8,}\.(server|memory\.\d+)\.safetensors")
LEFT = re.compile(r"\.\d{8,}\.(json|(server|memory\.\d+)\.safetensors)\.\d+")  # half-written by a killed process


class DamagedError(Exception):
    """A checkpoint that cannot be used; the message says which of its files is at fault, and why."""


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
            if name not in tensors and (self.manifest["schema"] == 1 or name.startswith(f"state.{NORMS}")):
                tensors[name] = vector  # earlier versions did not store it
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
            return dict(from_safetensors(read_bytes(self.folder / name)))
        except (OSError, SafetensorError) as error:
            raise RunError(f"{self.folder / name}: cannot be read ({error})") from None


def verified(path: Path) -> Checkpoint:
    """Read a manifest and verify the digest of every file."""
    manifest = read_manifest(path)
    if manifest.get("schema") not in READABLE:
        raise DamagedError(f"{path}: has schema {manifest.get('schema')!r}, and this version of fedflat reads 1 and 2")
    if manifest.pop("sha256", None) != hashlib.sha256(_canonical(manifest)).hexdigest():
        raise DamagedError(f"{path}: is damaged")
    if not well_formed(manifest):
        raise DamagedError(f"{path}: is not of the form of a checkpoint")
    for name, digest in files_of(manifest).items():
        if not TENSORS.fullmatch(name):
            raise DamagedError(f"{path}: names {name!r}, which is not a file of a checkpoint")
        try:
            with opened(path.parent / name) as file:
                right = hashlib.file_digest(file, "sha256").hexdigest() == digest
        except OSError as error:
            raise DamagedError(f"{path.parent / name}: cannot be read ({error.strerror})") from None
        if not right:
            raise DamagedError(f"{path.parent / name}: is damaged")
    return Checkpoint(path.parent, manifest)


def checkpoint_rounds(directory: Path) -> list[int]:
    """Return the rounds of a run that have a checkpoint, intact or not."""
    return sorted(int(path.stem) for path in manifests(directory / "checkpoints"))


def manifests(folder: Path) -> list[Path]:
    """The manifests in a directory of checkpoints, in no particular order."""
    return [path for path in folder.glob("*.json") if MANIFEST.fullmatch(path.name)]


def is_ours(path: Path) -> bool:
    """Whether a name is that of a checkpoint file; all other files are the user's."""
    return any(kind.fullmatch(path.name) for kind in (MANIFEST, TENSORS, LEFT))


def files_of(manifest: Record) -> dict[str, str]:
    """The files of a checkpoint with their digests."""
    with suppress(KeyError, TypeError, AttributeError):
        server, memory = manifest["server"], manifest["memory"]
        return {server["file"]: server["sha256"], **{name: bundle["sha256"] for name, bundle in memory.items()}}
    return {}


def well_formed(manifest: Record) -> bool:
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


def manifest_text(manifest: Record) -> bytes:
    """The manifest with a digest of itself."""
    return _canonical({**manifest, "sha256": hashlib.sha256(_canonical(manifest)).hexdigest()}) + b"\n"


def read_manifest(path: Path) -> Any:
    """Read a manifest and check that it is byte for byte as written."""
    try:
        content = read_bytes(path)
        manifest = json.loads(content)
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedError(f"{path}: cannot be read ({error})") from None
    if not isinstance(manifest, dict) or _canonical(manifest) + b"\n" != content:
        raise DamagedError(f"{path}: is damaged")
    return manifest
