"""Privacy and compression of what clients upload."""

from fedflat.methods.catalogue.entry import listed
from fedflat.methods.chain import Method
from fedflat.methods.parts import Ascent, CentralPrivacy, LocalPrivacy, TopK
from fedflat.methods.parts.protection import Entropy


@listed("McMahan et al. 2018", "a trusted server adds noise; added to most methods")
def central_dp(clip: float = 1.0, noise: float = 1.0, delta: float = 1e-5, entropy: Entropy = "recipe") -> Method:
    return Method(CentralPrivacy(clip, noise, delta, entropy))


@listed("Wei et al. 2020", "the clients add noise; added to most methods")
def local_dp(clip: float = 1.0, noise: float = 1.0, delta: float = 1e-5, entropy: Entropy = "recipe") -> Method:
    return Method(LocalPrivacy(clip, noise, delta, entropy))


@listed("Stich et al. 2018", "upload the largest entries only; added to any method")
def top_k(share: float = 0.1, feedback: bool = False) -> Method:
    return Method(TopK(share, feedback))


@listed("Shi et al. 2023", "SAM, sparse updates, and noise of the clients")
def dp_fedsam(
    rho: float = 0.5,
    share: float = 0.4,
    clip: float = 0.2,
    noise: float = 0.13,
    delta: float = 1e-5,
    entropy: Entropy = "recipe",
) -> Method:
    return Method(Ascent(rho), TopK(share), LocalPrivacy(clip, noise, delta, entropy))
