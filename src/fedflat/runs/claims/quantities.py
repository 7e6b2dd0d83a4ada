"""Quantities of a run that claims are about: columns of its row, and what is computed from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from fedflat.runs.claims.claim import Part
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
