"""The catalogue: each method's name, its chain of parts and its paper, and how a method is written in a recipe."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from fedflat.errors import RecipeError, nearest
from fedflat.local import LocalRule, Outcome, Vectors
from fedflat.parts import ActivationNorm, Ascent, DynamicDual, Part, Proximal, ServerState, Uploads
from fedflat.parts.part import range_text

HYPHEN = re.compile(r"(?<=[a-z])-(?=[a-z])")
ORDER = {"average": 0, "": 1, "ascent": 1, "server": 2}


class Method:
    """A chain of parts. Methods and parts add up: `FEDDYN + ActivationNorm(0.15)`.

    >>> method = Method(DynamicDual(0.1)) + Ascent(0.1)
    >>> method.memory, method.state
    (('drift',), ('mean_drift',))
    >>> method + Ascent(0.2)
    Traceback (most recent call last):
      ...
    fedflat.errors.RecipeError: method: Ascent and Ascent both want to be the ascent; a method can have only one
    """

    def __init__(self, *parts: Part) -> None:
        self.parts = tuple(sorted(parts, key=lambda part: ORDER[part.place]))
        self.memory = tuple(name for part in self.parts for name in part.memory)
        self.state = tuple(name for part in self.parts for name in part.state)
        self.uploads = tuple(name for part in self.parts for name in part.uploads)
        self._refuse_conflicts()

    def _refuse_conflicts(self) -> None:
        holder: dict[str, Part] = {}
        for part in self.parts:
            claims = [f"be the {part.place}"] if part.place else []
            claims += [f"keep {name!r}" for name in (*part.memory, *part.state)]
            for claim in claims:
                if claim in holder:
                    pair = f"{type(holder[claim]).__name__} and {type(part).__name__}"
                    raise RecipeError(f"method: {pair} both want to {claim}; a method can have only one")
                holder[claim] = part

    def __add__(self, other: Method | Part) -> Method:
        return Method(*self.parts, *(other.parts if isinstance(other, Method) else (other,)))

    def __repr__(self) -> str:
        return f"Method({', '.join(map(repr, self.parts))})"

    def send(self, server: ServerState) -> Vectors:
        """All that goes down in a round: the weights to start from and what the parts send beside them."""
        sent = {"weights": server.weights}
        for part in self.parts:
            sent.update(part.send(server))
        return sent

    def plan(self, rule: LocalRule, sent: Vectors, memory: Vectors) -> LocalRule:
        for part in self.parts:
            rule = part.plan(rule, sent, memory)
        return rule

    def settle(self, sent: Vectors, memory: Vectors, outcome: Outcome) -> tuple[Vectors, Vectors]:
        kept, uploads = dict(memory), {}
        for part in self.parts:
            remembered, uploaded = part.settle(sent, memory, outcome)
            kept.update(remembered)
            uploads.update(uploaded)
        return kept, uploads

    def merge(self, server: ServerState, uploads: Uploads) -> ServerState:
        for part in self.parts:
            server = part.merge(server, uploads)
        return server


def fedavg() -> Method:
    return Method()


def fedprox(mu: float = 0.1) -> Method:
    return Method(Proximal(mu))


def feddyn(penalty: float = 0.1) -> Method:
    return Method(DynamicDual(penalty))


def fedsam(rho: float = 0.1) -> Method:
    return Method(Ascent(rho))


def man(zeta: float = 0.15) -> Method:
    return Method(ActivationNorm(zeta))


@dataclass(frozen=True)
class Entry:
    """One line of the catalogue."""

    build: Callable[..., Method]
    paper: str
    idea: str

    def options(self) -> dict[str, Any]:
        """The options with their defaults."""
        return {name: p.default for name, p in inspect.signature(self.build).parameters.items()}


CATALOGUE: dict[str, Entry] = {
    "fedavg": Entry(fedavg, "McMahan et al. 2017", "average the clients' models"),
    "fedprox": Entry(fedprox, "Li et al. 2020", "stay near the global model"),
    "feddyn": Entry(feddyn, "Acar et al. 2021", "dynamic regularisation by a dual variable of each client"),
    "fedsam": Entry(fedsam, "Qu et al. 2022", "sharpness-aware minimisation on the client"),
    "man": Entry(man, "Yashwanth et al. 2025", "minimise the activations' norm; added to any method"),
}


def explain(name: str) -> dict[str, Any]:
    """A method in full: its parts with their equations, its options with defaults, ranges and meanings."""
    entry = CATALOGUE[_call(name, [], {})[0]]
    parts = entry.build().parts
    known = {f.name: f for part in parts for f in fields(part)}
    options = []
    for option, default in entry.options().items():
        meta = known[option].metadata if option in known else {}
        span = range_text(meta["low"], meta["high"], meta["open_low"]) if isinstance(default, float) and meta else ""
        options.append({"name": option, "default": default, "range": span, "doc": meta.get("doc", "")})
    texts = [{"part": repr(part), "text": inspect.getdoc(type(part)) or ""} for part in parts]
    return {"name": name, "paper": entry.paper, "idea": entry.idea, "parts": texts, "options": options}


Call = tuple[str, dict[str, Any]]
Written = str | Mapping[str, Any] | Iterable[Any]


def parse(written: Method | Part | Written) -> Method:
    """A method as people write it: a name, a sum of names with options, a table with a name, or a list of these.

    >>> parse("feddyn + man(0.15)")
    Method(DynamicDual(penalty=0.1), ActivationNorm(zeta=0.15))
    >>> parse([{"name": "fedsam", "rho": 0.05}, "man"])
    Method(Ascent(rho=0.05), ActivationNorm(zeta=0.15))
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

    >>> spell("feddyn + man")
    'feddyn(penalty=0.1) + man(zeta=0.15)'
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
