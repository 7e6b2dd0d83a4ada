"""`flwr-clientapp` for a client that runs its own code: the app in its folder, never one sent by a server.

Flower sends an app's code to the nodes with every run, and a node runs what it receives. A policy holds only if the
code that reads it is the client's own. SuperNodes start `flwr-clientapp` by name, so the first script of that name in
PATH decides what runs. It should run `python -m fedflat.flower.own_code FOLDER …` with Flower's own arguments.
"""

from __future__ import annotations

import importlib
import sys
import tomllib
from pathlib import Path
from typing import Any

from flwr.clientapp import ClientApp

FLOWER = "flwr.supernode.runtime.run_clientapp"
REPLACED = ("install_from_fab", "get_load_client_app_fn")  # how Flower 1.41 unpacks and loads a server's code


def own_app(folder: Path) -> ClientApp:
    """Load the ClientApp of the app in a folder.

    Raises:
        TypeError: if what its pyproject.toml names is not a ClientApp.
    """
    table = tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))
    module, _, name = table["tool"]["flwr"]["app"]["components"]["clientapp"].partition(":")
    sys.path.insert(0, str(folder))
    found = getattr(importlib.import_module(module), name)
    if not isinstance(found, ClientApp):
        raise TypeError(f"{module}:{name} is not a ClientApp")
    return found


def main(arguments: list[str]) -> None:
    """Run Flower's command, with the app loaded from the client's folder."""
    folder = Path(arguments[0]).resolve()
    flower: Any = importlib.import_module(FLOWER)
    if missing := [name for name in REPLACED if not callable(getattr(flower, name, None))]:
        sys.exit(f"this version of Flower has no {', '.join(missing)}: the client cannot run its own code")
    for name, own in zip(REPLACED, (_left_packed, lambda **_: lambda *_: own_app(folder)), strict=True):
        setattr(flower, name, own)
    sys.argv = ["flwr-clientapp", *arguments[1:]]
    importlib.import_module("flwr.supernode.cli").flwr_clientapp()


def _left_packed(*_: Any, **__: Any) -> None:
    """Do nothing: what the server sent is not unpacked."""


if __name__ == "__main__":
    main(sys.argv[1:])
