"""The code of classes that a script or notebook defines, saved with a run so that others can open it.

Networks and parts of a notebook belong to the module `__main__`, which is different in every process, so a recipe
cannot name them there. `own_code` writes them as a module: the classes, and what they use from the notebook (other
classes and functions, imports, plain constants). The module is named by a digest of its code, `own_0f3c…`, and the
recipe names `own_0f3c…:Net`.

Like all code from outside fedflat, the module is imported only if it is trusted. Its digest is checked first.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import linecache
import logging
import re
import symtable
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from fedflat.errors import FedflatError, RecipeError, RunError
from fedflat.files import read_whole
from fedflat.recipe import Recipe
from fedflat.runs.folder import Record, read_recipe
from fedflat.trusted import is_trusted, module_of_text, trust

log = logging.getLogger("fedflat")
MAIN = "__main__"
IN_MAIN = re.compile(rf"\b{MAIN}:(\w+)(?![\w.])")
OWN = re.compile(r"\b(own_[0-9a-f]{16}):")
HEADER = '''\
"""Classes of a script or notebook, kept with the run that used them."""

from __future__ import annotations

'''


class CodeError(FedflatError):
    """The code of a class cannot be kept; the text says why."""


@dataclass(frozen=True)
class OwnCode:
    """A module with classes of a script or notebook."""

    text: str

    @property
    def name(self) -> str:
        """The name of the module: a digest of its code."""
        return f"own_{hashlib.sha256(self.text.encode()).hexdigest()[:16]}"

    @property
    def file(self) -> str:
        """Its file in the directory of a run."""
        return f"{self.name}.py"

    def named(self, text: str) -> str:
        """Return a text with `__main__` replaced by this module in the paths of its classes."""
        return IN_MAIN.sub(rf"{self.name}:\1", text)


def with_own_code(table: Record, run: Path | None, resume: bool = False) -> tuple[Record, list[OwnCode]]:
    """Return a recipe's table that names classes of `__main__` by modules of their own, and those modules.

    If their code cannot be kept, the table stays as it is, and a logged warning says why.

    Args:
        table: the recipe, whose `model.name` and `method` may name classes of `__main__`.
        run: the directory of the run; without one nothing is kept.
        resume: whether the run continues. Its recipe may name the classes as they are (0.1 did).
    """
    begun = run if run is not None and resume and (run / "recipe.toml").is_file() else None
    if run is None or (begun is not None and f"{MAIN}:" in str(read_recipe(begun))):
        return table, []
    codes = []
    try:
        for text in (table["model"]["name"], table["method"]):
            wanted = {*IN_MAIN.findall(text)}
            codes.append(own_code(wanted, begun) if wanted else None)
    except CodeError as error:
        log.warning("%s: the command line cannot open this run: %s; put the class into a module", run, error)
        return table, []
    model, method = codes
    if model:
        table = table | {"model": table["model"] | {"name": model.named(table["model"]["name"])}}
    if method:
        table = table | {"method": method.named(table["method"])}
    return table, [code for code in codes if code]


def own_code(names: set[str], begun: Path | None = None) -> OwnCode:
    """Return a module with these classes of `__main__` and everything of `__main__` that they use.

    Args:
        names: the names of the classes.
        begun: the directory of a run to continue. Its code is taken if only comments and blanks differ.

    Raises:
        CodeError: if the source of a class or function is not known, or it uses a value that is not a plain constant.
    """
    found = _Collected(vars(sys.modules[MAIN]))
    for name in sorted(names):
        found.add(name)
    imports = "".join(f"{line}\n" for line in sorted(found.imports))
    text = "\n\n\n".join([(HEADER + imports).rstrip(), *found.definitions]) + "\n"
    code = OwnCode(text)
    trust(code.name)  # the same code is running in this process
    try:
        module_of_text(code.name, text, "its code alone")
    except RecipeError as error:
        raise CodeError(str(error)) from error
    for path in sorted(begun.glob("own_*.py")) if begun else ():
        kept = OwnCode(read_whole(path).decode("utf-8", "replace"))
        if kept.name == path.stem and _tree(kept.text) == _tree(text):
            return kept
    return code


class _Collected:
    """Imports and definitions, in the order in which a module needs them."""

    def __init__(self, space: Mapping[str, Any]) -> None:
        self.space = space
        self.imports: set[str] = set()
        self.definitions: list[str] = []
        self._seen: set[str] = set()

    def add(self, name: str) -> None:
        if name in self._seen or name not in self.space:
            return
        self._seen.add(name)
        value = self.space[name]
        if isinstance(value, ModuleType):
            self.imports.add(f"import {value.__name__}" + ("" if value.__name__ == name else f" as {name}"))
        elif isinstance(value, type | FunctionType) and value.__module__ == MAIN:
            text = _source(value, self.space)
            for used in sorted(_used(text)):  # the same code in every process
                self.add(used)
            self.definitions.append(text)
        elif origin := _origin(value):
            module, theirs = origin
            self.imports.add(f"from {module} import {theirs}" + ("" if theirs == name else f" as {name}"))
        elif _is_plain(value):
            self.definitions.append(f"{name} = {value!r}")
        else:
            raise CodeError(f"it uses {name}, a {type(value).__name__} that only this script or notebook has")


def _source(thing: type | FunctionType, space: Mapping[str, Any]) -> str:
    """The source of a class or function of `__main__`, with its decorators."""
    for text, line in _texts(thing, space):
        try:
            nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef | ast.FunctionDef)]
        except SyntaxError:
            continue
        for node in reversed(nodes):
            first = min((d.lineno for d in node.decorator_list), default=node.lineno)
            at = line is None or first <= line <= (node.end_lineno or line)
            if node.name == thing.__qualname__ and node.col_offset == 0 and at:
                return "\n".join(text.splitlines()[first - 1 : node.end_lineno])
    raise CodeError(f"the source of {thing.__qualname__} is not known")


def _texts(thing: type | FunctionType, space: Mapping[str, Any]) -> Iterator[tuple[str, int | None]]:
    """Texts that may define it, with a line inside of the definition if one is known. The most reliable come first."""
    functions = [thing] if isinstance(thing, FunctionType) else [_function(each) for each in vars(thing).values()]
    for function in functions:
        if function is not None and function.__module__ == MAIN:
            yield "".join(linecache.getlines(function.__code__.co_filename)), function.__code__.co_firstlineno
    if file := space.get("__file__"):
        yield "".join(linecache.getlines(file)), None
    cells = space.get("In")  # of IPython
    yield from ((cell, None) for cell in reversed(cells if isinstance(cells, list) else []) if isinstance(cell, str))


def _function(value: Any) -> FunctionType | None:
    value = getattr(value, "fget", None) or getattr(value, "__func__", value)
    return value if isinstance(value, FunctionType) else None


def _used(text: str) -> set[str]:
    """The names that a definition takes from its module."""
    table = symtable.symtable(text, "<own>", "exec")
    outer = {s.get_name() for s in table.get_symbols() if s.is_referenced()}
    return (outer | _globals(table)) - vars(builtins).keys()


def _globals(table: symtable.SymbolTable) -> set[str]:
    found = set[str]()
    for child in table.get_children():
        found |= _globals(child) | {symbol.get_name() for symbol in child.get_symbols() if symbol.is_global()}
    return found


def _origin(value: Any) -> tuple[str, str] | None:
    """The module and the name from which a value can be imported."""
    name = getattr(value, "__name__", "")
    for module in (getattr(value, "__module__", None), "torch", "numpy"):  # C functions name no module, or an inner one
        known = sys.modules.get(module) if isinstance(module, str) and module != MAIN else None
        if known is not None and name and getattr(known, name, None) is value:
            return known.__name__, name
    return None


def _is_plain(value: Any) -> bool:
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return False


def _tree(text: str) -> str:
    try:
        return ast.dump(ast.parse(text))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ""


def open_code(recipe: Recipe, run: Path) -> None:
    """Import the classes that are kept with a run, if its recipe names them and they are trusted.

    Raises:
        RunError: if the code is not that of the run.
        RecipeError: if the code fails.
    """
    for name in {*OWN.findall(f"{recipe.model.name} {recipe.method}")}:
        path = run / f"{name}.py"
        if name in sys.modules or not is_trusted(name) or not path.is_file():
            continue
        module_of_text(name, _unchanged(path), str(path))


def kept_code(run: Path, recipe: Recipe) -> str | None:
    """The code that is kept with a run for its model.

    Raises:
        RunError: if the code is not that of the run.
    """
    found = OWN.match(recipe.model.name)
    path = run / f"{found[1]}.py" if found else None
    return _unchanged(path) if path is not None and path.is_file() else None


def _unchanged(path: Path) -> str:
    text = read_whole(path).decode("utf-8", "replace")
    if OwnCode(text).file != path.name:
        raise RunError(f"{path}: has been changed since the run; its digest differs from its name")
    return text
