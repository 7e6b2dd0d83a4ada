"""A finished run: its numbers, its curve and its model."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, Self

from torch import nn

from fedflat.drawing import axes_for, draw_band
from fedflat.errors import RecipeError, RunError, nearest
from fedflat.federation import Federation, taking_raw
from fedflat.files import read_whole
from fedflat.flatness import Flatness, look
from fedflat.local import Loss
from fedflat.methods import concise
from fedflat.models import own_output
from fedflat.recipe import Recipe
from fedflat.rounds import Problem, flat_record
from fedflat.runs.folder import Record, parameters
from fedflat.runs.loading import load_run
from fedflat.runs.record import read_record
from fedflat.shown import Shown, framed
from fedflat.tasks import Task


@dataclass(frozen=True, repr=False)
class Result(Shown):
    """A finished run: its recipe, one record for each round, and the global model.

    `model` takes inputs as in the data set: images as bytes or in [0, 1], other numbers as they are. It normalises them
    itself. Its class and `state_dict` are those of the network.
    """

    recipe: Recipe
    history: list[Record]
    model: nn.Module
    directory: Path | None = None
    federation: Federation | None = field(default=None, compare=False)
    loss: Loss | None = field(default=None, compare=False)

    pictured = True

    @classmethod
    def of(cls, problem: Problem, history: list[Record], directory: Path | None = None) -> Self:
        """Return the result of a problem whose network holds the trained model.

        Args:
            problem: the problem after training.
            history: the record of each round.
            directory: the directory of the run, if it has one.
        """
        module = taking_raw(own_output(problem.network.module), problem.federation.dataset)
        return cls(problem.recipe, history, module, directory, problem.federation, problem.loss)

    @classmethod
    def load(
        cls,
        path: str | PathLike[str],
        federation: Federation | None = None,
        *,
        model: nn.Module | None = None,
        task: Task | None = None,
    ) -> Self:
        """Read a finished run.

        Args:
            path: the directory of the run.
            federation: the run's federation, required if neither its recipe nor its directory hold it.
            model: a module of the run's class, required if the recipe cannot build it; its weights do not matter.
            task: the run's task, required if it was made in Python.

        Raises:
            RunError: if the run cannot be read, or its federation is missing.
        """
        directory = Path(path)
        problem = load_run(directory, federation, task, module=model)
        return cls.of(problem, _records(directory / "metrics.jsonl"), directory)

    def save(self, path: str | PathLike[str]) -> None:
        """Refuse: a run is saved while it trains, by `train(…, out=directory)`.

        Raises:
            RunError: always; the message says what to do.
        """
        raise RunError(f"{path}: a run is saved while it trains; give train(…, out={str(path)!r})")

    def curve(self, name: str) -> list[tuple[int, float]]:
        """Return (round, value) of a metric, for the rounds that have it.

        Raises:
            RecipeError: if no round has a metric of this name.
        """
        flat = [flat_record(record) for record in self.history]
        known = {key for record in flat for key in record}
        if name not in known and flat:
            raise RecipeError(f"result: there is no metric {name!r}; {nearest(str(name), known - {'round'})}")
        return [(record["round"], record[name]) for record in flat if record.get(name) is not None]

    @property
    def accuracy(self) -> float:
        """The accuracy after the last evaluated round; NaN if labels are not classes."""
        known = any("accuracy" in record for record in self.history)
        return self.last("accuracy") if known else math.nan

    def last(self, name: str | None = None) -> float:
        """Return a metric after the last evaluated round, by default the one that tables follow.

        Raises:
            RecipeError: if no round has a metric of this name.
        """
        values = self.curve(name or self.recipe.metric)
        return values[-1][1] if values else math.nan

    @property
    def summary(self) -> Record:
        """The last and best values, rounds to the target, traffic and size of the model, by name."""
        return summary(self.history, self.recipe) | parameters(self.model)

    def flatness(self, **options: Any) -> Flatness:
        """Measure the flatness of the model on the training samples.

        Args:
            options: those of `fedflat.flatness.look`, such as `samples`, `k` and `seed`.

        Raises:
            RunError: if the result has no federation.
        """
        if self.federation is None:
            raise RunError("result: has no federation; use fedflat.flatness.look(result.model, data)")
        return look(self.model, self.federation, self.loss, **options)

    def caption(self) -> str:
        """Return the method, the rounds and the last value of the metric in one line."""
        rounds = self.history[-1]["round"] if self.history else 0
        reached = "" if math.isnan(self.last()) else f", {self.recipe.metric} {self.last():.4f}"
        where = f", in {self.directory}" if self.directory else ""
        return f"Result of {concise(self.recipe.method)} after {rounds} rounds{reached}{where}"

    def __repr__(self) -> str:
        return f"<{self.caption()}>"

    def rows(self) -> list[dict[str, Any]]:
        """Return the summary as rows of a table."""
        return [{"quantity": name, "value": value} for name, value in self.summary.items()]

    def to_frame(self) -> Any:
        """One row for each round, as a pandas DataFrame if pandas is installed, otherwise as a list of dictionaries."""
        return framed({"round": record["round"], **flat_record(record)} for record in self.history)

    def plot(self, ax: Any = None, metric: str | None = None, label: str = "") -> Any:
        """Draw a metric over the rounds, and return the axes.

        Args:
            ax: the axes to draw on; by default those of a new figure.
            metric: the name of the metric; by default the one that tables follow, for most tasks the accuracy.
            label: the name of the line; by default the method without its options.

        Raises:
            RecipeError: if matplotlib is not installed, or no round has the metric.
        """
        self.curve(metric or self.recipe.metric)
        axes = axes_for(ax)
        self.draw(axes, metric, label)
        return axes

    def draw(self, axes: Any, metric: str | None = None, label: str = "") -> None:
        """Draw a metric over the rounds on existing axes.

        Args:
            axes: matplotlib's axes.
            metric: the name of the metric; by default the one that tables follow.
            label: the name of the line; by default the method without its options.
        """
        metric = metric or self.recipe.metric
        curve = self.curve(metric)
        lines = len(axes.get_lines())
        rounds, values = [round for round, _ in curve], [value for _, value in curve]
        draw_band(axes, lines, label or bare_method(self.recipe.method), rounds, values)
        axes.set(xlabel="round", ylabel=metric)
        if lines:
            axes.legend(frameon=False, fontsize="small")


def bare_method(method: Any) -> str:
    """A method without options and modules: `fedsam(rho=0.05) + mine:Pull(1)` is `fedsam + Pull`."""
    return re.sub(r"\(.*?\)|[\w.]+:", "", str(method))


def _records(path: Path) -> list[Record]:
    found = [read_record(line) for line in read_whole(path).splitlines()]
    records = [record for record in found if record is not None]
    if len(records) < len(found):
        raise RunError(f"{path}: is damaged; resume the run from its last checkpoint")
    return records


def stopped(recipe: Recipe, history: Sequence[Record]) -> bool:
    """Return whether the mean training loss after the last round is below `server.stop_loss`."""
    loss = history[-1].get("train_loss") if history else None
    return recipe.server.stop_loss is not None and loss is not None and loss < recipe.server.stop_loss


def summary(history: Sequence[Record], recipe: Recipe) -> Record:
    """Summarize a run in a few numbers; each name says which value of which metric it is."""
    metric = recipe.metric
    found = [(r[metric], r["round"]) for r in history if r.get(metric) is not None]
    result: Record = {"method": recipe.method, "rounds": history[-1]["round"] if history else 0, "seed": recipe.seed}
    if found:
        values = [value for value, _ in found]
        best = max(found, key=lambda entry: (recipe.rank(entry[0]), -entry[1]))
        result |= {
            f"{metric}_last": values[-1],
            f"{metric}_best": best[0],
            f"{metric}_best_round": best[1],
            f"{metric}_mean_of_last_10": sum(values[-10:]) / len(values[-10:]),
            "loss_last": next(r["loss"] for r in reversed(history) if "loss" in r),
        }
        if recipe.evaluation.target is not None:
            goal = recipe.rank(recipe.evaluation.target)
            reached = (round for value, round in found if recipe.rank(value) >= goal)
            result |= {"target": recipe.evaluation.target, "rounds_to_target": next(reached, None)}
    if recipe.server.stop_loss is not None:
        losses = [r["train_loss"] for r in history if "train_loss" in r]
        result |= {"train_loss_last": losses[-1] if losses else None, "stop_loss": recipe.server.stop_loss}
        result["stopped"] = stopped(recipe, history)
    if history and "epsilon" in history[-1]:
        result["epsilon"] = history[-1]["epsilon"]
    refused = Counter(each["reason"] for record in history for each in record.get("refused", ()))
    if refused:
        result["refused"] = dict(refused)
    totals = {name: sum(record[name] for record in history) for name in ("bytes_down", "bytes_up", "seconds")}
    return result | totals
