"""Local training: the ingredients of a step, its reference implementation, and faster kernels for it."""

from fedflat.local.kernels import definition_only, prepare
from fedflat.local.kernels.rows import can_share, group_size, mixes_samples, train_together
from fedflat.local.rule import Ascent, Batch, Descent, LocalRule, Loss, Outcome, Term, Vectors
from fedflat.local.slope import Pass, Slope
from fedflat.local.step import corrected, train

__all__ = [
    "Ascent",
    "Batch",
    "Descent",
    "LocalRule",
    "Loss",
    "Outcome",
    "Pass",
    "Slope",
    "Term",
    "Vectors",
    "can_share",
    "corrected",
    "definition_only",
    "group_size",
    "mixes_samples",
    "prepare",
    "train",
    "train_together",
]
