"""Differential privacy of a client: its update is clipped, and Gaussian noise hides whether and how it took part."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedflat.parts.part import Part, ServerView, option
from fedflat.parts.uploads import Upload, Uploads
from fedflat.randomness import generator
from fedflat.rule import Outcome, Vectors

Entropy = Literal["recipe", "system"]


@dataclass(frozen=True)
class Privacy(Part):
    """What both kinds have: the clip C, the noise z in units of C, the δ to report at, and where the noise is from."""

    clip: float = option(1.0, "largest norm C of an update", low=0, open_low=True)
    noise: float = option(1.0, "noise multiplier z: standard deviation in units of C; 0 = no privacy", low=0)
    delta: float = option(1e-5, "δ at which ε is reported; far below 1/m", low=0, high=0.1, open_low=True)
    entropy: Entropy = option(
        "recipe", "noise from the recipe's seed (simulation) or the system (deployment)", choices=("recipe", "system")
    )

    def clipped(self, delta: Tensor) -> Tensor:
        """Δ · min(1, C/‖Δ‖)."""
        norm: Tensor = torch.linalg.vector_norm(delta)
        return delta * (self.clip / norm).clamp(max=1.0)

    def drawn(self, like: Tensor, seed: int, round: int, client: int = 0) -> Tensor:
        """N(0, (z C)² I)."""
        if self.entropy == "system":
            unit = system_normal(like.numel())
        else:
            unit = torch.randn(like.shape, generator=generator(seed, "privacy", round, client), dtype=like.dtype)
        return (self.noise * self.clip * unit).to(like)


@dataclass(frozen=True)
class CentralPrivacy(Privacy):
    """A trusted server clips every update and adds noise to their sum (DP-FedAvg):

        move = ( Σ_S Δᵢ min(1, C/‖Δᵢ‖) + N(0, z² C² I) ) / n

    n is the cohort that the recipe expects, not the clients that came: a client that is refused counts as zero, and a
    round without any still moves by the noise. Every client counts the same, or the sum's sensitivity would depend on
    the weights. Nothing else of the updates reaches the server's state. With `entropy = "recipe"` whoever knows the
    seed can take the noise away again: for simulations only.

    Deviations: the paper also clips layer by layer and weighs clients by samples up to a cap; here C is for the whole
    update, and all weights are one.
    """

    sees = "each"
    protects = "average"

    def merge(self, move: Tensor, server: ServerView, uploads: Uploads) -> tuple[Tensor, Vectors]:
        total = self.drawn(server.weights, server.seed, server.round)
        for upload in uploads:
            total += self.clipped(upload.delta)
        return total / server.cohort, {}


@dataclass(frozen=True)
class LocalPrivacy(Privacy):
    """Every client clips its update and adds noise before it uploads, so that the server need not be trusted:

        upload  Δᵢ min(1, C/‖Δᵢ‖) + N(0, z² C² I)

    Δᵢ is the update as all other parts have made it: the protection is the last thing that happens to an upload, in
    whatever order a method is written. The average and all that follows are the method's own. With
    `entropy = "recipe"` whoever knows the seed can take the noise away again, the server first of all: for simulations
    only.

    Deviations: the paper clips the client's weights, and its server adds noise of its own before it sends; here the
    update is clipped, and what the server does with noisy uploads cannot weaken their privacy.
    """

    protects = "upload"

    def report(self, upload: Upload, sent: Vectors, memory: Vectors, outcome: Outcome) -> tuple[Upload, Vectors]:
        rule = outcome.rule
        noise = self.drawn(upload.delta, rule.seed, rule.round, rule.client)
        return upload.update(delta=self.clipped(upload.delta) + noise), {}


def system_normal(size: int) -> Tensor:
    """Normal draws, each from 52 random bits of the operating system: torch's own generator has seeds of 32 bits."""
    bits = torch.frombuffer(bytearray(os.urandom(8 * size)), dtype=torch.int64) & (2**52 - 1)
    normal: Tensor = torch.special.ndtri((bits.double() + 0.5) * 2.0**-52)
    return normal
