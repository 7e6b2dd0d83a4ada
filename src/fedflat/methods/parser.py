"""Parsing, spelling and explaining methods."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from fedflat.errors import RecipeError, nearest, shortened
from fedflat.methods.catalogue import CATALOGUE, CHOICES
from fedflat.methods.chain import Method
from fedflat.methods.part import Part
from fedflat.methods.trial import passes
from fedflat.trusted import named_class

LONGEST, MOST_PARTS = 10_000, 64  # largest numbers of characters and parts of a method
TRUTH = {"true": True, "false": False}  # as TOML has them
HYPHEN = re.compile(r"(?<=[a-z])-(?=[a-z])")
OWN = re.compile(r"\b([A-Za-z_][\w.-]*):([A-Za-z_]\w*)")  # package.module:Name
Call = tuple[str, dict[str, Any]]
Written = str | Mapping[str, Any] | Iterable[Any]


def parse(written: Method | Part | Written) -> Method:
    """Build a method from a name, a sum of names with options, a dict with a name, or a list of these.

    Raises:
        RecipeError: a name or an option is unknown or invalid, or the parts do not fit together.

    >>> parse("fedsam(0.05) + swa(start=20)")
    Method(Ascent(rho=0.05), WeightAveraging(start=20, every=1))
    >>> parse([{"name": "fedsam", "rho": 0.05}, "swa(20)"])
    Method(Ascent(rho=0.05), WeightAveraging(start=20, every=1))
    >>> parse("fedflat.methods.parts:Ascent(rho=0.05) + swa(20)")
    Method(Ascent(rho=0.05), WeightAveraging(start=20, every=1))
    """
    if isinstance(written, Method):
        return written
    if isinstance(written, Part):
        return Method(written)
    calls = _calls(written)
    if len(calls) > MOST_PARTS:
        raise RecipeError(f"method: it has {len(calls)} parts, and {MOST_PARTS} are the most")
    parts: list[Part] = []
    for name, options in calls:
        parts += [own_part(name, options)] if ":" in name else CATALOGUE[name].build(**options).parts
    return Method(*parts)


def own_part(path: str, options: Mapping[str, Any]) -> Part:
    """Build a part from the import path of its class, `package.module:Name`, which must be a subclass of Part.

    Args:
        path: the import path.
        options: the values of the part's options, by name.

    Raises:
        RecipeError: there is no such class, it is not trusted, or an option is unknown or invalid.

    >>> own_part("fedflat.methods.parts:Ascent", {"rho": 0.05})
    Ascent(rho=0.05)
    """
    found = named_class(path, Part, "method")
    known = [f.name for f in fields(found) if f.init]
    for option in options:
        if option not in known:
            hint = nearest(option, known) if known else "it has none"
            raise RecipeError(f"method: {path} has no option {option!r}; {hint}")
    try:
        return found(**options)
    except TypeError as error:
        raise RecipeError(f"method: {path}: {error}") from None


def spell(written: Method | Part | Written) -> str:
    """Return the text of a method with the values of all options.

    >>> spell("mofedsam(0.05) + swa")
    'mofedsam(rho=0.05, mix=0.1) + swa(start=10, every=1)'
    """
    if isinstance(written, Method | Part):
        parts = written.parts if isinstance(written, Method) else (written,)
        return " + ".join(map(_spelled, parts)) or "fedavg"
    calls = (f"{name}({', '.join(f'{k}={_spelled(v)}' for k, v in o.items())})" for name, o in _calls(written))
    return " + ".join(call.removesuffix("()") for call in calls)


def concise(written: Written) -> str:
    """Return the text of a method without the options that have their defaults.

    >>> concise("feddyn(penalty=0.1, dual='all', balanced=False) + man(zeta=0.2, layers='all', attention=False)")
    'feddyn + man(zeta=0.2)'
    >>> concise("fedflat.methods.parts:Ascent(rho=0.1)")
    'Ascent'
    """
    calls = []
    for name, options in _calls(written):
        usual = CATALOGUE[name].options() if name in CATALOGUE else _defaults(name)
        name = name.rpartition(":")[2] if name.startswith("fedflat.") else name
        kept = [f"{k}={_spelled(v)}" for k, v in options.items() if k not in usual or usual[k] != v]
        calls.append(f"{name}({', '.join(kept)})".removesuffix("()"))
    return " + ".join(calls)


def _defaults(path: str) -> dict[str, Any]:
    """The defaults of the part at `package.module:Name`, if its module is imported already."""
    module, _, name = path.partition(":")
    found = getattr(sys.modules.get(module), name, None)
    return {f.name: f.default for f in fields(found)} if isinstance(found, type) and issubclass(found, Part) else {}


def _spelled(value: Any) -> str:
    """Return the import path and options of a part, and the repr of any other value."""
    if not isinstance(value, Part):
        return repr(value)
    kind = type(value)
    options = ", ".join(f"{f.name}={_spelled(getattr(value, f.name))}" for f in fields(value) if f.init)
    return f"{kind.__module__}:{kind.__qualname__}" + (f"({options})" if options else "")


def _calls(written: Written) -> list[Call]:
    """Return the names of the entries, each with all of its options."""
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
    if ":" in name:
        if arguments:
            raise RecipeError(f"method: name the options of {name}, as in {name}(rho={arguments[0]!r})")
        return name, options
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
    placed = dict(zip(known, arguments, strict=False))
    for option in placed.keys() & options.keys():
        raise RecipeError(f"method: {name} is given {option} twice, as {placed[option]!r} and {options[option]!r}")
    return name, {**known, **placed, **options}


def _from_text(text: str) -> list[Call]:
    own: dict[str, str] = {}

    def stand_in(match: re.Match[str]) -> str:
        """Replace `module:Name`, which is not valid Python, by a placeholder name."""
        own[f"own_{len(own)}_"] = match.group()
        return list(own)[-1]

    try:
        if len(text) > LONGEST:
            raise ValueError
        tree = ast.parse(HYPHEN.sub("_", OWN.sub(stand_in, text.strip())), mode="eval").body
        return _from_tree(tree, text, own)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise RecipeError(f"method = {shortened(repr(text))}: write it like 'feddyn + man(0.15)'") from None


def _from_tree(tree: ast.expr, text: str, own: Mapping[str, str]) -> list[Call]:
    if isinstance(tree, ast.BinOp) and isinstance(tree.op, ast.Add):
        return _from_tree(tree.left, text, own) + _from_tree(tree.right, text, own)
    if isinstance(tree, ast.Name):
        return [_call(own.get(tree.id, tree.id), [], {})]
    if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name):
        name = own.get(tree.func.id, tree.func.id)
        if any(k.arg is None for k in tree.keywords) or any(isinstance(a, ast.Starred) for a in tree.args):
            raise RecipeError(f"method = {text!r}: write the options of {name} one by one, without * or **")
        if twice := [each for each, times in Counter(str(k.arg) for k in tree.keywords).items() if times > 1]:
            raise RecipeError(f"method = {text!r}: {name} is given {twice[0]} twice")
        try:
            arguments = [_value(a, text, own) for a in tree.args]
            options = {str(k.arg): _value(k.value, text, own) for k in tree.keywords}
        except ValueError:
            raise RecipeError(f"method = {text!r}: the options of {name} must be plain values") from None
        return [_call(name, arguments, options)]
    raise RecipeError(f"method = {text!r}: write it like 'feddyn + man(0.15)'")


def _value(tree: ast.expr, text: str, own: Mapping[str, str]) -> Any:
    """Return a plain value, or a user-defined part that is an option of another part (as FedSoL wraps one)."""
    if isinstance(tree, ast.Name) and tree.id in TRUTH:
        return TRUTH[tree.id]
    name = tree.func if isinstance(tree, ast.Call) else tree
    if isinstance(name, ast.Name) and name.id in own:
        ((path, options),) = _from_tree(tree, text, own)
        return own_part(path, options)
    return ast.literal_eval(_WithoutNames().visit(tree))


class _WithoutNames(ast.NodeTransformer):
    """Replaces inf and nan, as `repr` writes them, by their values."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.copy_location(ast.Constant(float(node.id)), node) if node.id in ("inf", "nan") else node


def cost(method: Method) -> dict[str, Any]:
    """Return the cost of a round: vectors of model size and passes per local step.

    `down` and `up` count the vectors that a client receives and uploads, `client` and `server` those that each keeps.

    >>> cost(parse("fedsmoo"))
    {'down': 2, 'up': 2, 'client': 2, 'server': 2, 'gradients': 2, 'forwards': 0}
    """
    gradients, forwards = passes(method)
    return {
        "down": 1 + sum(size == "model" for size in method.found.sent.values()),
        "up": 1 + len(method.uploads),
        "client": len(method.memory),
        "server": len(method.state),
        "gradients": gradients,
        "forwards": forwards,
    }


def explain(name: str) -> dict[str, Any]:
    """Describe a method of the catalogue: its parts with their equations, its options and its cost.

    Args:
        name: a name in the catalogue.

    Returns:
        A dict with `name`, `paper`, `title`, `idea`, `cost`, `parts` (their reprs and docstrings) and `options` (names,
        defaults, ranges and meanings).

    Raises:
        RecipeError: there is no such method.
    """
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
