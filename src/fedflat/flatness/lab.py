"""The functions for a notebook: look at a model, split its generalisation gap, compare models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedflat.drawing import COLOURS
from fedflat.errors import DataError, RecipeError
from fedflat.flatness.activities import layers_of
from fedflat.flatness.door import objective_of, of_model
from fedflat.flatness.duality import Duality, decompose
from fedflat.flatness.landscape import Landscape
from fedflat.flatness.measure import Flatness, measure, quantity
from fedflat.flatness.objective import Objective
from fedflat.flatness.samples import Collate, Fields, batches_of
from fedflat.flatness.sharpness import adaptive_sharpness, ascent_sharpness, average_sharpness
from fedflat.local import Batch, Loss
from fedflat.progress import track
from fedflat.shown import Shown

look = of_model(measure)


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
    adaptive: float

    def caption(self) -> str:
        return f"Sharpness of the mean loss {self.loss:.4g} over {self.samples:,} samples"

    def rows(self) -> list[dict[str, Any]]:
        return [
            quantity(f"one ascent, ρ = {self.rho:g}", self.ascent),
            quantity(f"average, ρ = {self.rho:g}", self.average, self.average_error),
            quantity(f"adaptive (scale-invariant), ρ = {self.adaptive_rho:g}", self.adaptive),
        ]

    def draw(self, axes: Any) -> None:
        names = ("one ascent", "average", "adaptive")
        errors = (0.0, self.average_error, 0.0)
        axes.bar(names, (self.ascent, self.average, self.adaptive), yerr=errors, capsize=3, color=COLOURS[:3])
        axes.set(ylabel="rise of the loss")
        axes.grid(alpha=0.3, axis="y")


@of_model
def sharpness(
    objective: Objective, rho: float = 0.05, adaptive_rho: float = 0.5, directions: int = 30, seed: int = 0
) -> Sharpness:
    """Measures three sharpnesses of a model.

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
        model: the network, any nn.Module. It is given back as it was.
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
    inputs, labels = zip(*batches_of(data, samples, batch, seed, collate), strict=True)
    if any(isinstance(each, Fields) for each in inputs):
        raise DataError("duality: pairs samples by their distance, so it needs inputs that are one tensor")
    return torch.cat(inputs), torch.cat(labels)


@dataclass(frozen=True, repr=False)
class Comparison(Shown):
    """The flatness of several models on the same samples, by name."""

    found: dict[str, Flatness]

    def caption(self) -> str:
        samples = {each.samples for each in self.found.values()}
        return f"Flatness of {len(self.found)} models, over {' or '.join(f'{n:,}' for n in sorted(samples))} samples"

    def rows(self) -> list[dict[str, Any]]:
        columns = {name: {row["quantity"]: row["value"] for row in each.rows()} for name, each in self.found.items()}
        quantities = {each: None for column in columns.values() for each in column}
        return [{"quantity": each, **{name: c.get(each) for name, c in columns.items()}} for each in quantities]

    def draw(self, axes: Any) -> None:
        """Bars of λ1, the trace and the adaptive sharpness, each relative to the first model."""
        numbers = {
            name: (each.spectrum.eigenvalues[0], each.spectrum.trace_plus_plus.mean, each.adaptive_sharpness)
            for name, each in self.found.items()
        }
        first = next(iter(numbers.values()))
        width = 0.8 / len(numbers)
        for place, (name, values) in enumerate(numbers.items()):
            heights = [value / base if base else float("nan") for value, base in zip(values, first, strict=True)]
            at = [n + (place - (len(numbers) - 1) / 2) * width for n in range(len(first))]
            axes.bar(at, heights, width, label=name, color=COLOURS[place % len(COLOURS)])
        axes.set_xticks(range(len(first)), ["λ1", "trace", "adaptive sharpness"])
        axes.set(ylabel=f"relative to {next(iter(numbers))}")
        axes.grid(alpha=0.3, axis="y")
        axes.legend(frameon=False)


def compare(
    models: Mapping[str, nn.Module | Flatness] | Sequence[nn.Module | Flatness],
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
    named = dict(models) if isinstance(models, Mapping) else {f"model {n}": m for n, m in enumerate(models, start=1)}
    if not named:
        raise RecipeError("compare: there is no model to look at")
    waiting = any(not isinstance(model, Flatness) for model in named.values())
    fixed = batches_of(data, samples, batch, seed, collate) if waiting else []
    found = {}
    for name, model in track(named.items(), "models"):
        if not isinstance(model, Flatness):
            model = look(model, fixed, loss, samples=0, seed=seed, **options)
        found[name] = model
    return Comparison(found)


def load(path: str | PathLike[str]) -> Shown:
    """Reads any result that was saved: a landscape from an .npz file, all others from JSON.

    Raises:
        RunError: the file is missing, damaged, or holds something else.
    """
    return Landscape.load(path) if Path(path).suffix == ".npz" else Shown.load(path)
