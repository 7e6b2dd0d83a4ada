"""Small plots as SVG text. They are the same on every machine and need no other package."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from xml.sax.saxutils import escape

from fedflat.drawing import COLOURS
from fedflat.report.verdicts import bound_text, effect_text, number
from fedflat.runs import Effect

WORDS = {"holds": "#009E73", "does not hold": "#D55E00", "undecided": "#767676"}
LINE, LEFT, PLOT = 26, 430, 250  # of a forest: height of a row, width of its names, width of its axes
BESIDE = 270  # width of the effects in numbers, right of the axes
BANDS = 4  # with more curves than this the bands of the seeds would hide each other
LETTER = 6.9  # average width of a letter of a legend
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

    Parts of a claim have different units, so each row is scaled by the distance that its interval and bound span, and
    has its numbers beside it.
    """
    rows = [effect for effect in effects if not math.isnan(effect.finding.mean)]
    height = LINE * len(rows) + 34
    body = []
    for index, effect in enumerate(rows):
        found, y = effect.finding, 20 + LINE * index
        place = _scale(effect)
        colour = WORDS.get(found.word, "#767676")
        body.append(_text(LEFT - 12, y + 4, f"{effect.label}  ({bound_text(effect)})", "end"))
        body.append(_line(place(effect.bound), y - 11, place(effect.bound), y + 11, "#222222", 1, "3 3"))
        if not math.isnan(found.low):
            body.append(_line(place(found.low), y, place(found.high), y, colour, 3))
        body.append(f'<circle cx="{place(found.mean):.1f}" cy="{y:.1f}" r="5" fill="{colour}"/>')
        body.append(_text(LEFT + PLOT + 16, y + 4, effect_text(effect), colour=colour))
    key = ((LEFT, "holds"), (LEFT + 70, "does not hold"), (LEFT + 185, "undecided"))
    body += [_text(x, height - 8, word, colour=WORDS[word]) for x, word in key]
    return _page(LEFT + PLOT + BESIDE, height, body, title)


def _scale(effect: Effect) -> Callable[[float], float]:
    """Where a value of an effect is on its row: the bound in the middle, the farthest end at the margin."""
    change: Callable[[float], float] = _log if effect.unit == "ratio" else float
    found, bound = effect.finding, change(effect.bound)
    ends = [change(value) for value in (found.low, found.mean, found.high) if not math.isnan(value)]
    reach, half = max(abs(end - bound) for end in ends) or 1.0, PLOT / 2
    return lambda value: LEFT + half + half * (change(value) - bound) / reach


def _log(value: float) -> float:
    """The logarithm of a ratio; those that a float cannot hold are drawn at the smallest and largest that it can."""
    return math.log(min(max(value, sys.float_info.min), sys.float_info.max))


def curves(lines: Mapping[str, Sequence[Curve]], title: str) -> str:
    """A metric over the rounds: for each name the mean over its runs, and with few names their range as a band.

    The legend has the order in which the curves end.
    """
    merged = {name: _merged(runs) for name, runs in lines.items()}
    bands = len(merged) <= BANDS
    left, top, bottom, height = 48.0, 16.0, 40.0, 300.0 if bands else 420.0
    end = left + 420.0
    rounds = [r for curve in merged.values() for r, *_ in curve]
    values = [v for curve in merged.values() for _, mean, *ends in curve for v in (mean, *(ends if bands else ()))]
    span = max(values) - min(values) or 1.0
    low, high, last = min(values) - 0.03 * span, max(values) + 0.03 * span, max(rounds)

    def at(round: float, value: float) -> str:
        x = left + (end - left) * round / last
        return f"{x:.1f},{top + (height - top - bottom) * (high - value) / (high - low):.1f}"

    body = []
    for tick in ticks(low, high):
        x, y = map(float, at(0, tick).split(","))
        body += [_line(x, y, end, y, "#e0e0e0"), _text(x - 6, y + 4, number(tick), "end")]
    for tick in ticks(0, last):
        x, _ = map(float, at(tick, low).split(","))
        body.append(_text(x, height - bottom + 18, number(tick), "middle"))
    body.append(_text(end, height - 4, "round", "end"))
    styles = {
        name: (COLOURS[i % len(COLOURS)], ("", "6 3", "2 3")[i // len(COLOURS) % 3]) for i, name in enumerate(merged)
    }
    for name, curve in merged.items():
        colour, dash = styles[name]
        if bands:
            band = [at(r, most) for r, _, _, most in curve] + [at(r, least) for r, _, least, _ in reversed(curve)]
            body.append(f'<polygon points="{" ".join(band)}" fill="{colour}" fill-opacity="0.15"/>')
        mean = " ".join(at(r, middle) for r, middle, _, _ in curve)
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        body.append(f'<polyline points="{mean}" fill="none" stroke="{colour}" stroke-width="2"{dashed}/>')
    names = sorted(merged, key=lambda name: -merged[name][-1][1])
    body += _legend([(name, *styles[name]) for name in names], end + 12, top + 10)
    width = max(860.0, end + 46 + LETTER * max(map(len, merged)))
    return _page(width, max(height, top + 19 * len(merged) + 16), body, title)


def _legend(entries: Sequence[tuple[str, str, str]], x: float, y: float) -> list[str]:
    """Names with the colour and dash of their curves, one below the other."""
    body = []
    for index, (name, colour, dash) in enumerate(entries):
        here = y + 19 * index
        body += [_line(x, here - 4, x + 20, here - 4, colour, 2, dash), _text(x + 26, here, name)]
    return body


def _merged(runs: Sequence[Curve]) -> list[tuple[int, float, float, float]]:
    """Round, mean, lowest and highest value, for the rounds that all runs have."""
    tables = [dict(run) for run in runs]
    common = sorted(set.intersection(*(set(table) for table in tables)))
    found = []
    for round in common:
        values = [table[round] for table in tables]
        found.append((round, sum(values) / len(values), min(values), max(values)))
    return found
