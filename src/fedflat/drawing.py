"""Figures with matplotlib, which the extra `fedflat[plot]` installs: where to draw, and in which colours."""

from __future__ import annotations

from base64 import b64encode
from io import BytesIO
from pathlib import Path
from typing import Any

from fedflat.errors import RecipeError, RunError

# The colour-blind safe palette of Okabe and Ito, without its yellow, which is faint on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
STYLES = ("-", "--", "-.", ":")
MISSING = "drawing needs matplotlib: pip install 'fedflat[plot]'"


def new_figure(width: float, height: float) -> Any:
    """A figure of this size in inches, which is not shown by itself."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise RecipeError(MISSING) from None
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Any, path: Path) -> None:
    """Writes a figure in the format of the path's ending. Raises `RunError` if that fails."""
    try:
        figure.savefig(path, dpi=150)
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
    written = BytesIO()
    figure.savefig(written, format="png", dpi=100)
    return f'<img alt="" src="data:image/png;base64,{b64encode(written.getvalue()).decode()}"/>'
