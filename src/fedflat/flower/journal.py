"""State that the server of a deployment stores beside its checkpoints."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedflat.errors import RunError, printable
from fedflat.files import read_bytes, write_whole, written_to
from fedflat.flower.messages import ROUNDS, SAMPLES, UnfitError, whole, word
from fedflat.flower.shelf import Mark
from fedflat.flower.tally import own_secret, seed_of
from fedflat.randomness import Secret
from fedflat.runs import checkpoint_rounds

JOURNAL = "deployment.json"
SECRET = "deployment.secret"  # seed of the cohorts, known only to the server


class Journal:
    """A deployment's name, the clients' sizes, the marks of their memory, and the secret seed of the cohorts.

    `discarded` is the number of rounds that were discarded when the run went back to an earlier checkpoint.
    """

    def __init__(self, out: Path) -> None:
        self._out, self._path, self._secret = out, out / JOURNAL, out / SECRET
        self.run, self.discarded = "", 0
        self.sizes: dict[int, int] = {}
        self._marks: dict[int, list[Mark]] = {}
        if self._path.exists():
            self._read()
        elif (out / "checkpoints").exists():
            raise RunError(f"{out}: contains a run that is not a deployment (no {JOURNAL}); choose another `out`")

    def _read(self) -> None:
        try:
            found = json.loads(read_bytes(self._path))
            self.run = word(found, "run", "[0-9a-f]{16}")
            self.discarded = whole({"discarded": 0, **found}, "discarded", 0, ROUNDS)
            self.sizes = {int(client): whole(found["sizes"], client, 1, SAMPLES) for client in found["sizes"]}
            self._marks = {int(client): [*map(_mark, marks)] for client, marks in found["marks"].items()}
        except UnfitError as unfit:
            raise self._damaged(unfit.args[1]) from None
        except (OSError, ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError) as error:
            raise self._damaged(f"{type(error).__name__}: {printable(error, 100)}") from None

    def _damaged(self, why: str) -> RunError:
        return RunError(f"{self._path}: cannot be read ({why}); start a new run in another `out`")

    def begin(self, sizes: Mapping[int, int]) -> None:
        self.run, self.sizes = secrets.token_hex(8), dict(sorted(sizes.items()))
        own_secret(self._secret)
        self._write()

    def seed(self) -> Secret:
        """The server's secret seed of this run."""
        if not self._secret.exists():
            raise RunError(f"{self._secret}: is missing, and draws the cohorts; start a new run in another `out`")
        return seed_of(own_secret(self._secret), self.run)

    def mark(self, client: int, before: int) -> Mark | None:
        """The version of a client's memory that is valid at the start of a round."""
        return next((mark for mark in reversed(self._marks.get(client, [])) if mark.round < before), None)

    def merged(self, marks: Mapping[int, Mark]) -> None:
        """Record that uploads were merged, which makes these versions valid.

        Older versions stay if they are valid at a kept checkpoint, because the run may have to go back to it.
        """
        kept = [*checkpoint_rounds(self._out), math.inf]
        for client, mark in marks.items():
            known = [*(m for m in self._marks.get(client, []) if m.round < mark.round), mark]
            last = (max((m for m in known if m.round < at), default=None) for at in kept)
            self._marks[client] = sorted({m for m in last if m})
        if marks:
            self._write()

    def start(self, round: int) -> None:
        """Forget the marks of this round and later ones: the run continues from before them, so they do not count."""
        valid = {client: [m for m in marks if m.round < round] for client, marks in self._marks.items()}
        if valid != self._marks:
            self._marks = valid
            self._write()

    def discard(self, rounds: int) -> None:
        """Count rounds that are discarded to go back to a checkpoint: clients have already seen their models."""
        self.discarded += rounds
        self._write()

    def _write(self) -> None:
        facts = {"run": self.run, "sizes": self.sizes, "marks": self._marks, "discarded": self.discarded}
        with written_to(self._path, "make room, then start the run again"):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._path, json.dumps(facts).encode() + b"\n")


def _mark(written: Any) -> Mark:
    found = dict(zip(("round", "digest"), written, strict=True))
    return Mark(whole(found, "round", 0, ROUNDS), word(found, "digest", "[0-9a-f]{64}"))
