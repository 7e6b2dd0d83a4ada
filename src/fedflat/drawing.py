"""Figures with matplotlib, which the extra `fedflat[plot]` installs: where to draw, and in which colours."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

from fedflat.errors import RecipeError, RunError

# The colour-blind safe palette of Okabe and Ito, without its yellow, which is faint on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
STYLES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
COLUMN, PAGE = 3.3, 6.9  # inches: the width of a column, and of both, on a two-column page
# Readable at these widths without scaling; fonts are embedded as TrueType, as publishers ask.
PAPER: dict[Any, Any] = {
    "font.size": 8, "axes.labelsize": 8, "axes.titlesize": 8, "xtick.labelsize": 7, "ytick.labelsize": 7,
    "legend.fontsize": 7, "legend.handlelength": 1.8, "lines.linewidth": 1.2, "axes.linewidth": 0.6,
    "grid.linewidth": 0.4, "xtick.major.width": 0.6, "ytick.major.width": 0.6, "axes.spines.top": False,
    "axes.spines.right": False, "savefig.dpi": 300, "pdf.fonttype": 42, "ps.fonttype": 42, "svg.hashsalt": "fedflat",
}  # fmt: skip
ENDINGS = (".pdf", ".svg", ".png")
MISSING = "drawing needs matplotlib: pip install 'fedflat[plot]'"


def new_figure(width: float, height: float) -> Any:
    """A figure of this size in inches. A notebook shows it as the value of a cell."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise RecipeError(MISSING) from None
    figure = Figure(figsize=(width, height), layout="constrained")
    vars(figure)["_repr_png_"] = partial(_png, figure)  # without it, a notebook shows figures only once it has pyplot
    return figure


@contextmanager
def paper_style() -> Iterator[None]:
    """A context in which figures have the style of a two-column page."""
    try:
        from matplotlib import rc_context
    except ImportError:
        raise RecipeError(MISSING) from None
    with rc_context(PAPER):
        yield


def check_ending(path: Path) -> None:
    """Refuses a file format other than PDF, SVG and PNG before anything is computed."""
    if path.suffix.lower() not in ENDINGS:
        raise RecipeError(f"-o {path}: a figure is written as {', '.join(ENDINGS)}; choose one of these endings")


def look(place: int) -> dict[str, Any]:
    """The colour and the dashes of the n-th line. Neighbours differ in both, also when printed in grey."""
    return {"color": COLOURS[place % len(COLOURS)], "linestyle": STYLES[place % len(STYLES)]}


def draw_band(
    axes: Any,
    place: int,
    label: str,
    x: Any,
    mean: Any,
    ends: tuple[Any, Any] | None = None,
) -> None:
    """Draws the n-th line of a figure, with a shaded area between the two ends; a single point as a marker.

    Args:
        axes: matplotlib's axes.
        place: the index n of the line, which sets its colour, dashes and marker.
        label: the name of the line.
        x: the positions of the points.
        mean: the values of the line.
        ends: the lower and upper ends of the area.
    """
    marker = {"marker": MARKERS[place % len(MARKERS)], "markersize": 4} if len(x) == 1 else {}
    axes.plot(x, mean, label=label, **look(place), **marker)
    if ends is not None and len(x) > 1:
        axes.fill_between(x, *ends, color=look(place)["color"], alpha=0.18, linewidth=0)
    axes.grid(alpha=0.3)


def save_figure(figure: Any, path: Path, dpi: int = 150) -> None:
    """Writes a figure in the format of the path's ending. Raises `RunError` if that fails."""
    try:
        figure.savefig(path, dpi=dpi)
    except (OSError, ValueError) as error:
        raise RunError(f"{path}: the figure cannot be written ({error})") from None


def axes_for(ax: Any = None, width: float = 6.4, height: float = 4.0) -> Any:
    """The axes to draw on: those given, or those of a new figure of pyplot, which a notebook shows by itself.

    Raises:
        RecipeError: matplotlib is not installed, or `ax` is not matplotlib's axes.
    """
    if ax is not None:
        if not hasattr(ax, "plot") or not hasattr(ax, "figure"):
            raise RecipeError(f"plot: ax is a {type(ax).__name__}; give the axes of a matplotlib figure")
        return ax
    try:
        from matplotlib import pyplot
    except ImportError:
        raise RecipeError(MISSING) from None
    return pyplot.subplots(figsize=(width, height), layout="constrained")[1]


def inline_image(figure: Any) -> str:
    """An <img> tag that holds the figure as PNG."""
    return f'<img alt="" src="data:image/png;base64,{b64encode(_png(figure)).decode()}"/>'


def _png(figure: Any) -> bytes:
    written = BytesIO()
    figure.savefig(written, format="png", dpi=100)
    return written.getvalue()
