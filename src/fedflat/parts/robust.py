"""Averages that a few bad clients cannot move far."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedflat.parts.part import Part, ServerView, option
from fedflat.parts.uploads import Uploads
from fedflat.rule import Vectors

SPAN = 1 << 16  # coordinates at a time: sorting the whole cohort's Δ at once would hold it twice in memory


@dataclass(frozen=True)
class TrimmedMean(Part):
    """The mean of each coordinate without its largest and smallest values (Yin et al. 2018):

        move_j = mean of Δ_{(b+1),j} … Δ_{(n−b),j}      with Δ_{(1),j} ≤ … ≤ Δ_{(n),j} and b = ⌊trim · n⌋

    With trim = 0.5 it is the median of each coordinate. Every client counts the same.

    Deviations: none.
    """

    sees = "each"

    trim: float = option(0.1, "share of the clients left out at either end; 0.5 = the median", low=0, high=0.5)

    def merge(self, move: Tensor, server: ServerView, uploads: Uploads) -> tuple[Tensor, Vectors]:
        cut = min(int(self.trim * len(uploads) + 1e-9), (len(uploads) - 1) // 2)
        spans = [upload.delta.split(SPAN) for upload in uploads]
        return torch.cat([_middle(torch.stack(rows), cut) for rows in zip(*spans, strict=True)]), {}


def _middle(rows: Tensor, cut: int) -> Tensor:
    """The mean of what is left of each column when `cut` values are taken from either end."""
    return rows.sort(dim=0).values[cut : len(rows) - cut].mean(dim=0)
