"""Imports classes that a file names: only of the requested kind, and from outside fedflat only if trusted.

Importing a module runs its code, and so does building a model. Recipes, sweeps and run directories may come from
untrusted sources, so a class `package.module:Name` from outside fedflat is imported only

* with `--trust` on the command line, which also searches the current directory, beside the recipe;
* if the user's configuration (`config_file`) lists its package: `trust = ["mypackage"]`;
* after `fedflat.trust("mypackage")` in Python.

Processes of a Ray cluster exchange pickled objects, so a cluster that a file names is joined only if `ray` is trusted.
"""

from __future__ import annotations

import re
import sys
import tomllib
from importlib import import_module
from importlib.abc import InspectLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from platformdirs import user_config_path

from fedflat.errors import RecipeError, nearest
from fedflat.files import read_bytes

Kind = TypeVar("Kind")
PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
OURS = "fedflat"

_packages: set[str] = set()
_anything = False


def trust(*packages: str) -> None:
    """Allow recipes and runs to name classes of these packages or modules, until the process ends.

    Raises:
        RecipeError: an argument is not a name.

    >>> trust("mypackage.parts")
    >>> is_trusted("mypackage.parts.ascent"), is_trusted("mypackage")
    (True, False)
    """
    for name in packages:
        if not isinstance(name, str) or not name:
            raise RecipeError(f"trust: {name!r} is not the name of a package; write it as in an import")
    _packages.update(packages)


def trust_anything(allowed: bool = True) -> None:
    """Trust everything that a recipe or run names in this process, as `--trust` does."""
    global _anything
    _anything = allowed


def is_trusted(module: str) -> bool:
    """Return whether a file may cause this module to be imported."""
    if module.partition(".")[0] == OURS and not module.endswith("__main__"):
        return True
    return _anything or any(module == name or module.startswith(f"{name}.") for name in {*_packages, *_listed()})


def refuse_untrusted(module: str, why: str) -> None:
    """Raise a `RecipeError` that says why a module must be trusted, unless it is."""
    if not is_trusted(module):
        package = module.partition(".")[0]
        raise RecipeError(
            f'{why}; if you trust it add --trust, or list "{package}" under trust in {config_file()} '
            f'(in Python: fedflat.trust("{package}"))'
        )


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
    asked = f"{field} = {path!r}"
    refuse_untrusted(module, f"{asked}: is code from outside of fedflat")
    try:
        imported = import_module(module)
    except (Exception, SystemExit) as error:  # the user's module may raise anything on import
        raise RecipeError(f"{asked}: {module} cannot be imported ({type(error).__name__}: {error})") from error
    if not hasattr(imported, name):
        known = [key for key, value in vars(imported).items() if isinstance(value, type) and issubclass(value, kind)]
        raise RecipeError(f"{asked}: {module} has no {name}" + (f"; {nearest(name, known)}" if known else ""))
    found = getattr(imported, name)
    if not (isinstance(found, type) and issubclass(found, kind)):
        raise RecipeError(f"{asked}: is not a class that inherits from {kind.__name__}, and nothing else is called")
    return found


class _Text(InspectLoader):
    """Loads a module from its text. No file of compiled code is read or written."""

    def __init__(self, text: str) -> None:
        self.text = text

    def get_source(self, fullname: str) -> str:
        return self.text


def module_of_text(name: str, text: str, origin: str) -> ModuleType:
    """Import a trusted module from its text instead of a file on the search path.

    Args:
        name: the name of the module.
        text: its code.
        origin: where the text is from, for tracebacks and error messages.

    Raises:
        RecipeError: if the module is not trusted, or its code fails.
    """
    if not is_trusted(name):
        raise RecipeError(f"{origin}: is code from outside of fedflat; if you trust it add --trust")
    loader = _Text(text)
    spec = spec_from_loader(name, loader, origin=origin)
    assert spec  # there is one for every loader
    module = module_from_spec(spec)
    before = sys.modules.get(name)
    sys.modules[name] = module  # dataclasses look for their module there
    try:
        loader.exec_module(module)
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        del sys.modules[name]
        if before is not None:
            sys.modules[name] = before
        raise RecipeError(f"{origin}: cannot be imported ({type(error).__name__}: {error})") from error
    return module


def config_file() -> Path:
    """Return the user's configuration file: $XDG_CONFIG_HOME/fedflat/config.toml or ~/.config/fedflat/config.toml."""
    return user_config_path(OURS) / "config.toml"


def _listed() -> list[str]:
    """The packages that the user's configuration trusts."""
    path = config_file()
    try:
        table = tomllib.loads(read_bytes(path).decode("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, ValueError, RecursionError) as error:
        raise RecipeError(f"{path}: cannot be read ({error})") from None
    packages = table.get("trust", [])
    if table.keys() - {"trust"} or not isinstance(packages, list) or not all(isinstance(p, str) for p in packages):
        raise RecipeError(f'{path}: has one field, a list of packages: trust = ["mypackage"]')
    return packages
