"""The command for the papers' claims: run what is missing, and say what holds."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedflat.cli.app import JsonOption, TrustOption, app, err, out
from fedflat.cli.sweep import refuse_unknown_methods, train_all
from fedflat.errors import RecipeError, TrainingError, nearest

if TYPE_CHECKING:
    from fedflat.runs.claims import Claim, Evidence, State
    from fedflat.runs.sweep import Sweep

Judged = dict[str, tuple["Claim", dict[str, "Sweep"]]]


@app.command()
def claims(
    names: Annotated[list[str] | None, typer.Argument(help="names of claims, or claim files; default all")] = None,
    jobs: Annotated[int, typer.Option(help="parallel runs; 0 = what is fastest, within the memory", min=0)] = 0,
    listed: Annotated[
        bool, typer.Option("--list", help="only list the claims, with the runs that are missing")
    ] = False,
    dry: Annotated[bool, typer.Option("--dry", help="train nothing; judge by existing results")] = False,
    out_dir: Annotated[Path, typer.Option("--out", help="directory of the runs")] = Path("sweeps"),
    results: Annotated[
        Path | None, typer.Option(help="directory of result lines to read and to add to; default OUT/results")
    ] = None,
    trust: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Test the papers' claims: train the runs that are missing, and judge each claim by paired seeds.

    Results that come with fedflat are not trained again. After an interruption the same command continues.
    """
    from fedflat.runs.claims import Evidence, shipped_claims, shipped_evidence

    kept = results or out_dir / "results"
    chosen = _chosen(names or [*shipped_claims()])
    evidence = Evidence.read([shipped_evidence(), kept])
    for study in _studies(chosen).values():
        evidence.gather(study, out_dir / study.name)
    failed: list[str] = []
    if not (listed or dry):
        failed = _train(chosen, evidence, out_dir, kept, jobs, trust)
    found = _judged(chosen, evidence)
    _show(found, listed, as_json)
    if failed:
        raise TrainingError(f"{len(failed)} runs failed; see {', '.join(failed)}")
    _refuse_unmeasured(found, evidence)


def _chosen(names: Sequence[str]) -> Judged:
    """Load the claims and their studies; two that differ cannot have the same name."""
    from fedflat.runs.claims import load_claim, load_studies

    chosen: Judged = {}
    for name in names:
        claim = load_claim(name)
        studies = load_studies(claim, Path(name).parent if name.endswith(".toml") else None)
        before = _studies(chosen)
        same = [f"the study {each}" for each in studies if before.get(each, studies[each]) != studies[each]]
        if claim.name in chosen and chosen[claim.name] != (claim, studies):
            same.insert(0, f"the claim {claim.name}")
        if same:
            raise RecipeError(f"{name}: {same[0]} has the name of another one; rename it, or judge it alone")
        chosen[claim.name] = claim, studies
    return chosen


def _studies(chosen: Judged) -> "dict[str, Sweep]":
    return {name: study for _, studies in chosen.values() for name, study in studies.items()}


def _refuse_unmeasured(states: "Sequence[State]", evidence: "Evidence") -> None:
    """Refuse a quantity that no pair of runs has: it is probably misspelt, or its command after the run is missing."""
    from fedflat.runs.claims.quantities import DERIVED

    for state in states:
        what = "measure" if state.claim.ranking else "part"
        for effect, (studies, asked) in zip(state.effects, _asked(state.claim), strict=True):
            if effect.left_out and not effect.finding.seeds:
                rows = [row for study in studies for row in evidence.rows.get(study, {}).values()]
                columns = {*DERIVED, "rounds_to_target", *(name for row in rows for name in row["metrics"])}
                wrong = next((name for name in asked if name not in columns), None)
                why = (
                    f"no run has the quantity {wrong}; {nearest(wrong, columns)}"
                    if wrong
                    else "no seed has both values"
                )
                raise RecipeError(f"{state.claim.name}: {what} {effect.name!r}: {why}")


def _asked(claim: "Claim") -> list[tuple[list[str], tuple[str, str]]]:
    """The studies of each effect, and the two columns that it needs."""
    if claim.ranking:
        named = (*claim.ranking.measures, *claim.ranking.beside)
        return [(claim.ranking.studies, (name, claim.ranking.quantity)) for name in named]
    return [([claim.study_of(part)], (part.quantity, part.against_quantity or part.quantity)) for part in claim.part]


def _warn_of_added_seeds(chosen: Judged, evidence: "Evidence") -> None:
    """Say so if a claim is about to get further seeds beside those that it has: it may be judged by fresh ones only."""
    for claim, studies in chosen.values():
        for study in studies.values():
            points = claim.points(study)
            begun = {point.recipe.seed for point in points if evidence.of(study, point)}
            missing = {point.recipe.seed for point in evidence.missing(study, points)}
            if (whole := begun - missing) and (new := missing - begun):
                err.print(
                    f"{claim.name}: {study.name} has results for seeds {_listed(whole)}, and {_listed(new)} are new; "
                    "if you looked at the verdict before you added these, name the first ones as the claim's pilot",
                    markup=False,
                    highlight=False,
                )


def _listed(seeds: set[int]) -> str:
    return ", ".join(map(str, sorted(seeds)))


def _judged(chosen: Judged, evidence: "Evidence") -> "list[State]":
    from fedflat.runs.claims import state_of

    return [state_of(claim, studies, evidence) for claim, studies in chosen.values()]


def _train(chosen: Judged, evidence: "Evidence", out_dir: Path, kept: Path, jobs: int, trust: bool) -> list[str]:
    """Train the missing runs, study by study, and keep their rows; return the logs of those that failed."""
    from fedflat.runs.sweep import refuse_other_settings

    _warn_of_added_seeds(chosen, evidence)
    logs: list[str] = []
    for name, study in _studies(chosen).items():
        needed = [point for claim, studies in chosen.values() if name in studies for point in claim.points(study)]
        wanted = {point.slug for point in evidence.missing(study, needed)}
        plan = replace(study, points=tuple(point for point in study.points if point.slug in wanted))
        folder = out_dir / name
        if plan.points:
            refuse_unknown_methods(plan)
            refuse_other_settings(folder, plan)
            err.print(f"{name}: {len(plan.points)} runs are missing", markup=False, highlight=False)
        try:
            failed = train_all(plan, folder, jobs, trust) if plan.points else {}
        finally:
            evidence.gather(study, folder)
            evidence.write(study, kept)
        logs += [str(folder / slug / "log.txt") for slug in failed]
    return logs


def _show(states: "Sequence[State]", listed: bool, as_json: bool) -> None:
    if as_json:
        print(json.dumps([_as_table(state) for state in states], indent=2, ensure_ascii=False))
        return
    from fedflat.report.verdicts import claim_list, verdict_list

    out.print(claim_list(states) if listed else verdict_list(states))


def _as_table(state: "State") -> dict[str, object]:
    """A state as JSON; NaN, which JSON lacks, becomes null."""
    effects = [asdict(effect) for effect in state.effects]
    found = {"claim": state.claim.name, "verdict": state.verdict, "runs": state.runs, "known": state.known}
    text = json.dumps({**found, "hours": state.hours, "effects": effects})
    return dict(json.loads(text, parse_constant=lambda _: None))
