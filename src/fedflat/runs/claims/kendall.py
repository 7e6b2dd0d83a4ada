"""Kendall's τ between two values of the same runs: of one seed, and over all seeds with an interval."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fedflat.flatness import quantile

Pairs = list[tuple[float, float]]


def tau_of(pairs: Pairs) -> float:
    """Kendall's τ_b: concordant minus discordant pairs of runs, corrected for ties; NaN if one side is constant."""
    x, y = zip(*pairs, strict=True)
    from scipy.stats import kendalltau

    return float(kendalltau(x, y).statistic)


def step_of(seeds: Sequence[Sequence[Pairs]]) -> float:
    """4/(r(r − 1)), the distance between values of τ of r runs; the root of its mean square over seeds and studies."""
    runs = [len(pairs) for seed in seeds for pairs in seed]
    return math.sqrt(float(np.mean([(4 / (r * (r - 1))) ** 2 for r in runs]))) if runs else 0.0


def pooled_tau(groups: Sequence[Sequence[Pairs]]) -> tuple[float, float, float]:
    """Kendall's τ over all runs, and the ends of its 95 % interval by a jackknife over the seeds.

    τ = (concordant − discordant)/(concordant + discordant), over all pairs of runs without a tie. Runs of one seed are
    not independent, so a seed is left out as a whole, with its runs in all studies. Seeds of the same studies form a
    group. With z = artanh τ, and z₍ᵢ₎ the same without seed i, for M seeds of which m are of one group,

        tanh(z ± t s),      s² = Σ_groups v,      v = ((M − 1)/M)² m/(m − 1) Σᵢ (z₍ᵢ₎ − z̄)²,

    where t is Student's with s⁴ / Σ v²/(m − 1) degrees of freedom (Welch and Satterthwaite). For one group these are
    the usual (m − 1)/m Σᵢ (z₍ᵢ₎ − z̄)² and m − 1. The studies are fixed, so differences between them do not count as
    spread. If a group has only one seed, or only one seed has pairs without a tie, there is no interval (NaN). A
    bootstrap over so few seeds would be too short: with ten it covers about 90 %.

    Args:
        groups: for each group and each of its seeds, the two values of each run.
    """
    seeds = [pairs for group in groups for pairs in group]
    seed = np.repeat(np.arange(len(seeds)), [len(pairs) for pairs in seeds])
    x, y = np.array([pair for pairs in seeds for pair in pairs]).T
    agree = np.sign(x[:, None] - x[None]) * np.sign(y[:, None] - y[None])
    blocks, sizes = np.zeros((2, len(seeds), len(seeds)))
    np.add.at(blocks, (seed[:, None], seed[None]), agree)
    np.add.at(sizes, (seed[:, None], seed[None]), (agree != 0).astype(float))

    tau, most = float(blocks.sum() / sizes.sum()), 1 - 1 / sizes.sum()
    counts = [len(group) for group in groups]
    if min(counts) < 2 or not all(_without(sizes, i) for i in range(len(seeds))):
        return tau, math.nan, math.nan
    left_out = [_without(blocks, i) / _without(sizes, i) for i in range(len(seeds))]
    z, around = (np.arctanh(np.clip(value, -most, most)) for value in (tau, left_out))
    spread = [
        (1 - 1 / len(seeds)) ** 2 * len(each) ** 2 / (len(each) - 1) * float(np.var(each))
        for each in np.split(around, np.cumsum(counts)[:-1])
    ]
    if not any(spread):
        return tau, tau, tau
    freedom = sum(spread) ** 2 / sum(v**2 / (m - 1) for v, m in zip(spread, counts, strict=True))
    reach = quantile(freedom) * math.sqrt(sum(spread))
    return tau, float(np.tanh(z - reach)), float(np.tanh(z + reach))


def _without(blocks: NDArray[np.float64], i: int) -> float:
    """The sum over all pairs of seeds but those with seed i."""
    return float(blocks.sum() - 2 * blocks[i].sum() + blocks[i, i])
