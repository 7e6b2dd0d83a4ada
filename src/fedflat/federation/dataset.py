"""Samples and data sets as tensors, with the checks that the rest of the package relies on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from fedflat.errors import DataError
from fedflat.federation.text import Tokenizer, tokenizer_of, tokenizer_table
from fedflat.randomness import generator
from fedflat.tokens import IGNORED, PADDING, is_tokens


@dataclass(frozen=True, repr=False)
class Samples:
    """Inputs with labels and optionally their natural owners (N,).

    Inputs are uint8 images (N, C, H, W), floating numbers (N, …), or token ids (N, T) of another integer type, padded
    with −1. Labels are classes (N,), classes of every token (N, T), of which −100 do not count, or floating targets.
    """

    inputs: Tensor
    labels: Tensor
    groups: Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("inputs", "labels"):
            if not isinstance(given := getattr(self, name), Tensor):
                raise DataError(
                    f"samples: {name} is a {type(given).__name__}; give a tensor, or arrays to fedflat.federate"
                )
        if len(self.inputs) != len(self.labels) or (self.groups is not None and len(self.groups) != len(self.labels)):
            raise DataError(f"samples: {len(self.inputs)} inputs with {len(self.labels)} labels; give one for each")
        if self.labels.dtype != torch.int64 and not self.labels.is_floating_point():
            raise DataError(f"samples: labels are {self.labels.dtype}; make them int64 classes, or floating targets")
        if is_tokens(self.inputs) and self.inputs.ndim != 2:
            raise DataError(
                f"samples: token ids have the shape {tuple(self.inputs.shape)}; give one row for each sample"
            )

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        inputs, labels = (
            f"{str(t.dtype).removeprefix('torch.')} of shape {tuple(t.shape)}" for t in (self.inputs, self.labels)
        )
        return f"<Samples: inputs {inputs}, labels {labels}>"

    def to(self, device: str) -> Samples:
        """The same samples in the memory of another device."""
        return replace(self, inputs=self.inputs.to(device), labels=self.labels.to(device))


@dataclass(frozen=True, repr=False)
class Dataset:
    """A training and a test part.

    Attributes:
        name: the name of the data set.
        train: the training samples.
        test: the test samples.
        classes: the number of classes, or of the targets of a sample.
        mean: mean of each channel, of inputs scaled to [0, 1].
        std: standard deviation of each channel.
        vocabulary: the number of tokens, if the inputs are token ids.
        task: the task that the labels are for (`fedflat.tasks`), unless a recipe says otherwise.
        tokenizer: what makes token ids of a text; None if the ids were given.
        labels: the names of the classes, if the texts have labels.
    """

    name: str
    train: Samples
    test: Samples
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    vocabulary: int = 0
    task: str = "classification"
    tokenizer: Tokenizer | None = None
    labels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.tokenizer and self.tokenizer.size != self.vocabulary:
            raise DataError(f"{self.name}: its tokenizer has {self.tokenizer.size} tokens, not {self.vocabulary}")
        for name in ("train", "test"):
            if not isinstance(given := getattr(self, name), Samples):
                raise DataError(f"{self.name}: its {name} is a {type(given).__name__}; give fedflat.Samples")
        for part in (self.train, self.test):
            if not len(part):
                raise DataError(f"{self.name}: it needs at least one training and one test sample")
            if part.labels.is_floating_point() and not bool(part.labels.isfinite().all()):
                raise DataError(f"{self.name}: the labels have values that are missing or not finite")
            if part.labels.dtype == torch.int64:
                self._check_classes(part.labels.reshape(len(part), -1))
            if is_tokens(part.inputs):
                self._check_tokens(part.inputs)

    def _check_classes(self, labels: Tensor) -> None:
        counts = labels != IGNORED
        if not bool((((labels >= 0) & (labels < self.classes)) | ~counts).all()):
            raise DataError(f"{self.name}: labels must be classes from 0 to {self.classes - 1}")
        if not bool(counts.any(dim=1).all()):
            sample = int(counts.any(dim=1).int().argmin())
            raise DataError(f"{self.name}: all labels of sample {sample} are {IGNORED}, so it teaches nothing")

    def _check_tokens(self, tokens: Tensor) -> None:
        low, high = int(tokens.min()), int(tokens.max())
        if not PADDING <= low <= high < self.vocabulary:
            raise DataError(
                f"{self.name}: token ids go from {low} to {high}, where 0 to {self.vocabulary - 1} are known and "
                f"{PADDING} is padding"
            )
        here = tokens >= 0
        if not bool(here[:, 0].all()) or not bool((here[:, 1:] <= here[:, :-1]).all()):
            raise DataError(f"{self.name}: a sample has padding before a token; pad rows of tokens at their end")

    def __repr__(self) -> str:
        kind = "targets" if self.train.labels.is_floating_point() else "classes"
        return (
            f"<Dataset {self.name}: {len(self.train):,} training and {len(self.test):,} test samples of shape "
            f"{self.shape}, {self.classes} {kind}>"
        )

    def plain(self) -> Dataset:
        """The same data without the class of a user, whose constructor may take other arguments."""
        return self if type(self) is Dataset else Dataset(*(getattr(self, each.name) for each in fields(Dataset)))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        return tuple(self.train.inputs.shape[1:])

    def facts(self) -> dict[str, Any]:
        """Everything but the samples, as a table for JSON."""
        table = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in ("train", "test")}
        return {**table, "tokenizer": self.tokenizer and tokenizer_table(self.tokenizer)}

    @classmethod
    def of_facts(cls, train: Samples, test: Samples, facts: Mapping[str, Any]) -> Dataset:
        """Return the data set of these samples and facts. Facts of 0.1 name neither tokenizer nor labels.

        Args:
            train: the training samples.
            test: the test samples.
            facts: the name, classes, mean, std, vocabulary and task, and optionally the tokenizer and the labels.

        Raises:
            KeyError, TypeError, ValueError: the facts are not those of a data set.
        """
        tokenizer, labels = facts.get("tokenizer"), tuple(map(str, facts.get("labels", ())))
        mean, std = (tuple(map(float, facts[name])) for name in ("mean", "std"))
        counts = int(facts["classes"]), mean, std, int(facts["vocabulary"])
        read = tokenizer_of(tokenizer) if tokenizer else None
        return cls(str(facts["name"]), train, test, *counts, str(facts["task"]), read, labels)

    def class_counts(self) -> list[int] | None:
        """The number of training labels of each class; None if labels are not classes."""
        labels = self.train.labels
        return None if labels.is_floating_point() else labels[labels >= 0].bincount(minlength=self.classes).tolist()

    def limited(self, size: int, seed: int) -> Dataset:
        """Return the data set with fewer training samples and all test samples.

        Args:
            size: the largest number of training samples.
            seed: seed of the draw.
        """
        drawn = torch.randperm(len(self.train), generator=generator(seed, "limit"))[:size].sort().values
        groups = None if self.train.groups is None else self.train.groups[drawn]
        return replace(self, train=Samples(self.train.inputs[drawn], self.train.labels[drawn], groups))
