"""Tables of spectra by class or client, of local against global flatness, and of differences between methods."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rich.table import Table

from fedflat.flatness import ClientFlatness, Difference, GroupSpectrum, Locality, weighted
from fedflat.report.flatness_table import estimate, side_by_side, titled_table
from fedflat.report.lines import short_methods


def group_table(groups: Sequence[GroupSpectrum], title: str) -> Table:
    """λ₁ and trace of every group's loss, with the samples of each."""
    table = titled_table(title, ("", "samples", "loss", "λ1", "trace [95 %]"))
    for each in groups:
        told = estimate(each.trace.mean, each.trace.low, each.trace.high)
        table.add_row(each.name, str(each.samples), f"{each.loss:.4g}", f"{each.lambda1:.4g}", told)
    table.add_section()
    table.add_row("Σ p λ1", str(sum(each.samples for each in groups)), "", f"{weighted(groups):.4g}", "")
    return table


def locality_table(found: Mapping[str, Locality], title: str) -> Table:
    """Local against global flatness, with a column for each run."""
    return side_by_side(title, {name: locality_cells(each) for name, each in found.items()})


def locality_cells(found: Locality) -> dict[str, str]:
    """The cells of one run's column, by row name."""
    clients, share = found.clients, found.explained

    def mean(place: str, name: str) -> str:
        return f"{sum(each.weight * getattr(getattr(each, place), name) for each in clients):.4g}"

    return {
        "λ1(H), global loss at w": f"{found.lambda1:.4g}",
        "Σ pᵢ λ1(fᵢ) at w": f"{found.clients_sum:.4g}",
        "λ1(H) ÷ Σ pᵢ λ1(fᵢ)": "–" if share is None else f"{share:.3f}",
        "Σ pᵢ λ1(fᵢ) at wᵢ": mean("at_local", "lambda1"),
        "flatness gap Σ pᵢ (λ1 at w − at wᵢ)": f"{found.gap:.4g}",
        "flatness distance Σ pᵢ ‖wᵢ − w‖": f"{found.distance:.4g}",
        "sharpness of fᵢ at w": mean("at_global", "sharpness"),
        "sharpness of fᵢ at wᵢ": mean("at_local", "sharpness"),
        "clients": str(len(clients)),
        "samples": str(sum(each.samples for each in clients)),
    }


def client_rows(found: Locality, title: str) -> Table:
    """One row for each client of a run."""
    heads = ("client", "samples", "pᵢ", "λ1 at w", "λ1 at wᵢ", "sharpness at w", "at wᵢ", "‖wᵢ − w‖", "part of λ1(H)")
    table = titled_table(title, heads)
    for each in found.clients:
        table.add_row(*_client(each, found.lambda1))
    return table


def _client(each: ClientFlatness, whole: float) -> list[str]:
    at, own = each.at_global, each.at_local
    numbers = (at.lambda1, own.lambda1, at.sharpness, own.sharpness, each.distance)
    part = f"{100 * each.part / whole:.1f} %" if whole > 0 else "–"
    return [str(each.client), str(each.samples), f"{each.weight:.3f}", *(f"{x:.3g}" for x in numbers), part]


def difference_table(found: Sequence[Difference], title: str) -> Table:
    """The paired differences of each method from the reference, with one row for each measure."""
    reference = found[0].reference
    short = short_methods([reference, *dict.fromkeys(each.method for each in found)])
    columns = {
        f"{name}\n− {short[reference]}": {each.measure: told(each) for each in found if each.method == method}
        for method, name in short.items()
        if method != reference
    }
    return side_by_side(title, columns)


def told(each: Difference) -> str:
    """A difference in one cell: mean, interval and number of seeds, or why there is no interval.

    >>> told(Difference("trace", "a", "b", [0, 1], [1.0, 3.0], 2.0, -10.7, 14.7))
    '2 [-10.7, 14.7], 2 seeds'
    >>> told(Difference("trace", "a", "b", [0], [1.0], 1.0, math.nan, math.nan, "one seed: no interval"))
    '1 (one seed: no interval)'
    """
    if math.isnan(each.mean):
        return f"– ({each.note})"
    if each.note:
        return f"{each.mean:.3g} ({each.note})"
    return f"{each.mean:.3g} [{each.low:.3g}, {each.high:.3g}], {len(each.seeds)} seeds"
