"""The report: one self-contained HTML page about a set of runs."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from html import escape
from importlib import resources
from pathlib import Path
from string import Template

from fedflat.errors import RecipeError, RunError
from fedflat.flatness import Film, Trajectory
from fedflat.recipe import Recipe
from fedflat.report import flat_sections, sections
from fedflat.report.lines import Line, read_lines
from fedflat.report.markup import Canvas, switch
from fedflat.report.measured import Measured, Row, landscapes, measured, recorded, recorded_trajectory, split_counts
from fedflat.report.sections import Content, Counts
from fedflat.tasks import Accuracy

Status = Callable[[str], AbstractContextManager[object]]
LIMIT = 6_000_000  # maximum size of the page in bytes
POINTS = (500, 200, 80, 30)  # maximum points per curve, tried in turn until the page is below the limit
MOST_SPLITS = 4
ORDER = (
    flat_sections.glance,
    flat_sections.landscapes,
    sections.overview,
    sections.results,
    sections.learning,
    sections.splits,
    sections.classes,
    sections.local,
    sections.rounds,
    flat_sections.flatness,
    flat_sections.trajectories,
    flat_sections.duality,
    sections.refused,
    sections.repeat,
)


def collect(paths: Sequence[Path], status: Status, measure: bool = False, target: float | None = None) -> Content:
    """Reads the runs and collects the content of a report.

    Args:
        paths: directories of runs, or directories that contain several runs.
        status: a context manager that shows a message while it is open.
        measure: also measure the flatness of the first seed of each line.
        target: the target value of the metric; by default that of the first recipe that has one.

    Raises:
        RecipeError: plotly is not installed, or the metric cannot have the target value.
        RunError: a directory does not contain a readable run.
    """
    _plotly()  # fail early if plotly is missing
    lines = read_lines(paths)
    _check_target(target, lines[0].recipe.metric)
    found = {}
    for place, line in enumerate(lines if measure else ()):
        with status(f"{line.runs[0].path}: measuring"):
            found[place] = measured(line.runs[0].path)
    with status("reading the splits"):
        splits = _splits(lines)
    targets = (target, *(line.recipe.evaluation.target for line in lines))
    goal = next((each for each in targets if each is not None), None)
    return Content(lines, goal, splits, _landscapes(lines), found, _flatness(lines, found), _trajectories(lines))


def _check_target(target: float | None, metric: str) -> None:
    """Refuse a target that no run can reach."""
    if target is not None and metric == Accuracy.name and not 0 <= target <= 1:
        raise RecipeError(f"'--target': {target} is not in the range from 0 to 1 of an accuracy")
    if target is not None and not math.isfinite(target):
        raise RecipeError(f"'--target': {target} is not a finite number")


def _flatness(lines: Sequence[Line], found: Mapping[int, Measured]) -> Mapping[int, Mapping[int, Row]]:
    """The flatness of every seed of each line: as recorded in its directory, or as just measured."""
    rows: dict[int, dict[int, Row]] = {}
    for place, line in enumerate(lines):
        known = {run.recipe.seed: row for run in line.runs if (row := recorded(run.path))}
        if known or place in found:
            rows[place] = known or {line.recipe.seed: found[place].row()}
    return rows


def _trajectories(lines: Sequence[Line]) -> Mapping[int, Trajectory]:
    """The trajectory of each line, from the first seed that has one."""
    seen = ((k, recorded_trajectory(run.path)) for k, line in enumerate(lines) for run in reversed(line.runs))
    return {place: each for place, each in seen if each}


def _splits(lines: Sequence[Line]) -> Mapping[str, Counts | str]:
    """The split of the first seed of each line. Lines with the same split settings share one entry."""
    found: dict[str, tuple[Recipe, Path]] = {}
    for line in lines:
        split = line.recipe.split
        options = ", ".join(f"{name} {value}" for name, value in split.options().items())
        found.setdefault(f"{line.recipe.data.name}, {split.name} {options}", (line.recipe, line.runs[0].path))
    return {title: split_counts(*each) for title, each in [*found.items()][:MOST_SPLITS]}


def _landscapes(lines: Sequence[Line]) -> Mapping[str, Mapping[int, Film]]:
    """The landscapes by plane and line, each from the first seed that has one."""
    found: dict[str, dict[int, Film]] = {}
    for place, line in enumerate(lines):
        for run in line.runs:
            for plane, each in landscapes(run.path).items():
                found.setdefault(plane, {}).setdefault(place, each)
    return found


def page(content: Content) -> bytes:
    """The HTML page. Long curves are thinned until the page is below the size limit.

    Raises:
        RunError: the page is too large even with thinned curves.
    """
    script = _plotly()
    for most in POINTS:
        made = _assembled(content, script, most)
        if len(made) <= LIMIT:
            return made
    raise RunError(f"the report would be larger than {LIMIT // 10**6} MB; give fewer runs at a time")


def _assembled(content: Content, script: str, most: int) -> bytes:
    canvas = Canvas()
    shown = [each for make in ORDER if (each := make(content, canvas, most))]
    own = _asset("page.js")
    parts = {
        "title": escape(sections.subject(content.lines)),
        "policy": f"{_hash(script)} {_hash(own)}",
        "style": _asset("page.css"),
        "switches": "".join(switch(place, line.name) for place, line in enumerate(content.lines)),
        "links": "".join(each.link() for each in shown),
        "sections": "\n".join(map(str, shown)),
        "figures": canvas.json(),
        "plotly": script,
        "script": own,
    }
    # A directory's name may contain bytes that are not valid UTF-8.
    return Template(_asset("page.html.txt")).substitute(parts).encode("utf-8", "replace")


def _hash(script: str) -> str:
    """The hash of a script for the content security policy, which stops all other scripts."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _asset(name: str) -> str:
    return (resources.files("fedflat") / "report" / "assets" / name).read_text("utf-8")


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise RecipeError("a report needs plotly: pip install 'fedflat[report]'") from None
    script: str = get_plotlyjs()
    return script
