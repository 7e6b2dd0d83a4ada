"""Successive halving: many trials for a few rounds, the best of them for more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Rung:
    """A stage of the search: how many trials it has, and the round that each of them is trained to."""

    trials: int
    rounds: int


def rungs(rounds: int, trials: int, eta: int) -> list[Rung]:
    """The stages of successive halving (Jamieson, Talwalkar 2016).

    With K = ⌊log_η n⌋, stage k has ⌊n η⁻ᵏ⌋ trials, which are trained up to round ⌈R η^(k−K)⌉. A promoted trial
    continues from its checkpoint, so stage k costs only the rounds since stage k − 1.

    Args:
        rounds: R, the rounds of a trial in the last stage.
        trials: n, the number of trials in the first stage.
        eta: η; a share 1/η of the trials is promoted.

    >>> rungs(rounds=9, trials=9, eta=3)
    [Rung(trials=9, rounds=1), Rung(trials=3, rounds=3), Rung(trials=1, rounds=9)]
    """
    last = 0
    while eta ** (last + 1) <= trials:
        last += 1
    stages = [Rung(trials // eta**k, -(-rounds // eta ** (last - k))) for k in range(last + 1)]
    return [stage for stage, later in zip(stages, [*stages[1:], None], strict=True) if later is None or stage != later]


def spent(stages: Sequence[Rung], trials: int) -> int:
    """The rounds that a search with at most this many trials takes.

    >>> spent(rungs(rounds=9, trials=9, eta=3), 9), 9 * 9
    (21, 81)
    """
    before, total = 0, 0
    for stage in stages:
        total += min(trials, stage.trials) * (stage.rounds - before)
        before = stage.rounds
    return total


def promoted(scores: Mapping[int, float], places: int) -> list[int]:
    """The trials with the highest scores, in their original order. Of equal trials the earlier ones are promoted."""
    ranked = sorted(scores, key=lambda trial: (-scores[trial], trial))
    return sorted(ranked[:places])
