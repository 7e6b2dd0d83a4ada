"""The runs of each method among the committed results, for its page: their curves beside the paper's number."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from fedflat.report.svg_plots import curves
from fedflat.report.tables import published
from fedflat.runs import Evidence, Row, load_claim, load_studies, shipped_claims, shipped_evidence

# The published table that each study shortens, with the values of the column and of the rows to compare with.
PAPERS: dict[str, tuple[str, dict[str, Any]]] = {
    "fashion-mlp": ("fedsmoo-table1", {"setting": "CIFAR-10 u=0.6", "participation": "10%-100"}),
    "fashion-few": ("fedsmoo-table1", {"setting": "CIFAR-10 u=0.1", "participation": "5%-200"}),
    "fashion-sol": ("fedsol-table1", {"setting": "CIFAR-10 α=0.1"}),
    "fashion-lenet": ("man-accuracy", {"setting": "CIFAR-100 δ=0.3"}),
}
REFERENCE = "fedavg"


@dataclass(frozen=True)
class Studied:
    """The runs of one method in one study, by seed, and its number in the paper's table."""

    study: str
    method: str
    rows: list[Row]
    paper: str

    @property
    def curves(self) -> list[list[tuple[int, float]]]:
        return [[(int(r), float(v)) for r, v in row["curve"]] for row in self.rows]


def page_of(method: str) -> str:
    """The name of the page that a method belongs to: that of the last part of a sum.

    >>> page_of("fedsam(0.1)"), page_of("fedsam(0.1) + man(0.15)")
    ('fedsam', 'man')
    """
    return method.split("+")[-1].partition("(")[0].strip()


def studied() -> list[Studied]:
    """All methods of all studies that have results."""
    evidence, found, seen = Evidence.read([shipped_evidence()]), list[Studied](), set[str]()
    for claim in map(load_claim, shipped_claims()):
        for name, study in load_studies(claim).items():
            if name in seen:
                continue
            seen.add(name)
            groups: dict[str, list[Row]] = {}
            for point in study.points:
                row = evidence.of(study, point)
                if row and len(row["curve"]) > 1 and isinstance(point.values.get("method"), str):
                    groups.setdefault(point.values["method"], []).append(row)
            found += [Studied(name, method, rows, _printed(name, method)) for method, rows in groups.items()]
    return found


def _printed(study: str, method: str) -> str:
    """The number of a method in the paper's table; empty if the table has none."""
    if study not in PAPERS:
        return ""
    name, wanted = PAPERS[study]
    table = published(name)
    for row, values in zip(table.rows, table.values, strict=True):
        theirs = str(row.match.get("method", ""))
        if not _same(theirs, method) or any(wanted.get(k, v) != v for k, v in row.match.items() if k != "method"):
            continue
        for column, value in zip(table.columns, values, strict=True):
            if value and all(wanted.get(field) == asked for field, asked in column.match.items()):
                return f"{value.text.strip(' ↑↓')} ({', '.join(column.heads)})"
    return ""


def _same(theirs: str, ours: str) -> bool:
    """Whether two methods are the same, with any value for a name in braces.

    >>> _same("fedavg + man({man})", "fedavg + man(0.15)"), _same("fedsam(0.1)", "fedsam(0.05)")
    (True, False)
    """
    return re.fullmatch(re.sub(r"\\{\w+\\}", r"[^,)]+", re.escape(theirs)), ours) is not None


def section(name: str, runs: Sequence[Studied]) -> list[str]:
    """The section of a method's page about its runs; empty if there are none."""
    mine = [each for each in runs if page_of(each.method) == name]
    if not mine:
        return []
    lines = ["## Our runs", "", "| study | method | seeds | accuracy of the last evaluation, % | paper, % |"]
    lines += ["|---|---|---|---|---|"]
    for each in mine:
        last = [100 * curve[-1][1] for curve in each.curves]
        spread = f" ± {stdev(last):.1f}" if len(last) > 1 else ""
        lines.append(f"| {each.study} | `{each.method}` | {len(last)} | {fmean(last):.1f}{spread} | {each.paper} |")
    lines += ["", "The studies are smaller than the papers' experiments: compare methods, not numbers"]
    lines[-1] += " ([results](../results.md))."
    for study in dict.fromkeys(each.study for each in mine):
        lines += ["", f"![{name} in {study}](../figures/methods/{name}-{study}.svg)"]
    return [*lines, ""]


def figures(runs: Sequence[Studied]) -> dict[str, str]:
    """The curves of every method in every study beside FedAvg's, by path below docs."""
    found = {}
    for study in dict.fromkeys(each.study for each in runs):
        here = [each for each in runs if each.study == study]
        for name in dict.fromkeys(page_of(each.method) for each in here):
            lines = {each.method: each.curves for each in here if each.method == REFERENCE}
            lines |= {each.method: each.curves for each in here if page_of(each.method) == name}
            found[f"figures/methods/{name}-{study}.svg"] = curves(lines, f"{name} in {study}: test accuracy")
    return found
