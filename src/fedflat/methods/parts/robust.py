"""Robust averages, which limit the influence of a few bad clients. All clients have the same weight."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from fedflat.errors import RecipeError
from fedflat.local import Outcome, Vectors
from fedflat.methods.part import RobustAverage, ServerView, option
from fedflat.methods.uploads import Upload
from fedflat.randomness import generator

SPAN = 1 << 16  # coordinates per chunk; sorting all coordinates at once would need twice the memory


@dataclass(frozen=True)
class TrimmedMean(RobustAverage):
    """The mean of each coordinate without its largest and smallest values (Yin et al. 2018):

        move_j = mean of Δ_{(b+1),j} … Δ_{(n−b),j}      with Δ_{(1),j} ≤ … ≤ Δ_{(n),j} and b = ⌈trim · n⌉

    trim = 0.5, the largest value, gives the median of each coordinate. The average tolerates b malicious clients.

    Deviations: b is rounded up, so that a small cohort is trimmed too.
    """

    trim: float = option(0.1, "share of the clients left out at either end; 0.5 = the median", low=0, high=0.5)

    def locate(self, rows: Sequence[Tensor], server: ServerView, name: str = "") -> Tensor:
        cut = min(math.ceil(self.trim * len(rows) - 1e-9), (len(rows) - 1) // 2)
        return _by_spans(rows, lambda span: span.sort(dim=0).values[cut : len(rows) - cut].mean(dim=0))


@dataclass(frozen=True)
class GeometricMedian(RobustAverage):
    """The point with the smallest sum of distances to the Δᵢ (RFA, Pillutla et al. 2022), by Weiszfeld's iteration:

        move = argmin_v Σ ‖v − Δᵢ‖,      v ← Σ βᵢ Δᵢ / Σ βᵢ,      βᵢ = 1 / max(ν, ‖v − Δᵢ‖)

    It tolerates malicious clients if they are fewer than half. The smoothing ν is 10⁻⁶ of the median distance.

    Deviations: the paper weights clients by samples, starts at their mean, takes three steps and uses an absolute ν.
    Here all clients have the same weight, v starts at the median of each coordinate, and the iteration stops when v
    has converged.
    """

    steps: int = option(50, "most steps of Weiszfeld's iteration", low=1)

    def locate(self, rows: Sequence[Tensor], server: ServerView, name: str = "") -> Tensor:
        point = _median(rows)
        for _ in range(self.steps):
            gaps = _gaps(rows, point)
            scale = median(gaps)
            if not scale:
                return point  # more than half of the clients are at this point
            weights = [1 / max(1e-6 * scale, gap) for gap in gaps]
            last, point = point, _weighted(rows, [weight / sum(weights) for weight in weights])
            if _norm(point - last) <= 1e-6 * scale:
                break
        return point


@dataclass(frozen=True)
class CentredClipping(RobustAverage):
    """The last move, corrected `steps` times by the clipped differences of the Δᵢ from it (Karimireddy et al. 2021):

        v ← v + (1/n) Σ (Δᵢ − v) min(1, τ/‖Δᵢ − v‖)

    v starts at the move of the last round, so that a malicious client does not gain the same advantage again in every
    round. With `beta` the clients send a momentum in place of Δ,  mᵢ ← β mᵢ + (1 − β) Δᵢ,  which they keep between
    rounds. It makes honest clients more similar over the rounds, so that an attack within their spread has less effect.

    Deviations: with `radius = 0`, the default, τ is the median of the distances, so that the scale need not be known.
    For the vectors uploaded in addition to Δ there is no last move, and v starts at the median of each coordinate.
    """

    radius: float = option(0.0, "radius τ of the clip; 0 = the median distance", low=0)
    steps: int = option(3, "corrections in a round", low=1)
    beta: float = option(0.0, "momentum β of the clients' Δ", low=0, high=0.999)

    def first_state(self, weights: Tensor) -> Vectors:
        return {"centre": torch.zeros_like(weights)}

    def first_memory(self, initial: Tensor) -> Vectors:
        return {"momentum": torch.zeros_like(initial)} if self.beta else {}

    def report(self, upload: Upload, sent: Vectors, memory: Vectors, outcome: Outcome) -> tuple[Upload, Vectors]:
        if not self.beta:
            return upload, {}
        momentum = torch.lerp(upload.delta, memory["momentum"], self.beta)
        return upload.update(delta=momentum), {"momentum": momentum}

    def locate(self, rows: Sequence[Tensor], server: ServerView, name: str = "") -> Tensor:
        centre = server["centre"].clone() if name == "delta" else _median(rows)
        for _ in range(self.steps):
            gaps = _gaps(rows, centre)
            radius = self.radius or median(gaps)
            shares = [min(1.0, radius / gap) / len(rows) if gap else 0.0 for gap in gaps]
            centre = _weighted([*rows, centre], [*shares, 1 - sum(shares)])
        return centre

    def after(self, move: Tensor) -> Vectors:
        return {"centre": move}


@dataclass(frozen=True)
class Krum(RobustAverage):
    """The client that is nearest to its neighbours, or the mean of several such clients (Blanchard et al. 2017):

        score(i) = Σ ‖Δᵢ − Δⱼ‖² over the n − f − 2 nearest j,      f = min(⌈liars · n⌉, ⌊(n − 3)/2⌋)

    Krum takes the Δ with the lowest score, Multi-Krum the mean of the n − f lowest. Both tolerate f malicious clients,
    and need five clients to tolerate one. Each uploaded vector is selected by its own distances, because a client with
    an honest Δ may send other vectors that are wrong.

    Deviations: if `liars` gives a larger f than 2f + 2 < n allows, f is the largest allowed value.
    """

    liars: float = option(0.2, "share of the clients that may lie", low=0, high=0.5)
    several: bool = option(False, "the mean of the n − f best (Multi-Krum) in place of the best")

    @property
    def quorum(self) -> int:
        return 5

    def locate(self, rows: Sequence[Tensor], server: ServerView, name: str = "") -> Tensor:
        count = len(rows)
        bad = min(math.ceil(self.liars * count - 1e-9), (count - 3) // 2)
        nearest = _squares(rows).sort(dim=1).values[:, : count - bad - 1]  # the first is itself, at distance 0
        order = nearest.sum(dim=1).argsort(stable=True).tolist()
        chosen = [rows[i] for i in sorted(order[: count - bad if self.several else 1])]
        return _weighted(chosen, [1 / len(chosen)] * len(chosen))


@dataclass(frozen=True)
class NormBound(RobustAverage):
    """The mean of the clients' Δ, each clipped to a norm that is computed from the cohort (Sun et al. 2019):

        move = (1/n) Σ Δᵢ min(1, C/‖Δᵢ‖),      C = factor · median ‖Δᵢ‖

    f malicious clients move the mean by at most 2 f C/n, but in a direction of their choice. Longer honest Δ are
    clipped too.

    Deviations: in the paper C is a constant.
    """

    factor: float = option(1.0, "bound C in units of the median norm", low=0, open_low=True)

    def locate(self, rows: Sequence[Tensor], server: ServerView, name: str = "") -> Tensor:
        norms = [_norm(row) for row in rows]
        bound = self.factor * median(norms)
        return _weighted(rows, [min(1.0, bound / norm) / len(rows) if norm else 0.0 for norm in norms])


@dataclass(frozen=True)
class Bucketing(RobustAverage):
    """Another robust average, applied to the means of random buckets of clients (Karimireddy et al. 2022):

        move = loc( mean of bucket 1, mean of bucket 2, … ),      s clients in each bucket, drawn anew in every round

    With heterogeneous data, honest clients are far apart, and a robust average may drop the rare ones. Means over s
    clients are more similar. But f malicious clients can spoil f of the ⌈n/s⌉ means, so the average tolerates s times
    fewer of them.

    Deviations: none.
    """

    part: RobustAverage
    size: int = option(2, "clients s in a bucket", low=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.part, RobustAverage):
            raise RecipeError(f"Bucketing.part = {self.part!r}: must be a robust average")

    @property
    def quorum(self) -> int:
        return self.size * (self.part.quorum - 1) + 1

    def first_state(self, weights: Tensor) -> Vectors:
        return self.part.first_state(weights)

    def first_memory(self, initial: Tensor) -> Vectors:
        return self.part.first_memory(initial)

    def report(self, upload: Upload, sent: Vectors, memory: Vectors, outcome: Outcome) -> tuple[Upload, Vectors]:
        return self.part.report(upload, sent, memory, outcome)

    def locate(self, rows: Sequence[Tensor], server: ServerView, name: str = "") -> Tensor:
        chance = generator(server.seed, "buckets", server.round)
        buckets = torch.randperm(len(rows), generator=chance).split(self.size)
        means = [_weighted([rows[i] for i in bucket], [1 / len(bucket)] * len(bucket)) for bucket in buckets]
        return self.part.locate(means, server, name)

    def after(self, move: Tensor) -> Vectors:
        return self.part.after(move)


def _by_spans(rows: Sequence[Tensor], function: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply a function to the values of each coordinate, chunk by chunk."""
    spans = zip(*(row.split(SPAN) for row in rows), strict=True)
    return torch.cat([function(torch.stack(span)) for span in spans])


def _median(rows: Sequence[Tensor]) -> Tensor:
    """Return the median of each coordinate; for an even number of rows, the mean of the middle two."""
    low, high = (len(rows) - 1) // 2, len(rows) // 2 + 1
    return _by_spans(rows, lambda span: span.sort(dim=0).values[low:high].mean(dim=0))


def _norm(vector: Tensor) -> float:
    return float(torch.linalg.vector_norm(vector, dtype=torch.float64))


def _gaps(rows: Sequence[Tensor], point: Tensor) -> list[float]:
    """Return the distance of each row from a point."""
    return [_norm(row - point) for row in rows]


def _squares(rows: Sequence[Tensor]) -> Tensor:
    """Return ‖xᵢ − xⱼ‖² for all pairs."""
    total = torch.zeros(len(rows), len(rows), dtype=torch.float64)
    for span in zip(*(row.split(SPAN) for row in rows), strict=True):
        points = torch.stack(span)
        total += torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist").double().square()
    return total


def _weighted(rows: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return Σ pᵢ xᵢ; rows with weight 0 are skipped."""
    total = torch.zeros_like(rows[0])
    for row, weight in zip(rows, weights, strict=True):
        if weight:
            total.add_(row, alpha=weight)
    return total
