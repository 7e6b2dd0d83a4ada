"""Top-k sparsification with an error memory, alone or under `local_dp`."""

from dataclasses import dataclass

import torch

from fedflat import Part, option


@dataclass(frozen=True)
class TopK(Part):
    """Upload the k largest entries of Δ + e and keep the rest:  e ← Δ + e − top_k(Δ + e)."""

    share: float = option(0.1, "share k/d of the entries that go up", low=0, high=1, open_low=True)

    def first_memory(self, initial):
        return {"error": torch.zeros_like(initial)}

    def report(self, upload, sent, memory, outcome):
        total = upload.delta + memory["error"]
        largest = total.abs().topk(max(1, round(self.share * len(total)))).indices
        sparse = torch.zeros_like(total).index_copy(0, largest, total[largest])
        return upload.update(delta=sparse), {"error": total - sparse}
