"""The batches of a client: how many there are in a round, and which samples each holds."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from fedflat.tokens import is_tokens, lengths

SORTED = 50  # batches whose samples are sorted by length together


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

    If lengths are given, the shuffled samples are sorted by length within stretches of `SORTED` batches, and the
    batches of an epoch are shuffled again.

    Args:
        shard: the indices of a client's samples.
        batch: batch size; 0 means all samples.
        steps: number of batches.
        order: generator that shuffles the samples; None keeps their order.
        lengths: the number of tokens of each sample.
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
    """Removes the columns of a batch of token ids in which all rows are padding.

    Labels of every token lose the same columns. Floating labels belong to the whole text, also if a text has as many
    of them as tokens.
    """
    if not is_tokens(inputs) or bool((inputs[:, -1] >= 0).any()):
        return inputs, labels
    longest = int(lengths(inputs).max())
    per_token = labels.shape == inputs.shape and not labels.is_floating_point()
    return inputs[:, :longest], labels[:, :longest] if per_token else labels
