"""A deployment: write a Flower app, make its keys."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedflat.cli.app import SetOption, Spread, app, out
from fedflat.errors import RecipeError

deployment = typer.Typer(help="A deployment over Flower: init, keys.", no_args_is_help=True)
app.add_typer(deployment, name="flower")


@deployment.command(cls=Spread)
def init(
    directory: Annotated[Path, typer.Argument(help="new folder for the app; its name becomes the app's")],
    recipe: Annotated[str | None, typer.Option(help="recipe file or preset: smoo, sol, man; else the default")] = None,
    set_: SetOption = None,
    port: Annotated[int, typer.Option(help="port of the server", min=1, max=65535)] = 8443,
    insecure: Annotated[bool, typer.Option("--insecure", help="no encryption, no authentication of nodes")] = False,
) -> None:
    """Write a ready Flower app: recipe, data hook, and the commands that run it."""
    _need_flower()
    from fedflat.flower.app import write_app
    from fedflat.methods import parse
    from fedflat.recipe import load, overridden

    chosen = load(recipe, set_ or [])
    parse(chosen.method)
    if not chosen.admission.deadline:  # a message that is lost with a server must not hold a round for an hour
        chosen = overridden(chosen, ["admission.deadline=600"])
    name = write_app(directory, chosen, insecure, port)
    out.print(
        f"{directory}: the app {name} is ready; {directory}/README.md says how to run it",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


@deployment.command()
def keys(
    directory: Annotated[Path, typer.Argument(help="folder of the app")],
    host: Annotated[list[str], typer.Option(help="name or address by which clients reach the server; again for more")],
    clients: Annotated[int, typer.Option(help="how many clients; 0 = as many as the recipe has", min=0)] = 0,
    days: Annotated[int, typer.Option(help="how long the certificates are valid", min=1)] = 365,
) -> None:
    """Make the certificates and keys of a deployment, in DIRECTORY/keys."""
    _need_flower()
    from fedflat.flower.keys import write_keys
    from fedflat.recipe import load

    recipes = [*directory.glob("*/recipe.toml")]
    if not clients and not recipes:
        raise RecipeError(f"{directory}: no app is here (no recipe.toml); give its folder, or say --clients")
    count = clients or load(recipes[0]).split.clients
    written = write_keys(directory / "keys", [*host, "127.0.0.1", "localhost"], count, days)
    out.print(
        f"{directory}/keys: {len(written)} files; keep ca.key offline", markup=False, highlight=False, soft_wrap=True
    )


def _need_flower() -> None:
    try:
        import flwr  # noqa: F401
    except ImportError:
        raise RecipeError("a deployment needs Flower: pip install 'fedflat[flower]'") from None
