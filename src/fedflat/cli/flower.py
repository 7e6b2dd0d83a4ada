"""Commands for deployments: write a Flower app, make its keys, print its recipe's digest."""

from pathlib import Path
from typing import Annotated

import typer

from fedflat.cli.app import Group, SetOption, Spread, TrustOption, app, out
from fedflat.errors import RecipeError

deployment = typer.Typer(cls=Group, help="A deployment over Flower: init, keys, digest.", no_args_is_help=True)
app.add_typer(deployment, name="flower")


@deployment.command(cls=Spread)
def init(
    directory: Annotated[Path, typer.Argument(help="new folder for the app, which gets the folder's name")],
    recipe: Annotated[
        str | None, typer.Option(help="recipe file or preset: smoo, sol, man; default the digits")
    ] = None,
    set_: SetOption = None,
    port: Annotated[int, typer.Option(help="port of the server", min=1, max=65535)] = 8443,
    insecure: Annotated[bool, typer.Option("--insecure", help="no encryption, no authentication of nodes")] = False,
    trust: TrustOption = False,
) -> None:
    """Write a ready Flower app: recipe, data hook, and the commands that run it."""
    need_flower()
    from fedflat.flower.project import write_app
    from fedflat.methods.parser import parse
    from fedflat.recipe import load, overridden

    chosen = load(recipe, set_ or [])
    parse(chosen.method)
    if not chosen.admission.deadline:  # a message lost with a server must not hold up a round for an hour
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
    host: Annotated[
        list[str] | None, typer.Option(help="name or address under which clients reach the server; can be repeated")
    ] = None,
    clients: Annotated[int, typer.Option(help="how many clients; 0 = as many as the recipe has", min=0)] = 0,
    days: Annotated[int, typer.Option(help="how long the server's certificate is valid", min=1, max=7300)] = 365,
    renew: Annotated[bool, typer.Option("--renew", help="only renew the server's certificate")] = False,
    renew_client: Annotated[int | None, typer.Option(help="only renew the key of this client", min=0)] = None,
    add: Annotated[int, typer.Option(help="only add keys for this many more clients", min=0)] = 0,
) -> None:
    """Make the certificates and keys of a deployment, in DIRECTORY/keys."""
    need_flower()
    from fedflat.flower import keys as made
    from fedflat.recipe import load

    if add or renew_client is not None:
        _client_keys(directory, add, renew_client)
        return
    if not host:
        raise RecipeError("--host: say by which name or address clients reach the server")
    hosts = [*host, "127.0.0.1", "localhost"]
    if renew:
        files = made.renew(directory / "keys", hosts, days)
        told = f"{files[1]}: renewed for {days} days; restart the SuperLink with it"
        out.print(told, markup=False, highlight=False, soft_wrap=True)
        return
    count = clients or load(_recipe_of(directory, "; give the folder of an app, or set --clients")).split.clients
    written = made.write_keys(directory / "keys", hosts, count, days)
    out.print(
        f"{directory}/keys: {len(written)} files; keep ca.key offline", markup=False, highlight=False, soft_wrap=True
    )


def _client_keys(directory: Path, add: int, renewed: int | None) -> None:
    """New keys for clients: those that are added, and one that has lost its own."""
    from fedflat.flower import keys as made
    from fedflat.flower.project import add_clients

    known = made.known_clients(directory / "keys")
    if renewed is not None and renewed not in known:
        raise RecipeError(f"--renew-client {renewed}: {directory}/keys has no client-{renewed}.pub")
    lines = []
    if add:
        first, total = add_clients(directory, add)
        lines.append(f"{directory}: clients {first} to {total - 1} are added; the recipe has a new digest")
        lines.append("every client agrees to it in its policy.toml, and the next `flwr run` begins in another `out`")
    changed = [*range(first, total)] if add else []
    for client in [*changed, *([renewed] if renewed is not None else [])]:
        made.client_key(directory / "keys", client)
        lines.append(f"flwr supernode register keys/client-{client}.pub deployment")
    if renewed is not None:
        lines.append(f"client {renewed} gets keys/client-{renewed}; then `flwr supernode unregister` its old node")
    for line in lines:
        out.print(line, markup=False, highlight=False, soft_wrap=True)


@deployment.command()
def digest(directory: Annotated[Path, typer.Argument(help="folder of the app")]) -> None:
    """Print the digest of an app's recipe, by which a client agrees to it: `recipe` in its policy.toml."""
    need_flower()
    from fedflat.flower.policy import digest
    from fedflat.recipe import load

    found = digest(load(_recipe_of(directory, "; give the folder of an app")))
    out.print(f"sha256:{found}", markup=False, highlight=False, soft_wrap=True)


def _recipe_of(directory: Path, advice: str) -> Path:
    """The recipe of the app in a folder."""
    for found in directory.glob("*/recipe.toml"):
        return found
    raise RecipeError(f"{directory}: contains no app (no recipe.toml){advice}")


def need_flower() -> None:
    try:
        import flwr  # noqa: F401
    except ImportError:
        raise RecipeError("a deployment needs Flower: pip install 'fedflat[flower]'") from None
