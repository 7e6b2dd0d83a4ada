"""State that the server of a deployment stores beside its checkpoints."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedflat.errors import RunError
from fedflat.flower.shelf import Mark
from fedflat.flower.tally import own_secret, seed_of
from fedflat.randomness import Secret
from fedflat.runs import write_whole, written_to

VERSIONS = 3  # marks of a client's memory to keep: enough to go back behind a damaged checkpoint
JOURNAL = "deployment.json"
SECRET = "deployment.secret"  # seed of the cohorts, known only to the server


class Journal:
    """A deployment's name, the clients' sizes, the marks of their memory, and the secret seed of the cohorts."""

    def __init__(self, out: Path) -> None:
        self._path, self._secret = out / JOURNAL, out / SECRET
        found: dict[str, Any] = {}
        if self._path.exists():
            try:
                found = json.loads(self._path.read_text("utf-8"))
            except (OSError, ValueError) as error:
                raise RunError(f"{self._path}: cannot be read ({error}); begin anew in another `out`") from None
        elif (out / "checkpoints").exists():
            raise RunError(f"{out}: holds a run, but no {JOURNAL} of a deployment; choose another `out`")
        self.run: str = found.get("run", "")
        self.sizes: dict[int, int] = {int(client): n for client, n in found.get("sizes", {}).items()}
        self._marks = {int(client): [Mark(*m) for m in marks] for client, marks in found.get("marks", {}).items()}

    def begin(self, sizes: Mapping[int, int]) -> None:
        self.run, self.sizes = secrets.token_hex(8), dict(sorted(sizes.items()))
        own_secret(self._secret)
        self._write()

    def seed(self) -> Secret:
        """The server's secret seed of this run."""
        if not self._secret.exists():
            raise RunError(f"{self._secret}: is gone, so its cohorts cannot be drawn; begin anew in another `out`")
        return seed_of(own_secret(self._secret), self.run)

    def mark(self, client: int, before: int) -> Mark | None:
        """The version of a client's memory that is valid at the start of a round."""
        return next((mark for mark in reversed(self._marks.get(client, [])) if mark.round < before), None)

    def merged(self, marks: Mapping[int, Mark]) -> None:
        """Record that uploads were merged, which makes these versions valid."""
        for client, mark in marks.items():
            older = [m for m in self._marks.get(client, []) if m.round < mark.round]
            self._marks[client] = [*older, mark][-VERSIONS:]
        if marks:
            self._write()

    def _write(self) -> None:
        facts = {"run": self.run, "sizes": self.sizes, "marks": self._marks}
        with written_to(self._path, "make room, then start the run again"):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._path, json.dumps(facts).encode() + b"\n")
