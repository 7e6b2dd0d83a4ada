"""The building blocks of the page. All text that comes from a run is escaped here."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

from fedflat.report.figures import Figure, style

PATTERNS = {"solid": "", "dash": "9 5", "dot": "2 4", "dashdot": "9 4 2 4", "longdash": "15 5"}


@dataclass
class Canvas:
    """Places figures in the page and collects their data for the page's script."""

    figures: list[Figure] = field(default_factory=list)

    def plot(self, figure: Figure, title: str, told: str, place: int | None = None) -> str:
        """The HTML of a figure with a title.

        Args:
            figure: the Plotly figure.
            title: the caption.
            told: description for screen readers.
            place: the index of the line, if the figure shows only one.
        """
        self.figures.append(figure)
        turned = "forms" in figure
        hint = "; arrow keys turn the surface" if turned else ""
        role = 'role="application" tabindex="0"' if turned else 'role="img"'
        label = escape(f"{title}: {told}{hint}")
        canvas = f'<div class="canvas" data-figure="{len(self.figures) - 1}" {role} aria-label="{label}"></div>'
        return f"<figure{_of(place)}><figcaption>{escape(title)}</figcaption>{canvas}</figure>"

    def json(self) -> str:
        """The figures as JSON for a script element, escaped so that it cannot end the element."""
        return json.dumps(self.figures, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


@dataclass(frozen=True)
class Section:
    """A section of the page with a link to it."""

    name: str
    title: str
    body: str

    def link(self) -> str:
        return f'<a href="#{self.name}">{escape(self.title)}</a>'

    def __str__(self) -> str:
        heading = f'<h2 id="{self.name}-title">{escape(self.title)}</h2>'
        return f'<section id="{self.name}" aria-labelledby="{self.name}-title">{heading}\n{self.body}\n</section>'


def section(name: str, title: str, note: str, *blocks: str) -> Section | None:
    """A section with a heading, a note and the blocks that are not empty, or None if all are empty."""
    shown = [block for block in blocks if block]
    return Section(name, title, "\n".join([paragraph(note) if note else "", *shown])) if shown else None


def grid(plots: Iterable[str], kind: str = "plots") -> str:
    """Plots side by side, as many as fit."""
    joined = "".join(plots)
    return f'<div class="{kind}">{joined}</div>' if joined else ""


def table(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]], places: Sequence[int] = ()) -> str:
    """A table whose rows begin with their header. `places` gives the index of each row's line, if it has one."""
    if not rows:
        return ""
    titles = "".join(f'<th scope="col">{escape(title)}</th>' for title in head)
    lines = (places[k] if places else None for k in range(len(rows)))
    body = "".join(f"<tr{_of(place)}>{_cells(row)}</tr>" for place, row in zip(lines, rows, strict=True))
    content = f"<caption>{escape(caption)}</caption><thead><tr>{titles}</tr></thead><tbody>{body}</tbody>"
    return f'<div class="box" role="region" tabindex="0" aria-label="{escape(caption)}"><table>{content}</table></div>'


def _cells(row: Sequence[str]) -> str:
    first, *others = map(escape, row)
    return f'<th scope="row">{first}</th>' + "".join(f"<td>{cell}</td>" for cell in others)


def paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def heading(text: str) -> str:
    return f"<h3>{escape(text)}</h3>"


def fold(title: str, inside: str) -> str:
    """A collapsed block that the reader can open."""
    return f"<details><summary>{escape(title)}</summary>{inside}</details>" if inside else ""


def form_button() -> str:
    """The button that switches between surfaces and maps."""
    return '<button type="button" id="form" aria-pressed="false">Show as maps</button>'


def film_control(rounds: Sequence[int], plots: str, button: str = "") -> str:
    """The plots of a film below a slider for its rounds and an extra button. A single round has no slider."""
    if len(rounds) < 2:
        return (f"<p>{button}</p>" if button else "") + plots
    last = len(rounds) - 1
    slider = f'<input type="range" min="0" max="{last}" value="{last}" step="1" data-rounds="{escape(str([*rounds]))}">'
    told = f"<output>{rounds[-1]}</output>"
    control = f'<p>{button}<button type="button" class="play">Play</button> <label>Round {slider} {told}</label></p>'
    return f'<div class="film">{control}{plots}</div>'


def copied(title: str, text: str, place: int | None = None) -> str:
    """A collapsed text with a copy button."""
    button = '<button type="button" class="copy">copy</button>'
    return f"<details{_of(place)}><summary>{escape(title)}</summary>{button}<pre>{escape(text)}</pre></details>"


def switch(place: int, name: str) -> str:
    """The checkbox of a line, next to a sample of its line style."""
    look = style(place)
    stroke = f'stroke="{look["color"]}" stroke-width="3" stroke-dasharray="{PATTERNS[look["dash"]]}"'
    piece = f'<svg width="34" height="8" aria-hidden="true"><path d="M0 4H34" {stroke}/></svg>'
    return f'<label><input type="checkbox" checked data-switch="{place}">{piece}{escape(name)}</label>'


def _of(place: int | None) -> str:
    return "" if place is None else f' data-line="{place}"'
