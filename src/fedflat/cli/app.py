"""What the commands share: the app, the consoles, the options that several of them take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

app = typer.Typer(help="Flatness-aware federated learning.", no_args_is_help=True, add_completion=False)
out, err = Console(), Console(stderr=True)

RecipeArgument = Annotated[
    str | None, typer.Argument(help="recipe file (TOML) or preset: smoo, sol, man; else the default")
]
SetOption = Annotated[list[str] | None, typer.Option("--set", help="override a field: --set local.lr=0.05")]
JsonOption = Annotated[bool, typer.Option("--json", help="machine-readable output")]
DirOption = Annotated[
    Path | None, typer.Option("--dir", help="data directory; else $FEDFLAT_DATA, else the cache folder")
]


def complain(message: str) -> None:
    """One sentence to the standard error."""
    err.print(f"fedflat: {message}", style="red", markup=False, highlight=False, soft_wrap=True)
