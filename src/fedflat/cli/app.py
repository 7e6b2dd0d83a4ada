"""Shared by all commands: the app, the consoles, and common options."""

import codecs
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from fedflat.errors import nearest, printable, visible

if TYPE_CHECKING:
    from rich.table import Table


class Group(typer.core.TyperGroup):
    """Several commands. The answer to an unknown one names the nearest, once: click and typer would both name it."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        if not name.startswith("-") and not ctx.resilient_parsing and self.get_command(ctx, name) is None:
            ctx.fail(f"No such command {name!r}; {nearest(name, self.commands)}")
        return super().resolve_command(ctx, args)


class Front(Group):
    """All commands. Their list is plain text: typer would import parsers of Markdown and of code to draw it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args and not ctx.resilient_parsing:
            print(ctx.get_help())  # click would make an error message of it, which is one line here
            ctx.exit(2)
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super(typer.core.TyperGroup, self).format_help(ctx, formatter)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        longest = max(map(len, self.commands))
        panels: dict[str, list[tuple[str, str]]] = {}
        for name, command in self.commands.items():
            row = name.ljust(longest), command.get_short_help_str(limit=200)
            panels.setdefault(getattr(command, "rich_help_panel", "Others"), []).append(row)
        for panel, rows in panels.items():
            with formatter.section(panel):
                formatter.write_dl(rows)


app = typer.Typer(cls=Front, help="Flatness-aware federated learning.")


class Sober(Console):
    """A console on which the text of a file or client cannot move the cursor, clear the screen or set a title."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)


# The path of a part, `package:A:`, must not be rendered as an emoji.
out, err = Sober(emoji=False), Sober(stderr=True, emoji=False)

# How a terminal that knows only ASCII, or a Windows code page, shows the rest.
PLAIN = {
    "…": "...", "–": "-", "—": "-", "−": "-", "±": "+/-", "×": "x", "·": ".", "•": "*", "→": "->", "←": "<-",
    "↑": "^", "↓": "v", "≤": "<=", "≥": ">=", "√": "sqrt ", "‖": "||", "∇": "grad ", "Σ": "sum ", "∞": "inf",
    "α": "alpha", "β": "beta", "γ": "gamma", "δ": "delta", "Δ": "Delta", "ε": "eps", "ζ": "zeta", "η": "eta",
    "λ": "lambda", "μ": "mu", "ρ": "rho", "σ": "sigma", "τ": "tau", "“": '"', "”": '"', "‘": "'", "’": "'",
}  # fmt: skip


def _in_plain(error: UnicodeError) -> tuple[str, int]:
    """Replaces characters that the output cannot encode: `λ₁ ± ε` becomes `lambda1 +/- eps`."""
    assert isinstance(error, UnicodeEncodeError)
    texts = (PLAIN.get(c) or unicodedata.normalize("NFKD", c) for c in error.object[error.start : error.end])
    plain = ("".join(c if c.isascii() else "?" for c in text if not unicodedata.combining(c)) for text in texts)
    return "".join(plain), error.end


def encode_anything() -> None:
    """Let the standard streams replace characters that they cannot encode, instead of a traceback."""
    codecs.register_error("fedflat.plain", _in_plain)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="fedflat.plain")


def show(table: "Table") -> None:
    """Print a table so that no number is cut, however narrow the terminal is."""
    from fedflat.report.display import fitted

    out.print(fitted(table, out.width))


@app.callback(invoke_without_command=True)
def _version(
    version: Annotated[bool, typer.Option("--version", help="print the version and exit", is_eager=True)] = False,
) -> None:
    """Flatness-aware federated learning."""
    if version:
        from fedflat import __version__

        print(f"fedflat {__version__}")
        raise typer.Exit()


def names_in_package(folder: str, *others: str) -> Callable[[str], Iterable[str]]:
    """Complete an argument by the TOML files of a folder that comes with fedflat."""

    def complete(incomplete: str) -> Iterable[str]:
        package = Path(__file__).parents[1]
        places = (package / folder, package.parents[1] / folder)  # a checkout has the sweeps at the top
        found = {path.stem for place in places for path in place.glob("*.toml")} | {*others}
        return sorted(name for name in found if name.startswith(incomplete))

    return complete


def _trusting(trust: bool) -> bool:
    """Import code from the current directory only on request: the user's own model beside the recipe."""
    from fedflat.trusted import trust_anything

    trust_anything(trust)
    if trust and "" not in sys.path:
        sys.path.insert(0, "")
    return trust


RecipeArgument = Annotated[
    str | None,
    typer.Argument(
        help="recipe file (TOML) or preset: smoo, sol, man; default the digits",
        autocompletion=names_in_package("presets"),
    ),
]
SetOption = Annotated[list[str] | None, typer.Option("--set", help="override a field: --set local.lr=0.05")]
JsonOption = Annotated[bool, typer.Option("--json", help="machine-readable output")]
TrustOption = Annotated[
    bool,
    typer.Option("--trust", callback=_trusting, help="import code from outside fedflat that the recipe or run names"),
]
DirOption = Annotated[
    Path | None, typer.Option("--dir", help="data directory; default $FEDFLAT_DATA, or the cache folder")
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
