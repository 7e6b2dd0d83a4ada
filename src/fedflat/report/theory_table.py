"""The table of MAN's theory: the bounded values, the bounds and their looseness, for several runs side by side."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from rich.table import Table

from fedflat.flatness import BlockCurvature, Curvature, Theory, mean_over, over
from fedflat.runs import bare_method

Span = tuple[float, float]
Cell = float | Span | None
Cells = dict[str, Cell]


def theory_table(found: Mapping[str, Theory], methods: Sequence[str], measured: str) -> Table:
    """All inequalities of every run. Runs after the first also show the ratio to the first.

    Args:
        found: the result of each run, by its name.
        methods: the method of each run.
        measured: the end of the title, which says what was measured.
    """
    sections = [theory_cells(each) for each in found.values()]
    return _table(f"bounds on the curvature: {measured}", _heads(found, methods), sections)


def client_table(found: Mapping[str, Sequence[Curvature]], methods: Sequence[str], measured: str) -> Table:
    """Curvature, blocks and bounds of the clients' losses. The arguments are those of `theory_table`."""
    sections = [_client_sections(clients) for clients in found.values()]
    return _table(f"curvature of each client's loss: {measured}", _heads(found, methods), sections)


def theory_cells(each: Theory) -> dict[str, Cells]:
    """The cells of one run's column, by block and row name."""
    pooled, clients = each.pooled, each.clients
    whole: Cells = {
        "λ1(H)": pooled.hessian,
        **_clients_against(clients, lambda client: client.hessian, pooled.hessian, "λ1(H)"),
        "λ1(G), Gauss–Newton": pooled.gauss_newton,
        "Σ λ1(G_l) of the blocks": pooled.blocks_sum,
        "Σ λ1(G_l) ÷ λ1(G)": over(pooled.blocks_sum, pooled.gauss_newton),
    }
    return {"": whole, **{block.name: _block_cells(each, n) for n, block in enumerate(pooled.blocks)}}


def _block_cells(each: Theory, n: int) -> Cells:
    block = each.pooled.blocks[n]
    return {
        "λ1(H_l)": block.hessian,
        "MAN's bound": block.bound,
        "MAN's bound ÷ λ1(H_l)": block.looseness,
        "E‖a‖²": block.norm,
        **_clients_against(each.clients, lambda client: client.blocks[n].hessian, block.hessian, "λ1(H_l)"),
        "clients: bound ÷ λ1, range": _span([client.blocks[n].looseness for client in each.clients]),
        "λ1(G_l)": block.gauss_newton,
    }


def _clients_against(
    clients: Sequence[Curvature], number: Callable[[Curvature], float], pooled: float, name: str
) -> Cells:
    total = mean_over(clients, number)
    return {
        "clients: Σ pᵢ λ1": total,
        f"clients: Σ pᵢ λ1 ÷ {name}": over(total, pooled),
        "clients: λ1, range": _span([number(client) for client in clients]),
    }


def _client_sections(clients: Sequence[Curvature]) -> dict[str, Cells]:
    def block_cells(n: int) -> Cells:
        own: list[BlockCurvature] = [client.blocks[n] for client in clients]
        return {
            "Σ pᵢ λ1(Hᵢ_l)": mean_over(clients, lambda client: client.blocks[n].hessian),
            "λ1(Hᵢ_l), range": _span([block.hessian for block in own]),
            "Σ pᵢ × MAN's bound": mean_over(clients, lambda client: client.blocks[n].bound),
            "MAN's bound ÷ λ1(Hᵢ_l), range": _span([block.looseness for block in own]),
        }

    whole: Cells = {
        "clients": float(len(clients)),
        "Σ pᵢ λ1(Hᵢ)": mean_over(clients, lambda client: client.hessian),
        "λ1(Hᵢ), range": _span([client.hessian for client in clients]),
    }
    return {"": whole, **{block.name: block_cells(n) for n, block in enumerate(clients[0].blocks)}}


def _span(values: Sequence[float | None]) -> Span | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return (min(known), max(known)) if known else None


def _heads(found: Mapping[str, object], methods: Sequence[str]) -> list[str]:
    return [f"{run}\n{bare_method(method)}" for run, method in zip(found, methods, strict=True)]


def _table(title: str, heads: Sequence[str], columns: Sequence[Mapping[str, Cells]]) -> Table:
    """A table with one column for each run and, after the first run, one for the ratio to the first."""
    table = Table(title=title, title_justify="left")
    table.add_column("block", no_wrap=True)
    table.add_column("", no_wrap=True)
    for place, head in enumerate(heads):
        table.add_column(head, justify="right")
        if place:
            table.add_column("÷ first", justify="right")
    for name, rows in _union(columns).items():
        for place, row in enumerate(rows):
            values = [column.get(name, {}).get(row) for column in columns]
            shown = [_shown(values[0]), *(text for v in values[1:] for text in (_shown(v), _change(v, values[0])))]
            table.add_row(name or "all" if place == 0 else "", row, *shown)
        table.add_section()
    return table


def _union(columns: Sequence[Mapping[str, Cells]]) -> dict[str, list[str]]:
    """The rows of each block, over all runs."""
    names = {name: None for column in columns for name in column}
    return {name: list({row: None for column in columns for row in column.get(name, {})}) for name in names}


def _shown(cell: Cell) -> str:
    if isinstance(cell, tuple):
        return f"{cell[0]:.3g} … {cell[1]:.3g}"
    return "–" if cell is None or math.isnan(cell) else f"{cell:.4g}"


def _change(cell: Cell, first: Cell) -> str:
    if isinstance(cell, tuple) or isinstance(first, tuple) or cell is None or not first:
        return ""
    ratio = cell / first
    return f"{ratio:.3g}{' ↑' if ratio > 1.005 else ''}"
