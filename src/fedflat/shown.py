"""The base of all results: they print, convert to a table, plot, save and load."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable
from os import PathLike
from typing import Any, ClassVar, Self

from fedflat.drawing import axes_for, inline_image, new_figure
from fedflat.errors import RecipeError, RunError
from fedflat.stored import read_record, write_record

MOST_ROWS = 30  # rows of a table that are printed


class Shown:
    """The base of a result. A result is a frozen dataclass with `repr=False` and three methods:

        caption()     one line that says what was measured, and on what
        rows()        the numbers, one dictionary for each row of the table
        draw(axes)    the picture, on given axes

    The printed text, the table in a notebook, `table()` and `plot()` use these methods. `save()` and `load()` handle
    numbers, texts, arrays of float64 and other dataclasses. With `pictured = True` a notebook shows the picture too.
    """

    pictured: ClassVar[bool] = False
    size: ClassVar[tuple[float, float]] = (6.4, 4.0)  # of a new figure, in inches
    _kinds: ClassVar[dict[str, type]] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        Shown._kinds[cls.__name__] = cls

    def caption(self) -> str:
        raise NotImplementedError

    def rows(self) -> Iterable[dict[str, Any]]:
        raise NotImplementedError

    def draw(self, axes: Any) -> None:
        raise RecipeError(f"{type(self).__name__}: there is nothing to draw; see table()")

    def __repr__(self) -> str:
        return f"{self.caption()}\n{Rows(self.rows())}"

    def _repr_html_(self) -> str:
        table = f"<p>{html.escape(self.caption())}</p>{Rows(self.rows())._repr_html_()}"
        return table + self._picture() if self.pictured else table

    def _picture(self) -> str:
        """The picture for a notebook; empty without matplotlib."""
        try:
            figure = new_figure(*self.size)
        except RecipeError:
            return ""
        self.draw(figure.subplots())
        return inline_image(figure)

    def table(self) -> Any:
        """The numbers as a pandas DataFrame if pandas is installed, otherwise as a list of dictionaries."""
        return framed(self.rows())

    def plot(self, ax: Any = None) -> Any:
        """Draws the result with matplotlib and returns the axes.

        Args:
            ax: the axes to draw on; by default those of a new figure.

        Raises:
            RecipeError: matplotlib is not installed.
        """
        axes = axes_for(ax, *self.size)
        self.draw(axes)
        axes.set_axisbelow(True)  # bars hide the lines of the grid
        return axes

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the result as a JSON file. Raises `RunError` if that fails."""
        write_record(self, path)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Self:
        """Reads a file written by `save`. `Shown.load` reads any kind of result.

        Raises:
            RunError: the file is missing, damaged or holds another kind of result.
        """
        found = read_record(path, Shown._kinds)
        if not isinstance(found, cls):
            raise RunError(f"{path}: holds a {type(found).__name__}, not a {cls.__name__}")
        return found


class Rows(list[dict[str, Any]]):
    """Rows of a table, printed with aligned columns.

    >>> Rows([{"layer": "fc", "λ₁": 12.34567}, {"layer": "head", "λ₁": 0.5}])
    layer     λ₁
    fc     12.35
    head     0.5
    """

    def __repr__(self) -> str:
        names = self._columns()
        cells = [names, *([written(row.get(name)) for name in names] for row in self[:MOST_ROWS])]
        widths = [max(len(line[k]) for line in cells) for k in range(len(names))]
        texts = [any(isinstance(row.get(name), str) for row in self) for name in names]
        lines = [
            "  ".join(c.ljust(w) if text else c.rjust(w) for c, w, text in zip(line, widths, texts, strict=True))
            for line in cells
        ]
        more = [f"… and {len(self) - MOST_ROWS} more"] if len(self) > MOST_ROWS else []
        return "\n".join(line.rstrip() for line in [*lines, *more])

    def _repr_html_(self) -> str:
        names = self._columns()
        head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(written(row.get(name)))}</td>" for name in names) + "</tr>"
            for row in self[:MOST_ROWS]
        )
        more = f"<p>… and {len(self) - MOST_ROWS} more</p>" if len(self) > MOST_ROWS else ""
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}"

    def _columns(self) -> list[str]:
        return list({name: None for row in self for name in row})


def written(value: Any) -> str:
    """A cell as text: four significant digits, a dash for what is missing.

    >>> [written(x) for x in (0.123456, 12345, 12345.6, None, "fc1", float("nan"))]
    ['0.1235', '12,345', '1.235e+04', '–', 'fc1', '–']
    """
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if isinstance(value, bool | str):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}" if isinstance(value, float) else str(value)


def framed(rows: Iterable[dict[str, Any]]) -> Any:
    """Rows as a pandas DataFrame if pandas is installed, otherwise as a list of dictionaries that prints as a table."""
    try:
        from pandas import DataFrame
    except ImportError:
        return Rows(rows)
    return DataFrame(Rows(rows))
