"""The functions for a notebook: look at a model, split its generalisation gap, compare models."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from statistics import fmean
from typing import Any

from torch import nn

from fedflat.drawing import COLOURS
from fedflat.errors import DataError, RecipeError, RunError
from fedflat.flatness.activities import layers_of
from fedflat.flatness.comparison import Difference, Measurement, paired_differences
from fedflat.flatness.door import objective_of, of_model
from fedflat.flatness.duality import Duality, decompose
from fedflat.flatness.film import Film
from fedflat.flatness.landscape import Landscape
from fedflat.flatness.measure import Flatness, measure, quantity
from fedflat.flatness.objective import Objective
from fedflat.flatness.samples import Collate, Fields, batches_of
from fedflat.flatness.sharpness import adaptive_sharpness, ascent_sharpness, average_sharpness
from fedflat.flatness.track import Trajectory
from fedflat.local import Batch, Loss
from fedflat.progress import track
from fedflat.shown import Shown
from fedflat.tokens import joined

look = of_model(measure, "look")
Compared = nn.Module | Flatness


@dataclass(frozen=True, repr=False)
class Sharpness(Shown):
    """The rise of the loss within a radius: after SAM's ascent, in random directions, and after ASAM's ascent."""

    samples: int
    loss: float
    rho: float
    adaptive_rho: float
    ascent: float
    average: float
    average_error: float
    average_low: float
    average_high: float
    adaptive: float

    def caption(self) -> str:
        return f"Sharpness of the mean loss {self.loss:.4g} over {self.samples:,} samples"

    def rows(self) -> list[dict[str, Any]]:
        return [
            quantity(f"one ascent, ρ = {self.rho:g}", self.ascent),
            quantity(
                f"average, ρ = {self.rho:g}", self.average, self.average_error, self.average_low, self.average_high
            ),
            quantity(f"adaptive (scale-invariant), ρ = {self.adaptive_rho:g}", self.adaptive),
        ]

    def draw(self, axes: Any) -> None:
        """Draws the three as bars, the average with its 95 % interval."""
        names = (f"one ascent\nρ = {self.rho:g}", f"average\nρ = {self.rho:g}", f"adaptive\nρ = {self.adaptive_rho:g}")
        bars = axes.bar(names, (self.ascent, self.average, self.adaptive), color=COLOURS[:3])
        axes.bar_label(bars, fmt="%.3g", padding=3)  # the average is often a thousand times smaller than the others
        axes.margins(y=0.12)
        ends = [[self.average - self.average_low], [self.average_high - self.average]]
        axes.errorbar([names[1]], [self.average], yerr=ends, capsize=3, color="black")
        axes.set(ylabel="rise of the loss")
        axes.grid(alpha=0.3, axis="y")


@of_model
def sharpness(
    objective: Objective, rho: float = 0.05, adaptive_rho: float = 0.5, directions: int = 30, seed: int = 0
) -> Sharpness:
    """Measures the sharpness of a model in three ways.

    Args:
        objective: the mean loss.
        rho: radius of the ascent and of the average sharpness.
        adaptive_rho: radius of the adaptive sharpness.
        directions: number of random directions of the average.
        seed: seed of all random draws.
    """
    average = average_sharpness(objective, rho, directions, seed)
    return Sharpness(
        samples=objective.samples,
        loss=objective.value(),
        rho=rho,
        adaptive_rho=adaptive_rho,
        ascent=ascent_sharpness(objective, rho),
        average=average.mean,
        average_error=average.error,
        average_low=average.low,
        average_high=average.high,
        adaptive=adaptive_sharpness(objective, adaptive_rho),
    )


def duality(
    model: nn.Module,
    train: Any,
    test: Any,
    loss: Loss | None = None,
    layer: str | None = None,
    *,
    k: int = 100,
    limit: int = 2000,
    samples: int = 4000,
    batch: int = 256,
    seed: int = 0,
    collate: Collate | None = None,
) -> Duality:
    """Decomposes the generalisation gap of a model into dual weights of one layer, for both pairings.

    Args:
        model: the network, any nn.Module. It is unchanged afterwards.
        train: the training samples, in any form that `look` takes.
        test: the test samples.
        loss: maps outputs and labels to a number; by default cross-entropy, or the squared error for real labels.
        layer: the layer's name, one of `layers_of(model)`; by default the last of them.
        k: number of directions for a layer with more than 3000 weights. A smaller layer uses all its directions.
        limit: maximum number of pairs in each pairing; 0 uses all.
        samples: maximum number of training samples, and of test samples; 0 uses all.
        batch: samples per forward pass.
        seed: seed of all random draws.
        collate: turns one batch of the data into (inputs, labels).

    Raises:
        RecipeError: an argument is out of range, or the layer cannot be analysed.
        DataError: no pairs can be formed, or the data cannot be read.
    """
    known = layers_of(model)
    if layer is None and not known:
        raise RecipeError("duality: the model has no linear or convolutional layer with trained weights")
    name = known[-1] if layer is None else layer
    halves = [[_whole(data, samples, batch, seed, collate)] for data in (train, test)]
    with objective_of(model, halves[0], loss, samples=0) as f, objective_of(model, halves[1], loss, samples=0) as g:
        return decompose(model, f.loss, f.batches[0], g.batches[0], name, k, limit, 0, batch, seed)


def _whole(data: Any, samples: int, batch: int, seed: int, collate: Collate | None) -> Batch:
    """All samples in one batch."""
    batches = batches_of(data, samples, batch, seed, collate)
    if any(isinstance(inputs, Fields) for inputs, _ in batches):
        raise DataError("duality: pairs samples by their distance, so it needs inputs that are one tensor")
    return joined(batches)


@dataclass(frozen=True, repr=False)
class Comparison(Shown):
    """The flatness of several models on the same samples: by name, with an entry for each seed."""

    found: dict[str, list[Flatness]]

    @property
    def differences(self) -> list[Difference]:
        """The paired differences of every model from the first one; the n-th entries of two models share a seed."""
        rows = [Measurement(name, n, each.numbers) for name, many in self.found.items() for n, each in enumerate(many)]
        return paired_differences(rows) if len(self.found) > 1 else []

    def caption(self) -> str:
        samples = {each.samples for many in self.found.values() for each in many}
        seeds = max(map(len, self.found.values()))
        means = f"; means over {seeds} seeds, paired differences with 95 % intervals" if seeds > 1 else ""
        counts = " or ".join(f"{n:,}" for n in sorted(samples))
        return f"Flatness of {len(self.found)} models, over {counts} samples{means}"

    def rows(self) -> list[dict[str, Any]]:
        """A row for each measure. With one seed a difference has no interval."""
        columns = {name: _means(many) for name, many in self.found.items()}
        rows: dict[str, dict[str, Any]] = {
            each: {"quantity": each, **{name: column[each] for name, column in columns.items()}}
            for each in next(iter(columns.values()))
        }
        for each in self.differences:
            title = f"{each.method} − {each.reference}"
            rows[each.measure].update({title: each.mean, f"{title}, low": each.low, f"{title}, high": each.high})
        return [*rows.values()]

    def draw(self, axes: Any) -> None:
        """Bars of λ1, the trace and the adaptive sharpness, each relative to the first model.

        With several seeds, the bars of the others have the 95 % intervals of their paired differences from the first.
        """
        drawn = {"lambda1": "λ1", "trace": "trace", "adaptive_sharpness": "adaptive sharpness"}
        columns = {name: _means(many) for name, many in self.found.items()}
        apart = {(each.method, each.measure): each for each in self.differences}
        first = next(iter(columns.values()))
        width = 0.8 / len(columns)
        for place, (name, column) in enumerate(columns.items()):
            colour = COLOURS[place % len(COLOURS)]
            at = [n + (place - (len(columns) - 1) / 2) * width for n in range(len(drawn))]
            heights = [column[each] / first[each] if first[each] else math.nan for each in drawn]
            axes.bar(at, heights, width, label=name, color=colour)
            for x, height, each in zip(at, heights, drawn, strict=True):
                found = apart.get((name, each))
                if found and len(found.seeds) > 1 and first[each]:
                    reach = (found.high - found.mean) / abs(first[each])
                    axes.errorbar(x, height, yerr=reach, capsize=3, color="black")
        axes.axhline(1, color="0.5", linewidth=0.8)
        axes.set_xticks(range(len(drawn)), drawn.values())
        axes.set(ylabel=f"relative to {next(iter(columns))}")
        axes.grid(alpha=0.3, axis="y")
        axes.legend(frameon=False)


def _means(many: Sequence[Flatness]) -> dict[str, float]:
    """The mean of each measure over the seeds."""
    return {name: fmean(each.numbers[name] for each in many) for name in many[0].numbers}


def compare(
    models: Mapping[str, Compared | Sequence[Compared]] | Sequence[Compared],
    data: Any = None,
    loss: Loss | None = None,
    *,
    samples: int = 1000,
    batch: int = 100,
    seed: int = 0,
    collate: Collate | None = None,
    **options: Any,
) -> Comparison:
    """Measures several models on the same samples.

    With a list of models for each name, one for each seed, the differences between names are paired by seed and come
    with 95 % intervals.

    Args:
        models: the models by name, or in a list. A `Flatness` that was measured before is taken as it is.
        data: the samples, in any form that `look` takes.
        loss: maps outputs and labels to a number; by default cross-entropy, or the squared error for real labels.
        samples: maximum number of samples, drawn with the seed; 0 takes all.
        batch: samples in a batch, where the data do not come in batches.
        seed: seed of all random draws.
        collate: turns one batch of the data into (inputs, labels).
        options: further options of `look`.

    Raises:
        RecipeError: there is no model.
    """
    if isinstance(models, nn.Module | Flatness):  # a Sequential could be taken for a list of models
        raise RecipeError("compare: there is one model; give a list of models, or a dictionary of them by name")
    listed = models.items() if isinstance(models, Mapping) else enumerate(models, start=1)
    named = {str(name) if isinstance(models, Mapping) else f"model {name}": each for name, each in listed}
    many = {name: [each] if isinstance(each, nn.Module | Flatness) else [*each] for name, each in named.items()}
    if not many or not all(many.values()):
        raise RecipeError("compare: there is no model to look at")
    waiting = any(not isinstance(model, Flatness) for each in many.values() for model in each)
    fixed = batches_of(data, samples, batch, seed, collate) if waiting else []

    def looked(model: Compared) -> Flatness:
        return model if isinstance(model, Flatness) else look(model, fixed, loss, samples=0, seed=seed, **options)

    return Comparison({name: [looked(model) for model in each] for name, each in track(many.items(), "models")})


def load(path: str | PathLike[str]) -> Shown:
    """Reads any result that was saved: landscapes and trajectories from .npz files, all others from JSON.

    Raises:
        RunError: the file is missing, damaged, or holds something else.
    """
    if Path(path).suffix != ".npz":
        return Shown.load(path)
    for kind in (Trajectory, Film):
        with suppress(RunError):
            return kind.load(path)
    return Landscape.load(path)
