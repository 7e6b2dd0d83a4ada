"""The command line. torch is imported only when a command needs it, so that help and errors appear at once."""

from __future__ import annotations

import signal
import sys

import typer

from fedflat.cli import data, export, flatness, flower, gap, methods, paths, personalize, report, run, sweep, watch
from fedflat.cli.app import app, complain
from fedflat.errors import FedflatError

__all__ = [
    "app",
    "data",
    "export",
    "flatness",
    "flower",
    "gap",
    "main",
    "methods",
    "paths",
    "personalize",
    "report",
    "run",
    "sweep",
    "watch",
]


def main() -> None:
    """Entry point: a user error becomes one sentence and an exit code, never a traceback."""
    # A batch system ends jobs with SIGTERM: exit normally, so that workers and shared files are removed too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        code = app(standalone_mode=False)
        sys.exit(_failed("interrupted", code) if code == 130 else code)
    except FedflatError as error:
        sys.exit(_failed(str(error), error.exit_code))
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(_failed("interrupted", 130))
    except Exception as error:
        if hasattr(error, "format_message"):
            sys.exit(_failed(error.format_message(), 2))
        raise


def _failed(message: str, code: int) -> int:
    complain(message)
    return code
