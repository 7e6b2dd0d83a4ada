"""Tables of claims: each hypothesis with its effect, interval and verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fedflat.runs import Effect, State

# What `undecided (would need n more seeds)` asks for; seeds must not be added to those that were looked at.
FRESH = (
    "With n more seeds there is about an even chance to decide, if mean and spread stay as they are. "
    "Seeds that were looked at do not count again, so train as many as those shown and n more, all of them fresh."
)


def effect_text(effect: Effect) -> str:
    """The effect with its interval, as in `−0.012 (−0.020 to −0.004)` or `× 0.84 (0.71 to 0.99)`.

    Accuracies and other quantities keep their own unit; a ratio is marked by ×, Kendall's coefficient by τ.
    """
    found = effect.finding
    if math.isnan(found.mean):
        return ""
    mark = {"ratio": "× ", "τ": "τ "}.get(effect.unit, "")
    show = _signed if effect.unit in ("difference", "τ") else number
    if math.isnan(found.low):
        return f"{mark}{show(found.mean)}"
    return f"{mark}{show(found.mean)} ({show(found.low)} to {show(found.high)})"


def bound_text(effect: Effect) -> str:
    """What the effect must be, as in `> −0.01`."""
    side = ">" if effect.direction == "higher" else "<"
    mark = {"ratio": "× ", "τ": "τ "}.get(effect.unit, "")
    shown = _signed(effect.bound) if effect.unit == "difference" and effect.bound else number(effect.bound)
    return f"{mark}{side} {shown}"


def number(value: float) -> str:
    """Three significant digits, without an exponent where that is short.

    >>> number(0.01234), number(123.456), number(-0.5), number(0.0), number(12345.6), number(1e30)
    ('0.0123', '123', '−0.5', '0', '12346', '1e+30')
    """
    text = f"{value:.3g}"
    return (f"{value:.0f}" if "e" in text and 1 < abs(value) < 1e6 else text).replace("-", "−")


def _signed(value: float) -> str:
    return f"+{number(value)}" if value > 0 else number(value)


def verdict_list(states: Sequence[State]) -> Group:
    """All claims with their parts, as blocks of text that fit any terminal.

    Each block has the claim's verdict, name and title, then one line for each part: its verdict, what is claimed, the
    mean effect with its 95 % interval over paired seeds, and what the part says.
    """
    blocks: list[RenderableType] = []
    for state in states:
        runs = f"{state.runs} runs" if state.known == state.runs else f"{state.known} of {state.runs} runs"
        hours = f" ({runs}, {state.hours:.2f} h)" if state.hours else ""
        blocks.append(Text.assemble((f"{state.verdict}: {state.claim.name}", "bold"), hours))
        blocks.append(Padding(Text(state.claim.title), (0, 0, 0, 2)))
        blocks.append(Padding(_parts(state.effects), (0, 0, 1, 4)))
    blocks.append(Text("claimed, mean effect (95 % interval over paired seeds)", style="dim"))
    if any(map(undecided, states)):
        blocks.append(Text(FRESH, style="dim"))
    return Group(*blocks)


def undecided(state: State) -> bool:
    """Whether the verdict on a claim, or on one of its parts, is open."""
    return "undecided" in (state.word, *(effect.finding.word for effect in state.effects))


def seeds_text(effect: Effect) -> str:
    """The number of seeds that count, of those whose runs lack the quantity, and for a ranking of the runs that do.

    >>> from fedflat.runs.claims import judge
    >>> seeds_text(Effect("λ₁", judge([0.1, 0.2], 0.0, "lower"), 1.0, "lower", "ratio", (0.1, 0.2), left_out=3))
    '2 (3 left out)'
    """
    runs = "1 run lacks it" if effect.lacking == 1 else f"{effect.lacking} runs lack it"
    told = [*([f"{effect.left_out} left out"] if effect.left_out else []), *([runs] if effect.lacking else [])]
    return f"{effect.finding.seeds} ({', '.join(told)})" if told else f"{effect.finding.seeds}"


def _parts(effects: Sequence[Effect]) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    for _ in range(3):
        grid.add_column(overflow="fold")
    for effect in effects:
        some = effect.finding.seeds or effect.left_out
        claimed = f"{bound_text(effect)}{f', seeds: {seeds_text(effect)}' if some else ''}"
        found = effect_text(effect)
        grid.add_row(Text(str(effect.finding)), Text(f"{claimed}\n{found}" if found else claimed), Text(effect.label))
    return grid


def plain_table(rows: Sequence[Mapping[str, str]], title: str) -> Table:
    """Rows of text as a table for a terminal."""
    table = Table(title=title)
    for head in rows[0]:
        table.add_column(head, overflow="fold")
    for row in rows:
        table.add_row(*row.values())
    return table


def claim_list(states: Sequence[State]) -> Group:
    """The claims: what each says, the runs it needs and how many of them exist."""
    blocks: list[RenderableType] = []
    for state in states:
        blocks.append(Text.assemble((state.claim.name, "bold"), f": {state.known} of {state.runs} runs are there"))
        blocks.append(Padding(Text(f"{state.claim.title}. {state.claim.paper}"), (0, 0, 0, 2)))
    return Group(*blocks)
