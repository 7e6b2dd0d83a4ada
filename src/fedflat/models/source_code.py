"""The source code of a network as one Python file that needs only PyTorch."""

import ast
import inspect
from collections.abc import Iterable

from fedflat.models import blocks, networks, products, sequences, winograd
from fedflat.models.registry import MODELS

HEADER = '"""For the model next to this file, in plain PyTorch."""\n\n'


def source(name: str | None, normalised: bool = False) -> str:
    """Return the source code of a network: its function, and everything in this package that the function uses.

    Args:
        name: the name of the network, one of `MODELS`; None for no network.
        normalised: whether to add the class `Normalised`, which normalises the inputs of a network.

    >>> "class Residual" in source("resnet18"), "class Residual" in source("mlp"), "fedflat" in source("resnet18")
    (True, False, False)
    """
    texts, needs, imports = dict[str, str](), dict[str, set[str]](), list[str]()
    for module in (products, winograd, blocks, networks, sequences):
        text = inspect.getsource(module)
        for node in ast.parse(text).body:
            code = ast.get_source_segment(text, node) or ""
            if isinstance(node, ast.Import | ast.ImportFrom):
                imports += [code] if "fedflat" not in code else []
            elif defined := _defines(node):
                texts[defined], needs[defined] = code, {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    wanted = _reached([*([MODELS[name].__name__] if name else []), *(["Normalised"] if normalised else [])], needs)
    own = "RecipeError = ValueError  # a shape that does not fit\n" if _uses(wanted, needs, "RecipeError") else ""
    code = "\n\n\n".join(text for defined, text in texts.items() if defined in wanted)
    return f"{HEADER}{_united(imports, wanted, needs)}\n{own}\n\n{code}\n"


def _defines(node: ast.stmt) -> str:
    """Return the name that a top-level statement defines, or an empty string."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return node.name
    targets = [target.id for target in getattr(node, "targets", ()) if isinstance(target, ast.Name)]
    return targets[0] if targets else ""


def _reached(start: list[str], needs: dict[str, set[str]]) -> set[str]:
    found, ahead = set[str](), start
    while ahead:
        name = ahead.pop()
        if name in needs and name not in found:
            found.add(name)
            ahead += needs[name]
    return found


def _uses(wanted: Iterable[str], needs: dict[str, set[str]], name: str) -> bool:
    return any(name in needs[each] for each in wanted)


def _united(imports: list[str], wanted: set[str], needs: dict[str, set[str]]) -> str:
    """Return the imports that the wanted code uses, without duplicates."""
    lines = set[str]()
    for statement in ast.parse("\n".join(imports)).body:
        start = f"from {statement.module} import" if isinstance(statement, ast.ImportFrom) else "import"
        for alias in getattr(statement, "names", ()):
            if _uses(wanted, needs, alias.asname or alias.name.partition(".")[0]):
                lines.add(f"{start} {ast.unparse(alias)}")
    return "".join(f"{line}\n" for line in sorted(lines))
