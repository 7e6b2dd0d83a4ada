"""Chooses how many runs train at a time, and with how many workers each, by the speed of a few rounds."""

from __future__ import annotations

import json
import time
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

from fedflat.engine import Scratch
from fedflat.errors import FedflatError
from fedflat.files import read_whole
from fedflat.runs.sweep.jobs import Jobs
from fedflat.runs.sweep.plan import Point, Sweep
from fedflat.runs.sweep.results import unfinished

Layout = tuple[int, int]  # runs at a time, workers of each
ROUNDS = 3  # of a trial run; the first one only warms up
WORTH = 20  # a sweep must last this many times as long as a trial


def layouts(cores: int, most: int) -> list[Layout]:
    """The ways to divide the cores among at most `most` runs, starting with the largest number of runs.

    >>> layouts(cores=4, most=4), layouts(cores=8, most=3)
    ([(4, 1), (2, 2), (1, 4)], [(3, 2), (2, 4), (1, 8)])
    """
    even = [jobs for jobs in range(1, most + 1) if cores % jobs == 0]
    return [(jobs, max(1, cores // jobs)) for jobs in sorted({*even, most}, reverse=True)]


def fastest(sweep: Sweep, folder: Path, cores: int, most: int, trust: bool) -> tuple[Layout, dict[Layout, float]]:
    """Choose a layout for the unfinished runs, and return the rounds per second of those that were tried.

    The first unfinished run is trained for a few rounds in each layout, as many copies at a time as the layout has
    runs. Short sweeps, and runs that set their own workers, get the first layout without a trial. The layout does not
    change the result of any run.

    Args:
        sweep: the sweep.
        folder: its directory.
        cores: number of cores to divide.
        most: maximum number of runs at a time.
        trust: whether the runs may load code from outside of fedflat.
    """
    choices, rates = layouts(cores, most), dict[Layout, float]()
    left = unfinished(folder, sweep)
    rounds = sum(point.recipe.server.rounds for point in left)
    tried = ROUNDS * sum(jobs for jobs, _ in choices)
    if len(choices) == 1 or rounds < WORTH * tried or any(point.recipe.engine.workers for point in left):
        return choices[0], rates
    for layout in choices:
        begun = time.monotonic()
        rates[layout] = trial(left[0], layout, trust)
        if not rates[layout] or rounds / rates[layout] < WORTH * (time.monotonic() - begun):
            break
    return max(rates, key=lambda layout: rates[layout]), rates


def trial(point: Point, layout: Layout, trust: bool = False) -> float:
    """Train copies of a run for a few rounds, and return the rounds per second of all together; 0 if they fail."""
    jobs, workers = layout
    recipe = point.recipe
    update = {"server": recipe.server.model_copy(update={"rounds": ROUNDS}), "trackers": []}
    short = replace(point, recipe=recipe.model_copy(update=update), after=(), base=None)  # random weights do as well
    copies = tuple(replace(short, slug=str(number)) for number in range(jobs))
    with closing(Scratch(0)) as scratch:
        Jobs(Sweep("trial", "trial", copies), scratch.path, jobs, workers, trust).run(lambda: None, lambda *_: None)
        return sum(_rate(scratch.path / copy.slug) for copy in copies)


def _rate(folder: Path) -> float:
    """The rounds per second of a run after its first round, or 0 if it has failed."""
    with suppress(FedflatError, OSError, ValueError, KeyError, ZeroDivisionError):
        lines = read_whole(folder / "metrics.jsonl").splitlines()
        seconds: list[float] = [json.loads(line)["seconds"] for line in lines][1:]
        return len(seconds) / sum(seconds)
    return 0.0
