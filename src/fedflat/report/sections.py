"""The sections of a report. A function returns None if there is nothing to show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedflat.flatness import Film, Trajectory
from fedflat.report import figures
from fedflat.report.lines import Band, Line, differing
from fedflat.report.markup import Canvas, Section, copied, fold, grid, heading, paragraph, section, table
from fedflat.report.measured import Measured, Row

Counts = Sequence[Sequence[int]]
# Further curves: title, axis label, and whether the scale is logarithmic.
CURVES = {
    "consistency": ("Consistency of the local models", "(1/n) Σ ‖wᵢ − w‖²", True),
    "divergence": ("Distance of the local models from the received model", "(1/n) Σ ‖wᵢ − w‖", True),
    "discord": ("Distance between local models", "mean ‖wᵢ − wⱼ‖", True),
    "cosine": ("Cosine of update and proximal gradient", "cosine", False),
    "proximal_loss": ("Distance of the local outputs from those of the received model", "KL at temperature 3", False),
    "gradient": ("Gradient of the global objective", "‖∇f(w)‖²", True),
    "margin": ("Margin loss on the training samples", "share within γ", False),
    "local_sharpness": ("Sharpness of the clients' losses at their own models", "mean rise within ρ", True),
    "averaged_sharpness": ("Sharpness of the clients' losses at the global model", "mean rise within ρ", True),
    "local_lambda1": ("Curvature of the clients' losses at their own models", "mean λ₁", True),
    "averaged_lambda1": ("Curvature of the clients' losses at the global model", "mean λ₁", True),
    "flatness_distance": ("Flatness distance", "mean ‖wᵢ − w‖ to the new global model", True),
    "lambda1": ("Sharpness during training", "λ₁ of the Hessian", False),
    "epsilon": ("Privacy spent", "ε", False),
}
LAST_REFUSALS = 20
LONGEST = 300  # maximum number of characters of a refusal's detail


@dataclass(frozen=True)
class Content:
    """The content of a report. All but the first three are keyed by the index of the line, `landscapes` first by plane.

    `flatness` holds the flatness record of each seed of a line.
    """

    lines: Sequence[Line]
    target: float | None
    splits: Mapping[str, Counts | str]
    landscapes: Mapping[str, Mapping[int, Film]]
    measured: Mapping[int, Measured]
    flatness: Mapping[int, Mapping[int, Row]] = field(default_factory=dict)
    trajectories: Mapping[int, Trajectory] = field(default_factory=dict)

    def name(self, place: int) -> str:
        return self.lines[place].name

    @property
    def metric(self) -> str:
        """The metric of the first line, which the page follows."""
        return self.lines[0].recipe.metric


def subject(lines: Sequence[Line]) -> str:
    """The models, data sets and client counts, as a short title."""
    recipes = [line.recipe for line in lines]
    told = [f"{recipe.model.name} on {recipe.data.name}, {recipe.split.clients} clients" for recipe in recipes]
    return "; ".join(dict.fromkeys(told))


def overview(content: Content, _: Canvas, __: int) -> Section | None:
    """The list of runs and the settings they share."""
    lines = content.lines
    rows = [
        (line.name, str(line.recipe.method), _seeds(line), _progress(line), ", ".join(str(r.path) for r in line.runs))
        for line in lines
    ]
    settings = [line.runs[0].settings for line in lines]
    own = differing(settings)
    shared = [(name, _text(value)) for name, value in settings[0].items() if name not in own and value is not None]
    head = ("line", "method", "seeds", "rounds", "directories")
    common = fold("Settings that all runs share", table("Settings of all runs", ("setting", "value"), shared))
    note = "Runs that differ only in the seed form one line: their mean, and the range from lowest to highest."
    return section("runs", "Runs", note, table("Runs", head, rows, range(len(rows))), common)


def _seeds(line: Line) -> str:
    return ", ".join(str(run.recipe.seed) for run in line.runs)


def _progress(line: Line) -> str:
    done = sorted({len(run.history) for run in line.runs})
    reached = f"{done[0]}" if len(done) == 1 else f"{done[0]}–{done[-1]}"
    return f"{reached} of {line.recipe.server.rounds}"


def _text(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def results(content: Content, _: Canvas, __: int) -> Section | None:
    """The summary of each line: the metric, loss, rounds to target, traffic and time."""
    precise: Callable[[float], str] = "{:.4f}".format
    metric = content.metric
    columns: dict[str, tuple[str, Callable[[float], str]]] = {
        f"{metric}, last": (f"{metric}_last", precise),
        "best": (f"{metric}_best", precise),
        "mean of last 10": (f"{metric}_mean_of_last_10", precise),
        "loss, last": ("loss_last", "{:.4g}".format),
        "rounds to target": ("rounds_to_target", "{:.0f}".format),
        "MB down": ("bytes_down", lambda value: f"{value / 1e6:.4g}"),
        "MB up": ("bytes_up", lambda value: f"{value / 1e6:.4g}"),
        "ε": ("epsilon", "{:.3g}".format),
        "seconds": ("seconds", "{:.4g}".format),
    }
    found = [[run.summary(content.target) for run in line.runs] for line in content.lines]
    kept = {title: how for title, how in columns.items() if any(how[0] in each for line in found for each in line)}
    rows = [
        (line.name, *(_spread([each.get(name) for each in runs], form) for name, form in kept.values()))
        for line, runs in zip(content.lines, found, strict=True)
    ]
    on = {line.recipe.evaluation.on for line in content.lines}
    goal = f" Target: {metric} {content.target:g}." if content.target is not None else ""
    note = f"The global model on the {' or '.join(sorted(on))} samples; mean over seeds (lowest – highest).{goal}"
    return section("results", "Results", note, table("Results", ("line", *kept), rows, range(len(rows))))


def _spread(values: Sequence[float | None], form: Callable[[float], str]) -> str:
    """The mean over the seeds with their range and, if some seeds lack the value, the number that have it."""
    there = [value for value in values if value is not None]
    if not there:
        return "–"
    mean, low, high = form(sum(there) / len(there)), form(min(there)), form(max(there))
    some = f", {len(there)} of {len(values)} seeds" if len(there) < len(values) else ""
    return mean + (f" ({low} – {high}{some})" if low != high else f" ({some[2:]})" if some else "")


def learning(content: Content, canvas: Canvas, most: int) -> Section | None:
    """The metric and the loss over the rounds, and the metric against traffic."""
    goal = content.target
    mark = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": goal, "y1": goal, "line": {"dash": "dot"}}
    shapes = {} if goal is None else {"shapes": [mark]}
    metric = content.metric
    title = metric.capitalize()
    plots = [_curve(content, canvas, most, metric, title, metric, **shapes)]
    plots += [_curve(content, canvas, most, "loss", "Loss", "loss")]
    if by_bytes := figures.traffic(content.lines, most, metric):
        plots.append(canvas.plot(by_bytes, f"{title} by traffic", "against the megabytes sent so far"))
    return section("learning", "Learning curves", "", grid(plots))


def _curve(content: Content, canvas: Canvas, most: int, metric: str, title: str, axis: str, **options: Any) -> str:
    found = _bands(content, metric)
    if not found:
        return ""
    ends = "; ".join(f"{name} ends at {band.mean[-1]:.4g}" for _, name, band in found)
    return canvas.plot(figures.bands(found, axis, most, **options), title, ends)


def _bands(content: Content, metric: str) -> list[tuple[int, str, Band]]:
    return [(k, line.name, band) for k, line in enumerate(content.lines) if (band := line.band(metric))]


def rounds(content: Content, canvas: Canvas, most: int) -> Section | None:
    """All other metrics over the rounds."""
    plots = []
    for metric, (title, axis, logarithmic) in CURVES.items():
        ends = [end for *_, band in _bands(content, metric) for end in (min(band.low), max(band.high))]
        scale = {"yaxis": figures.log(ends)} if logarithmic and ends and min(ends) > 0 else {}
        plots.append(_curve(content, canvas, most, metric, title, axis, **scale))
    return section("rounds", "Round by round", "", grid(plots))


def local(content: Content, canvas: Canvas, most: int) -> Section | None:
    """The metric on all samples before and after local training."""
    name = content.metric
    titles = {
        f"local_{name}_before": "Before local training",
        f"local_{name}": "After local training, mean of clients",
    }
    found = [band for metric in titles for _, _, band in _bands(content, metric)]
    if not found:
        return None
    low, high = min(min(band.low) for band in found), max(max(band.high) for band in found)
    same = {"range": [low - 0.03 * (high - low) - 1e-3, high + 0.03 * (high - low) + 1e-3]}
    plots = [_curve(content, canvas, most, metric, title, name, yaxis=same) for metric, title in titles.items()]
    note = f"The loss in {name} between the two shows how much clients forget of the classes that they do not hold."
    return section("local", "Local models on all samples", note, grid(plots))


def classes(content: Content, canvas: Canvas, _: int) -> Section | None:
    """The accuracy of each class, as one heat map for each line."""
    most, plots = figures.MOST_CELLS // len(content.lines), []
    for place, line in enumerate(content.lines):
        if figure := figures.classes(line, most):
            plots.append(canvas.plot(figure, line.name, "accuracy of each class over the rounds", place))
    return section("classes", "Accuracy of each class", "", grid(plots))


def splits(content: Content, canvas: Canvas, _: int) -> Section | None:
    """The samples of each client by class."""
    blocks = []
    for title, counts in content.splits.items():
        if isinstance(counts, str):
            blocks.append(paragraph(counts))
            continue
        clients, total = len(counts), sum(map(sum, counts))
        cut = f", the first {figures.MOST_CLIENTS}" if clients > figures.MOST_CLIENTS else ""
        told = f"{total} samples of {len(counts[0])} classes on {clients} clients{cut}"
        blocks.append(grid([canvas.plot(figures.split(counts), f"{title}: {told}", "clients × classes")]))
    return section("split", "Data split", "", *blocks)


def refused(content: Content, _: Canvas, __: int) -> Section | None:
    """The uploads that were not merged, counted by reason, and the last of them in detail."""
    everyone = [(k, seed, round, each) for k, line in enumerate(content.lines) for seed, round, each in _refusals(line)]
    skipped = [sum("skipped" in record for run in line.runs for record in run.history) for line in content.lines]
    if not everyone and not any(skipped):
        return None
    reasons = [*dict.fromkeys(each["reason"] for *_, each in everyone)]
    counts = [Counter(each["reason"] for k, *_, each in everyone if k == place) for place in range(len(content.lines))]
    rows = [
        (line.name, *(str(count[reason]) for reason in reasons), str(skips))
        for line, count, skips in zip(content.lines, counts, skipped, strict=True)
    ]
    last = sorted(everyone, key=lambda entry: entry[2])[-LAST_REFUSALS:]
    details = [
        (content.name(k), str(seed), str(round), str(each["client"]), each["reason"], _cut(each["detail"]))
        for k, seed, round, each in last
    ]
    return section(
        "refused",
        "Refused clients",
        "Uploads that were not merged, over all seeds, and rounds that were skipped because too few were left.",
        table("By reason", ("line", *reasons, "skipped rounds"), rows, range(len(rows))),
        heading(f"The last {len(details)}") if details else "",
        table("The last ones", ("line", "seed", "round", "client", "reason", "detail"), details, [k for k, *_ in last]),
    )


def _refusals(line: Line) -> Iterator[tuple[int, int, Mapping[str, Any]]]:
    for run in line.runs:
        for record in run.history:
            for each in record.get("refused", ()):
                yield run.recipe.seed, record["round"], each


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} …"


def repeat(content: Content, _: Canvas, __: int) -> Section | None:
    """The recipe of each line and the commands that reproduce it."""
    blocks = []
    for k, line in enumerate(content.lines):
        blocks.append(copied(f"{line.name}: recipe.toml", line.recipe.to_toml(), k))
        blocks.append(copied(f"{line.name}: commands", _commands(line), k))
    note = "On the same kind of machine, equal recipes give bitwise equal results."
    return section("repeat", "Reproduce", note, *blocks)


def _commands(line: Line) -> str:
    if line.recipe.split.name == "given":
        return "# The federation was made in Python: pass it to fedflat.train(…) with these settings."
    commands = []
    for place, recipe in enumerate(run.recipe for run in line.runs):
        split = "" if recipe.split.seed is None else f" split.seed={recipe.split.seed}"
        commands.append(f"fedflat run recipe.toml --set seed={recipe.seed}{split} --out again/{place}")
    return "\n".join(commands)
