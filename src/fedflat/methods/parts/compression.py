"""Parts that make an update sparse."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedflat.local import Outcome, Vectors
from fedflat.methods.part import Part, option
from fedflat.methods.uploads import Upload


@dataclass(frozen=True)
class TopK(Part):
    """Upload only the k largest entries of the update, k = ⌈share · d⌉, and zero in place of the others:

        upload  top_k(Δᵢ)                                          without feedback
        upload  top_k(Δᵢ + eᵢ),   eᵢ ← Δᵢ + eᵢ − top_k(Δᵢ + eᵢ)     with feedback

    With error feedback the client keeps in eᵢ what it has not uploaded, so that no part of an update is lost. Δᵢ is the
    update after the changes of the previous parts. Entries are compared by absolute value, over the whole model.

    With `local_dp`, which is always the last step of an upload, the sparse update is clipped, and all d entries get
    noise: the choice of entries depends on the client's data, and noise on these entries alone would reveal it. The
    reported ε is that of `local_dp` and holds for the upload as the server sees it. eᵢ stays on the client.

    Deviations: a sparse update is stored, sent and counted as a dense one. What other parts keep on the client
    (FedDyn's hᵢ, SCAFFOLD's cᵢ) comes from the full update.
    """

    share: float = option(0.1, "share of the entries that is uploaded", low=0, high=1, open_low=True)
    feedback: bool = option(False, "add what was not uploaded to the next update")

    def first_memory(self, initial: Tensor) -> Vectors:
        return {"residual": torch.zeros_like(initial)} if self.feedback else {}

    def report(self, upload: Upload, sent: Vectors, memory: Vectors, outcome: Outcome) -> tuple[Upload, Vectors]:
        whole = upload.delta + memory["residual"] if self.feedback else upload.delta
        sparse = top_k(whole, math.ceil(self.share * len(whole)))
        return upload.update(delta=sparse), {"residual": whole - sparse} if self.feedback else {}


def top_k(vector: Tensor, k: int) -> Tensor:
    """Return the vector with all but its k largest entries, by absolute value, set to zero.

    >>> top_k(torch.tensor([1.0, -3.0, 2.0]), 2)
    tensor([ 0., -3.,  2.])
    """
    kept = vector.abs().topk(k, sorted=False).indices
    return torch.zeros_like(vector).index_copy(0, kept, vector[kept])
