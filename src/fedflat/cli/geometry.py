"""Further measures of `fedflat flatness` besides the spectrum, and comparisons of several runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from fedflat.cli.app import show

if TYPE_CHECKING:  # torch takes seconds to import, and `fedflat --help` must not wait for it
    from fedflat.flatness import Difference, GroupSpectrum, Locality, Portion
    from fedflat.recipe import Recipe
    from fedflat.rounds.setup import Problem


class MatrixName(StrEnum):
    """The matrix whose spectrum is computed."""

    hessian = "hessian"
    ggn = "ggn"
    fisher = "fisher"


class By(StrEnum):
    """The groups whose losses are measured separately."""

    whole = "whole"
    classes = "class"
    clients = "client"


class WeightsName(StrEnum):
    """The clients' weights in the global loss."""

    samples = "samples"
    uniform = "uniform"


def groups_of(
    problem: Problem, portion: Portion, by: By, matrix: MatrixName, products: int, seed: int
) -> list[GroupSpectrum]:
    """The spectrum of each class's or each client's loss; none for the whole loss."""
    from fedflat.flatness import by_class, by_client

    if by is By.classes:
        return by_class(portion.pooled(problem), matrix.value, products, seed=seed)
    return by_client(problem, portion, matrix.value, products, seed=seed) if by is By.clients else []


def locality_of(problem: Problem, portion: Portion, rho: float, weights: WeightsName | None, seed: int) -> Locality:
    """Local against global flatness, with the learning rate of the run's last round."""
    from fedflat.flatness import locality
    from fedflat.runs import last_lr

    lr = last_lr(problem.recipe)
    return locality(problem, portion, rho, lr, weights.value if weights else None, seed=seed)


def locality_record(found: Locality) -> dict[str, Any]:
    """All numbers as one table, with the sums over the clients."""
    sums = {name: getattr(found, name) for name in ("clients_sum", "explained", "distance", "gap")}
    return asdict(found) | sums


def differences(rows: Sequence[Mapping[str, Any]], recipes: Sequence[Recipe]) -> list[Difference]:
    """Paired differences between methods if the runs differ only in method and seed; otherwise an empty list."""
    from fedflat.flatness import Measurement, paired_differences

    shared = {json.dumps(_setting(recipe), sort_keys=True, default=str) for recipe in recipes}
    pairs = [(recipe.method, recipe.seed) for recipe in recipes]
    if len(shared) > 1 or len({method for method, _ in pairs}) < 2 or len(set(pairs)) < len(pairs):
        return []
    found = [Measurement(method, seed, _numbers(row)) for (method, seed), row in zip(pairs, rows, strict=True)]
    return paired_differences(found)


def _setting(recipe: Recipe) -> dict[str, Any]:
    """Everything that a run depends on, except its method and its seed."""
    table = recipe.essentials()
    table["split"] = {name: value for name, value in table["split"].items() if name != "seed"}
    table["server"] = {**table["server"], "rounds": recipe.server.rounds}
    return {name: value for name, value in table.items() if name not in ("method", "seed")}


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    spectrum = row["spectrum"]
    named = ("loss", "ascent_sharpness", "average_sharpness", "adaptive_sharpness", "weight_norm", "log10_capacity")
    curved = {"λ1": spectrum["eigenvalues"][0], "trace": spectrum["trace"]["mean"]}
    return curved | {name.replace("_", " "): row[name] for name in named if name in row}


def print_geometry(
    groups: Mapping[str, Sequence[GroupSpectrum]],
    local: Mapping[str, Locality],
    compared: Sequence[Difference],
    matrix: MatrixName,
) -> None:
    """Print the tables of what was measured."""
    from fedflat.report.geometry_table import client_rows, difference_table, group_table, locality_table

    for run, some in groups.items():
        show(group_table(some, f"{run}: {matrix.value} matrix of each group's mean loss"))
    if local:
        title = "local against global flatness: fᵢ is a client's loss, w the global model, wᵢ its model a round later"
        show(locality_table(local, title))
    for run, each in local.items():
        show(client_rows(each, f"{run}: each client's loss at the global model w and at its own model wᵢ"))
    if compared:
        show(difference_table(compared, "paired differences over seeds, mean and 95 % interval of Student's t"))
