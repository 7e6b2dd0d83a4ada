"""The state of a run in progress, from its metrics file, as a screen, a line or JSON."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median_low
from textwrap import shorten
from typing import Any

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fedflat.recipe import Recipe

Record = Mapping[str, Any]
Curve = list[tuple[int, float]]
TALLEST = 1e300  # largest value that is drawn; the difference of two such values is still finite
LEVELS = "▁▂▃▄▅▆▇█"
CURVES = ("loss", "lambda1")  # beside the metric that the recipe follows
RECENT = 20  # number of rounds that the speed is averaged over
LABEL = 10  # width of the labels on the screen


@dataclass
class Story:
    """The accumulated records of a run. Adding one takes constant time."""

    name: str
    recipe: Recipe
    round: int = 0
    best: tuple[int, float] | None = None
    curves: dict[str, Curve] = field(default_factory=dict)
    epsilon: float | None = None
    cohort: Sequence[int] = ()
    refused: Counter[str] = field(default_factory=Counter)
    refusals: deque[Record] = field(default_factory=lambda: deque(maxlen=4))
    skipped: int = 0
    last_skipped: str = ""
    bytes: Counter[str] = field(default_factory=Counter)
    over: bool = False
    silent: float = 0.0
    _seconds: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def __post_init__(self) -> None:
        self.curves = {name: [] for name in (self.recipe.metric, *CURVES)}

    def add(self, record: Record) -> None:
        """Adds the record of the next round."""
        self.round, self.cohort = record["round"], record.get("cohort", ())
        self.epsilon = record.get("epsilon", self.epsilon)
        self._seconds.append(record.get("seconds", 0.0))
        for name, curve in self.curves.items():
            if record.get(name) is not None:
                curve.append((self.round, record[name]))
        followed, rank = self.curves[self.recipe.metric], self.recipe.rank
        if followed and (self.best is None or rank(followed[-1][1]) > rank(self.best[1])):
            self.best = followed[-1]
        for each in record.get("refused", ()):
            self.refused[each["reason"]] += 1
            self.refusals.append({"round": self.round, **each})
        if record.get("skipped"):
            self.skipped, self.last_skipped = self.skipped + 1, f"round {self.round}: {record['skipped']}"
        self.bytes.update({name: record.get(name, 0) for name in ("bytes_down", "bytes_up", "sharpness_bytes")})

    @property
    def rounds(self) -> int:
        """The number of rounds in the recipe."""
        return self.recipe.server.rounds

    @property
    def complete(self) -> bool:
        return self.over or self.round >= self.rounds

    @property
    def pace(self) -> float | None:
        """Seconds per round, averaged over the recent rounds."""
        return sum(self._seconds) / len(self._seconds) if self._seconds else None

    @property
    def seconds_left(self) -> float | None:
        return None if self.pace is None else 0.0 if self.complete else self.pace * (self.rounds - self.round)

    def snapshot(self) -> dict[str, Any]:
        """The whole state as JSON-compatible values."""
        return {
            "run": self.name,
            "method": self.recipe.method,
            "round": self.round,
            "rounds": self.rounds,
            "finished": self.complete,
            "seconds_per_round": self.pace,
            "seconds_left": self.seconds_left,
            "seconds_since_written": self.silent,
            **{name: curve[-1][1] if curve else None for name, curve in self.curves.items()},
            f"{self.recipe.metric}_best": self.best[1] if self.best else None,
            f"{self.recipe.metric}_best_round": self.best[0] if self.best else None,
            "epsilon": self.epsilon,
            "cohort": list(self.cohort),
            "refused": dict(self.refused),
            "last_refusals": list(self.refusals),
            "skipped": self.skipped,
            **self.bytes,
            "curves": self.curves,
        }


def screen(story: Story, width: int) -> RenderableType:
    """The run as a screen for a terminal of this width."""
    recipe = story.recipe
    title = Text.assemble((story.name, "bold"), f"  {recipe.method}")
    setting = Text(f"{recipe.model.name} on {recipe.data.name}, {recipe.split.clients} clients", style="dim")
    advance = Table.grid(padding=(0, 2, 0, 0))
    bar = ProgressBar(story.rounds, story.round, width=max(8, width - 48))
    advance.add_row(bar, f"{story.round}/{story.rounds}", Text(_time(story)))
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(width=LABEL - 2, style="cyan")
    table.add_column(ratio=1, overflow="fold")
    for label, value, style in _facts(story, width - LABEL):
        table.add_row(label, Text(value, style=style))
    return Group(title, setting, advance, table)


def _facts(story: Story, width: int) -> Iterator[tuple[str, str, str]]:
    """Label, text and style of each row of the screen."""
    numbers = [*_numbers(story)]
    column = max((len(text) for _, text, _ in numbers), default=0)
    for label, text, curve in numbers:
        yield label, f"{text:<{column}}  {sparkline([v for _, v in curve], min(40, width - column - 2))}", ""
    if story.epsilon is not None:
        yield "ε", f"{story.epsilon:.3g}", ""
    if story.cohort:
        yield "cohort", f"{len(story.cohort)}: {_some(story.cohort)}", ""
    if story.bytes:
        yield "traffic", _traffic(story.bytes), ""
    if story.refused:
        reasons = ", ".join(f"{count} {reason}" for reason, count in story.refused.most_common())
        yield "refused", f"{story.refused.total()} in all: {reasons}", "yellow"
    for each in story.refusals:
        why = f"round {each['round']}, client {each['client']}: {each['reason']}: {each['detail']}"
        yield "", shorten(why, 2 * width, placeholder=" …"), "yellow"
    if story.skipped:
        yield "skipped", f"{story.skipped} in all; {story.last_skipped}", "red"


def _numbers(story: Story) -> Iterator[tuple[str, str, Curve]]:
    metric = story.recipe.metric
    followed, loss, top = (story.curves[name] for name in (metric, *CURVES))
    if story.best:
        yield metric, f"{followed[-1][1]:.4f}, best {story.best[1]:.4f} in round {story.best[0]}", followed
    if loss:
        yield "loss", f"{loss[-1][1]:.4g}", loss
    if top:
        yield "λ₁", f"{top[-1][1]:.4g} after round {top[-1][0]}", top


def line(story: Story) -> str:
    """The run as one line of text."""
    metric = story.recipe.metric
    followed, loss, top = (story.curves[name] for name in (metric, *CURVES))
    parts = [f"{story.name}: round {story.round}/{story.rounds}"]
    if story.best:
        parts.append(f"{metric} {followed[-1][1]:.4f} (best {story.best[1]:.4f})")
    parts += [f"{name} {curve[-1][1]:.4g}" for name, curve in (("loss", loss), ("λ₁", top)) if curve]
    parts += [f"ε {story.epsilon:.3g}"] if story.epsilon is not None else []
    parts += [f"{story.refused.total()} refused"] if story.refused else []
    return "  ".join([*parts, _time(story)])


def sparkline(values: Sequence[float], width: int) -> str:
    """Draws a curve as one line of text, scaled from its lowest to its highest value.

    If there are more values than columns, a column shows the median of its values. NaN and infinity are drawn as
    very large values.

    >>> sparkline([0, 1, 2, 7], 40)
    '▁▂▃█'
    >>> sparkline([0, 2, 7, 7], 2)
    '▁█'
    """
    columns = max(min(len(values), width), 0)
    edges = [column * len(values) // columns for column in range(columns + 1)] if columns else []
    tall = [max(-TALLEST, min(TALLEST, value)) if value == value else TALLEST for value in values]
    heights = [median_low(tall[start:stop]) for start, stop in pairwise(edges)]
    low, high = min(heights, default=0.0), max(heights, default=0.0)
    if low == high:
        return LEVELS[3] * columns
    return "".join(LEVELS[round((height - low) / (high - low) * (len(LEVELS) - 1))] for height in heights)


def _time(story: Story) -> str:
    if story.complete:
        return "finished"
    if story.pace is None:
        return "no round yet"
    if story.silent > max(30.0, 5 * story.pace):
        return f"no update for {_clock(story.silent)}"
    return f"{story.pace:.3g} s a round, {_clock(story.seconds_left or 0.0)} left"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _some(clients: Sequence[int], most: int = 10) -> str:
    shown = ", ".join(map(str, clients[:most]))
    return f"{shown}, …" if len(clients) > most else shown


def _traffic(crossed: Mapping[str, int]) -> str:
    down, up, products = (crossed[name] / 1e6 for name in ("bytes_down", "bytes_up", "sharpness_bytes"))
    return f"{down:.4g} MB down, {up:.4g} MB up" + (f", {products:.4g} MB for λ₁" if products else "")
