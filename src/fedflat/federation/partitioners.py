"""Partitioners of flwr-datasets as splits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedflat.errors import SplitError, shortened
from fedflat.federation.dataset import Dataset
from fedflat.federation.hub_folders import reading_hub

ROW = "row of the training samples"  # a column that says where a partition's rows come from


def is_partitioner(split: Any) -> bool:
    """Return whether this is a partitioner of flwr-datasets, or has the same interface."""
    return all(hasattr(type(split), name) for name in ("load_partition", "num_partitions", "is_dataset_assigned"))


def partitioned(partitioner: Any, dataset: Dataset, rows: Any = None) -> tuple[Tensor, ...]:
    """Divide the training samples by a partitioner of flwr-datasets.

    The partitioner sees the columns of the table that the samples come from, or else `label` (classes) and `client`
    (owners). It must not have a data set yet.

    Args:
        partitioner: such as `DirichletPartitioner(num_partitions=10, partition_by="label", alpha=0.3)`.
        dataset: the data set.
        rows: the `datasets.Dataset` of its training samples (`HubData.rows`).

    Raises:
        SplitError: the partitioner refuses, divides columns instead of rows, or leaves a client without samples.
    """
    kind = type(partitioner).__name__
    with reading_hub(kind):
        import datasets

        table = rows if rows is not None else datasets.Dataset.from_dict(_facts(dataset))
        with _silent():
            table = table.add_column(ROW, list(range(len(table))))
    if partitioner.is_dataset_assigned():
        raise SplitError(f"{kind}: already divides a data set; make a new one for each federation")
    try:
        partitioner.dataset = table
        parts = [partitioner.load_partition(number) for number in range(partitioner.num_partitions)]
    except Exception as error:
        reason = shortened(" ".join(str(error).split()) or type(error).__name__, 160)
        raise SplitError(f"{kind}: {reason}") from error
    if any(ROW not in part.column_names or len(part.column_names) < len(table.column_names) for part in parts):
        raise SplitError(f"{kind}: divides columns, and the clients of a federation hold rows")
    shards = [torch.tensor(np.sort(np.asarray(part[ROW], np.int64))) for part in parts]
    if empty := [number for number, shard in enumerate(shards) if not len(shard)][:1]:
        raise SplitError(f"{kind}: client {empty[0]} gets no sample; lower the number of partitions")
    return tuple(shards)


@contextmanager
def _silent() -> Iterator[None]:
    """Turns off the progress bars of `datasets` in this context."""
    import datasets

    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()


def _facts(dataset: Dataset) -> dict[str, Any]:
    """The columns that a partitioner sees if the samples do not come from a table."""
    samples = dataset.train
    facts = {"label": samples.labels.numpy()} if samples.labels.ndim == 1 else {}
    return facts | ({"client": samples.groups.numpy()} if samples.groups is not None else {}) or {
        "label": np.zeros(len(samples), np.int64)
    }
