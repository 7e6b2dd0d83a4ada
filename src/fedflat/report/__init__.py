"""Figures, tables, reports and the methods' pages. From Python, `table` and `plot` make those for papers."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedflat.report.paper import plot
    from fedflat.report.pivot import table

__all__ = ["plot", "table"]

_HOMES = {"plot": "fedflat.report.paper", "table": "fedflat.report.pivot"}


def __getattr__(name: str) -> Any:
    """Import a function on first use: runs print their progress with this package, without SciPy or matplotlib."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'fedflat.report' has no attribute {name!r}")
