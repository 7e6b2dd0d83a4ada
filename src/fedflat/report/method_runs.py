"""The runs of each method among the committed results, for its page: their curves beside the paper's number."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from fedflat.report.svg_plots import curves
from fedflat.report.tables import Axis, published
from fedflat.runs import Evidence, Row, load_claim, load_studies, shipped_claims, shipped_evidence

Source = tuple[str, dict[str, Any]]  # a published table, and the values of the columns and rows to compare with

MAN: Source = ("man-accuracy", {"setting": "CIFAR-100 δ=0.3"})
SMOO: Source = ("fedsmoo-table1", {"setting": "CIFAR-10 u=0.6", "participation": "10%-100"})
SMOO_01: Source = ("fedsmoo-table1", {"setting": "CIFAR-10 u=0.1", "participation": "10%-100"})
SMOO_FEW: Source = ("fedsmoo-table1", {"setting": "CIFAR-10 u=0.1", "participation": "5%-200"})
SOL: tuple[Source, ...] = (
    ("fedsol-table1", {"setting": "CIFAR-10 α=0.1"}),
    ("fedsol-table8", {}),
    ("fedsol-table6", {}),
    ("fedsol-table5", {"setting": "CIFAR-10"}),
)
# What each study shortens; the first table that has a method counts.
PAPERS: dict[str, tuple[Source, ...]] = {
    "fashion-mlp": (SMOO, MAN),
    "fashion-tuned": (SMOO, MAN),
    "fashion-few": (SMOO_FEW,),
    "fashion-lenet": (MAN,),
    "cifar10-lenet-small": (SMOO_01, MAN),
    "cifar10-smoo": (SMOO_01,),
    "cifar10-smoo-cnn": (SMOO_01,),
    "cifar10-man": (MAN,),
    **dict.fromkeys(("fashion-sol", "fashion-sol-radius", "fashion-sol-tuned", "fashion-forgetting"), SOL),
    **dict.fromkeys(("fashion-bf16", "cifar10-sol-small", "cifar10-sol-cnn", "cifar10-sol"), SOL),
}
# Methods whose options here are not the paper's: tuned, or those of another paper's setting.
ALIKE = {
    "fedsam(0.02)": "fedsam(0.1)",
    "fedasam(0.5, eta=0.0, biases=True)": "fedasam(1.0, eta=0.0, biases=True)",
    "fedsmoo(rho=0.02)": "fedsmoo",
    "fedsmoo(rho=0.02, penalty=0.1)": "fedsmoo",
    "feddyn(0.1) + man(0.15)": "feddyn(0.01, balanced=True) + man(0.15)",
    "fedspeed": "fedspeed(0.01, 0.01, balanced=True)",
    "fedspeed + man(0.15)": "fedspeed(0.01, 0.01, balanced=True) + man(0.15)",
}
REFERENCE = "fedavg"


@dataclass(frozen=True)
class Studied:
    """The runs of one method in one study, by seed, and its number in the paper's table.

    `setting` has what else the study varies, such as the precision.
    """

    study: str
    method: str
    setting: str
    rows: list[Row]
    paper: str

    @property
    def label(self) -> str:
        return ", ".join(filter(None, (self.method, self.setting)))

    @property
    def curves(self) -> list[list[tuple[int, float]]]:
        return [[(int(r), float(v)) for r, v in row["curve"]] for row in self.rows]

    @property
    def drawn(self) -> bool:
        """Whether its runs have at least two evaluated rounds in common; a curve needs two."""
        return len(set.intersection(*({round for round, _ in curve} for curve in self.curves))) > 1


def page_of(method: str) -> str:
    """The name of the page that a method belongs to: that of the last part of a sum.

    >>> page_of("fedsam(0.1)"), page_of("fedsam(0.1) + man(0.15)")
    ('fedsam', 'man')
    """
    return method.split("+")[-1].partition("(")[0].strip()


def studied() -> list[Studied]:
    """All methods of all studies that have results, but runs of a single round, which only time a step."""
    evidence, found, seen = Evidence.read([shipped_evidence()]), list[Studied](), set[str]()
    for claim in map(load_claim, shipped_claims()):
        for name, study in load_studies(claim).items():
            if name in seen:
                continue
            seen.add(name)
            groups: dict[tuple[str, str], list[Row]] = {}
            for point in study.points:
                row = evidence.of(study, point)
                if row and row["curve"] and row["curve"][-1][0] > 1 and isinstance(point.values.get("method"), str):
                    others = (str(v) for field, v in point.values.items() if field not in ("method", "seed"))
                    groups.setdefault((point.values["method"], ", ".join(others)), []).append(row)
            found += [Studied(name, *who, rows, _printed(name, who[0], rows)) for who, rows in groups.items()]
    return found


def _printed(study: str, method: str, rows: Sequence[Row]) -> str:
    """The number of a method in the first of the paper's tables that has one; empty if none has."""
    for spelling in (method, ALIKE.get(method, method)):
        for name, wanted in PAPERS.get(study, ()):
            table = published(name)
            found = [
                _entry(row, column, value.text, rows)
                for row, values in zip(table.rows, table.values, strict=True)
                for column, value in zip(table.columns, values, strict=True)
                if value and _fits({**row.match, **column.match}, spelling, wanted)
            ]
            if found:
                return found[-1]  # of fine-tuning for one and for five epochs, five
    return ""


def _fits(match: Mapping[str, Any], method: str, wanted: Mapping[str, Any]) -> bool:
    """Whether an entry of a table with these values is that of a method."""
    known = {**wanted, **_options(method)}
    return all(_same(asked, method) if name == "method" else known.get(name) == asked for name, asked in match.items())


def _options(method: str) -> dict[str, Any]:
    """The options that FedSoL's tables vary.

    >>> _options("fedsol(rho=2.0, radius='dim0')"), _options("fedsol(rho=2.0, radius='fixed')")
    ({'method.rho': 2.0, 'method.scope': 'all'}, {})
    >>> _options("fedsol_ablation(form='A2', rho=2.0)")
    {'method.form': 'A2'}
    """
    found = dict(re.findall(r"(\w+)='?([\w.]+)", method))
    if page_of(method) == "fedsol_ablation":
        return {"method.form": found["form"]}
    if page_of(method) == "fedsol" and found["radius"] == "dim0":
        return {"method.rho": float(found["rho"]), "method.scope": found.get("scope", "all")}
    return {}


def _entry(row: Axis, column: Axis, printed: str, rows: Sequence[Row]) -> str:
    """An entry with its heads; where it is not the accuracy of the global model, with ours beside it."""
    text = printed.strip(" ↑↓")
    if row.metric:
        ours = fmean(100 * each["metrics"][row.metric] for each in rows)
        return f"personalised: {text} ({row.heads[0]}, {', '.join(column.heads)}; ours {ours:.1f})"
    heads = column.heads if "method" in row.match else [*row.heads, *column.heads]
    return f"{text} ({', '.join(heads)})"


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
        what = ", ".join(filter(None, (f"`{each.method}`", each.setting)))
        lines.append(f"| {each.study} | {what} | {len(last)} | {fmean(last):.1f}{spread} | {each.paper} |")
    lines += ["", "The studies are smaller than the papers' experiments: compare methods, not numbers"]
    lines[-1] += " ([results](../results.md))."
    if any(each.method in ALIKE for each in mine):
        lines += ["Where our options are not the paper's, its number is still that of its own options."]
    for study in dict.fromkeys(each.study for each in mine if each.drawn):
        lines += ["", f"![{name} in {study}](../figures/methods/{name}-{study}.svg)"]
    return [*lines, ""]


def figures(runs: Sequence[Studied]) -> dict[str, str]:
    """The curves of every method in every study beside FedAvg's, by path below docs; a single evaluation has none."""
    found = {}
    for study in dict.fromkeys(each.study for each in runs):
        here = [each for each in runs if each.study == study and each.drawn]
        for name in dict.fromkeys(page_of(each.method) for each in here):
            lines = {each.label: each.curves for each in here if each.method == REFERENCE}
            lines |= {each.label: each.curves for each in here if page_of(each.method) == name}
            found[f"figures/methods/{name}-{study}.svg"] = curves(lines, f"{name} in {study}: test accuracy")
    return found
