"""Tunes methods with equal budgets on validation samples. The directory of the runs is the only state."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from fedflat.errors import RecipeError, RunError
from fedflat.files import private_directory, read_whole, write_whole, written_to
from fedflat.recipe import Recipe, toml
from fedflat.runs.folder import read_recipe
from fedflat.runs.lock import RunLock
from fedflat.runs.record import read_record
from fedflat.runs.result import stopped
from fedflat.runs.sweep.grid import is_field
from fedflat.runs.sweep.overrides import filled
from fedflat.runs.sweep.plan import FULL, Point, Sweep, slug_of, told_apart
from fedflat.runs.tune.halving import Rung, promoted, rungs, spent
from fedflat.runs.tune.space import Settings, Space, tuned_recipe
from fedflat.runs.tune.tuned import Trial, Tuned

SEARCH_SEEDS = 10_000  # the first seed of a search; those of the final runs are below
LOOKS = 9  # evaluations in the first stage, if it has so many rounds; a score is the mean of the last third of them
Train = Callable[[Sweep, Path], object]  # trains the runs of a sweep in a directory; failed ones have no score


@dataclass(frozen=True)
class Plan:
    """A search: what is tuned, with which budget.

    Attributes:
        recipe: all settings that are not tuned.
        space: methods and values.
        rounds: number of rounds of a run in the last stage.
        trials: maximum number of combinations of each method.
        eta: η; a share 1/η of the trials is promoted.
        seeds: number of search seeds for each trial.
        validation: share of each client's samples that is held out and scored.
    """

    recipe: Recipe
    space: Space
    rounds: int
    trials: int = 9
    eta: int = 3
    seeds: int = 1
    validation: float = 0.1

    @property
    def stages(self) -> list[Rung]:
        return rungs(self.rounds, self.trials, self.eta)

    def point(self, method: str, settings: Settings, seed: int, rounds: int) -> Point:
        """A run of a trial up to a round. It never sees test samples: it is scored on held-out client samples."""
        every = max(1, self.stages[0].rounds // LOOKS)
        evaluation = {"on": "validation", "validation": self.validation, "every": every}
        layer = {"seed": seed, "server": {"rounds": rounds}, "evaluation": evaluation}
        recipe = tuned_recipe(self.recipe, method, settings, [layer])
        values = {"method": filled(method, settings), **settings, "seed": seed}
        return Point(values, recipe, (), slug_of(values))

    def described(self) -> dict[str, Any]:
        """Everything that the search depends on, as a table."""
        budget = {"rounds": self.rounds, "trials": self.trials, "eta": self.eta, "seeds": self.seeds}
        recipe = {name: value for name, value in self.recipe.essentials().items() if name not in ("seed", "method")}
        table = {**budget, "validation": self.validation, **asdict(self.space), "recipe": recipe}
        return dict(json.loads(json.dumps(table, default=str)))


def search(plan: Plan, folder: Path, train: Train) -> list[Tuned]:
    """Tunes every method of a plan by successive halving.

    The scores are read from the metrics of the runs, and a run that exists already continues from its checkpoint.
    So a search that was killed and is started again gives the same result, bit for bit.

    Args:
        plan: the search.
        folder: its directory.
        train: trains the runs of a sweep in a directory, and skips or resumes those that are begun.

    Returns:
        For each method, its best settings and its budget.

    Raises:
        RunError: the directory holds another search, or another process searches in it.
    """
    _claim(plan, folder)
    with RunLock(folder, "search"):
        return _searched(plan, folder, train)


def _searched(plan: Plan, folder: Path, train: Train) -> list[Tuned]:
    chosen = {method: plan.space.drawn(method, plan.trials) for method in plan.space.methods}
    trials = [(method, settings) for method, some in chosen.items() for settings in some]
    scores: dict[int, dict[int, float | None]] = {index: {} for index in range(len(trials))}
    alive, folders = list(scores), _folders(plan, folder, trials)
    for stage in plan.stages:
        alive = [index for method in chosen for index in _best(method, trials, alive, scores, stage.trials)]
        _train_stage(plan, folder, [(trials[index], folders[index]) for index in alive], stage, train)
        for index in alive:
            scores[index][stage.rounds] = _score(folders[index], stage.rounds)
    found = [_tuned(plan, method, trials, scores, folders) for method in chosen]
    with written_to(folder, "free some space, then run the same command again"):
        table = [asdict(each) for each in found]
        write_whole(folder / "tuned.json", json.dumps(table, indent=2, ensure_ascii=False).encode() + b"\n")
        write_whole(folder / "hours.json", json.dumps(_hours(trials, folders), indent=2).encode() + b"\n")
    return found


def _hours(trials: Sequence[tuple[str, Settings]], folders: Sequence[Mapping[int, Path]]) -> dict[str, float]:
    """The hours that the runs of each method took to train.

    They stand in a file of their own, because all others are the same however often the search was interrupted.
    """
    hours = dict.fromkeys((method for method, _ in trials), 0.0)
    for (method, _), runs in zip(trials, folders, strict=True):
        hours[method] += sum(r.get("seconds", 0.0) for run in runs.values() for r in _records(run)) / 3600
    return {method: round(each, 4) for method, each in hours.items()}


def _records(run: Path) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    lines = read_whole(path).splitlines() if path.is_file() else []
    return [record for line in lines if (record := read_record(line))]


def _claim(plan: Plan, folder: Path) -> None:
    """Writes the plan into the directory, or checks that the directory holds the same plan."""
    path = folder / "search.json"
    if path.exists():
        try:
            same = json.loads(read_whole(path)) == plan.described()
        except ValueError:
            same = False
        if not same:
            raise RunError(f"{folder}: holds another search; repeat its command to go on, or choose another --out")
        return
    with written_to(folder, "choose another --out"):
        private_directory(folder)
        write_whole(path, json.dumps(plan.described(), indent=2).encode() + b"\n")


def _best(
    method: str,
    trials: Sequence[tuple[str, Settings]],
    alive: Sequence[int],
    scores: dict[int, dict[int, float | None]],
    places: int,
) -> list[int]:
    """The trials of a method that enter the next stage: those with the best last scores; failed ones never do."""
    mine = [index for index in alive if trials[index][0] == method]
    last = {index: list(scores[index].values())[-1] if scores[index] else 0.0 for index in mine}
    return promoted({index: score for index, score in last.items() if score is not None}, places)


def _folders(plan: Plan, folder: Path, trials: Sequence[tuple[str, Settings]]) -> list[dict[int, Path]]:
    """The directories of the runs of each trial, by seed. They are the same in all stages, so that runs go on."""
    seeds = range(SEARCH_SEEDS, SEARCH_SEEDS + plan.seeds)
    points = told_apart([plan.point(*trial, seed, plan.rounds) for trial in trials for seed in seeds])
    starts = range(0, len(points), plan.seeds)
    return [{point.recipe.seed: folder / point.slug for point in points[at : at + plan.seeds]} for at in starts]


def _train_stage(
    plan: Plan,
    folder: Path,
    trials: Sequence[tuple[tuple[str, Settings], dict[int, Path]]],
    stage: Rung,
    train: Train,
) -> None:
    waiting = tuple(
        replace(plan.point(*trial, seed, stage.rounds), slug=run.name)
        for trial, runs in trials
        for seed, run in runs.items()
        if _read(run, stage.rounds) is None
    )
    if waiting:
        train(Sweep("tune", FULL, waiting), folder)


def _score(runs: Mapping[int, Path], rounds: int) -> float | None:
    """The mean over the search seeds of the score up to a round (larger is better).

    None if a run has none, or one that is not finite: such a trial has failed.
    """
    found = [_read(run, rounds) for run in runs.values()]
    known = [value for value in found if value is not None and math.isfinite(value)]
    return fmean(known) if len(known) == len(found) else None


def _read(run: Path, round: int) -> float | None:
    """The followed metric of a run up to a round, with a sign so that larger is better; None if the run is shorter.

    A run that ended at its `server.stop_loss` is not shorter: it counts with the round in which it ended.

    It is the mean over the evaluations of the last third of the rounds: with few clients in a round, the metric
    of a single round says more about these clients than about the settings. It is NaN if one of them is not finite.
    """
    if not (records := _records(run)):
        return None
    recipe = read_recipe(run)
    found = {record["round"]: value for record in records if (value := record.get(recipe.metric)) is not None}
    if stopped(recipe, records):
        round = min(round, records[-1]["round"])
    last = [recipe.rank(value) for evaluated, value in found.items() if 2 * round < 3 * evaluated <= 3 * round]
    if round not in found:
        return None
    return fmean(last) if all(map(math.isfinite, last)) else math.nan


def _tuned(
    plan: Plan,
    method: str,
    trials: Sequence[tuple[str, Settings]],
    scores: dict[int, dict[int, float | None]],
    folders: Sequence[Mapping[int, Path]],
) -> Tuned:
    mine = {index: Trial(*trials[index], scores[index]) for index in scores if trials[index][0] == method}
    last = {index: score for index, trial in mine.items() if (score := trial.scores.get(plan.rounds)) is not None}
    best = max(last, key=lambda index: (last[index], -index)) if last else None
    count = plan.space.combinations(method)
    given, used = (plan.seeds * spent(plan.stages, n) for n in (plan.trials, min(plan.trials, count)))
    settings, score = (None, None) if best is None else (mine[best].settings, last[best])
    lowest = best is not None and any(read_recipe(run).evaluation.best == "lowest" for run in folders[best].values())
    return Tuned(method, settings, score, count, given, used, list(mine.values()), lowest)


def final_sweep(plan: Plan, found: Sequence[Tuned], seeds: int) -> str:
    """A sweep file that trains every method with its best settings on seeds that the search has not seen.

    It uses all training samples, and scores what the recipe scores.

    Raises:
        RecipeError: no method has settings that worked, or there are too many seeds.
    """
    working = _distinct(found)
    if not working:
        raise RecipeError(
            "tune: every trial of every method failed; look at the log.txt of a run, and try other values"
        )
    if not 0 < seeds <= SEARCH_SEEDS:
        raise RecipeError(f"--final {seeds}: must be from 1 to {SEARCH_SEEDS:,}, below the seeds of the search")
    server = plan.recipe.server.model_copy(update={"rounds": plan.rounds})
    base = plan.recipe.model_copy(update={"server": server}).to_toml()
    methods = toml([each.filled for each in working])
    lines = [f'preset = "none"\n{base}', f"[grid]\nmethod = {methods}\nseed = {list(range(seeds))}"]
    for each in working:
        fields = {name: value for name, value in (each.best or {}).items() if is_field(name)}
        if fields:
            when = toml({"method": each.filled})
            lines.append(f"[[override]]\nwhen = {when}\nset = {toml(fields)}")
    return "\n\n".join(lines) + "\n"


def _distinct(found: Sequence[Tuned]) -> list[Tuned]:
    """The methods with settings that worked; of those that became the same method, the one with the better score.

    With the best ρ = 0.1, `fedsam({rho})` becomes `fedsam(0.1)`, which may be among the methods too.
    """
    best: dict[str, Tuned] = {}
    for each in found:
        if each.score is not None:
            other = best.setdefault(each.filled, each).score
            best[each.filled] = each if other is None or each.score > other else best[each.filled]
    return [*best.values()]
