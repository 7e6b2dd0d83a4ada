"""The spectrum of parts of the loss: of each class, and of each client."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fedflat.errors import DataError, RecipeError
from fedflat.flatness.federated import Portion
from fedflat.flatness.hessian import Matrix, matrix_of, top_eigenvalues
from fedflat.flatness.objective import Objective, batch_layer
from fedflat.flatness.traces import Trace, trace
from fedflat.rounds import Problem


@dataclass(frozen=True)
class GroupSpectrum:
    """λ₁ and the trace of the matrix of one group's mean loss. The group has `samples` of its own."""

    name: str
    samples: int
    loss: float
    lambda1: float
    trace: Trace


def by_class(
    objective: Objective, matrix: Matrix = "hessian", products: int = 32, tolerance: float = 1e-3, seed: int = 0
) -> list[GroupSpectrum]:
    """The spectrum of each class's loss f_c, the mean over the samples of class c. f = Σ p_c f_c with p_c = n_c/N.

    Args:
        objective: the mean loss over the samples of all classes.
        matrix: "hessian", "ggn" or "fisher".
        products: matrix products for each trace.
        tolerance: relative accuracy of λ₁.
        seed: seed of the start vectors and probes.

    Raises:
        DataError: the labels are not one class for each sample.
        RecipeError: a layer mixes the samples of a batch, so a class has no loss of its own.
    """
    labels = torch.cat([labels for _, labels in objective.batches])
    if labels.is_floating_point() or labels.ndim != 1:
        raise DataError("classes: the labels are not one class for each sample, so the loss cannot be split by class")
    if layer := batch_layer(objective.module):
        raise RecipeError(
            f"classes: layer {layer!r} normalises with the statistics of each batch, so a class has no loss of its own"
        )
    names, found = list(objective.layout.shapes), []
    for label in labels.unique().tolist():
        batches = [(x[y == label], y[y == label]) for x, y in objective.batches if (y == label).any()]
        part = Objective(objective.module, objective.loss, batches, names)
        found.append(_spectrum(f"class {label}", part, matrix, products, tolerance, seed))
    return found


def by_client(
    problem: Problem,
    portion: Portion,
    matrix: Matrix = "hessian",
    products: int = 32,
    tolerance: float = 1e-3,
    seed: int = 0,
) -> list[GroupSpectrum]:
    """The spectrum of each client's loss fᵢ at the problem's current weights, from that client's samples alone.

    Args:
        problem: the network, the loss and the federation.
        portion: the samples of each client.
        matrix: "hessian", "ggn" or "fisher".
        products: matrix products for each trace.
        tolerance: relative accuracy of λ₁.
        seed: seed of the start vectors and probes.
    """
    clients = range(problem.federation.clients)
    parts = [(f"client {client}", portion.own(problem, client)) for client in clients]
    return [_spectrum(name, part, matrix, products, tolerance, seed) for name, part in parts]


def _spectrum(name: str, part: Objective, matrix: Matrix, products: int, tolerance: float, seed: int) -> GroupSpectrum:
    operator = matrix_of(part, matrix)
    top = float(top_eigenvalues(operator, 1, tolerance, seed).values[0])
    return GroupSpectrum(name, part.samples, part.value(), top, trace(operator, products, seed))


def weighted(groups: Sequence[GroupSpectrum]) -> float:
    """Σ p λ₁ over the groups with p = n/N, an upper bound on λ₁ of their common loss."""
    total = sum(group.samples for group in groups)
    return sum(group.samples / total * group.lambda1 for group in groups)
