"""The server's state between rounds."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedflat.local import Vectors


@dataclass(frozen=True)
class ServerState:
    """The global weights and batch-norm statistics, the state of the method's parts, and the round."""

    weights: Tensor
    buffers: Tensor
    vectors: Vectors
    round: int = 0
