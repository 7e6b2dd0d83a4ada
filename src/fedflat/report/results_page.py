"""Generates docs/results.md and its figures from the committed results; nothing is trained.

python -m fedflat.report.results_page docs
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedflat.report.method_runs import figures, studied
from fedflat.report.svg_plots import curves, forest
from fedflat.report.verdicts import FRESH, bound_text, effect_text, seeds_text, undecided
from fedflat.runs import (
    Effect,
    Evidence,
    State,
    beside_best,
    load_claim,
    load_studies,
    read_tuned,
    shipped_claims,
    shipped_evidence,
    state_of,
    tuned_rows,
)

FIGURES = "figures/claims"
HOURS = ".hours.json"  # what `fedflat tune` writes as hours.json, beside a search's tuned.json under its name
TEXT = """## Curves on text

FedAvg, FedSAM, FedAvg + MAN and FedSMOO on Shakespeare by speaking role. The papers make no claim about it;
[studies.md](studies.md#shakespeare-by-speaking-role) has the settings, the numbers, and what others publish.

![Next characters predicted, by rounds](figures/shakespeare.png)

"""
HEAD = """# The papers' claims, and what we found

Every claim is a file in [claims](../claims) that says what is compared and what would refute it;
[claims.md](claims.md) defines the verdicts. Effects are means over paired seeds with 95 % intervals. The runs are
small: each section says at which scale its claim was tested, so a verdict is about that scale and not about the
paper's. Hours are the time that the runs took to train on one thread of a machine that was also used for other work.
A seed is left out where a run lacks the quantity, for example a ratio of traces of which one is negative.

This page is generated from [docs/results](results) by `make results`. `fedflat claims NAME` trains what is missing.
Older runs, from before claims were files, are in [studies.md](studies.md).
"""


def states() -> list[State]:
    """All claims that come with fedflat, judged by the results that come with it."""
    evidence = Evidence.read([shipped_evidence()])
    claims = [load_claim(name) for name in shipped_claims()]
    return [state_of(claim, load_studies(claim), evidence) for claim in claims]


def pages() -> dict[str, str]:
    """The content of the page and of its figures, by path below docs."""
    found = states()
    files = {"results.md": page(found)}
    for state in found:
        if state.known:
            files[f"{FIGURES}/{state.claim.name}.svg"] = forest(state.effects, state.claim.title)
    for name, lines in study_curves(found).items():
        files[f"{FIGURES}/study-{name}.svg"] = curves(lines, f"{name}: test accuracy")
    return files | figures(studied())


def page(found: Sequence[State]) -> str:
    """The whole page: a table of all claims, then a section for each."""
    lines = [HEAD, "## Verdicts", "", "| claim | verdict | parts that hold | runs | hours |", "|---|---|---|---|---|"]
    for state in found:
        held = sum(effect.finding.word == "holds" for effect in state.judged)
        link = f"[{state.claim.title}](#{state.claim.name})"
        runs = f"{state.known} of {state.runs}"
        row = (link, f"**{state.verdict}**", f"{held} of {len(state.judged)}", runs, f"{state.hours:.2f}")
        lines.append(f"| {' | '.join(map(_cell, row))} |")
    lines += ["", FRESH] if any(map(undecided, found)) else []
    lines += ["", _hours()]
    for state in found:
        lines += ["", *_section(state)]
    lines += ["", *_searches(), *TEXT.splitlines(), "## The studies", ""]
    lines += [
        "Test accuracy over the rounds: the mean of the seeds, and in figures of at most four curves their range.",
        "",
    ]
    for name in study_curves(found):
        lines += [f"### {name}", "", f"![{name}]({FIGURES}/study-{name}.svg)", ""]
    return "\n".join(lines).rstrip() + "\n"


def _section(state: State) -> list[str]:
    claim = state.claim
    lines = [f'<a id="{claim.name}"></a>', "", f"## {claim.title}", "", f"**{state.verdict}** · {claim.paper}", ""]
    told = (("Says", claim.says), ("Prints", claim.printed), ("Here", claim.here))
    lines += [f"- {head}: {text}" for head, text in told if text]
    lines += [f"- {note}" for note in claim.notes]
    if claim.pilot:
        seeds = ", ".join(map(str, claim.pilot))
        lines.append(f"- The number of seeds was decided after a look at the seeds {seeds}. These do not count here.")
    if not state.known:
        return [*lines, "", f"None of its {state.runs} runs has been made: `fedflat claims {claim.name}`."]
    lines += ["", f"![{claim.title}]({FIGURES}/{claim.name}.svg)", "", *_table(state.effects)]
    return [*lines, *_best_measure(state)]


def _best_measure(state: State) -> list[str]:
    """Which measure of a ranking is the best, and how far it is above the others and the controls."""
    found = beside_best(state)
    if len(found) < 2:
        return []
    best, *others = found
    places = []
    for place, word in (("ahead of", "holds"), ("behind", "does not hold"), ("not clearly apart from", "undecided")):
        if names := [f"`{each.name}`{' (control)' * each.control}" for each in others if each.finding.word == word]:
            places.append(f"{place} {', '.join(names)}")
    told = f"Of the measures, `{best.name}` is the best: {effect_text(best)}. It is {'; '.join(places)}."
    lines = ["", f"{told} The same seeds chose it, so its lead is somewhat overestimated.", ""]
    lines += [f"| τ of `{best.name}` minus that of | difference (95 % interval) | seeds |", "|---|---|---|"]
    return lines + [f"| {each.label} | {effect_text(each)} | {each.finding.seeds} |" for each in others]


def _hours() -> str:
    """The time that all runs took, also those of pilots; a run that several studies share counts once."""
    rows = {digest: row for study in Evidence.read([shipped_evidence()]).rows.values() for digest, row in study.items()}
    hours = sum(row["metrics"].get("seconds", 0.0) for row in rows.values()) / 3600
    return f"All {len(rows)} distinct runs, those of the pilots among them, took {hours:.2f} hours together."


def _searches() -> list[str]:
    """What each method was given in the searches whose settings the tuned claims use."""
    folder = shipped_evidence() / "tuning"
    files = [path for path in sorted(folder.glob("*.json")) if not path.name.endswith(HOURS)]
    if not files:
        return []
    lines = ["## The searches", ""]
    lines += ["The settings of the tuned claims, found by `fedflat tune` with the same budget for every method, on"]
    lines += [
        "samples held out from the clients' training data and on seeds from 10,000 on. A best value marked (edge)"
    ]
    lines += ["is the smallest or largest that was tried, so that a better one may lie beyond."]
    for path in files:
        rows, kept = tuned_rows(read_tuned(path)), folder / f"{path.stem}{HOURS}"
        hours = json.loads(kept.read_text("utf-8")) if kept.is_file() else {}
        if hours:
            rows = [{**row, "hours": f"{hours[row['method']]:.2f}"} for row in rows]
        lines += ["", f"### {path.stem}", "", f"| {' | '.join(rows[0])} |", "|" + "---|" * len(rows[0])]
        lines += [f"| {' | '.join(map(_cell, row.values()))} |" for row in rows]
        lines += [] if hours else ["", "The hours of this search were not kept."]
    return [*lines, ""]


def _table(effects: Sequence[Effect]) -> list[str]:
    ranked = any(effect.unit == "τ" for effect in effects)
    last = ("τ over all runs",) if ranked else ("paper",)
    head = ("hypothesis", "claimed", "effect (95 % interval)", "seeds", "verdict", *last)
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for effect in effects:
        beside = effect.printed
        if effect.pooled:
            tau, *ends = (f"{value:+.2f}".replace("-", "−") for value in effect.pooled)
            beside = tau if math.isnan(effect.pooled[1]) else f"{tau} ({' to '.join(ends)})"
        row = (effect.label, bound_text(effect), effect_text(effect), seeds_text(effect), str(effect.finding), beside)
        lines.append(f"| {' | '.join(map(_cell, row))} |")
    return lines


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def study_curves(found: Sequence[State]) -> dict[str, dict[str, list[list[tuple[int, float]]]]]:
    """The curves of every study with at least two evaluated rounds: for each line the runs of its seeds."""
    evidence, lines = Evidence.read([shipped_evidence()]), dict[str, dict[str, list[list[tuple[int, float]]]]]()
    for state in found:
        for name, study in load_studies(state.claim).items():
            if name in lines:
                continue
            mine: dict[str, list[list[tuple[int, float]]]] = {}
            for point in study.points:
                row = evidence.of(study, point)
                if row and len(row["curve"]) > 1:
                    label = ", ".join(str(value) for field, value in point.values.items() if field != "seed")
                    mine.setdefault(label, []).append([(int(r), float(v)) for r, v in row["curve"]])
            lines[name] = {label: runs for label, runs in mine.items() if _overlap(runs)}
    return {name: mine for name, mine in lines.items() if mine}


def _overlap(runs: Sequence[Sequence[tuple[int, float]]]) -> bool:
    return len(set.intersection(*({round for round, _ in run} for run in runs))) > 1


def write(folder: Path, files: Mapping[str, str]) -> None:
    """Writes generated files below a folder."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]), pages())
