"""Small plots as SVG text. They are the same on every machine and need no other package."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from xml.sax.saxutils import escape

from fedflat.drawing import COLOURS
from fedflat.report.verdicts import bound_text, number
from fedflat.runs import Effect

WORDS = {"holds": "#009E73", "does not hold": "#D55E00", "undecided": "#767676"}
WIDTH, LINE, LEFT, RIGHT = 860, 26, 430, 24
FONT = 'font-family="system-ui, sans-serif" font-size="13"'

Curve = Sequence[tuple[int, float]]


def _page(width: float, height: float, body: Sequence[str], title: str) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" {FONT} role="img">'
    back = f'<rect width="{width:g}" height="{height:g}" fill="#ffffff"/>'
    return "\n".join([head, f"<title>{escape(title)}</title>", back, *body, "</svg>"]) + "\n"


def _text(x: float, y: float, text: str, anchor: str = "start", colour: str = "#222222") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'


def _line(x: float, y: float, to_x: float, to_y: float, colour: str, width: float = 1.0, dash: str = "") -> str:
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return (
        f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}" '
        f'stroke="{colour}" stroke-width="{width:g}"{dashed}/>'
    )


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers between two ends, at most `most` + 1 of them.

    >>> ticks(0.12, 0.87)
    [0.2, 0.4, 0.6, 0.8]
    """
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * each for each in (1, 2, 5, 10) if power * each >= raw * (1 - 1e-9))
    return [round(k * step, 12) for k in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def forest(effects: Sequence[Effect], title: str) -> str:
    """Effects with their intervals, one below the other, each on its own axis. The dashed line is the bound.

    Parts of a claim have different units, so each row is scaled by the distance that its interval and bound span.
    """
    rows = [effect for effect in effects if not math.isnan(effect.finding.mean)]
    height = LINE * len(rows) + 34
    body = []
    for index, effect in enumerate(rows):
        found, y = effect.finding, 20 + LINE * index
        place = _scale(effect)
        colour = WORDS.get(found.word, "#767676")
        body.append(_text(LEFT - 12, y + 4, f"{effect.name}  ({bound_text(effect)})", "end"))
        body.append(_line(place(effect.bound), y - 11, place(effect.bound), y + 11, "#222222", 1, "3 3"))
        if not math.isnan(found.low):
            body.append(_line(place(found.low), y, place(found.high), y, colour, 3))
        body.append(f'<circle cx="{place(found.mean):.1f}" cy="{y:.1f}" r="5" fill="{colour}"/>')
    key = ((LEFT, "holds"), (LEFT + 70, "does not hold"), (LEFT + 185, "undecided"))
    body += [_text(x, height - 8, word, colour=WORDS[word]) for x, word in key]
    return _page(WIDTH, height, body, title)


def _scale(effect: Effect) -> Callable[[float], float]:
    """Where a value of an effect is on its row: the bound in the middle, the farthest end at the margin."""
    change: Callable[[float], float] = math.log if effect.unit == "ratio" else float
    found, bound = effect.finding, change(effect.bound)
    ends = [change(value) for value in (found.low, found.mean, found.high) if not math.isnan(value)]
    reach, half = max(abs(end - bound) for end in ends) or 1.0, (WIDTH - LEFT - RIGHT) / 2
    return lambda value: LEFT + half + half * (change(value) - bound) / reach


def curves(lines: Mapping[str, Sequence[Curve]], title: str, height: float = 300) -> str:
    """A metric over the rounds: for each name the mean over its runs, and their range as a band."""
    left, right, top, bottom = 48.0, 400.0, 16.0, 40.0
    merged = {name: _merged(runs) for name, runs in lines.items()}
    rounds = [r for curve in merged.values() for r, *_ in curve]
    values = [v for curve in merged.values() for _, *some in curve for v in some]
    span = max(values) - min(values) or 1.0
    low, high, last = min(values) - 0.03 * span, max(values) + 0.03 * span, max(rounds)

    def at(round: float, value: float) -> str:
        x = left + (WIDTH - left - right) * round / last
        return f"{x:.1f},{top + (height - top - bottom) * (high - value) / (high - low):.1f}"

    body = []
    for tick in ticks(low, high):
        x, y = map(float, at(0, tick).split(","))
        body += [_line(x, y, WIDTH - right, y, "#e0e0e0"), _text(x - 6, y + 4, number(tick), "end")]
    for tick in ticks(0, last):
        x, _ = map(float, at(tick, low).split(","))
        body.append(_text(x, height - bottom + 18, number(tick), "middle"))
    body.append(_text(WIDTH - right, height - 4, "round", "end"))
    for index, (name, curve) in enumerate(merged.items()):
        colour = COLOURS[index % len(COLOURS)]
        band = [at(r, most) for r, _, _, most in curve] + [at(r, least) for r, _, least, _ in reversed(curve)]
        body.append(f'<polygon points="{" ".join(band)}" fill="{colour}" fill-opacity="0.15"/>')
        mean = " ".join(at(r, middle) for r, middle, _, _ in curve)
        dash = ' stroke-dasharray="6 3"' if index >= len(COLOURS) else ""
        body.append(f'<polyline points="{mean}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        y = top + 10 + 19 * index
        body.append(_line(WIDTH - right + 12, y - 4, WIDTH - right + 32, y - 4, colour, 2, "6 3" if dash else ""))
        body.append(_text(WIDTH - right + 38, y, name))
    return _page(WIDTH, max(height, top + 19 * len(merged) + 16), body, title)


def _merged(runs: Sequence[Curve]) -> list[tuple[int, float, float, float]]:
    """Round, mean, lowest and highest value, for the rounds that all runs have."""
    tables = [dict(run) for run in runs]
    common = sorted(set.intersection(*(set(table) for table in tables)))
    found = []
    for round in common:
        values = [table[round] for table in tables]
        found.append((round, sum(values) / len(values), min(values), max(values)))
    return found
