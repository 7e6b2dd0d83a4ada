"""Methods as people write them, and what there is to say of them."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from fedflat.catalogue import CATALOGUE, CHOICES
from fedflat.errors import RecipeError, nearest
from fedflat.method import Method
from fedflat.observe import passes
from fedflat.parts import Part

HYPHEN = re.compile(r"(?<=[a-z])-(?=[a-z])")
Call = tuple[str, dict[str, Any]]
Written = str | Mapping[str, Any] | Iterable[Any]


def parse(written: Method | Part | Written) -> Method:
    """A method as people write it: a name, a sum of names with options, a table with a name, or a list of these.

    >>> parse("fedsam(0.05) + swa(start=20)")
    Method(Ascent(rho=0.05), WeightAveraging(start=20, every=1))
    >>> parse([{"name": "fedsam", "rho": 0.05}, "swa(20)"])
    Method(Ascent(rho=0.05), WeightAveraging(start=20, every=1))
    """
    if isinstance(written, Method):
        return written
    if isinstance(written, Part):
        return Method(written)
    total = Method()
    for name, options in _calls(written):
        total = total + CATALOGUE[name].build(**options)
    return total


def spell(written: Method | Part | Written) -> str:
    """The method with every option in force.

    >>> spell("mofedsam(0.05) + swa")
    'mofedsam(rho=0.05, mix=0.1) + swa(start=10, every=1)'
    """
    if isinstance(written, Method | Part):
        return repr(written)
    calls = (f"{name}({', '.join(f'{k}={v!r}' for k, v in options.items())})" for name, options in _calls(written))
    return " + ".join(call.removesuffix("()") for call in calls)


def _calls(written: Written) -> list[Call]:
    """The entries of the catalogue that are meant, each with all of its options."""
    if isinstance(written, str):
        return _from_text(written)
    if isinstance(written, Mapping):
        options = dict(written)
        if not isinstance(options.get("name"), str):
            raise RecipeError('method: a table needs a name, as in {name = "fedsam", rho = 0.1}')
        return [_call(options.pop("name"), [], options)]
    if not isinstance(written, Iterable):
        raise RecipeError(f"method = {written!r}: write it like 'feddyn + man(0.15)'")
    return [call for item in written for call in _calls(item)]


def _call(name: str, arguments: list[Any], options: dict[str, Any]) -> Call:
    name = name.replace("-", "_")
    if name not in CATALOGUE:
        raise RecipeError(f"method: there is no {name!r}; {nearest(name, CATALOGUE)}")
    known = CATALOGUE[name].options()
    for option in options:
        if option not in known:
            hint = nearest(option, known) if known else "it has none"
            raise RecipeError(f"method: {name} has no option {option!r}; {hint}")
    if len(arguments) > len(known):
        raise RecipeError(f"method: {name} takes at most {len(known)} options, {len(arguments)} given")
    return name, {**known, **dict(zip(known, arguments, strict=False)), **options}


def _from_text(text: str) -> list[Call]:
    try:
        tree = ast.parse(HYPHEN.sub("_", text.strip()), mode="eval").body
    except SyntaxError:
        raise RecipeError(f"method = {text!r}: write it like 'feddyn + man(0.15)'") from None
    return _from_tree(tree, text)


def _from_tree(tree: ast.expr, text: str) -> list[Call]:
    if isinstance(tree, ast.BinOp) and isinstance(tree.op, ast.Add):
        return _from_tree(tree.left, text) + _from_tree(tree.right, text)
    if isinstance(tree, ast.Name):
        return [_call(tree.id, [], {})]
    if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name):
        try:
            arguments = [ast.literal_eval(a) for a in tree.args]
            options = {str(k.arg): ast.literal_eval(k.value) for k in tree.keywords}
        except ValueError:
            raise RecipeError(f"method = {text!r}: the options of {tree.func.id} must be plain values") from None
        return [_call(tree.func.id, arguments, options)]
    raise RecipeError(f"method = {text!r}: write it like 'feddyn + man(0.15)'")


def cost(method: Method) -> dict[str, Any]:
    """What a round of a method costs: vectors of model size down, up and kept by client and server; passes a step.

    >>> cost(parse("fedsmoo"))
    {'down': 2, 'up': 2, 'client': 2, 'server': 3, 'gradients': 2, 'forwards': 0}
    """
    gradients, forwards = passes(method)
    return {
        "down": 1 + sum(size is None for size in method.found.sent.values()),
        "up": 1 + len(method.uploads),
        "client": len(method.memory),
        "server": len(method.state),
        "gradients": gradients,
        "forwards": forwards,
    }


def explain(name: str) -> dict[str, Any]:
    """A method in full: its parts with their equations, its options with defaults, ranges and meanings, its cost."""
    entry = CATALOGUE[_call(name, [], {})[0]]
    method = entry.build()
    parts = [inner for part in method.parts for inner in (part, getattr(part, "part", None)) if isinstance(inner, Part)]
    known = {
        f.name: (str(f.metadata["range"]), f.metadata["doc"]) for part in parts for f in fields(part) if f.metadata
    }
    options = []
    for option, default in entry.options().items():
        span, doc = (known | CHOICES)[option]
        options.append({"name": option, "default": default, "range": span, "doc": doc})
    texts = [{"part": repr(part), "text": inspect.getdoc(type(part)) or ""} for part in parts]
    head = {"name": name, "paper": entry.paper, "title": entry.title, "idea": entry.idea, "cost": cost(method)}
    return {**head, "parts": texts, "options": options}
