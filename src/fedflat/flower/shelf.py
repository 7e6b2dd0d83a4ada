"""A client's memory between two messages of a deployment, on its own disk.

Only the server knows whether an upload was merged. It tells the client with the next broadcast: the round of the last
merged upload, and the digest of the memory the client wanted to keep then. So the client keeps two versions, that one
and the one after it. A missing, damaged or outdated version is never mistaken for the right one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import MutableMapping
from pathlib import Path
from typing import NamedTuple, Protocol

from safetensors.torch import load as from_safetensors
from safetensors.torch import save as safetensors_bytes

from fedflat.errors import RunError
from fedflat.files import private_directory, read_bytes, write_whole, written_to
from fedflat.local import Vectors


class Mark(NamedTuple):
    """A version of a client's memory: the round in which it was made, and its SHA-256."""

    round: int
    digest: str


OTHERS = 32  # other runs whose memory a client keeps at most


class MemoryLostError(RunError):
    """The version of a client's memory that the server expects is missing."""


class Shelf(Protocol):
    """Stores versions by round; `full` says why it has no room for a new run."""

    @property
    def full(self) -> str: ...

    def rounds(self) -> list[int]: ...

    def read(self, round: int) -> bytes | None: ...

    def write(self, round: int, blob: bytes) -> None: ...

    def drop(self, round: int) -> None: ...


class DiskShelf:
    """Files in the client's directory: memory/RUN/client-3/00000012.safetensors."""

    def __init__(self, directory: Path, run: str, client: int) -> None:
        if not run.isalnum():  # the name comes from the server and must not lead to another directory
            raise RunError(f"the server's name of the run, {run!r}, cannot be the name of a directory")
        self._folder = directory / run / f"client-{client}"

    @property
    def full(self) -> str:
        """Why there is no room for another run; empty if there is. A server must not fill the disk with new runs."""
        if self._folder.exists():
            return ""
        others = len([*self._folder.parents[1].glob(f"*/{self._folder.name}")])
        full = f"the memory of {others} other runs is stored here; delete the memory of runs that have ended"
        return full if others >= OTHERS else ""

    def rounds(self) -> list[int]:
        return sorted(int(path.stem) for path in self._folder.glob("[0-9]*.safetensors") if path.stem.isdigit())

    def read(self, round: int) -> bytes | None:
        try:
            return read_bytes(self._path(round))
        except OSError:
            return None

    def write(self, round: int, blob: bytes) -> None:
        with written_to(self._folder, "the node's `memory` directory must be writable and have room"):
            private_directory(self._folder)
            write_whole(self._path(round), blob)

    def drop(self, round: int) -> None:
        self._path(round).unlink(missing_ok=True)

    def _path(self, round: int) -> Path:
        return self._folder / f"{round:08}.safetensors"


class StateShelf:
    """Storage that Flower keeps during a run, for simulations; lost when the node ends."""

    full = ""

    def __init__(self, state: MutableMapping[str, bytes]) -> None:
        self._state = state

    def rounds(self) -> list[int]:
        return sorted(int(name) for name in self._state)

    def read(self, round: int) -> bytes | None:
        return self._state.get(str(round))

    def write(self, round: int, blob: bytes) -> None:
        self._state[str(round)] = blob

    def drop(self, round: int) -> None:
        del self._state[str(round)]


def recall(shelf: Shelf, mark: Mark | None, anew: bool) -> tuple[Vectors | None, str]:
    """Return what the client kept when its upload was last merged, and a note if that was lost.

    Args:
        shelf: stores the versions of the memory.
        mark: the version that the server expects; None if no upload of this client was ever merged, so that it starts
            without memory.
        anew: whether the client may start without memory if it was lost.

    Raises:
        MemoryLostError: if the memory was lost and `anew` is false.
    """
    if mark is None:
        return None, ""
    found = shelf.read(mark.round)
    if found is not None and hashlib.sha256(found).hexdigest() == mark.digest:
        return from_safetensors(found), ""
    trouble = f"its memory of round {mark.round} is {'missing' if found is None else 'not the one it stored then'}"
    if not anew:
        raise MemoryLostError(f'{trouble}; restore it, or set deployment.memory = "anew" to start without memory')
    return None, f"{trouble}; it started without memory"


def keep(shelf: Shelf, round: int, memory: Vectors, about: dict[str, str], valid: Mark | None) -> Mark:
    """Store a new version beside the valid one; it becomes valid once the server reports that the upload was merged.

    All other versions are removed now and not earlier, because a server that asks for a missing version may be
    mistaken. The digest is sent to the server, so `about` must contain something that the server does not know.
    Otherwise the server could test guesses of the memory against the digest.

    Args:
        shelf: stores the versions of the memory.
        round: the round in which the new version was made.
        memory: the new version.
        about: facts to store with it.
        valid: the version that is valid now, if any.

    Returns:
        The mark of the new version.
    """
    for other in shelf.rounds():
        if valid is None or other != valid.round:
            shelf.drop(other)
    tensors = {name: vector.detach().cpu().contiguous() for name, vector in memory.items()}
    blob = safetensors_bytes(tensors, {"fedflat": json.dumps({**about, "round": round})})
    shelf.write(round, blob)
    return Mark(round, hashlib.sha256(blob).hexdigest())
