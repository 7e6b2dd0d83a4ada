"""Shared by all commands: the app, the consoles, and common options."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer
from rich.console import Console

from fedflat.errors import printable
from fedflat.trusted import trust_anything

app = typer.Typer(help="Flatness-aware federated learning.", no_args_is_help=True, add_completion=False)
# The path of a part, `package:A:`, must not be rendered as an emoji.
out, err = Console(emoji=False), Console(stderr=True, emoji=False)


def _trusting(trust: bool) -> bool:
    """Import code from the current directory only on request: the user's own model beside the recipe."""
    trust_anything(trust)
    if trust and "" not in sys.path:
        sys.path.insert(0, "")
    return trust


RecipeArgument = Annotated[
    str | None, typer.Argument(help="recipe file (TOML) or preset: smoo, sol, man; else the default")
]
SetOption = Annotated[list[str] | None, typer.Option("--set", help="override a field: --set local.lr=0.05")]
JsonOption = Annotated[bool, typer.Option("--json", help="machine-readable output")]
TrustOption = Annotated[
    bool,
    typer.Option("--trust", callback=_trusting, help="import the code from outside of fedflat that is named there"),
]
DirOption = Annotated[
    Path | None, typer.Option("--dir", help="data directory; else $FEDFLAT_DATA, else the cache folder")
]


def complain(message: str) -> None:
    """Print one sentence to standard error; it may quote a file or a message, so control characters are replaced."""
    err.print(f"fedflat: {printable(message, 4000)}", style="red", markup=False, highlight=False, soft_wrap=True)


class Spread(typer.core.TyperCommand):
    """A command in which `--epochs 1 5` means `--epochs 1 --epochs 5`, and `--set a.b=1 c.d=2` likewise."""

    belongs: ClassVar[dict[str, Callable[[str], bool]]] = {
        "--epochs": str.isdigit,
        "--set": lambda argument: "=" in argument and not argument.startswith("-"),
    }

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        spread: list[str] = []
        option = ""
        for argument in args:
            if argument in self.belongs:
                option = argument
            elif not (option and self.belongs[option](argument)):
                option = ""
            elif spread[-1] != option:
                spread.append(option)
            spread.append(argument)
        return super().parse_args(ctx, spread)
