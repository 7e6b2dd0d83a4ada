"""A federation: a data set, its partition among clients, and the batches that a client trains on."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice, starmap, zip_longest
from os import PathLike
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fedflat.drawing import axes_for
from fedflat.errors import DataError, SplitError
from fedflat.federation import authors, partition
from fedflat.federation.augment import Augment, normalise
from fedflat.federation.batching import batch_indices, trimmed
from fedflat.federation.dataset import Dataset, Samples
from fedflat.federation.packed import Packed
from fedflat.randomness import numpy_generator
from fedflat.shown import Rows, framed
from fedflat.tokens import lengths

BLOCK, NUMBERS = 512, 2**18  # maximum number of samples, and of their elements, that are prepared at a time


@dataclass(frozen=True)
class Origin:
    """The names of a data set and a split, as tables of a recipe, and what they stand for.

    A table is None if its data set or split has no name.
    """

    dataset: Dataset
    shards: Sequence[Tensor]
    data: Mapping[str, Any] | None = None
    split: Mapping[str, Any] | None = None


@dataclass(frozen=True, repr=False)
class Federation:
    """A data set and its partition among clients.

    Attributes:
        dataset: the data set.
        shards: the indices of each client's training samples.
        augment: the augmentation of training batches.
        dtype: the precision of the batches.
        tests: the indices of each client's test samples, if the partition divides them too.
        by_length: whether a batch holds token samples of similar length, so that it has little padding.
        origin: how a recipe names the data set and the split.
    """

    dataset: Dataset
    shards: Sequence[Tensor]
    augment: Augment = field(default_factory=Augment)
    dtype: torch.dtype = torch.float32
    tests: tuple[Tensor, ...] | None = None
    by_length: bool = False
    origin: Origin | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.shards, Packed):
            object.__setattr__(self, "shards", Packed.of(self.shards))

    @property
    def clients(self) -> int:
        """m, the number of clients."""
        return len(self.shards)

    def shard(self, client: int) -> Tensor:
        """The indices of one client's samples."""
        return self.shards[client]

    def samples(self, client: int) -> int:
        """nᵢ, the number of one client's samples."""
        return self._packed.size(client)

    def largest_first(self, clients: Sequence[int]) -> list[int]:
        """The clients by descending size, then by index: the order of training and of summing uploads."""
        return sorted(clients, key=lambda client: (-self.samples(client), client))

    def empty(self) -> int | None:
        """The first client without samples, or None."""
        return self._packed.empty()

    def share(self, client: int) -> float:
        """nᵢ m / N, a client's size relative to the mean."""
        return self.samples(client) * self.clients / self._total

    @property
    def mean_samples(self) -> float:
        """N/m, the mean size of a client."""
        return self._total / self.clients

    @property
    def _packed(self) -> Packed:
        return cast(Packed, self.shards)

    @property
    def _total(self) -> int:
        return self._packed.total

    @cached_property
    def _block(self) -> int:
        return max(1, min(BLOCK, NUMBERS // self.dataset.train.inputs[0].numel()))

    def to(self, dtype: torch.dtype, device: str = "cpu") -> Federation:
        """Return the federation with its batches in another precision and its samples on another device.

        Args:
            dtype: the floating-point type of the batches.
            device: the device of the samples, such as "cuda".
        """
        data = self.dataset
        moved = replace(data, train=data.train.to(device), test=data.test.to(device))
        origin = self.origin and replace(self.origin, dataset=moved if self.origin.dataset is data else data)
        return replace(self, dataset=moved, dtype=dtype, origin=origin)

    def tables(self) -> tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]:
        """The tables `data` and `split` of a recipe that gives this federation; None for what no recipe can name."""
        origin = self.origin
        if origin is None:
            return None, None
        ours = origin.dataset is self.dataset
        return origin.data if ours else None, origin.split if ours and origin.shards is self.shards else None

    def __repr__(self) -> str:
        sizes = self._packed.sizes
        each = f"{int(sizes.min()):,} to {int(sizes.max()):,}" if len(sizes) else "no"
        split = self.tables()[1]
        told = ", ".join(f"{k} {v}" for k, v in (split or {}).items() if k not in ("clients", "seed", "draws", "name"))
        how = f", {split['name']}{f' ({told})' if told else ''}" if split else ""
        return f"<Federation of {self.dataset.name}: {self.clients:,} clients with {each} samples{how}>"

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(repr(self)[1:-1])}</p>{self._rows()._repr_html_()}"

    def _rows(self) -> Rows:
        labelled = self.dataset.class_counts() is not None and self.dataset.train.labels.ndim == 1
        counts = self.counts().tolist() if labelled else [[] for _ in self.shards]
        return Rows(
            {"client": i, "samples": self.samples(i), **{f"class {c}": n for c, n in enumerate(row)}}
            for i, row in enumerate(counts)
        )

    def to_frame(self) -> Any:
        """One row for each client: its samples, and how many of them are of each class.

        A pandas DataFrame if pandas is installed, otherwise a list of dictionaries.
        """
        return framed(self._rows())

    def plot(self, ax: Any = None) -> Any:
        """Draw the clients' samples, stacked by class if labels are classes, and return the axes.

        Args:
            ax: the axes to draw on; by default those of a new figure.

        Raises:
            RecipeError: if matplotlib is not installed.
        """
        axes = axes_for(ax)
        rows = self._rows()
        names = [name for name in rows[0] if name.startswith("class ")] or ["samples"]
        below = np.zeros(self.clients)
        for name in names:
            heights = np.array([row[name] for row in rows])
            axes.bar(range(self.clients), heights, bottom=below, width=0.9, label=name.removeprefix("class "))
            below = below + heights
        axes.set(xlabel="client", ylabel="samples")
        if 1 < len(names) <= 20:
            axes.legend(title="class", frameon=False, fontsize="small", ncols=2)
        return axes

    def save(self, path: str | PathLike[str]) -> None:
        """Write the indices of each client's samples as an .npz file; `federate(data, "file.npz")` reads it.

        Raises:
            DataError: the file has another ending or cannot be written.
        """
        if Path(path).suffix != ".npz":
            raise DataError(f"{path}: a split is saved as .npz; choose this ending, by which recipes know it")
        partition.save(path, [shard.numpy() for shard in self.shards])

    def validating(self, share: float, seed: int) -> Federation:
        """The federation with a share of each client's training samples in place of the test samples.

        A sample that is held out leaves the training data of every client that holds it, also where clients share
        samples. Every client keeps at least one of its own.

        Args:
            share: the share of each client's samples to hold out; at least one sample if it has two.
            seed: seed of the draw.

        Raises:
            SplitError: a client has no samples left, because others hold them too; or none has two.
        """
        mine = [
            shard[torch.from_numpy(numpy_generator(seed, "validation", client=i).permutation(len(shard)))]
            for i, shard in enumerate(self.shards)
        ]
        held = torch.cat([shard[: min(len(shard) - 1, max(1, round(share * len(shard))))] for shard in mine]).unique()
        if not len(held):
            raise SplitError('evaluation.on = "validation": no client has two samples, so none can be held out')
        data = self.dataset
        out = torch.zeros(len(data.train.labels), dtype=torch.bool)
        out[held] = True
        place = torch.where(out, out.cumsum(0), (~out).cumsum(0)) - 1  # of a sample in its new part
        shards = tuple(place[shard[~out[shard]]] for shard in self.shards)
        if any(not len(shard) and len(old) for shard, old in zip(shards, self.shards, strict=True)):
            raise SplitError(f"evaluation.validation = {share}: a client has no training samples left; lower it")
        train, test = (Samples(data.train.inputs[part], data.train.labels[part]) for part in (~out, out))
        tests = self.tests and tuple(place[shard[out[shard]]] for shard in self.shards)
        return replace(self, dataset=replace(data, train=train, test=test), shards=shards, tests=tests)

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
    ) -> Iterator[tuple[tuple[Tensor, Tensor, Tensor], list[int]]]:
        """Yield the batches of several clients without augmentation: (inputs, labels, shares), and each client's n.

        The tensors have the shape (clients, samples, …). The share of a sample is 1/n in a batch of n samples. The
        padding after them, and batches of clients that have no more steps (n = 0), have share 0.

        Args:
            clients: the clients.
            size: the number of samples in a batch.
            steps: the number of batches of each client.
            orders: the generator of each client's sample order; None keeps the order of the samples.
        """
        streams = [self._indices(c, size, k, o) for c, k, o in zip(clients, steps, orders, strict=True)]
        each = [batch for step in zip_longest(*streams, fillvalue=torch.zeros(0).long()) for batch in step]
        lengths = torch.tensor([len(batch) for batch in each]).unsqueeze(1)
        here = torch.arange(int(lengths.max())) < lengths
        # A client's own sample as padding: where logits overflow, even a share of 0 leaves no number.
        own = torch.stack([self.shard(client)[:1] for client in clients]).repeat(len(each) // len(clients), 1)
        indices = pad_sequence(each, batch_first=True).where(here, own)
        shares = here.to(self.dtype) / lengths.clamp(min=1)
        shares = shares.to(self.dataset.train.inputs.device)
        block = len(clients) * max(1, self._block // (len(clients) * indices.shape[1]))
        for some, theirs, counts in zip(indices.split(block), shares.split(block), lengths.split(block), strict=True):
            inputs, labels = self.batch(some.flatten(), None)
            shape = (-1, len(clients), some.shape[1])
            batches = zip(inputs.unflatten(0, shape), labels.view(shape), theirs.view(shape), strict=True)
            yield from zip(batches, counts.view(shape[:2]).tolist(), strict=True)

    def batch(self, indices: Tensor, chance: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """Return the inputs and labels of training samples, normalised and optionally augmented.

        Args:
            indices: the indices of the samples in the training data.
            chance: draws the augmentation; None leaves it out.
        """
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
        """Return the inputs and labels of consecutive samples, normalised and without augmentation.

        Args:
            part: "train" or "test".
            start: the first sample.
            stop: the sample after the last one.
        """
        samples: Samples = getattr(self.dataset, part)
        inputs = normalise(samples.inputs[start:stop], self.dataset.mean, self.dataset.std, self.dtype)
        return trimmed(inputs, samples.labels[start:stop])

    def counts(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The number of samples of each class that each client holds, as clients × classes.

        Raises:
            DataError: the labels are not classes.
        """
        if self.dataset.train.labels.is_floating_point():
            raise DataError(f"{self.dataset.name}: its labels are not classes, so no client's classes can be counted")
        shards = [shard.numpy() for shard in self.shards]
        return partition.counts(self.dataset.train.labels.cpu().numpy(), shards, self.dataset.classes)

    def local_tests(self, seed: int, size: int = 1000) -> tuple[Tensor, ...]:
        """Return the indices of each client's test samples, with the label distribution of its training samples.

        A client of a natural split of texts is tested on the test samples of its own roles.

        Args:
            seed: seed of the draw.
            size: the number of test samples of a client, before rounding down in each class.
        """
        if self.tests is not None and (size == authors.MATCHED or self.dataset.vocabulary):
            return self.tests
        labels = self.dataset.test.labels.cpu().numpy()
        return tuple(
            torch.from_numpy(partition.matched_test(row, labels, numpy_generator(seed, "local test", client=i), size))
            for i, row in enumerate(self.counts())
        )
