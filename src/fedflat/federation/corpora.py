"""Data sets of text: Shakespeare by speaking role, AG News, and the user's own files."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar, get_args

import numpy as np
import torch

from fedflat.errors import DataError, RecipeError
from fedflat.federation.dataset import Dataset, Samples
from fedflat.federation.formats import find
from fedflat.federation.places import data_directory, own_path
from fedflat.federation.subwords import read_subwords
from fedflat.federation.text import (
    LETTERS,
    Alphabet,
    Ids,
    Predict,
    Row,
    Tokenizer,
    Words,
    check_window,
    following,
    moved,
    narrow,
    padded,
    read_json_lines,
    read_utf8,
    speeches,
)
from fedflat.tokens import PADDING

AG_NEWS = (120_000, 7_600)
T = TypeVar("T")
TESTED = 0.2  # share of a text, at its end, that is for testing


@dataclass(frozen=True)
class Cut:
    """How texts become samples.

    Args:
        window: tokens of a sample; 0 takes the data set's default.
        stride: tokens between the starts of two windows; 0 means 1 if one token is predicted, else the window.
        predict: "next" for the token after a window, "all" for the next token at every position.
        words: number of words in the vocabulary; 0 takes characters.
        shortest: characters that a role or file must have.
        half: 1 or 2 for every second role or file; 0 takes all.
        tokenizer: path of a tokenizer.json, or of its folder; empty takes words or characters.
    """

    window: int = 0
    stride: int = 0
    predict: Predict = "next"
    words: int = 0
    shortest: int = 0
    half: int = 0
    tokenizer: str = ""

    def __post_init__(self) -> None:
        if self.predict not in get_args(Predict):
            raise RecipeError(f"data.predict = {self.predict!r}: take next or all")
        for name in ("words", "shortest"):
            if getattr(self, name) < 0:
                raise RecipeError(f"data.{name} = {getattr(self, name)}: must be 0 or more")
        if self.half not in (0, 1, 2):
            raise RecipeError(f"data.half = {self.half!r}: must be 1 or 2, or 0 for both halves")
        if self.tokenizer and self.words:
            raise RecipeError(f"data.words = {self.words}: data.tokenizer has tokens of its own; leave one of them out")

    def owners(self, texts: Mapping[str, Sequence[str]], where: Path, what: str) -> list[str]:
        """Return the owners whose texts are long enough; `what` is the beginning of "with 10 characters".

        Raises:
            DataError: there are none, or only one and the second half is asked for.
        """
        long = [owner for owner, said in texts.items() if len("".join(said)) >= self.shortest]
        if not long:
            raise DataError(f"{where} has no {what} {self.shortest} characters; lower data.shortest")
        if len(long) < self.half:
            raise DataError(f"{where} has one {what} {self.shortest} characters, so data.half = {self.half} is empty")
        return long

    def halved(self, owners: Sequence[T]) -> Sequence[T]:
        """Return every second owner, or all."""
        return owners[self.half - 1 :: 2] if self.half else owners

    def samples(self, ids: Iterable[Ids], window: int) -> tuple[Ids, Ids]:
        """Return the inputs and labels of some documents."""
        stride = self.stride or (1 if self.predict == "next" else window)
        check_window(window, stride)
        cut = following if self.predict == "next" else moved
        inputs, labels = zip(*(cut(each, window, stride) for each in ids), strict=True)
        return np.concatenate(inputs), np.concatenate(labels)

    def tokens(self, texts: Iterable[str]) -> Tokenizer:
        """Return the tokens of some texts: those of the tokenizer, the most frequent words, or all characters."""
        if self.tokenizer:
            return read_subwords(self.tokenizer)
        return Words.of(texts, self.words) if self.words else Alphabet.of(texts)

    @property
    def task(self) -> str:
        return "classification" if self.predict == "next" else "next-token"


AS_USUAL = Cut()  # every setting as the data set has it


def shakespeare(directory: Path | None, cut: Cut = AS_USUAL) -> Dataset:
    """Shakespeare's plays by speaking role, as in LEAF: 80 characters, of which the next one is predicted.

    The file is tiny-shakespeare, so roles of the same name in several plays are one. As in LEAF, a speech is preceded
    by as many blanks as a window has, and each of its characters is the label of one sample. The last fifth of a role's
    speeches is for testing (LEAF draws single samples, whose windows overlap those for training). With
    `predict = "all"`, the speeches of a role are one text, which may have other tokens.
    """
    if cut.words:
        raise RecipeError(f"data.words = {cut.words}: shakespeare has LEAF's 80 characters; leave it out")
    if cut.tokenizer and cut.predict == "next":
        raise RecipeError(
            'data.tokenizer: shakespeare has LEAF\'s windows of characters; take data.predict = "all" for other tokens'
        )
    path = find(data_directory(directory) / "shakespeare", "input.txt")
    window = cut.window or 80
    letters: Tokenizer = cut.tokens(()) if cut.tokenizer else Alphabet(LETTERS)
    roles = speeches(path)
    blanks = " " * window

    def documents(said: Sequence[str]) -> list[Ids]:
        texts = [blanks + speech for speech in said] if cut.predict == "next" else ["".join(said)]
        return [letters.encode(text) for text in texts]

    owned = [_divided(roles[role]) for role in cut.halved(cut.owners(roles, path, "role with"))]
    train, test = ([documents(parts[which]) if parts[which] else [] for parts in owned] for which in (0, 1))
    return _language("shakespeare", train, test, letters, window, cut)


def plain_text(directory: Path | None, cut: Cut = AS_USUAL) -> Dataset:
    """A user's own text file, or a folder of .txt files whose owners are different clients; the end is for testing."""
    path = own_path(directory, "text", "a text file or a folder of them")
    files = sorted(path.glob("*.txt")) if path.is_dir() else [path]
    if not files:
        raise DataError(f"{path} has no .txt file")
    texts = {str(file): read_utf8(file) for file in files}
    for name, text in texts.items():
        if not text.strip():
            raise DataError(f"{name} is empty")
    return _language_of("text", [texts[name] for name in cut.owners(texts, path, "text of")], cut)


def json_lines(directory: Path | None, cut: Cut = AS_USUAL) -> Dataset:
    """A user's own JSON-lines file of objects with `text`, optionally `label` to predict, and optionally `client`.

    Without labels the texts are for predicting their tokens. Every fifth text of a client is for testing.
    """
    path = own_path(directory, "jsonl", "a .jsonl file")
    return of_rows("jsonl", list(read_json_lines(path)), None, cut, str(path))


def ag_news(directory: Path | None, cut: Cut = AS_USUAL) -> Dataset:
    """AG News by its official CSV files: class, title and description; four classes, 120,000 + 7,600 texts."""
    folder = data_directory(directory) / "ag-news"
    train, test = (_news(find(folder, f"{part}.csv")) for part in ("train", "test"))
    for rows, size in zip((train, test), AG_NEWS, strict=True):
        if len(rows) != size:
            raise DataError(f"{folder} holds {len(rows)} texts of AG News where {size} were published")
    words = 0 if cut.tokenizer else cut.words or 10_000
    return of_rows("ag-news", train, test, replace(cut, window=cut.window or 64, words=words), str(folder))


def _news(path: Path) -> list[Row]:
    rows = []
    try:
        for number, row in enumerate(csv.reader(io.StringIO(read_utf8(path), newline="")), start=1):
            if len(row) != 3 or row[0] not in ("1", "2", "3", "4"):
                raise DataError(f"{path}, row {number}: is not a class from 1 to 4, a title and a description")
            rows.append(Row(f"{row[1]} {row[2]}", row[0]))
    except csv.Error as error:
        raise DataError(f"{path} is not a CSV file: {error}") from None
    return rows


def of_rows(name: str, train: Sequence[Row], test: Sequence[Row] | None, cut: Cut, where: str) -> Dataset:
    """Make a data set of texts: labels to predict if all of them have one, else their own next tokens.

    Args:
        name: the name of the data set.
        train: the texts.
        test: the texts for testing; None takes every fifth one of a client.
        cut: how texts become samples.
        where: where the texts come from, for error messages.
    """
    rows = [*train, *(test or ())]
    if not rows:
        raise DataError(f"{where} has no text")
    labelled = sum(row.label is not None for row in rows)
    if labelled not in (0, len(rows)):
        raise DataError(f"{where} has a label for {labelled} of {len(rows)} texts; give one for each, or none")
    if test is None:
        train, test = _held_out(rows)
    if not labelled:
        return _documents(name, train, test, cut)
    for field, usual in (("predict", "next"), ("stride", 0)):
        if getattr(cut, field) != usual:
            raise RecipeError(
                f"data.{field} = {getattr(cut, field)!r}: the texts of {where} have labels, so each is one sample; "
                "leave it out"
            )
    tokens = cut.tokens(row.text for row in train)
    window = cut.window or 128
    check_window(window, 1)
    classes = sorted({row.label or "" for row in rows}, key=lambda label: (len(label), label))
    number, owner = {label: i for i, label in enumerate(classes)}, _numbers(row.client for row in rows)

    def samples(some: Sequence[Row]) -> Samples:
        ids = [tokens.encode(row.text) for row in some]
        if empty := next((i for i, each in enumerate(ids, start=1) if not len(each)), 0):
            raise DataError(f"{where}: text {empty} has no {tokens.unit}")
        inputs = narrow(padded(ids, window, PADDING), tokens.size)
        labels = torch.tensor([number[row.label or ""] for row in some])
        return Samples(torch.from_numpy(inputs), labels, _owners(some, owner))

    parts = samples(train), samples(test)
    return Dataset(name, *parts, len(classes), (), (), tokens.size, tokenizer=tokens, labels=tuple(classes))


def _documents(name: str, train: Sequence[Row], test: Sequence[Row], cut: Cut) -> Dataset:
    """The texts of each client as its documents."""
    owner = _numbers(row.client for row in (*train, *test))
    tokens = cut.tokens(row.text for row in train)

    def owned(rows: Sequence[Row]) -> list[list[Ids]]:
        lists: list[list[Ids]] = [[] for _ in owner]
        for row in rows:
            lists[owner[row.client]].append(tokens.encode(row.text))
        return lists

    return _language(name, owned(train), owned(test), tokens, cut.window or 80, cut)


def _language_of(name: str, texts: Sequence[str], cut: Cut) -> Dataset:
    """Documents of different owners, the end of each for testing. Both halves have the tokens of all texts."""
    tokens = cut.tokens(texts)
    ids = [tokens.encode(text) for text in cut.halved(texts)]
    ends = [len(each) - int(TESTED * len(each)) for each in ids]
    train, test = (
        [[each[:end]] for each, end in zip(ids, ends, strict=True)],
        [[each[end:]] for each, end in zip(ids, ends, strict=True)],
    )
    return _language(name, train, test, tokens, cut.window or 80, cut)


def _language(
    name: str, train: Sequence[Sequence[Ids]], test: Sequence[Sequence[Ids]], tokens: Tokenizer, window: int, cut: Cut
) -> Dataset:
    """Samples that predict tokens, from the documents of each owner."""

    def samples(owned: Sequence[Sequence[Ids]], part: str) -> Samples:
        found = [(number, *cut.samples(ids, window)) for number, ids in enumerate(owned) if ids]
        found = [(number, x, y) for number, x, y in found if len(y)]
        if not found:
            raise DataError(f"{name}: no text for {part} is longer than a window of {window}")
        owners = np.concatenate([np.full(len(y), number) for number, _, y in found])
        inputs = narrow(np.concatenate([x for _, x, _ in found]), tokens.size)
        labels = np.concatenate([y for *_, y in found])
        return Samples(*map(torch.from_numpy, (inputs, labels, owners)))

    parts = samples(train, "training"), samples(test, "testing")
    return Dataset(name, *parts, tokens.size, (), (), tokens.size, cut.task, tokens)


def _divided(said: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """The first speeches for training and the last fifth for testing: one of two, and none of a single one."""
    kept = len(said) - max(int(TESTED * len(said)), min(len(said) - 1, 1))
    return said[:kept], said[kept:]


def _held_out(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    seen: dict[str | None, int] = {}
    train, test = list[Row](), list[Row]()
    for row in rows:
        seen[row.client] = seen.get(row.client, 0) + 1
        (test if seen[row.client] % 5 == 0 else train).append(row)
    return train, test


def _numbers(names: Iterable[str | None]) -> dict[str | None, int]:
    return {name: number for number, name in enumerate(dict.fromkeys(names))}


def _owners(rows: Sequence[Row], owner: dict[str | None, int]) -> torch.Tensor | None:
    return torch.tensor([owner[row.client] for row in rows]) if len(owner) > 1 else None
