"""The verdict on a hypothesis: from effects in paired seeds to `holds`, `does not hold` or `undecided`."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from fedflat.flatness import LEVEL, quantile, stepped, student

Direction = Literal["higher", "lower"]
Word = Literal["holds", "does not hold", "undecided", "not run yet"]
Need = Literal["all", "any"]
MOST = 1000  # maximum number of further seeds that are counted


@dataclass(frozen=True)
class Finding:
    """What the seeds say about one hypothesis "the expected effect lies above (or below) a bound".

    Attributes:
        word: the verdict.
        mean: mean effect over the seeds; NaN without any.
        low: lower end of its interval; NaN with fewer than two seeds.
        high: its upper end.
        seeds: number of seeds.
        more: for an undecided hypothesis, how many further seeds would decide it if mean and spread stayed as they are;
            None if it is decided, or if no number up to 1,000 is enough. With so many there is about an even chance.
            Seeds that were looked at may not count again, so a new study needs `seeds + more` fresh ones.
    """

    word: Word
    mean: float
    low: float
    high: float
    seeds: int
    more: int | None = None

    def __str__(self) -> str:
        """The verdict as a table shows it."""
        if self.word != "undecided":
            return self.word
        many = f"more than {MOST:,}" if self.more is None else f"{self.more}"
        return f"undecided (would need {many} more seed{'' if self.more == 1 else 's'})"


class Hypothesis(NamedTuple):
    """The effects, the bound, on which side of it they should be, and the step between the values that they can take.

    The step is 0 for effects that can take any value.
    """

    effects: Sequence[float]
    bound: float
    direction: Direction
    step: float = 0.0

    def judged(self, level: float = LEVEL) -> Finding:
        return judge(self.effects, self.bound, self.direction, level, self.step)


def judge(
    effects: Sequence[float], bound: float, direction: Direction, level: float = LEVEL, step: float = 0.0
) -> Finding:
    """Judges the hypothesis that the expected effect is above `bound` (direction "higher") or below it ("lower").

    With the interval  d̄ ± t s/√n  of n effects (Student's t, n − 1 degrees of freedom) the hypothesis

        holds           if all of the interval lies on the claimed side of the bound,
        does not hold   if all of it lies on the other side,
        undecided       otherwise, and always with fewer than two effects.

    So a true hypothesis is called false, and a false one is called true, in at most (1 − level)/2 of all
    repetitions, 2.5 % at the usual level, if the effects are about normal. "No loss" is a hypothesis with a bound below
    0: the loss is smaller than the margin that the bound states.

    Args:
        effects: one for each seed, such as the difference between two methods.
        bound: the number that the effect must exceed or stay below.
        direction: on which side of it the claimed effects are.
        level: the probability with which the interval covers the expectation.
        step: for effects that take only few values, such as Kendall's τ, the distance between neighbouring ones; the
            interval is then `stepped`.

    >>> judge([1.0, 1.2, 0.9, 1.1], 0.0, "higher").word, judge([1.0, 1.2, 0.9, 1.1], 0.0, "lower").word
    ('holds', 'does not hold')
    >>> print(judge([1.0, -0.5, 0.8], 0.0, "higher"))
    undecided (would need 14 more seeds)
    """
    n = len(effects)
    if not n:
        return Finding("not run yet", math.nan, math.nan, math.nan, 0)
    found = stepped(effects, step, level) if step else student(effects, level)
    if n < 2:
        return Finding("undecided", found.mean, math.nan, math.nan, n, 2 - n)
    above, below = found.low > bound, found.high < bound
    if above or below:
        word: Word = "holds" if above == (direction == "higher") else "does not hold"
        return Finding(word, found.mean, found.low, found.high, n)
    more = further_seeds(n, abs(found.mean - bound), found.error * math.sqrt(n), level)
    return Finding("undecided", found.mean, found.low, found.high, n, more)


def further_seeds(n: int, distance: float, deviation: float, level: float = LEVEL) -> int | None:
    """The smallest number of seeds beyond n at which  t s/√N < |d̄ − bound|, or None if more than 1,000 are needed.

    Args:
        n: the number of seeds so far.
        distance: |d̄ − bound|.
        deviation: the sample standard deviation s of the effects.
        level: the level of the interval.

    >>> further_seeds(5, 1.0, 1.5), further_seeds(5, 0.0, 1.5)
    (7, None)
    """

    def enough(total: int) -> bool:
        return quantile(total - 1, level) * deviation < distance * math.sqrt(total)

    more = 1 + bisect_left(range(n + 1, n + MOST + 1), True, key=enough)  # t s/√N falls with N
    return more if more <= MOST else None


def concluded(parts: Sequence[Hypothesis], need: Need = "all") -> tuple[Word, int | None]:
    """The verdict on a claim of several hypotheses, of which all (or any one) must be true.

    With `need = "all"` the claim holds if every part holds. Each part's own interval is enough for that: if a part is
    false, the verdict is wrong only if this part's interval misses. The claim does not hold if a part does not. Since
    any of k intervals can miss, that part is judged at the level 1 − 0.05/k (Bonferroni). With `need = "any"` the two
    cases are swapped. Either way a false verdict has a probability of at most 2.5 %. If a part has no runs, the claim
    is not run yet, unless the other parts decide it.

    Returns:
        The verdict, and for an undecided one the number of further seeds that would decide it one way or the other if
        all means and spreads stayed as they are; None if that is more than 1,000.

    >>> sure, unsure = Hypothesis([1.0, 1.1, 0.9], 0.0, "higher"), Hypothesis([0.1, -0.1, 0.2], 0.0, "higher")
    >>> concluded([sure, sure])
    ('holds', None)
    >>> concluded([sure, unsure])
    ('undecided', 20)
    """
    every: Word = "holds" if need == "all" else "does not hold"
    one: Word = "does not hold" if need == "all" else "holds"
    strict = 1 - (1 - LEVEL) / max(1, len(parts))
    if all(part.judged().word == every for part in parts):
        return (every, None) if parts else ("not run yet", None)
    if any(part.judged(strict).word == one for part in parts):
        return one, None
    if any(len(part.effects) == 0 for part in parts):
        return "not run yet", None
    together = [_until(part, every, LEVEL) for part in parts]
    alone = [more for part in parts if (more := _until(part, one, strict)) is not None]
    ways = [max(more for more in together if more is not None)] if None not in together else []
    return "undecided", min([*ways, *alone], default=None)


def _until(part: Hypothesis, word: Word, level: float) -> int | None:
    """How many further seeds a part needs to come out as `word`; 0 if it does, None if it leans the other way."""
    found = part.judged(level)
    if found.word == word:
        return 0
    leaning = "holds" if (found.mean > part.bound) == (part.direction == "higher") else "does not hold"
    return found.more if leaning == word else None
