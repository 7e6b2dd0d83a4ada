"""A method with client memory and a server state."""

from dataclasses import dataclass

import torch

from fedflat import Part


@dataclass(frozen=True)
class FedVARP(Part):
    """Variance reduction over the cohorts (Jhunjhunwala et al. 2022), with y_i kept by the clients:

    client   upload Δᵢ − yᵢ,  yᵢ ← Δᵢ          server   move = ȳ + mean_S(Δᵢ − yᵢ),  ȳ ← ȳ + (1/m) Σ_S (Δᵢ − yᵢ)
    """

    def first_memory(self, initial):
        return {"last": torch.zeros_like(initial)}

    def first_state(self, weights):
        return {"mean": torch.zeros_like(weights)}

    def report(self, upload, sent, memory, outcome):
        return upload.update(delta=upload.delta - memory["last"]), {"last": upload.delta}

    def merge(self, move, server, uploads):
        return server["mean"] + move, {"mean": server["mean"] + uploads.sum("delta") / server.clients}
