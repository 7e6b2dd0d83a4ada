"""Effects: what the runs of a study say about each hypothesis of a claim, seed by seed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from fedflat.runs.claims.claim import FEWEST, Claim, Part, Ranking, Values, matches
from fedflat.runs.claims.evidence import Evidence
from fedflat.runs.claims.kendall import Pairs, pooled_tau, step_of, tau_of
from fedflat.runs.claims.quantities import quantity, value_of
from fedflat.runs.claims.verdict import Finding, Hypothesis, Word, concluded, judge
from fedflat.runs.sweep.plan import Point, Sweep
from fedflat.runs.sweep.results import Row

RowsBySeed = dict[int, dict[str, list[Row]]]  # of each seed, the rows of each study


@dataclass(frozen=True)
class Effect:
    """One hypothesis and what the seeds say.

    Attributes:
        name: the name of the part, or the measure of a ranking.
        finding: the verdict with mean and interval, in the unit that is shown: a difference, a ratio, or τ.
        bound: what the effect must exceed or stay below, in the same unit.
        direction: on which side of it the claimed effects are.
        unit: "difference", "ratio", "value" (of the runs themselves) or "τ".
        values: the effect for each seed, on the scale on which it was judged.
        means: mean quantity of the runs in question, and of those they are compared with (None if there are none).
        printed: what the paper prints.
        pooled: for a ranking, τ over all runs at once, with the ends of its jackknife interval.
        left_out: the number of seeds whose runs are there but lack the quantity: it is missing, not finite, or not
            positive where a ratio needs it; for a ranking, fewer than three runs of the seed have both values, or
            all have the same. The effect is that of the other seeds.
        lacking: for a ranking, the number of runs that lack one of the two values.
        control: whether it is shown beside the measures of a ranking, without a part in the verdict.
        seeds: the seed of each of the `values`.
        step: for τ, the distance between the values that it can take; 0 for effects that can take any value.
    """

    name: str
    finding: Finding
    bound: float
    direction: str
    unit: str
    values: tuple[float, ...]
    means: tuple[float | None, float | None] = (None, None)
    printed: str = ""
    pooled: tuple[float, float, float] | None = None
    left_out: int = 0
    lacking: int = 0
    control: bool = False
    seeds: tuple[int, ...] = ()
    step: float = field(default=0.0, compare=False)  # differs in its last digit with the order of the studies

    @property
    def label(self) -> str:
        """The name as tables and figures show it."""
        return f"{self.name} (control)" if self.control else self.name


@dataclass(frozen=True)
class State:
    """A claim with the effects of its parts, its verdict, and what it cost.

    Attributes:
        claim: the claim.
        effects: one for each part.
        word: the verdict on the whole.
        more: for an undecided claim, the number of further seeds that would decide it; None if more than 1,000.
        runs: the number of runs that it needs.
        known: the number of these runs that have results.
        hours: the time that these took to train.
    """

    claim: Claim
    effects: tuple[Effect, ...]
    word: Word
    more: int | None
    runs: int
    known: int
    hours: float

    @property
    def judged(self) -> tuple[Effect, ...]:
        """The effects that the verdict is about: all but those shown beside a ranking."""
        return tuple(effect for effect in self.effects if not effect.control)

    @property
    def verdict(self) -> str:
        """The verdict in words."""
        return str(Finding(self.word, math.nan, math.nan, math.nan, 0, self.more))


def state_of(claim: Claim, studies: Mapping[str, Sweep], evidence: Evidence) -> State:
    """Judges a claim by the results that are known."""
    if claim.ranking:
        judged = _ranked(claim, studies, evidence)
    else:
        judged = [_effect(claim, part, studies[claim.study_of(part)], evidence) for part in claim.part]
    rows = [evidence.of(study, point) for study in studies.values() for point in claim.points(study)]
    seconds = sum(value_of(row, "seconds") or 0.0 for row in rows if row)
    word, more = concluded([part for effect, part in judged if not effect.control], claim.need)
    effects = tuple(effect for effect, _ in judged)
    return State(claim, effects, word, more, len(rows), sum(row is not None for row in rows), seconds / 3600)


def _effect(claim: Claim, part: Part, study: Sweep, evidence: Evidence) -> tuple[Effect, Hypothesis]:
    known = [(point, row) for point in claim.judged(study) if (row := evidence.of(study, point))]
    mine = _by_seed(part, part.quantity, part.of, known)
    other = part.against_quantity or part.quantity
    theirs = _by_seed(part, other, part.against, known) if part.against is not None else {}
    seeds = sorted(seed for seed in mine if part.against is None or seed in theirs)
    scale = math.log if part.compare == "ratio" else float
    values = tuple(scale(mine[s]) - (scale(theirs[s]) if part.against is not None else 0.0) for s in seeds)
    bound = scale(part.limit)
    found = judge(values, bound, part.direction)
    if part.compare == "ratio":
        ends = (_exp(found.mean), _exp(found.low), _exp(found.high))
        found = Finding(found.word, *ends, found.seeds, found.more)
    unit = part.compare if part.against is not None else "value"
    means = (_mean([mine[s] for s in seeds]), _mean([theirs[s] for s in seeds if s in theirs]))
    left_out = len(_paired(part, known)) - len(seeds)
    shown = Effect(
        part.name, found, part.limit, part.direction, unit, values, means, part.printed,
        left_out=left_out, seeds=tuple(seeds),
    )  # fmt: skip
    return shown, Hypothesis(values, bound, part.direction)


def _paired(part: Part, known: Sequence[tuple[Point, Row]]) -> set[int]:
    """The seeds of which all runs are known that the part needs, whether these have the quantity or not."""
    groups = [chosen for chosen in (part.of, part.against) if chosen is not None]
    seeds = [{point.recipe.seed for point, _ in known if matches(point, chosen)} for chosen in groups]
    return set.intersection(*seeds)


def _exp(value: float) -> float:
    """The exponential, infinite where it is too large for a float: the interval of two seeds can be that wide."""
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _by_seed(part: Part, name: str, chosen: Values, known: Sequence[tuple[Point, Row]]) -> dict[int, float]:
    """A quantity of the chosen runs among those that are known, by seed."""
    found: dict[int, float] = {}
    for point, row in known:
        value = quantity(row, name, part, point.recipe.server.rounds) if matches(point, chosen) else None
        if value is not None:
            found[point.recipe.seed] = value
    return found


def _ranked(claim: Claim, studies: Mapping[str, Sweep], evidence: Evidence) -> list[tuple[Effect, Hypothesis]]:
    """The effect of each measure of a ranking, from the known runs of its studies."""
    ranking = claim.ranking
    assert ranking is not None
    found: RowsBySeed = {}
    for name in ranking.studies:
        for point in claim.judged(studies[name]):
            if row := evidence.of(studies[name], point):
                found.setdefault(point.recipe.seed, {}).setdefault(name, []).append(row)
    return [_ranked_by(measure, ranking, found) for measure in (*ranking.measures, *ranking.beside)]


def _ranked_by(measure: str, ranking: Ranking, found: RowsBySeed) -> tuple[Effect, Hypothesis]:
    """Kendall's τ of a measure with the quantity: within each seed of each study, and over all runs at once.

    The runs of one seed share data, split and first weights and differ only in the method. Studies with the same seed
    share all of these too, so a seed counts once: its effect is the mean of its τ over the studies. These effects are
    judged like any other, but τ takes only few values, so their interval is `stepped`. The τ over all runs also
    compares settings with each other; its interval is that of a jackknife over the seeds, because runs of one seed are
    not independent. A run that two studies share is one run there.
    """
    enough = {seed for seed, rows in found.items() if any(len(mine) >= FEWEST for mine in rows.values())}
    within: dict[int, list[Pairs]] = {}
    together: dict[tuple[str, ...], list[Pairs]] = {}
    lacking: set[str] = set()
    for seed, rows in found.items():
        each = [row for mine in rows.values() for row in mine]
        lacking |= {row["digest"] for row in each if not _pairs([row], measure, ranking.quantity)}
        pairs = {name: _pairs(mine, measure, ranking.quantity) for name, mine in rows.items()}
        kept = tuple(name for name in pairs if len(pairs[name]) >= FEWEST)
        if kept:
            within[seed] = [pairs[name] for name in kept]
            distinct = {row["digest"]: row for name in kept for row in rows[name]}
            together.setdefault(kept, []).append(_pairs([*distinct.values()], measure, ranking.quantity))
    taus = {s: [tau for pairs in mine if not math.isnan(tau := tau_of(pairs))] for s, mine in within.items()}
    values = {seed: float(np.mean(mine)) for seed, mine in taus.items() if mine}
    step = step_of([*within.values()])
    hypothesis = Hypothesis(tuple(values.values()), ranking.bound, "higher", step)
    shown = Effect(
        measure, hypothesis.judged(), ranking.bound, "higher", "τ", tuple(values.values()),
        pooled=pooled_tau([*together.values()]) if values else None,
        left_out=len(enough - values.keys()), lacking=len(lacking), control=measure in ranking.beside,
        seeds=tuple(values), step=step,
    )  # fmt: skip
    return shown, hypothesis


def _pairs(rows: Sequence[Row], measure: str, quantity: str) -> Pairs:
    both = ((value_of(row, measure), value_of(row, quantity)) for row in rows)
    return [(x, y) for x, y in both if x is not None and y is not None]


def beside_best(state: State) -> list[Effect]:
    """How far the best measure of a ranking is above the others: the paired differences of the seeds' τ.

    The best is the measure, not a control, with the highest mean τ. The same seeds have chosen it, so its lead is
    somewhat overestimated. No direction is claimed for a control: one whose interval is below 0 ranks the other way
    round, and stands here as "minus" itself.

    Returns:
        The best measure, then an effect for each other measure and control: the best one's τ minus the other's, over
        the seeds that have both. Empty if no measure has been judged.
    """
    ranked = [effect for effect in state.effects if effect.unit == "τ" and effect.values]
    measures = [each for each in ranked if not each.control]
    if not measures:
        return []
    best = max(measures, key=lambda each: each.finding.mean)
    own, found = dict(zip(best.seeds, best.values, strict=True)), [best]
    for other in ranked:
        if other is not best:
            sign = -1 if other.control and other.finding.high < 0 else 1
            name = other.name if sign > 0 else f"minus {other.name}"
            theirs = zip(other.seeds, other.values, strict=True)
            pairs = {seed: own[seed] - sign * tau for seed, tau in theirs if seed in own}
            values, step = tuple(pairs.values()), max(best.step, other.step)
            finding = judge(values, 0.0, "higher", step=step)
            found.append(Effect(name, finding, 0.0, "higher", "τ", values, control=other.control, step=step))
    return found
