"""The tokens of a model of the hub: a tokenizer.json, read by the library `tokenizers`. Nothing is downloaded."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedflat.errors import DataError, RecipeError, printable
from fedflat.federation.places import expanded
from fedflat.federation.sizes import TooLargeError, read_at_most
from fedflat.files import opened

FILE = "tokenizer.json"
LONGEST = 2**27  # bytes of the file
MOST = 2**21  # ids; the largest vocabularies of the hub have 2¹⁸
RANDOM = ("dropout", "alpha")  # settings of a model that draws the pieces of a word
Found = TypeVar("Found")


@dataclass(frozen=True)
class Subwords:
    """Tokens by the rules of a tokenizer.json, with the special tokens that they add to a text.

    Padding and truncation are ours, whatever the file says of them.
    """

    unit: ClassVar[str] = "subword"
    definition: str

    @cached_property
    def _rules(self) -> Any:
        if not find_spec("tokenizers"):
            raise RecipeError(f"{FILE} needs one more package: pip install 'fedflat[transformers]'")
        from tokenizers import Tokenizer

        with _unheard():
            rules = _tried("is not a tokenizer", lambda: Tokenizer.from_str(self.definition))
            _tried("is not a tokenizer", lambda: rules.encode(""))  # it panics if its special tokens are not there
        for name in RANDOM:
            if value := getattr(rules.model, name, None):
                raise DataError(f"gives a text other tokens each time (model.{name} = {value:g}); set that to null")
        rules.no_padding()
        rules.no_truncation()
        return rules

    @cached_property
    def tokens(self) -> list[str]:
        """The token of each id; empty for an id that no token has.

        Raises:
            DataError: there are none, or an id is too large.
        """
        ids: dict[str, int] = self._rules.get_vocab(with_added_tokens=True)
        if not ids or max(ids.values()) >= MOST:
            count = f"an id of {max(ids.values())}" if ids else "no token"
            raise DataError(f"has {count}, where 1 to {MOST:,} tokens are read")
        found = [""] * (1 + max(ids.values()))
        for token, number in ids.items():
            found[number] = token
        return found

    @property
    def size(self) -> int:
        return len(self.tokens)

    def encode(self, text: str) -> NDArray[np.int64]:
        """Return the ids of a text.

        Raises:
            DataError: the text cannot be told in these tokens.
        """
        ids = np.array(_tried("data.tokenizer: cannot read a text", lambda: self._rules.encode(text).ids), np.int64)
        if len(ids) and ids.max() >= self.size:  # of a special token that the rules add
            raise DataError(f"data.tokenizer: gives a text the id {ids.max()}, and its last token is {self.size - 1}")
        return ids


@contextmanager
def _unheard() -> Iterator[None]:
    """Silence the library, which tells of a panic by a backtrace that it writes past Python's standard error."""
    try:
        kept = os.dup(2)
    except OSError:  # there is no standard error
        yield
        return
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _tried(what: str, call: Callable[[], Found]) -> Found:
    """What the library returns; it reports a damaged file, or a text without tokens, by plain exceptions or a panic."""
    try:
        return call()
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise DataError(f"{what} ({printable(error, 120)})") from None


def read_subwords(place: str | Path) -> Subwords:
    """Read a tokenizer.json, given by its path or that of its folder.

    Raises:
        DataError: there is none, or it is too long or damaged.
        RecipeError: the library is not installed.
    """
    path = expanded(place)
    try:
        path = path / FILE if path.is_dir() else path
        with opened(path) as stream:
            found = Subwords(read_at_most(path, stream, LONGEST).decode("utf-8"))
        _ = found.tokens
    except UnicodeDecodeError:
        raise DataError(f"data.tokenizer = {str(place)!r}: {path.name} is not UTF-8 text") from None
    except (OSError, ValueError):  # the latter of a name with a null character
        raise DataError(
            f"data.tokenizer = {str(place)!r}: is neither a tokenizer.json nor a local folder with one; nothing is "
            "downloaded"
        ) from None
    except TooLargeError:
        raise
    except DataError as error:
        raise DataError(f"data.tokenizer = {str(place)!r}: {path.name} {error}") from None
    return found
