"""A federation: a data set, its partition among clients, and the batches that a client trains on."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice, starmap, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fedflat.errors import RecipeError, SplitError, nearest
from fedflat.federation import authors, partition
from fedflat.federation.augment import Augment, normalise
from fedflat.federation.datasets import Dataset, Samples, load
from fedflat.federation.splits import Shards
from fedflat.randomness import numpy_generator
from fedflat.tokens import is_tokens, lengths

BLOCK, NUMBERS = 512, 2**18  # maximum number of samples, and of their elements, that are prepared at a time
SORTED = 50  # batches whose samples are sorted by length together


@dataclass(frozen=True)
class Federation:
    """A data set and its partition among clients.

    Attributes:
        dataset: the data set.
        shards: the indices of each client's training samples.
        augment: the augmentation of training batches.
        dtype: the precision of the batches.
        tests: the indices of each client's test samples, if the partition divides them too.
        by_length: whether a batch holds token samples of similar length, so that it has little padding.
    """

    dataset: Dataset
    shards: tuple[Tensor, ...]
    augment: Augment = field(default_factory=Augment)
    dtype: torch.dtype = torch.float32
    tests: tuple[Tensor, ...] | None = None
    by_length: bool = False

    @property
    def clients(self) -> int:
        """m, the number of clients."""
        return len(self.shards)

    def shard(self, client: int) -> Tensor:
        """The indices of one client's samples."""
        return self.shards[client]

    def samples(self, client: int) -> int:
        """nᵢ, the number of one client's samples."""
        return len(self.shard(client))

    def largest_first(self, clients: Sequence[int]) -> list[int]:
        """The clients by descending size, then by index: the order of training and of summing uploads."""
        return sorted(clients, key=lambda client: (-self.samples(client), client))

    def empty(self) -> int | None:
        """The first client without samples, or None."""
        return next((client for client, shard in enumerate(self.shards) if not len(shard)), None)

    def share(self, client: int) -> float:
        """nᵢ m / N, a client's size relative to the mean."""
        return self.samples(client) * self.clients / self._total

    @property
    def mean_samples(self) -> float:
        """N/m, the mean size of a client."""
        return self._total / self.clients

    @cached_property
    def _total(self) -> int:
        return sum(map(len, self.shards))

    @cached_property
    def _block(self) -> int:
        return max(1, min(BLOCK, NUMBERS // self.dataset.train.inputs[0].numel()))

    def to(self, dtype: torch.dtype, device: str = "cpu") -> Federation:
        """The federation with its batches in another precision and its samples on another device."""
        data = self.dataset
        moved = replace(data, train=data.train.to(device), test=data.test.to(device))
        return replace(self, dataset=moved, dtype=dtype)

    def batches(
        self, client: int, size: int, steps: int, order: torch.Generator | None, chance: torch.Generator | None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields the batches of one client. Without augmentation, many are fetched and normalised at a time.

        Args:
            client: the client.
            size: batch size; 0 means all samples.
            steps: number of batches.
            order: generator that shuffles the samples before each epoch; None keeps their order.
            chance: generator for the augmentation; None turns it off.
        """
        block = 1 if self.augment.draws and chance is not None else max(1, self._block // (size or self._block))
        indices = self._indices(client, size, steps, order)
        while together := list(islice(indices, block)):
            inputs, labels = self.batch(torch.cat(together), chance)
            sizes = [len(batch) for batch in together]
            yield from starmap(trimmed, zip(inputs.split(sizes), labels.split(sizes), strict=True))

    def _indices(self, client: int, size: int, steps: int, order: torch.Generator | None) -> Iterator[Tensor]:
        shard = self.shard(client)
        if not self.by_length or order is None:
            return batch_indices(shard, size, steps, order)
        return batch_indices(shard, size, steps, order, lengths(self.dataset.train.inputs[shard]))

    def batches_together(
        self, clients: Sequence[int], size: int, steps: Sequence[int], orders: Sequence[torch.Generator | None]
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yields the batches of several clients without augmentation: inputs, labels and shares.

        Each has the shape (clients, samples, …). The share of a sample is 1/n in a batch of n samples. Padding of
        short batches, and batches of clients that have no more steps, have share 0.
        """
        streams = [self._indices(c, size, k, o) for c, k, o in zip(clients, steps, orders, strict=True)]
        each = [batch for step in zip_longest(*streams, fillvalue=torch.zeros(0).long()) for batch in step]
        lengths = torch.tensor([len(batch) for batch in each]).unsqueeze(1)
        indices = pad_sequence(each, batch_first=True)
        shares = (torch.arange(indices.shape[1]) < lengths).to(self.dtype) / lengths.clamp(min=1)
        shares = shares.to(self.dataset.train.inputs.device)
        block = len(clients) * max(1, self._block // (len(clients) * indices.shape[1]))
        for some, theirs in zip(indices.split(block), shares.split(block), strict=True):
            inputs, labels = self.batch(some.flatten(), None)
            shape = (-1, len(clients), some.shape[1])
            yield from zip(inputs.unflatten(0, shape), labels.view(shape), theirs.view(shape), strict=True)

    def batch(self, indices: Tensor, chance: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """The inputs and labels of training samples, normalised, and augmented if a generator is given."""
        data = self.dataset
        indices = indices.to(data.train.inputs.device)
        inputs, labels = data.train.inputs.index_select(0, indices), data.train.labels.index_select(0, indices)
        if chance is None:
            return trimmed(normalise(inputs, data.mean, data.std, self.dtype), labels)
        return trimmed(self.augment(inputs, data.mean, data.std, chance, self.dtype), labels)

    def size(self, part: str) -> int:
        """The number of samples of a part, "train" or "test"."""
        samples: Samples = getattr(self.dataset, part)
        return len(samples.labels)

    def held_out(self, part: str, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """The inputs and labels of the samples start … stop − 1 of a part, normalised and without augmentation."""
        samples: Samples = getattr(self.dataset, part)
        inputs = normalise(samples.inputs[start:stop], self.dataset.mean, self.dataset.std, self.dtype)
        return trimmed(inputs, samples.labels[start:stop])

    def counts(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The number of samples of each class that each client holds, as clients × classes."""
        shards = [shard.numpy() for shard in self.shards]
        return partition.counts(self.dataset.train.labels.numpy(), shards, self.dataset.classes)

    def local_tests(self, seed: int, size: int = 1000) -> tuple[Tensor, ...]:
        """The indices of each client's test samples, with the label distribution of its training samples."""
        if self.tests is not None and size == authors.MATCHED:
            return self.tests
        labels = self.dataset.test.labels.numpy()
        return tuple(
            torch.from_numpy(partition.matched_test(row, labels, numpy_generator(seed, "local test", client=i), size))
            for i, row in enumerate(self.counts())
        )


def batch_steps(samples: float, batch: int, epochs: int, steps: int | None) -> int:
    """The number of local steps K: `steps` if given, otherwise ⌈n/B⌉ per epoch. Batch size 0 means all samples.

    >>> batch_steps(12, batch=5, epochs=3, steps=None), batch_steps(12, batch=0, epochs=3, steps=None)
    (9, 3)
    """
    return steps if steps is not None else epochs * math.ceil(samples / (batch or samples))


def batch_indices(
    shard: Tensor, batch: int, steps: int, order: torch.Generator | None, lengths: Tensor | None = None
) -> Iterator[Tensor]:
    """Yields the indices of `steps` batches. The samples are shuffled before each epoch if a generator is given.

    With their lengths, the shuffled samples are sorted by length within stretches of `SORTED` batches, and the batches
    of an epoch are shuffled again.
    """
    size = batch or len(shard)
    done = 0
    while done < steps:
        drawn = None if order is None else torch.randperm(len(shard), generator=order)
        if lengths is None or drawn is None:
            epoch = (shard if drawn is None else shard[drawn]).split(size)
        else:
            stretches = [some[lengths[some].argsort(stable=True)] for some in drawn.split(size * SORTED)]
            batches = shard[torch.cat(stretches)].split(size)
            epoch = tuple(batches[i] for i in torch.randperm(len(batches), generator=order).tolist())
        for indices in epoch[: steps - done]:
            yield indices
            done += 1


def trimmed(inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Removes the columns of a batch of token ids in which all rows are padding."""
    if not is_tokens(inputs) or bool((inputs[:, -1] >= 0).any()):
        return inputs, labels
    longest = int(lengths(inputs).max())
    return inputs[:, :longest], labels[:, :longest] if labels.shape == inputs.shape else labels


def federate(
    data: str | Dataset = "digits",
    split: str = "dirichlet",
    clients: int = 20,
    *,
    seed: int = 0,
    draws: str = "fedflat",
    directory: str | Path | None = None,
    augment: Augment | None = None,
    mean: tuple[float, ...] | None = None,
    std: tuple[float, ...] | None = None,
    normalise: bool = True,
    by_length: bool = False,
    **options: Any,
) -> Federation:
    """Loads a data set and divides it among clients.

    Args:
        data: the name of a data set, or your own `Dataset`.
        split: the name of a split, or the .npz file of a saved one.
        clients: number of clients; 0 with the split `natural` means one for each group.
        seed: seed of the split.
        draws: `fedflat` (our own draws) or the authors' draws to reproduce: `fedsol`, `fl-simulator` or `fedman`.
        directory: the directory of the data sets.
        augment: augmentation of training batches; none by default.
        mean: mean of each channel; that of the data set by default.
        std: standard deviation of each channel; that of the data set by default.
        normalise: whether to apply mean and std. Bytes are scaled to [0, 1] in either case.
        by_length: whether batches hold texts of similar length.
        options: the options of the split, such as `alpha`.

    Raises:
        DataError: the data set or the split's file cannot be read.
        RecipeError: the split or an option is unknown or invalid.
        SplitError: the split cannot be made from this data set.

    >>> federation = federate("digits", split="dirichlet", clients=20, alpha=0.1)
    >>> federation.clients, sum(federation.samples(i) for i in range(20)) == len(federation.dataset.train.labels)
    (20, True)
    """
    if split == "given":
        raise SplitError("split = 'given': this federation was made in Python; pass it to fedflat.train again")
    dataset = load(data, directory) if isinstance(data, str) else data
    if normalise:
        dataset = replace(dataset, mean=mean or dataset.mean, std=std or dataset.std)
    else:
        dataset = replace(dataset, mean=(0.0,) * len(dataset.mean), std=(1.0,) * len(dataset.std))
    shards, tests = _divided(dataset, split, clients, seed, draws, options)
    matched = None if tests is None else tuple(map(torch.from_numpy, tests))
    held = tuple(map(torch.from_numpy, shards))
    return Federation(dataset, held, augment or Augment(), tests=matched, by_length=by_length)


def _divided(
    dataset: Dataset, split: str, clients: int, seed: int, draws: str, options: dict[str, Any]
) -> tuple[Shards, Shards | None]:
    """The partition, and the local test sets if the authors' code draws them."""
    train = dataset.train
    if split.endswith(".npz"):
        return _saved(split, dataset), None
    if draws not in ("fedflat", *authors.DRAWS):
        raise RecipeError(f"split.draws = {draws!r} is unknown; {nearest(draws, ('fedflat', *authors.DRAWS))}")
    if draws != "fedflat":
        test = dataset.test.labels.numpy()
        return authors.divide(draws, split, train.labels.numpy(), clients, seed, test=test, **options)
    groups = None if train.groups is None else train.groups.numpy()
    chance = numpy_generator(seed, "partition")
    return partition.partition(split, train.labels.numpy(), clients, chance, groups=groups, **options), None


def _saved(path: str, dataset: Dataset) -> Shards:
    """Reads a partition written by `fedflat split --save` and checks it against the data set."""
    shards = partition.load(path)
    size = len(dataset.train.labels)
    if any(shard.size == 0 or shard.min() < 0 or shard.max() >= size for shard in shards):
        raise SplitError(f"{path}: not a split of the {size} training samples of {dataset.name}")
    return shards
