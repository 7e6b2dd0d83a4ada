"""Tables of flatness measures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import PurePath
from typing import Any

from rich.table import Table

from fedflat.flatness import Direction, Duality, Landscape, Pairing
from fedflat.runs import bare_method

ENDS = ("error", "low", "high")
PRODUCTS = {"ggn": "Gauss–Newton", "fisher": "Fisher"}


def flatness_table(rows: Sequence[Mapping[str, Any]], measured: str) -> Table:
    """The spectrum and trace of each run and, unless the Hessian was federated, its sharpness and norms.

    Args:
        rows: the flatness record of each run.
        measured: the title, which says what was measured.
    """
    names = short_names([str(row["run"]) for row in rows])
    heads = [f"{name}\n{bare_method(row['method'])}" for name, row in zip(names, rows, strict=True)]
    return side_by_side(measured, dict(zip(heads, map(flatness_cells, rows), strict=True)))


def short_names(paths: Sequence[str]) -> list[str]:
    """The paths without the folders that all of them share.

    >>> short_names(["runs/demo/fedavg-seed-0", "runs/demo/fedsam-seed-0"]), short_names(["runs/0001"])
    (['fedavg-seed-0', 'fedsam-seed-0'], ['runs/0001'])
    """
    parts = [PurePath(path).parts for path in paths]
    if len(set(parts)) == 1:
        return list(paths)
    levels = zip(*(each[:-1] for each in parts), strict=False)
    shared = sum(1 for _ in takewhile(lambda level: len(set(level)) == 1, levels))
    return [str(PurePath(*each[shared:])) for each in parts]


def flatness_cells(row: Mapping[str, Any]) -> dict[str, str]:
    """The cells of one run's column, by row name."""
    spectrum = row["spectrum"]
    values, residual = spectrum["eigenvalues"], max(spectrum["residuals"])
    ratio = f"– ({spectrum.get('ratio_missing')})" if spectrum["ratio"] is None else f"{spectrum['ratio']:.3g}"
    cells = {
        "samples": str(row["samples"]),
        "λ1": f"{values[0]:.4g}",
        **({"sharpness, adaptive (scale-invariant)": f"{row['adaptive_sharpness']:.3g}"} if "loss" in row else {}),
        **({f"λ1/λ{len(values)}": ratio} if len(values) > 1 else {}),
        "‖Hv−λv‖/λ1, largest": f"{residual / abs(values[0]):.0e}" if values[0] else "–",
        "trace [95 %]": _estimate(spectrum["trace"]),
        f"{PRODUCTS.get(spectrum.get('matrix'), 'Hessian')} products": str(spectrum["products"]),
    }
    if found := spectrum.get("outliers"):
        beside = f" (K − 1 = {row['classes'] - 1})" if "classes" in row else ""
        cells |= {f"outliers{beside}": f"{len(found['values'])} above {found['edge']:.3g}"}
    if "loss" not in row:
        return cells | {"MB sent": f"{spectrum['bytes'] / 1e6:,.0f}"}
    return cells | {
        "loss": f"{row['loss']:.4g}",
        "sharpness, one ascent": f"{row['ascent_sharpness']:.3g}",
        "sharpness, average [95 %]": _estimate(
            {end: row[f"average_sharpness_{end}"] for end in ENDS if f"average_sharpness_{end}" in row}
            | {"mean": row["average_sharpness"]}
        ),
        "‖w‖": f"{row['weight_norm']:.4g}",
        "capacity, log10 V_L": f"{row['log10_capacity']:.2f}",
    }


def headline(row: Mapping[str, Any]) -> dict[str, tuple[float, float | None]]:
    """λ₁, trace and scale-invariant adaptive sharpness of a run; the trace with half the width of its 95 % interval."""
    spectrum = row["spectrum"]
    trace = spectrum["trace"]
    ends = [trace.get(end) for end in ("low", "high")]  # null in a file if there is no interval
    half = 2 * float(trace["error"]) if "high" not in trace else None if None in ends else (ends[1] - ends[0]) / 2
    return {
        "lambda1": (float(spectrum["eigenvalues"][0]), None),
        "trace": (float(trace["mean"]), half),
        "adaptive": (float(row["adaptive_sharpness"]), None),
    }


def _estimate(trace: Mapping[str, Any]) -> str:
    """The trace with its interval. Records of fedflat 0.1 have only a standard error."""
    if "low" not in trace:
        return f"{trace['mean']:.4g} ± {trace['error']:.2g}"
    return estimate(trace["mean"], trace["low"], trace["high"])


def estimate(mean: float, low: float | None, high: float | None, digits: int = 4) -> str:
    """A mean with its 95 % interval, if there is one.

    >>> estimate(12.345, 11.0, 13.0), estimate(12.345, math.nan, math.nan)
    ('12.35 [11, 13]', '12.35')
    """
    if low is None or high is None or math.isnan(low + high):
        return f"{mean:.{digits}g}"
    return f"{mean:.{digits}g} [{low:.{digits}g}, {high:.{digits}g}]"


def layer_table(row: Mapping[str, Any]) -> Table:
    """The layers of one run: the curvature of each block, the activations, and the bound that they give."""
    parts = "weight and bias" if any(layer["bias"] for layer in row["layers"]) else "weight"
    table = titled_table(
        f"{row['run']}: Hessian block of each layer's {parts}, and the layer's inputs",
        ("layer", "parameters", "λ1", "trace [95 %]", "E‖a‖²", "mean a²", "MAN's bound"),
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


def landscape_table(found: Mapping[str, Landscape], samples: Sequence[int], measured: str, span: float) -> Table:
    """The loss at the centre of each run's landscape and its largest rise, with the samples of each run."""
    table = titled_table(measured, ("run", "samples", "loss at the centre", f"largest rise within ±{span:g}"))
    for (name, each), count in zip(found.items(), samples, strict=True):
        table.add_row(name, str(count), f"{each.centre:.4g}", f"{each.rise:.4g}")
    return table


PAIRINGS: dict[Direction, str] = {"train_to_test": "train → test", "test_to_train": "test → train"}


def duality_table(results: Mapping[str, Duality], measured: str) -> Table:
    """The gap of each run and layer and its decomposition, for both pairings."""
    return side_by_side(measured, duality_columns(results))


def duality_columns(results: Mapping[str, Duality]) -> dict[str, dict[str, str]]:
    """Two columns for each layer, one for each pairing. A column maps row names to cells."""
    return {
        f"{name}\n{PAIRINGS[direction]}": duality_cells(each, found)
        for name, each in results.items()
        for direction, found in each.pairings.items()
    }


def duality_cells(each: Duality, found: Pairing) -> dict[str, str]:
    """The cells of one layer and pairing, by row name."""
    c = found.correlations
    return {
        "gap: test − training loss": f"{each.gap:.4g}",
        "gap of the pairs": f"{found.paired_gap:.4g}",
        "… Σ c σ_w σ_g": f"{found.fluctuation:.4g}",
        "… Σ μ_w μ_g": f"{found.drift:.4g}",
        "… beyond the basis": f"{found.remainder:.2g}",
        "Σ σ_w σ_g": f"{found.envelope:.4g}",
        "c, mean ± deviation": f"{c.mean:.3f} ± {c.std:.3f}",
        "c, median (10–90 %)": f"{c.median:.3f} ({c.low:.3f} … {c.high:.3f})",
        "size √Σ σ_w²": f"{found.size:.4g}",
        "sharpness √Σ σ_g²": f"{found.sharpness:.4g}",
        "‖W‖": f"{each.weight_norm:.4g}",
        "samples, train + test": f"{each.train_samples} + {each.test_samples}",
        "pairs (left out)": f"{found.pairs} ({found.skipped})",
        "directions (that carry it)": f"{len(found.contribution)} ({found.participation:.1f})",
    }


def side_by_side(title: str, columns: Mapping[str, Mapping[str, str]]) -> Table:
    """A table with one column for each entry and one row for each quantity."""
    table = Table(title=title, title_justify="left")
    table.add_column("", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right")
    for row in {name: None for cells in columns.values() for name in cells}:
        table.add_row(row, *(cells.get(row, "–") for cells in columns.values()))
    return table


def titled_table(title: str, columns: Sequence[str]) -> Table:
    """An empty table with a title; all columns but the first are aligned to the right."""
    table = Table(title=title, title_justify="left")
    for position, name in enumerate(columns):
        table.add_column(name, justify="right" if position else "left")
    return table
