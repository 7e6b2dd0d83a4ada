"""Conventions for token inputs and for labels that do not count, used by data, losses and metrics.

A sample of text is a row of token ids 0 … V − 1, filled with `PADDING` up to the longest sample. The ids therefore
carry their own mask, `tokens >= 0`. A label `IGNORED` counts neither in a loss nor in a metric.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

PADDING = -1
IGNORED = -100  # the default of torch's cross-entropy


def is_tokens(inputs: Tensor) -> bool:
    """Return whether inputs are token ids: integers, but not the bytes of images.

    >>> is_tokens(torch.zeros(2, 5, dtype=torch.int16)), is_tokens(torch.zeros(2, 5, dtype=torch.uint8))
    (True, False)
    """
    return not inputs.is_floating_point() and inputs.dtype != torch.uint8


def lengths(tokens: Tensor) -> Tensor:
    """Return the number of tokens in each row, without the padding at its end.

    >>> lengths(torch.tensor([[3, 0, 4], [3, -1, -1]]))
    tensor([3, 1])
    """
    return (tokens >= 0).sum(dim=1)


def widened(inputs: Tensor, labels: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return rows of token ids padded to a width, with the labels of tokens beside them; other samples as they are.

    >>> widened(torch.tensor([[3, 4]]), torch.tensor([[4, 5]]), 3)
    (tensor([[ 3,  4, -1]]), tensor([[   4,    5, -100]]))
    """
    if not is_tokens(inputs) or inputs.ndim != 2 or inputs.shape[1] >= width:
        return inputs, labels
    more = (0, width - inputs.shape[1])
    per_token = labels.shape == inputs.shape and not labels.is_floating_point()
    return F.pad(inputs, more, value=PADDING), F.pad(labels, more, value=IGNORED) if per_token else labels


def joined(batches: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return all samples of some batches as one, with rows of token ids as long as those of the longest batch."""
    width = max(inputs.shape[-1] for inputs, _ in batches)
    inputs, labels = zip(*(widened(*batch, width) for batch in batches), strict=True)
    return torch.cat(inputs), torch.cat(labels)


def counted_rows(values: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return one row of values and one label for each label that counts.

    Args:
        values: (N, K), or (N, T, K) with a row for every token.
        labels: (N,), or (N, T) with a label for every token. Other labels, such as floating targets, all count.

    >>> values, labels = counted_rows(torch.zeros(2, 3, 7), torch.tensor([[1, 2, -100], [5, -100, -100]]))
    >>> values.shape, labels
    (torch.Size([3, 7]), tensor([1, 2, 5]))
    """
    if labels.is_floating_point() or values.ndim != labels.ndim + 1:
        return values, labels
    values, labels = values.flatten(0, -2), labels.flatten()
    here = labels != IGNORED
    return (values, labels) if bool(here.all()) else (values[here], labels[here])
