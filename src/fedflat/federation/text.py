"""Text as token ids: alphabets, words, tokens of a model of the hub; windows over a document; readers of text files.

Two kinds of samples come out of a document. With `predict = "next"` a sample is a window of tokens and its label the
token after it, for every position (Caldas et al. 2018, LEAF). With `predict = "all"` the labels of a window are its
tokens moved by one, and windows do not overlap unless `data.stride` is shorter than `data.window`.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from fedflat.errors import DataError, RecipeError
from fedflat.federation.sizes import read_at_most
from fedflat.federation.subwords import Subwords
from fedflat.files import opened
from fedflat.tokens import IGNORED, PADDING

Ids = NDArray[np.int64]
Predict = Literal["next", "all"]
LONGEST = 2**30  # bytes of a text file
WORD = r"\w+|[^\w\s]"  # a word or a punctuation mark
HALF = re.compile("[\ud800-\udfff]")  # of a character in UTF-16, as JSON may have it alone
OTHERS = "�"  # stands for tokens that are not in a vocabulary
# LEAF's 80 characters, in its order.
LETTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"


@dataclass(frozen=True)
class Alphabet:
    """Characters as tokens. Others count as the last one, as in LEAF's code."""

    unit: ClassVar[str] = "character"
    letters: str

    @property
    def size(self) -> int:
        return len(self.letters)

    @property
    def tokens(self) -> list[str]:
        """The token of each id."""
        return [*self.letters]

    @property
    def unknown(self) -> int:
        """The id of all other tokens."""
        return self.size - 1

    def encode(self, text: str) -> Ids:
        """Return the ids of a text.

        >>> Alphabet("abz").encode("bad").tolist()
        [1, 0, 2]
        """
        known = {letter: number for number, letter in enumerate(self.letters)}
        return np.fromiter((known.get(letter, self.unknown) for letter in text), np.int64, len(text))

    @classmethod
    def of(cls, texts: Iterable[str]) -> Alphabet:
        """Return the characters of some texts in the order of their code points, and � for all others."""
        return cls("".join(sorted({letter for text in texts for letter in text} - {OTHERS})) + OTHERS)


@dataclass(frozen=True)
class Words:
    """Lower-case words and punctuation marks as tokens; 0 stands for all others."""

    unit: ClassVar[str] = "word"
    unknown: ClassVar[int] = 0
    words: tuple[str, ...]

    @property
    def size(self) -> int:
        return 1 + len(self.words)

    @property
    def tokens(self) -> list[str]:
        """The token of each id."""
        return [OTHERS, *self.words]

    def encode(self, text: str) -> Ids:
        """Return the ids of a text.

        >>> Words(("a", ".")).encode("A cat.").tolist()
        [1, 0, 2]
        """
        known = {word: number for number, word in enumerate(self.words, start=1)}
        return np.array([known.get(word, self.unknown) for word in words_of(text)], np.int64)

    @classmethod
    def of(cls, texts: Iterable[str], most: int) -> Words:
        """Return the most frequent words of some texts; among equally frequent ones, those first in the alphabet."""
        counts = Counter(word for text in texts for word in words_of(text))
        return cls(tuple(sorted(counts, key=lambda word: (-counts[word], word))[:most]))


def words_of(text: str) -> list[str]:
    """Return the words and punctuation marks of a text, in lower case."""
    return re.findall(WORD, text.lower())


Tokenizer = Alphabet | Words | Subwords


def tokenizer_table(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return a tokenizer as a table for JSON: the token of each id and the id of all others, or the rules."""
    if isinstance(tokenizer, Subwords):
        return {"unit": tokenizer.unit, "definition": tokenizer.definition}
    return {"unit": tokenizer.unit, "tokens": tokenizer.tokens, "unknown": tokenizer.unknown}


def tokenizer_of(table: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer of a table.

    >>> tokenizer_of(tokenizer_table(Words(("a", "."))))
    Words(words=('a', '.'))
    """
    if table["unit"] == Subwords.unit:
        return Subwords(str(table["definition"]))
    tokens = [str(token) for token in table["tokens"]]
    return Alphabet("".join(tokens)) if table["unit"] == Alphabet.unit else Words(tuple(tokens[1:]))


def following(ids: Ids, window: int, stride: int) -> tuple[Ids, Ids]:
    """Return windows of tokens and the token after each.

    >>> following(np.arange(5), 3, 1)
    (array([[0, 1, 2],
           [1, 2, 3]]), array([3, 4]))
    """
    if len(ids) <= window:
        return np.empty((0, window), np.int64), np.empty(0, np.int64)
    return np.lib.stride_tricks.sliding_window_view(ids, window)[:-1:stride], ids[window::stride]


def moved(ids: Ids, window: int, stride: int) -> tuple[Ids, Ids]:
    """Return windows of tokens and, for every token of a window, the next one; the last window is padded.

    >>> moved(np.arange(5), 3, 3)
    (array([[ 0,  1,  2],
           [ 3, -1, -1]]), array([[   1,    2,    3],
           [   4, -100, -100]]))
    """
    starts = range(0, max(len(ids) - 1, 0), stride)
    rows = [(ids[s : s + window], ids[s + 1 : s + 1 + window]) for s in starts]
    inputs = padded([x[: len(y)] for x, y in rows], window, PADDING)
    return inputs, padded([y for _, y in rows], window, IGNORED)


def padded(rows: Sequence[Ids], width: int, fill: int) -> Ids:
    """Return rows of different lengths as a matrix, cut at `width` and filled at their end."""
    matrix = np.full((len(rows), width), fill, np.int64)
    for place, row in zip(matrix, rows, strict=True):
        place[: min(len(row), width)] = row[:width]
    return matrix


def narrow(tokens: Ids, vocabulary: int) -> NDArray[np.signedinteger[Any]]:
    """Return token ids in the smallest signed type, because a text makes many overlapping windows."""
    return tokens.astype(np.int8 if vocabulary <= 128 else np.int16 if vocabulary <= 2**15 else np.int32)


def read_utf8(path: Path) -> str:
    """Read a text file, without its byte order mark if it has one.

    Raises:
        DataError: it is missing, too long or not UTF-8; the message names it.
    """
    try:
        with opened(path) as stream:
            return read_at_most(path, stream, LONGEST).decode("utf-8-sig")
    except FileNotFoundError:
        raise DataError(f"{path} is missing") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror})") from None


def speeches(path: Path) -> dict[str, list[str]]:
    """Return what each role of a play says, from blocks of a line `ROLE:` and lines of speech between empty lines.

    As in LEAF, the lines of a speech are joined by blanks, several blanks become one, and a speech ends with a newline.
    Speeches without text and roles without speeches are left out.

    Raises:
        DataError: a block has no role, or no role says anything.
    """
    found: dict[str, list[str]] = {}
    line = 1
    for block in re.split(r"(\n(?:[ \t\r]*\n)+)", read_utf8(path)):
        if block.strip():
            role, _, said = block.strip().partition("\n")
            if not role.rstrip().endswith(":"):
                raise DataError(f"{path}, line {line}: {role[:40]!r} is not the name of a role with a colon after it")
            if words := " ".join(said.split()):
                found.setdefault(role.rstrip().removesuffix(":"), []).append(f"{words}\n")
        line += block.count("\n")
    if not found:
        raise DataError(f"{path} has no role that says anything")
    return found


@dataclass(frozen=True)
class Row:
    """A text with its label and its owner, if it has them."""

    text: str
    label: str | None = None
    client: str | None = None


def read_json_lines(path: Path) -> Iterator[Row]:
    """Yield the rows of a JSON-lines file, objects with `text` and optionally `label` and `client`.

    Raises:
        DataError: a line is not such an object; the message names its number.
    """
    for number, line in enumerate(read_utf8(path).split("\n"), start=1):
        if line.strip():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                raise DataError(f"{path}, line {number}: is not valid JSON") from None
            yield row_of(row, f"{path}, line {number}")


def row_of(row: Any, where: str, text: str = "text", label: str = "label", client: str = "client") -> Row:
    """Return a table's row as `Row`.

    Args:
        row: the row, a dictionary of its cells.
        where: where the row is, for error messages.
        text: the name of the column with the text.
        label: the name of the column with the label.
        client: the name of the column with the owner.

    Raises:
        DataError: it has no text, a label or owner that is neither a word nor a whole number, or half a character.
    """
    if not isinstance(row, dict) or not isinstance(row.get(text), str) or not row[text].strip():
        raise DataError(f"{where}: has no text under {text!r}")
    for field in (label, client):
        if not isinstance(row.get(field), str | int | None) or isinstance(row.get(field), bool):
            raise DataError(f"{where}: {field} is neither a word nor a whole number")
    named = (None if row.get(field) is None else str(row[field]) for field in (label, client))
    found = Row(row[text], *named)
    if any(HALF.search(each or "") for each in (found.text, found.label, found.client)):
        raise DataError(f"{where}: has half of a character (\\ud800 to \\udfff alone), which no text can hold")
    return found


def check_window(window: int, stride: int) -> None:
    """Raise `RecipeError` for windows that cannot be cut."""
    if window < 1 or stride < 1:
        raise RecipeError(f"data.window = {window}, data.stride = {stride}: must be whole numbers, 1 or more")
