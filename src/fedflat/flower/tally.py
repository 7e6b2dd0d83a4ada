"""A client's ledger: what it has answered and refused over all runs, and the privacy it has spent.

The ledger is on the client's disk and outlives runs and restarts. An answer is recorded before it is sent, so a crash
can only overcount.
"""

from __future__ import annotations

import json
import math
import secrets
import sys
import time
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

from fedflat.files import changeable, open_to_others, private_directory, read_bytes, read_whole, write_whole, written_to
from fedflat.flower import policy as rules
from fedflat.flower.policy import Insists, Policy, PolicyError, Question
from fedflat.methods import Method
from fedflat.randomness import Secret

if sys.platform != "win32":
    import fcntl

RUNS = 1000  # number of runs whose recipe is remembered
ADVICE = "the directory of the client's ledger must be writable and have room"


@dataclass
class Tally:
    """The entries of a ledger: `spent` is Σ 1/σ² over all uploads, `recipes` the recipe each run began with."""

    answers: dict[str, int] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)
    spent: float = 0.0
    recipes: dict[str, str] = field(default_factory=dict)
    last: str = ""

    def agree(self, run: str, digest: str) -> None:
        """Check that a run keeps the recipe that it began with."""
        if self.recipes.setdefault(run, digest) != digest:
            raise PolicyError("recipe: it is not the one that this run started with")
        while len(self.recipes) > RUNS:
            del self.recipes[next(iter(self.recipes))]

    def spend(self, policy: Policy, question: Question, method: Method, lasting: bool = True) -> None:
        """Record an answer, if the policy allows one more.

        Args:
            policy: the client's policy.
            question: what was asked.
            method: the method of the recipe.
            lasting: whether the ledger outlives a run. If not, a server could reset it by starting another run, so
                that nothing is answered whose number matters: measures of the loss, and uploads within a budget.

        Raises:
            PolicyError: if the policy does not allow it.
        """
        given, most = self.answers.get(question, 0), getattr(policy.answers, question)
        if given >= most:
            raise PolicyError(f"{question}: {given} answers were given already, answers.{question} = {most}")
        if not lasting and (question != "train" or policy.privacy.epsilon is not None):
            raise PolicyError(f"{question}: no ledger outlives this run; set `ledger` in the policy of this client")
        if question == "train":
            self._spend_privacy(policy.privacy, rules.cost(method, policy.privacy))
        self.answers[question] = given + 1

    def _spend_privacy(self, least: Insists, cost: float) -> None:
        total = self.spent + cost
        if least.epsilon is not None and (would := rules.epsilon(total, least.delta)) > least.epsilon:
            raise PolicyError(f"train: this client's ε would reach {would:.3g}, privacy.epsilon = {least.epsilon:g}")
        if math.isfinite(total):  # without a budget, uploads without noise are sent and not counted
            self.spent = total

    def refuse(self, question: Question, sentence: str) -> None:
        self.refused[question] = self.refused.get(question, 0) + 1
        self.last = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {sentence}"


class Book(Protocol):
    """Stores a client's ledger and secret; `lasting` says whether they outlive a run."""

    lasting: bool

    def opened(self) -> Any: ...

    def secret(self) -> bytes: ...


class DiskBook:
    """Two private files: client-3.json, the ledger, and client-3.secret, for the order of its samples."""

    lasting = True

    def __init__(self, directory: Path, client: int) -> None:
        self._folder = directory
        self._ledger, self._secret = directory / f"client-{client}.json", directory / f"client-{client}.secret"

    @contextmanager
    def opened(self) -> Iterator[Tally]:
        """Open the ledger exclusively; changes are saved on exit, even after an exception."""
        with written_to(self._folder, ADVICE):
            private_directory(self._folder)
            _refuse_open(self._ledger)
            lock = changeable(self._ledger.with_suffix(".lock"))
        try:
            if sys.platform != "win32":
                fcntl.flock(lock, fcntl.LOCK_EX)
            tally = _read(read_whole(self._ledger), str(self._ledger)) if self._ledger.exists() else Tally()
            try:
                yield tally
            finally:
                write_whole(self._ledger, json.dumps(asdict(tally)).encode() + b"\n")
        finally:
            lock.close()

    def secret(self) -> bytes:
        return own_secret(self._secret)


class StateBook:
    """Stores the ledger in Flower's state, for simulations without a disk; it lasts as long as the node and its run."""

    lasting = False

    def __init__(self, state: MutableMapping[str, str]) -> None:
        self._state = state

    @contextmanager
    def opened(self) -> Iterator[Tally]:
        tally = _read(self._state["ledger"], "ledger") if "ledger" in self._state else Tally()
        try:
            yield tally
        finally:
            self._state["ledger"] = json.dumps(asdict(tally))

    def secret(self) -> bytes:
        return bytes.fromhex(self._state.setdefault("secret", secrets.token_hex(32)))


def _read(text: str | bytes, where: str) -> Tally:
    """Read a ledger. A damaged one allows no answer; otherwise deleting a byte would reset the budget."""
    try:
        tally = Tally(**json.loads(text))
        counts = [*tally.answers.values(), *tally.refused.values()]
        texts = [tally.last, *tally.recipes.keys(), *tally.recipes.values()]
        if not all(type(n) is int and n >= 0 for n in counts) or not all(isinstance(text, str) for text in texts):
            raise ValueError("its counts are not valid")
        if type(tally.spent) not in (int, float) or not 0 <= tally.spent <= sys.float_info.max:
            raise ValueError("`spent` is not valid")
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise PolicyError(f"{where}: the client's ledger is damaged ({error}); restore it from a backup") from None
    return tally


def _refuse_open(path: Path) -> None:
    """Refuse files open to other users, who could reset the ledger by removing it, or read the secret."""
    if how := open_to_others(path):
        raise PolicyError(f"{path}: must be accessible to this user only, but {how}")


def own_secret(path: Path) -> bytes:
    """Return 32 random bytes, created once and stored in a private file.

    Raises:
        PolicyError: if the file is damaged or open to other users.
    """
    with written_to(path, ADVICE):
        private_directory(path.parent)
        _refuse_open(path)
        if not path.exists():
            write_whole(path, secrets.token_hex(32).encode() + b"\n")
        found = read_bytes(path).strip()
    try:
        known = bytes.fromhex(found.decode("ascii"))
    except ValueError:
        known = b""
    if len(known) != 32:
        raise PolicyError(f"{path}: is damaged; restore it from a backup")
    return known


def seed_of(secret: bytes, run: str) -> Secret:
    """Return the secret seed of one run."""
    return Secret(int(_keyed(secret, run), 16))


def salt_of(secret: bytes, run: str) -> str:
    """Return the salt of one run, which makes its digests unpredictable without the secret."""
    return _keyed(secret, f"{run} salt")


def _keyed(secret: bytes, text: str) -> str:
    return blake2b(text.encode(), key=secret, digest_size=32).hexdigest()
