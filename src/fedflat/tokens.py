"""Conventions for token inputs and for labels that do not count, used by data, losses and metrics.

A sample of text is a row of token ids 0 … V − 1, filled with `PADDING` up to the longest sample. The ids therefore
carry their own mask, `tokens >= 0`. A label `IGNORED` counts neither in a loss nor in a metric.
"""

from __future__ import annotations

import torch
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
