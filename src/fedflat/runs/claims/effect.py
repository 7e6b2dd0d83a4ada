"""Effects: what the runs of a study say about each hypothesis of a claim, seed by seed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fedflat.flatness import quantile
from fedflat.runs.claims.claim import FEWEST, Claim, Part, Values, matches
from fedflat.runs.claims.evidence import Evidence
from fedflat.runs.claims.verdict import Finding, Hypothesis, Word, concluded, judge
from fedflat.runs.sweep.plan import Point, Sweep
from fedflat.runs.sweep.results import Row

Quantity = Callable[[Mapping[str, float]], float | None]
DUALITY = "duality_fc2"  # the middle layer, whose decomposition the claims look at


def _gap(metrics: Mapping[str, float]) -> float | None:
    """Test loss minus training loss of the last model."""
    return metrics["loss"] - metrics["train_loss"] if {"loss", "train_loss"} <= metrics.keys() else None


def _drift_share(metrics: Mapping[str, float]) -> float | None:
    """|Σ μ_w μ_g / mean Δl| of the pairs train → test.

    This is a share of the gap of the pairs, mean Δl = Σ c σ_w σ_g + Σ μ_w μ_g: of the sum that the paper decomposes and
    in which it finds the drift negligible. The gap of the model is larger here, so a share of it would be smaller.
    """
    drift, gap = (metrics.get(f"{DUALITY}_train_to_test_{name}") for name in ("drift", "gap"))
    return abs(drift / gap) if drift is not None and gap else None


def _explained(pairing: str) -> Quantity:
    def share(metrics: Mapping[str, float]) -> float | None:
        """Σ c σ_w σ_g of one pairing ÷ the gap of the model, test loss minus training loss."""
        fluctuation, gap = (metrics.get(f"{DUALITY}_{name}") for name in (f"{pairing}_fluctuation", "gap"))
        return fluctuation / gap if fluctuation is not None and gap else None

    return share


def _knowledge_kept(metrics: Mapping[str, float]) -> float | None:
    """What local training changes of the test accuracy, in the mean over the clients of the last round."""
    after, before = metrics.get("local_accuracy"), metrics.get("local_accuracy_before")
    return after - before if after is not None and before is not None else None


# Quantities that are computed from others; `rounds_to_target` is computed from the curve.
DERIVED: dict[str, Quantity] = {
    "gap": _gap,
    "drift_share": _drift_share,
    "explained": _explained("train_to_test"),
    "explained_test_to_train": _explained("test_to_train"),
    "knowledge_kept": _knowledge_kept,
}


def rounds_to_target(
    curve: Sequence[tuple[int, float]], target: float, rounds: int, best: str = "highest"
) -> int | None:
    """The first evaluated round with at least the target, or `rounds + 1` if there is none.

    The true number of a run that does not reach the target is larger, so a difference to such a run is a lower bound.

    Args:
        curve: pairs of round and value.
        target: the value to reach.
        rounds: number of rounds of the run.
        best: "lowest" for a metric of which less is better: its target is reached by at most this value.

    Returns:
        The round; None for a run that was never evaluated.

    >>> rounds_to_target([(2, 0.5), (4, 0.7)], 0.6, 4), rounds_to_target([(2, 0.5), (4, 0.7)], 0.8, 4)
    (4, 5)
    >>> rounds_to_target([(2, 0.7), (4, 0.5)], 0.6, 4, "lowest"), rounds_to_target([], 0.6, 4)
    (4, None)
    """
    sign = -1 if best == "lowest" else 1
    reached = (round for round, value in curve if sign * value >= sign * target)
    return next(reached, rounds + 1) if curve else None


def quantity(row: Row, name: str, part: Part, rounds: int) -> float | None:
    """The value of a part's quantity in a run; None if it is missing, or if a ratio needs it and it is not positive."""
    if part.target is not None:
        round = rounds_to_target(row["curve"], part.target, rounds, row.get("best", "highest"))
        return None if round is None else float(round)
    found = value_of(row, name)
    return None if part.compare == "ratio" and found is not None and found <= 0 else found


def value_of(row: Row, name: str) -> float | None:
    """A column of a run's row or a derived quantity; None if it is missing or not finite."""
    metrics = row["metrics"]
    found = DERIVED[name](metrics) if name in DERIVED else metrics.get(name)
    return found if found is not None and math.isfinite(found) else None


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
    """Kendall's τ of each measure with the quantity: within each seed of each study, and over all runs at once.

    The runs of one seed share data, split and first weights and differ only in the method. Studies with the same seed
    share all of these too, so a seed counts once: its effect is the mean of its τ over the studies. These effects are
    judged like any other, but τ takes only few values, so their interval is `stepped`. The τ over all runs also
    compares settings with each other; its interval is that of a jackknife over the seeds, because runs of one seed are
    not independent. A run that two studies share is one run there.
    """
    ranking = claim.ranking
    assert ranking is not None
    found: dict[int, dict[str, list[Row]]] = {}
    for name in ranking.studies:
        for point in claim.judged(studies[name]):
            if row := evidence.of(studies[name], point):
                found.setdefault(point.recipe.seed, {}).setdefault(name, []).append(row)
    enough = [seed for seed, rows in found.items() if any(len(mine) >= FEWEST for mine in rows.values())]
    judged: list[tuple[Effect, Hypothesis]] = []
    for measure in (*ranking.measures, *ranking.beside):
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
        taus = {s: [tau for pairs in mine if not math.isnan(tau := _tau(pairs))] for s, mine in within.items()}
        values = {seed: float(np.mean(mine)) for seed, mine in taus.items() if mine}
        step = _step([*within.values()])
        hypothesis = Hypothesis(tuple(values.values()), ranking.bound, "higher", step)
        shown = Effect(
            measure, hypothesis.judged(), ranking.bound, "higher", "τ", tuple(values.values()),
            pooled=pooled_tau([*together.values()]) if values else None,
            left_out=len(set(enough) - values.keys()), lacking=len(lacking), control=measure in ranking.beside,
            seeds=tuple(values), step=step,
        )  # fmt: skip
        judged.append((shown, hypothesis))
    return judged


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


Pairs = list[tuple[float, float]]


def _pairs(rows: Sequence[Row], measure: str, quantity: str) -> Pairs:
    both = ((value_of(row, measure), value_of(row, quantity)) for row in rows)
    return [(x, y) for x, y in both if x is not None and y is not None]


def _tau(pairs: Pairs) -> float:
    """Kendall's τ_b: concordant minus discordant pairs of runs, corrected for ties; NaN if one side is constant."""
    x, y = zip(*pairs, strict=True)
    from scipy.stats import kendalltau

    return float(kendalltau(x, y).statistic)


def _step(seeds: Sequence[Sequence[Pairs]]) -> float:
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
