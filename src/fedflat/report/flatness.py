"""Tables of what was measured about minima."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from fedflat.flatness import Duality, Landscape


def flatness_table(rows: Sequence[Mapping[str, Any]], measured: str) -> Table:
    """Each run's spectrum and trace, and unless the products were the clients', its sharpness and norms."""
    return _side_by_side(measured, {f"{row['run']}\n{bare(row['method'])}": flatness_cells(row) for row in rows})


def flatness_cells(row: Mapping[str, Any]) -> dict[str, str]:
    """What one run's column shows, by the names of the rows."""
    spectrum = row["spectrum"]
    values, residual = spectrum["eigenvalues"], max(spectrum["residuals"])
    cells = {
        "λ1": f"{values[0]:.4g}",
        f"λ1/λ{len(values)}": f"{spectrum['ratio']:.3g}",
        "‖Hv−λv‖/λ1, largest": f"{residual / abs(values[0]):.0e}" if values[0] else "–",
        "trace (Hutchinson)": _estimate(spectrum["trace"]),
        "trace (Hutch++)": _estimate(spectrum["trace_plus_plus"]),
        "Hessian products": str(spectrum["products"]),
    }
    if "loss" not in row:
        return cells | {"MB sent": f"{spectrum['bytes'] / 1e6:,.0f}"}
    return cells | {
        "loss": f"{row['loss']:.4g}",
        "sharpness, one ascent": f"{row['ascent_sharpness']:.3g}",
        "sharpness, average": f"{row['average_sharpness']:.2g} ± {row['average_sharpness_error']:.1g}",
        "sharpness, adaptive": f"{row['adaptive_sharpness']:.3g}",
        "‖w‖": f"{row['weight_norm']:.4g}",
        "capacity, log10 V_L": f"{row['log10_capacity']:.2f}",
    }


def _estimate(trace: Mapping[str, Any]) -> str:
    return f"{trace['mean']:.4g} ± {trace['error']:.2g}"


def layer_table(row: Mapping[str, Any]) -> Table:
    """One run's layers: the block's curvature beside the activations and the bound that they give."""
    parts = "weight and bias" if any(layer["bias"] for layer in row["layers"]) else "weight"
    table = _table(
        f"{row['run']}: the Hessian's block of each layer's {parts}, and what enters the layer",
        ("layer", "parameters", "λ1", "trace", "E‖a‖²", "mean a²", "MAN's bound"),
    )
    for layer in row["layers"]:
        activity, trace = layer["activity"], layer["trace"]
        table.add_row(
            layer["name"],
            f"{layer['parameters']:,}",
            f"{layer['eigenvalues'][0]:.4g}",
            _estimate(trace),
            f"{activity['norm']:.4g}",
            f"{activity['mean_square']:.4g}",
            "–" if activity["bound"] is None else f"{activity['bound']:.4g}",
        )
    return table


def landscape_table(found: Mapping[str, Landscape], measured: str, span: float) -> Table:
    table = _table(measured, ("run", "loss at the centre", f"largest rise within ±{span:g}"))
    for name, each in found.items():
        table.add_row(name, f"{each.centre:.4g}", f"{each.rise:.4g}")
    return table


def duality_table(results: Mapping[str, Duality], measured: str) -> Table:
    """Each run's and layer's gap, and what the directions of the basis make of it."""
    return _side_by_side(measured, {name: duality_cells(each) for name, each in results.items()})


def duality_cells(each: Duality) -> dict[str, str]:
    """What one layer's column shows, by the names of the rows."""
    return {
        "pairs": str(each.pairs),
        "gap of test and training loss": f"{each.gap:.4g}",
        "gap of the pairs": f"{each.paired_gap:.4g}",
        "… in the basis": f"{each.paired_gap - each.remainder:.4g}",
        "… beyond it": f"{each.remainder:.2g}",
        "directions of the basis": str(len(each.contribution)),
        "directions that carry it": f"{each.participation:.1f}",
        "Σ σ_w σ_g": f"{each.spread:.4g}",
        "‖W‖": f"{each.weight_norm:.4g}",
    }


def bare(method: str) -> str:
    """A method's name without its options."""
    return re.sub(r"\(.*?\)", "", str(method))


def _side_by_side(title: str, columns: Mapping[str, Mapping[str, str]]) -> Table:
    """One column for each thing measured, one row for each number."""
    table = Table(title=title, title_justify="left")
    table.add_column("", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right")
    for row in {name: None for cells in columns.values() for name in cells}:
        table.add_row(row, *(cells.get(row, "–") for cells in columns.values()))
    return table


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    for position, name in enumerate(columns):
        table.add_column(name, justify="right" if position else "left")
    return table
