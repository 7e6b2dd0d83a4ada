"""Imports classes that a file names: only of the requested kind, and from outside fedflat only if trusted.

Importing a module runs its code, and so does building a model. Recipes, sweeps and run directories may come from
untrusted sources, so a class `package.module:Name` from outside fedflat is imported only

* with `--trust` on the command line, which also searches the current directory, beside the recipe;
* if the user's configuration (`config_file`) lists its package: `trust = ["mypackage"]`;
* after `fedflat.trust("mypackage")` in Python.
"""

from __future__ import annotations

import re
import tomllib
from importlib import import_module
from pathlib import Path
from typing import TypeVar

from platformdirs import user_config_path

from fedflat.errors import RecipeError

Kind = TypeVar("Kind")
PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
OURS = "fedflat"

_packages: set[str] = set()
_anything = False


def trust(*packages: str) -> None:
    """Allow recipes and runs to name classes of these packages or modules, until the process ends.

    >>> trust("mypackage.parts")
    >>> is_trusted("mypackage.parts.ascent"), is_trusted("mypackage")
    (True, False)
    """
    _packages.update(packages)


def trust_anything(allowed: bool = True) -> None:
    """Trust everything that a recipe or run names in this process, as `--trust` does."""
    global _anything
    _anything = allowed


def is_trusted(module: str) -> bool:
    """Return whether a file may have this module imported."""
    if module.partition(".")[0] == OURS and not module.endswith("__main__"):
        return True
    return _anything or any(module == name or module.startswith(f"{name}.") for name in {*_packages, *_listed()})


def named_class(path: str, kind: type[Kind], field: str) -> type[Kind]:
    """Import the class at `package.module:Name`.

    Args:
        path: the import path.
        kind: the class must be a subclass of it.
        field: the field that names the class, for error messages.

    Raises:
        RecipeError: if the path is invalid, not trusted, or does not lead to such a class.

    >>> from torch import nn
    >>> named_class("os:system", nn.Module, "model.name")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    fedflat.errors.RecipeError: model.name = 'os:system': is code from outside of fedflat; if you trust it ...
    """
    if not PATH.fullmatch(path):
        raise RecipeError(f"{field} = {path!r}: is not a path of the form package.module:Class")
    module, name = path.split(":")
    if not is_trusted(module):
        package = module.partition(".")[0]
        raise RecipeError(
            f"{field} = {path!r}: is code from outside of fedflat; if you trust it add --trust, "
            f'or list "{package}" under trust in {config_file()} (in Python: fedflat.trust("{package}"))'
        )
    asked = f"{field} = {path!r}"
    try:
        found = getattr(import_module(module), name, None)
    except (Exception, SystemExit) as error:  # the user's module may raise anything on import
        raise RecipeError(f"{asked}: {module} cannot be imported ({type(error).__name__}: {error})") from error
    if not (isinstance(found, type) and issubclass(found, kind)):
        raise RecipeError(f"{asked}: is not a class that inherits from {kind.__name__}, and nothing else is called")
    return found


def config_file() -> Path:
    """Return the user's configuration file: $XDG_CONFIG_HOME/fedflat/config.toml or ~/.config/fedflat/config.toml."""
    return user_config_path(OURS) / "config.toml"


def _listed() -> list[str]:
    """The packages that the user's configuration trusts."""
    path = config_file()
    try:
        table = tomllib.loads(path.read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, ValueError, RecursionError) as error:
        raise RecipeError(f"{path}: cannot be read ({error})") from None
    packages = table.get("trust", [])
    if table.keys() - {"trust"} or not isinstance(packages, list) or not all(isinstance(p, str) for p in packages):
        raise RecipeError(f'{path}: has one field, a list of packages: trust = ["mypackage"]')
    return packages
