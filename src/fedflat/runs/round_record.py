"""What is recorded of a round: one line of metrics.jsonl."""

from __future__ import annotations

import math

from fedflat.errors import AwayError, printable
from fedflat.flatness import FederatedHessian, top_eigenvalues
from fedflat.rounds import Engine, Problem, RoundReport, ServerState, gradient_norm, margin_loss
from fedflat.runs.folder import Record
from fedflat.runs.launch import sharpness_portion


def round_record(state: ServerState, report: RoundReport) -> Record:
    """The record of a round before its model is evaluated."""
    notes = {name: _number(value) for name, value in report.notes.items()}
    refused = [{"client": r.client, "reason": r.reason, "detail": r.detail} for r in report.refused]
    return {
        "round": state.round,
        "local_loss": _number(report.local_loss),
        **{name: _number(value) for name, value in report.measures.items()},
        "cohort": report.cohort,
        "bytes_down": report.bytes_down,
        "bytes_up": report.bytes_up,
        **({"notes": notes} if notes else {}),
        **({"refused": refused} if refused else {}),
        **({"skipped": report.skipped} if report.skipped else {}),
    }


def evaluation_record(problem: Problem, state: ServerState, engine: Engine) -> Record:
    """The metrics of a model, and the recipe's measures of it on the clients' training samples."""
    recipe, section = problem.recipe, problem.recipe.evaluation
    score = engine.score(state, section.part, section.batch)
    record: Record = {name: _number(value) for name, value in score.values.items()} | {"loss": _number(score.loss)}
    if recipe.server.stop_loss is not None:
        on_train = score if section.part == "train" else engine.score(state, "train", section.batch)
        record["train_loss"] = _number(on_train.loss)
    if "classes" in section.measures:
        record["class_accuracy"] = [_number(accuracy) for accuracy in score.per_class]
    return record | _of_training_samples(problem, state, engine)


def _of_training_samples(problem: Problem, state: ServerState, engine: Engine) -> Record:
    """The recipe's measures of the evaluated model on the clients' samples; None if they cannot be asked."""
    wanted = [name for name in ("gradient", "margin") if name in problem.recipe.evaluation.measures]
    if not wanted:
        return {}
    measures = {"gradient": gradient_norm, "margin": margin_loss}
    try:
        return {name: _number(measures[name](engine, state, problem)) for name in wanted}
    except AwayError:
        return dict.fromkeys(wanted)


def sharpness_record(problem: Problem, state: ServerState, engine: Engine) -> Record:
    """λ₁ of the Hessian of the global objective, and the bytes of the clients' Hessian products."""
    hessian = FederatedHessian(engine, state, problem, sharpness_portion(problem.recipe))
    try:
        top = top_eigenvalues(hessian, k=1, tolerance=1e-2, seed=problem.recipe.seed)
    except AwayError as away:
        return {"lambda1": None, "sharpness_missing": printable(away)}
    return {"lambda1": _number(float(top.values[0])), "sharpness_bytes": hessian.bytes}


def _number(value: float) -> float | None:
    """Replace NaN, which JSON lacks."""
    return value if math.isfinite(value) else None
