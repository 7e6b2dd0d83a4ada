"""Client-level differential privacy: updates are clipped, and Gaussian noise hides the contribution of each client."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedflat.errors import RecipeError
from fedflat.local import Outcome, Vectors
from fedflat.methods.part import Part, ServerView, option
from fedflat.methods.uploads import Upload, Uploads
from fedflat.randomness import generator

Entropy = Literal["recipe", "system"]


@dataclass(frozen=True)
class Privacy(Part):
    """Options of central and local privacy: the clip C, the noise z in units of C, the reported δ, the noise source."""

    clip: float = option(1.0, "largest norm C of an update", low=0, open_low=True)
    noise: float = option(1.0, "noise multiplier z: standard deviation in units of C; 0 = no privacy", low=0)
    delta: float = option(1e-5, "δ at which ε is reported; far below 1/m", low=0, high=0.1, open_low=True)
    entropy: Entropy = option(
        "recipe", "noise from the recipe's seed (simulation) or the system (deployment)", choices=("recipe", "system")
    )

    def refuse_seeded(self) -> None:
        """Raise a RecipeError if the noise comes from the recipe's seed, for use in a deployment.

        Anyone who knows the seed can compute the noise and remove it.
        """
        if self.noise and self.entropy != "system":
            raise RecipeError(
                f"method: the noise of {type(self).__name__} would follow from the recipe's seed, which gives no "
                'privacy; in a deployment write entropy="system"'
            )

    def clipped(self, delta: Tensor) -> Tensor:
        """Return Δ · min(1, C/‖Δ‖), or 0 if Δ is not finite.

        Noise does not hide NaN: a server could send weights that overflow only on certain samples, and read from an
        upload whether the client has such samples.
        """
        norm: Tensor = torch.linalg.vector_norm(delta)
        clipped = delta * (self.clip / norm).clamp(max=1.0)
        return torch.where(torch.isfinite(delta).all(), clipped, torch.zeros_like(delta))

    def drawn(self, like: Tensor, seed: int, round: int, client: int = 0) -> Tensor:
        """Draw from N(0, (z C)² I), with the shape, type and device of `like`."""
        if self.entropy == "system":
            unit = system_normal(like.numel())
        else:
            unit = torch.randn(like.shape, generator=generator(seed, "privacy", round, client), dtype=like.dtype)
        return (self.noise * self.clip * unit).to(like)


@dataclass(frozen=True)
class CentralPrivacy(Privacy):
    """Clip every update and add noise to their sum on a trusted server (DP-FedAvg):

        move = ( Σ_S Δᵢ min(1, C/‖Δᵢ‖) + N(0, z² C² I) ) / n

    n is the cohort size that the recipe expects, not the number of uploads: a rejected client counts as zero, and a
    round without uploads still moves by the noise. All clients have the same weight; otherwise the sensitivity of the
    sum would depend on the weights. Nothing else of the updates enters the server's state. With `entropy = "recipe"`
    anyone who knows the seed can remove the noise, so use it only in simulations.

    Deviations: the paper also clips per layer and weights clients by samples up to a cap. Here C bounds the whole
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
    """Clip each update and add noise on the client before the upload, so that the server need not be trusted:

        upload  Δᵢ min(1, C/‖Δᵢ‖) + N(0, z² C² I)

    Δᵢ is the update after the changes of all other parts: the protection is always applied last, in any order of the
    parts. The average and the server's step are those of the method. With `entropy = "recipe"` anyone who knows the
    seed, including the server, can remove the noise, so use it only in simulations.

    ε holds for a client's uploads as the server sees them, one by one. In DP-FedSAM a client's noise has the variance
    σ² C²/n for n clients in a round: z = σ/√n, which is 0.13 for its σ = 0.95 and n = 50. Its ε holds for the sum over
    the round, which is all that secure aggregation would reveal; the ε reported here is much larger. The released code
    of DP-FedSAM clips each tensor separately, and its SAM is adaptive; here C bounds the whole update. What is said of
    DP-FedSAM was written from the named paper and that code. It is not recorded how much of the paper's text was read,
    and no run of its authors is replayed.

    Deviations: the paper clips the client's weights, and its server adds more noise before it broadcasts. Here the
    update is clipped, and no processing of noisy uploads on the server can weaken their privacy.
    """

    protects = "upload"

    def report(self, upload: Upload, sent: Vectors, memory: Vectors, outcome: Outcome) -> tuple[Upload, Vectors]:
        rule = outcome.rule
        noise = self.drawn(upload.delta, rule.seed, rule.round, rule.client)
        return upload.update(delta=self.clipped(upload.delta) + noise), {}


def system_normal(size: int) -> Tensor:
    """Draw normal numbers, each from 52 random bits of the operating system; torch's generator has 32-bit seeds."""
    bits = torch.frombuffer(bytearray(os.urandom(8 * size)), dtype=torch.int64) & (2**52 - 1)
    normal: Tensor = torch.special.ndtri((bits.double() + 0.5) * 2.0**-52)
    return normal
