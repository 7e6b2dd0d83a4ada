"""The command line. torch is imported only when a command needs it, so that help and errors appear at once."""

from __future__ import annotations

import signal
import sys
from typing import Any

import typer

from fedflat.cli import (
    claims,
    cost,
    data,
    export,
    flatness,
    flower,
    gap,
    methods,
    paths,
    personalize,
    plot,
    report,
    run,
    sweep,
    table,
    tune,
    watch,
)
from fedflat.cli.app import app, complain, encode_anything
from fedflat.errors import FedflatError

__all__ = [
    "app",
    "claims",
    "cost",
    "data",
    "export",
    "flatness",
    "flower",
    "gap",
    "main",
    "methods",
    "paths",
    "personalize",
    "plot",
    "report",
    "run",
    "sweep",
    "table",
    "tune",
    "watch",
]


# The help lists the commands by what they are for.
PANELS = {
    "Train": ("run", "sweep", "resume", "watch", "methods", "recipe", "split", "data", "tune", "personalize"),
    "Figures, tables and pages": ("plot", "table", "report", "claims"),
    "Flatness": ("flatness", "landscape", "path", "trajectory", "animate", "duality", "rescale"),
    "Check, export, deploy": ("verify", "export", "flower", "cost"),
}


def _arrange() -> None:
    order = {name: panel for panel, names in PANELS.items() for name in names}
    every: list[Any] = [*app.registered_commands, *app.registered_groups]
    for each in every:
        each.rich_help_panel = order.get(_name(each), "Others")
    app.registered_commands.sort(key=lambda each: [*order, _name(each)].index(_name(each)))


def _name(each: Any) -> str:
    return str(each.name or getattr(each.callback, "__name__", ""))


_arrange()


def main() -> None:
    """Entry point: a user error becomes one sentence and an exit code, never a traceback."""
    # A batch system ends jobs with SIGTERM: exit normally, so that workers and shared files are removed too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    encode_anything()
    try:
        code = app(prog_name="fedflat", standalone_mode=False)
        sys.exit(_failed("interrupted", code) if code == 130 else code)
    except FedflatError as error:
        sys.exit(_failed(str(error), error.exit_code))
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(_failed("interrupted", 130))
    except Exception as error:
        if hasattr(error, "format_message"):
            message = error.format_message()  # empty if the help was printed instead
            sys.exit(_failed(message, 2) if message else 2)
        raise


def _failed(message: str, code: int) -> int:
    complain(message)
    return code
