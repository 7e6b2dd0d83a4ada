"""Other optimisers for the local step."""

from fedflat.methods.catalogue.entry import listed
from fedflat.methods.chain import Method
from fedflat.methods.parts import CarriedAdamW, CarriedMuon, LocalAdamW, LocalMuon


@listed("Loshchilov and Hutter 2019", "AdamW as the clients' optimiser; added to most methods")
def adamw(beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8) -> Method:
    return Method(LocalAdamW(beta1, beta2, eps))


@listed("Jordan et al. 2024", "Muon as the clients' optimiser; added to most methods")
def muon(momentum: float = 0.95, steps: int = 5) -> Method:
    return Method(LocalMuon(momentum, steps))


@listed("Liu et al. 2025b", "local AdamW with shared second moments and the last global update")
def fedadamw(
    align: float = 0.5, blocks: bool = True, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8
) -> Method:
    return Method(CarriedAdamW(align, blocks, beta1, beta2, eps))


@listed("Liu et al. 2025c", "local Muon with shared momenta and the last global update")
def fedmuon(align: float = 0.5, momentum: float = 0.95, steps: int = 5) -> Method:
    return Method(CarriedMuon(align, momentum, steps))
