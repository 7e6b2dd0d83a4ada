"""The results of a sweep: a row for each run, and means over the seeds."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean, pstdev, stdev
from typing import Any

from fedflat.errors import RunError, literal, shown
from fedflat.files import opened, read_bytes, read_whole, write_whole, written_to
from fedflat.recipe import Recipe
from fedflat.rounds import flat_record
from fedflat.runs.folder import read_recipe
from fedflat.runs.record import read_record, read_summary
from fedflat.runs.sweep.overrides import flattened, spelled
from fedflat.runs.sweep.plan import BASE, Point, Sweep

JUDGED = ("last", "best", "mean_of_last_10")  # of the metric that the recipe follows
METRICS = ("rounds_to_target", "bytes_up", "bytes_down", "seconds", "consistency")
ELSEWHERE = {"round", "cohort"}  # fields of a record that a row has in its settings
FORGOTTEN = 0.5  # a class counts as forgotten below this fraction of its best accuracy
FLATNESS = ("ascent_sharpness", "average_sharpness", "adaptive_sharpness", "weight_norm", "log10_capacity")
# What a file that was damaged or edited by hand may raise; its run counts as not finished, and is finished again.
DAMAGED = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
GO_ON = "free some space, then run the same command again"
TAIL = 2**17  # bytes; longer than any record of a round

Row = dict[str, Any]


def finished(folder: Path, point: Point) -> bool:
    """Whether the run is finished, with the same recipe and the same commands after it.

    A field that the recorded recipe lacks, because an earlier version wrote it, counts with its default.
    """
    with suppress(*DAMAGED):
        return bool(_recorded(folder) == point.asked())
    return False


def _recorded(folder: Path) -> dict[str, Any]:
    """What was asked for when a run was finished, with the defaults of fields that are newer.

    Raises one of `DAMAGED` if the result is not whole.
    """
    result = json.loads(read_bytes(folder / "result.json"))
    if "scale" not in result or not all(isinstance(v, int | float | None) for v in result["metrics"].values()):
        raise ValueError(f"{folder}: result.json is damaged")
    return _in_full(result["asked"])


def _in_full(asked: dict[str, Any]) -> dict[str, Any]:
    for section, fields in json.loads(json.dumps(Recipe().essentials())).items():
        asked[section] = {**fields, **asked[section]} if isinstance(fields, dict) else asked[section]
    return {**asked, BASE: _in_full(asked[BASE])} if BASE in asked else asked


def unfinished(folder: Path, sweep: Sweep) -> list[Point]:
    """The runs of a sweep that are left to train."""
    return [point for point in sweep.points if not finished(folder / point.slug, point)]


def refuse_other_settings(folder: Path, sweep: Sweep) -> None:
    """Refuses to train a sweep in a directory whose runs have other settings: they cannot be continued with these.

    More rounds and other commands after a run are allowed; more rounds of a base until a run begins from its model.
    """
    begun = any(path.parent.name != BASE for path in folder.glob("*/metrics.jsonl"))
    found = ((point, _other_setting(folder / point.slug, point, begun and point.slug == BASE)) for point in sweep.runs)
    others = [(point, other) for point, other in found if other]
    if others:
        point, (name, there, here) = others[0]
        raise RunError(
            f"{folder}: {len(others)} of {len(sweep.runs)} runs have other settings, {point.slug} for example has "
            f"{name} = {shown(there)}, and now it is {shown(here)}; choose another --out"
        )


def _other_setting(folder: Path, point: Point, begun_from: bool) -> tuple[str, Any, Any] | None:
    """The first setting in which a finished run differs from what is asked for: its name, the old and the new value.

    Args:
        folder: the directory of the run.
        point: what is asked for.
        begun_from: whether other runs have begun from its model, which more rounds would change.
    """
    try:
        before, now = flattened({**_recorded(folder), "after": []}), flattened({**point.asked(), "after": []})
    except DAMAGED:
        return None
    more = now["server.rounds"] - before.get("server.rounds", 0)
    changed = more != 0 if begun_from else more < 0
    differing = (name for name in {**before, **now} if before.get(name) != now.get(name))
    name = next((name for name in differing if name != "server.rounds" or changed), None)
    return None if name is None else (name, before.get(name), now.get(name))


def save_result(folder: Path, point: Point, scale: str, answers: Iterable[Path]) -> None:
    """Writes result.json, which marks the run as finished.

    Args:
        folder: the directory of the run.
        point: the run.
        scale: the scale of the sweep.
        answers: the JSON output files of the commands that followed the run.
    """
    summary, last = read_summary(folder), last_record(folder)
    metric = read_recipe(folder).metric
    judged = (f"{metric}_{which}" for which in JUDGED)
    metrics = {name: summary.get(name, last.get(name)) for name in (*judged, *METRICS)}
    metrics |= {name: value for name, value in noted(last).items() if name not in {*metrics, metric}}
    if last.get("class_accuracy"):
        metrics |= by_class(read_whole(folder / "metrics.jsonl").splitlines())
    for path in answers:
        metrics |= columns(json.loads(read_whole(path)))
    result = {"values": point.values, "scale": scale, "metrics": metrics, "asked": point.asked()}
    with written_to(folder, GO_ON):
        write_whole(folder / "result.json", json.dumps(result, indent=2).encode() + b"\n")


def last_record(folder: Path) -> Row:
    """The last record of a run's metrics, or an empty one before the first round."""
    with suppress(OSError, IndexError), opened(folder / "metrics.jsonl") as file:
        file.seek(max(0, file.seek(0, io.SEEK_END) - TAIL))
        whole = file.read().rpartition(b"\n")[0]
        return read_record(whole.splitlines()[-1]) or {}
    return {}


def noted(record: Row) -> Row:
    """All numbers of a record: the metrics, the loss, the requested measures, and the notes of the method's parts.

    >>> noted({"round": 3, "accuracy": 0.5, "loss": 1.2, "cohort": [1, 4], "notes": {"activation/relu1": 0.3}})
    {'activation/relu1': 0.3, 'accuracy': 0.5, 'loss': 1.2}
    """
    flat = flat_record(record)
    numbers = {name: value for name, value in flat.items() if value is None or isinstance(value, int | float)}
    return {name: value for name, value in numbers.items() if name not in ELSEWHERE}


def by_class(lines: Iterable[bytes | str]) -> Row:
    """Summarises the accuracy by class over the rounds.

    `forgetting` is (1/C) Σ_c max_t (a_c(t) − a_c(T)) (Lee et al. 2021, FedNTD). `class_accuracy_std` is the standard
    deviation over the classes in the last round T. `classes_forgotten` counts the classes that end below half of their
    best accuracy.

    >>> rounds = [{"class_accuracy": [0.8, 0.5]}, {"loss": 1.0}, {"class_accuracy": [0.2, 0.6]}]
    >>> {name: round(value, 3) for name, value in by_class(map(json.dumps, rounds)).items()}
    {'class_accuracy_std': 0.2, 'forgetting': 0.3, 'classes_forgotten': 1}
    """
    seen = [json.loads(line).get("class_accuracy") for line in lines]
    curves = [[value for value in curve if value is not None] for curve in zip(*filter(None, seen), strict=True)]
    pairs = [(max(curve), curve[-1]) for curve in curves if curve]
    return {
        "class_accuracy_std": pstdev(last for _, last in pairs),
        "forgetting": fmean(best - last for best, last in pairs),
        "classes_forgotten": sum(last < FORGOTTEN * best for best, last in pairs),
    }


def columns(answer: Any) -> Row:
    """The results of a command that followed a run, as named columns.

    The names end with `_all` if they were measured in all weights and not in the trained ones.
    """
    if isinstance(answer, list):
        return _personal(answer)
    if "step_cost" in answer:
        return {"step_cost": answer["step_cost"]}
    measured = answer["layers"] if "layers" in answer else answer["runs"]
    end = "_all" if measured[0].get("parameters") == "all" else ""
    return {f"{name}{end}": value for name, value in _geometry(answer).items()}


def _geometry(answer: Row) -> Row:
    """The results of the commands `duality`, `landscape` and `flatness`."""
    if "layers" in answer:
        return _duality(answer["layers"])
    (run,) = answer["runs"]
    if "plane" in answer:
        return {f"landscape_{answer['plane']}_{name}": run[name] for name in ("centre", "rise")}
    return _spectrum(run["spectrum"]) | {name: run[name] for name in FLATNESS if run.get(name) is not None}


def _spectrum(spectrum: Row) -> Row:
    """λ₁, the trace with the ends of its interval and, with at least five eigenvalues, λ₅ and λ₁/λ₅.

    The ratio is None unless both eigenvalues are positive. Files of fedflat 0.1 hold two estimates of the trace, of
    which Hutch++'s is read, and no interval.
    """
    trace: Row = spectrum["trace_plus_plus" if "trace_plus_plus" in spectrum else "trace"]
    values = spectrum["eigenvalues"]
    found = {"lambda1": values[0], "trace": trace["mean"]}
    found |= {f"trace_{end}": trace[end] for end in ("low", "high") if end in trace}
    if len(values) >= 5:
        positive = None not in (values[0], values[4]) and min(values[0], values[4]) > 0
        found |= {"lambda5": values[4], "lambda1/lambda5": values[0] / values[4] if positive else None}
    return found


def _personal(rows: Iterable[Row]) -> Row:
    found: Row = {}
    for row in rows:
        name = "personal_local" if row["how"] == "local" else f"personal_{row['how']}_{row['epochs']}"
        found |= {name: row["accuracy_after"], f"{name}_std": row["accuracy_after_std"]}
    return found


def _duality(layers: Iterable[Row]) -> Row:
    """The gap and ‖W‖ of each layer, and the decomposition of the gap for each pairing."""
    named = ("fluctuation", "drift", "envelope", "size", "sharpness")
    found: Row = {}
    for row in layers:
        prefix = f"duality_{row['layer']}"
        found |= {f"{prefix}_gap": row["gap"], f"{prefix}_norm": row["weight_norm"]}
        for direction, pairing in row["pairings"].items():
            c = pairing["correlations"]
            numbers = {"gap": pairing["paired_gap"], **{name: pairing[name] for name in named}}
            numbers |= {"correlation": c["mean"], "correlation_spread": c["std"]}
            found |= {f"{prefix}_{direction}_{name}": value for name, value in numbers.items()}
    return found


def collect(folder: Path, sweep: Sweep) -> list[Row]:
    """A row for each finished run of the sweep, in the order of the grid."""
    rows = []
    for point in sweep.points:
        if finished(folder / point.slug, point):
            result = json.loads(read_whole(folder / point.slug / "result.json"))
            values = {field: point.values.get(field) for field in sweep.fields}
            rows.append({**values, "scale": result["scale"], **result["metrics"], "asked": result["asked"]})
    return rows


def read_rows(source: Path) -> list[Row]:
    """Reads the rows of a sweep from its directory or its results.jsonl. Raises `RunError` if there are none."""
    path = source / "results.jsonl" if source.is_dir() else source
    if not path.is_file():
        raise RunError(f"{source}: has no results.jsonl; give a directory that `fedflat sweep` wrote")
    try:
        rows = [json.loads(line) for line in read_whole(path).splitlines()]
        if all(isinstance(row, dict) and "asked" in row and "scale" in row for row in rows):
            return rows
    except (ValueError, RecursionError):
        pass
    raise RunError(f"{path}: a line is not a valid result; let `fedflat sweep` write the file again")


def summarised(rows: Sequence[Row]) -> list[Row]:
    """Means and sample standard deviations over the seeds. The deviation of a single run is None.

    >>> rows = [{"method": "fedavg", "seed": seed, "scale": "full", "accuracy_last": 0.5 + seed} for seed in (0, 2)]
    >>> summarised(rows)[0]["accuracy_last_mean"], round(summarised(rows)[0]["accuracy_last_std"], 3)
    (1.5, 1.414)
    """
    groups: dict[str, list[Row]] = {}
    for row in rows:
        place = {field: value for field, value in row.items() if field != "seed" and field in places(row)}
        groups.setdefault(json.dumps(place), []).append(row)
    return [_mean_row(json.loads(place), group) for place, group in groups.items()]


def places(row: Row) -> list[str]:
    """The fields of the grid and the scale, which come before the metrics."""
    names = list(row)
    return names[: names.index("scale") + 1]


def _mean_row(place: Row, group: Sequence[Row]) -> Row:
    row = {**place, "runs": len(group)}
    for name in list(group[0])[len(places(group[0])) :]:
        if name == "asked":
            continue
        mean, std = mean_and_std([each.get(name) for each in group])
        row |= {f"{name}_mean": mean, f"{name}_std": std}
        if name == "rounds_to_target":
            row["target_reached"] = sum(each.get(name) is not None for each in group)
    return row


def mean_and_std(values: Sequence[float | None]) -> tuple[float | None, float | None]:
    """The mean and the sample standard deviation; None if a value is missing or not finite: the rest would be biased.

    >>> mean_and_std([1.0, 3.0]), mean_and_std([1.0, None]), mean_and_std([2.0]), mean_and_std([1.0, float("nan")])
    ((2.0, 1.4142135623730951), (None, None), (2.0, None), (None, None))
    """
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known or len(known) < len(values):
        return None, None
    return fmean(known), stdev(known) if len(known) > 1 else None


def write_results(folder: Path, rows: Sequence[Row]) -> None:
    """Writes results.jsonl and results.csv with a row for each run, and summary.csv with means over the seeds."""
    bare = [{name: value for name, value in row.items() if name != "asked"} for row in rows]
    with written_to(folder, GO_ON):
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / "results.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode())
        write_whole(folder / "results.csv", _csv(bare))
        write_whole(folder / "summary.csv", _csv(summarised(rows)))


def _cell(value: Any) -> str:
    """A value for a table that a spreadsheet may open."""
    return "" if value is None else literal(str(spelled(value)))


def _csv(rows: Sequence[Mapping[str, Any]]) -> bytes:
    text = io.StringIO()
    names = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(map(literal, names))
    writer.writerows([_cell(row.get(name)) for name in names] for row in rows)
    return text.getvalue().encode()
