"""What the server holds between rounds."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedflat.rule import Vectors


@dataclass(frozen=True)
class ServerState:
    """The global weights and batch-norm statistics, what the method's parts keep beside them, and the round."""

    weights: Tensor
    buffers: Tensor
    vectors: Vectors
    round: int = 0
