"""Break the mathematics on purpose, one place at a time, and see whether a test fails.

    python benchmarks/mutation.py [--module methods/parts/pulls.py] [--sample 100 --seed 0] [--jobs 2]
                                  [--results mutants.jsonl]

A mutant is the package with one expression changed in the body of one function: a sign flipped, a term or an argument
dropped, two operands swapped, a number or a condition changed, a statement left out. Functions that draw a picture stay
as they are, because most changes of them are a matter of taste. The tests run once, and it is noted which functions
each of them calls. Then the process forks for every mutant. The child puts the changed code in place of the function's
own and runs the tests that call it, the fast ones first, until one fails. A test that takes far longer than it did also
kills the mutant.

The results are JSON lines. A second call with the same file goes on where the first one ended, and tries the survivors
again; so a first call may use few fast tests (`--tests`, `--slow`, `--patience`) and a second one all. What the tests
call is kept beside them, for as long as the test's file does not change. Prints Markdown tables. Exits 1 if a mutant
survives that is not in `EQUIVALENT`.
"""

import argparse
import ast
import gc
import hashlib
import importlib
import json
import os
import random
import signal
import sys
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType

import pytest
import torch
from _pytest.runner import runtestprotocol
from equivalent import EQUIVALENT
from hypothesis import HealthCheck, Phase, settings

from fedflat.methods import chain

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "fedflat"
STEPS = [
    "tests/methods/parts",
    "tests/local",
    "tests/methods/test_oracles.py",
    "tests/rounds/test_measures.py",
    "tests/methods/test_descent.py",
    "tests/methods/test_walks.py",
    "tests/methods/test_walks_flat.py",
    "tests/runs/test_verify.py",
    "tests/runs/test_verify_other.py",
]
TESTS = {  # which tests belong to a module: those of every beginning of its path that is here
    "methods/": STEPS,
    "methods/parts/": [
        "tests/methods/test_laws.py",
        "tests/methods/test_zero.py",
        "tests/methods/test_own_methods.py",
        "tests/methods/test_contract.py",
    ],
    "methods/parts/ascent.py": ["tests/methods/test_sparing.py"],
    "methods/parts/local_work.py": ["tests/runs/test_personal.py", "tests/test_frozen.py"],
    "methods/parts/low_rank.py": ["tests/methods/test_low_rank.py"],
    "methods/parts/protection.py": ["tests/methods/test_privacy.py"],
    "methods/parts/proximal.py": ["tests/test_frozen.py"],
    "methods/parts/pulls.py": ["tests/test_frozen.py"],
    "methods/parts/robust.py": ["tests/methods/test_robust.py", "tests/rounds/test_attacks.py"],
    "methods/parts/server_step.py": ["tests/methods/test_robust.py", "tests/rounds/test_attacks.py"],
    "methods/parts/terms.py": ["tests/methods/test_top_eigenvalue.py"],
    "methods/uploads.py": [
        "tests/engine/test_engine.py",
        "tests/methods/test_contract.py",
        "tests/methods/test_privacy.py",
    ],
    "methods/part.py": ["tests/methods/test_contract.py", "tests/test_recipe.py", "tests/methods/test_laws.py"],
    "local/": [
        *STEPS,
        "tests/test_frozen.py",
        "tests/test_lora.py",
        "tests/tasks",
        "tests/models/test_sequences.py",
        "tests/methods/test_zero.py",
        "tests/methods/test_own_methods.py",
        "tests/methods/test_contract.py",
    ],
    "local/kernels/": [],
    "flatness/": ["tests/flatness", "tests/rounds/test_measures.py"],
    "flatness/norms.py": ["tests/models/test_adapters.py"],
}
OPPOSITE = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.Pow: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.GtE, ast.GtE: ast.Lt,
    ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
METHODS = {"add": "sub", "add_": "sub_", "sub_": "add_", "mul_": "div_", "div_": "mul_", "sum": "mean", "mean": "sum"}
COMMUTATIVE = (
    "addcmul_",
    "max",
    "min",
    "maximum",
    "minimum",
    "zip",
    "cosine_similarity",
    "slope",
)  # slope(q, c) moves by c q
GUARD = 1e-5  # numbers below it only keep a division finite
HANG = 1200  # seconds after which a test that waits for something has failed
SKIPPED = ast.Raise | ast.Assert | ast.JoinedStr  # and annotations, decorators, defaults, docstrings and option()


def changed(node: ast.AST, **fields: object) -> ast.AST:
    """A copy of the node with other fields."""
    other = copy(node)
    for name, value in fields.items():
        setattr(other, name, value)
    return other


def guards(node: ast.AST) -> bool:
    """Whether a node only keeps a division finite or names a seed, so that to change it means little."""
    match node:
        case ast.Constant(float() as value):
            return 0 < value < GUARD
        case ast.Name(name):
            return name.lower() == "guard"
        case ast.BinOp(left, _, right):
            return guards(left) or guards(right)
        case ast.Call(ast.Attribute(_, "manual_seed")):
            return True
    return isinstance(node, ast.keyword) and node.arg == "strict"


def variants(node: ast.AST) -> Iterator[ast.AST]:
    """What a node may be changed into."""
    match node:
        case ast.BinOp(left, op, right):
            if type(op) in OPPOSITE:
                yield changed(node, op=OPPOSITE[type(op)]())
            if isinstance(op, ast.Sub | ast.Div):
                yield changed(node, left=right, right=left)
            yield left
            if isinstance(op, ast.Add | ast.Mult):
                yield right
        case ast.UnaryOp(ast.USub() | ast.Not() | ast.Invert(), operand):
            yield operand
        case ast.Compare(_, [op], _):
            yield changed(node, ops=[OPPOSITE[type(op)]()])
        case ast.BoolOp(_, values):
            for value in values:
                rest = [other for other in values if other is not value]
                yield changed(node, values=rest) if len(rest) > 1 else rest[0]
        case ast.IfExp(_, body, orelse):
            yield body
            yield orelse
        case ast.If(test) if not isinstance(test, ast.Compare | ast.UnaryOp):
            yield changed(node, test=ast.UnaryOp(ast.Not(), test))
        case ast.Constant(bool() as value):
            yield changed(node, value=not value)
        case ast.Constant(int() | float() as value):
            yield changed(node, value={0: 1, 1: 0}.get(value, 2 * value))
        case ast.Call(function, arguments, keywords):
            name = getattr(function, "attr", getattr(function, "id", ""))
            if len(arguments) > 1 and name not in COMMUTATIVE and not isinstance(arguments[0], ast.Starred):
                yield changed(node, args=[arguments[1], arguments[0], *arguments[2:]])
            for keyword in [other for other in keywords if other.arg != "strict"]:
                yield changed(node, keywords=[other for other in keywords if other is not keyword])
                if keyword.arg == "alpha":
                    minus = changed(keyword, value=ast.UnaryOp(ast.USub(), keyword.value))
                    yield changed(node, keywords=[minus if other is keyword else other for other in keywords])
            if isinstance(function, ast.Attribute) and name in METHODS:
                yield changed(node, func=changed(function, attr=METHODS[name]))
        case ast.Expr(ast.Call()) if "super()" not in ast.unparse(node):  # which keeps the class in reach
            yield ast.Pass()


def draws(function: ast.FunctionDef) -> bool:
    """Whether a function draws a picture: its name says so, or it gets the axes of one."""
    given = {ast.unparse(argument) for argument in function.args.args}
    return f"{function.name.lstrip('_')}_".startswith("draw_") or "axes: Any" in given


def places(tree: ast.Module) -> Iterator[tuple[str, int, ast.AST]]:
    """The nodes that may be changed, each with the qualified name and the line of the outermost function around it."""

    def inside(node: ast.AST, function: str, first: int) -> Iterator[tuple[str, int, ast.AST]]:
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "args") and not isinstance(node, ast.Call):
                continue
            children = value if isinstance(value, list) else [value]
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "track":
                children = children[:1]  # the others are about its progress bar
            for child in children:
                if not isinstance(child, ast.AST) or isinstance(child, SKIPPED):
                    continue
                if not guards(child):
                    yield function, first, child
                    yield from inside(child, function, first)

    def outside(body: list[ast.stmt], path: str) -> Iterator[tuple[str, int, ast.AST]]:
        for node in body:
            if isinstance(node, ast.ClassDef):
                yield from outside(node.body, f"{path}{node.name}.")
            elif isinstance(node, ast.FunctionDef) and not draws(node):
                yield from inside(node, path + node.name, node.lineno)

    return outside(tree.body, "")


class Exchange(ast.NodeTransformer):
    """The tree with one node exchanged for another."""

    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return ast.copy_location(self.new, node) if node is self.old else self.generic_visit(node)


@dataclass(frozen=True)
class Mutant:
    """One change: the `variant`-th of the `place`-th node of a module. Its function begins in the line `first`."""

    module: str
    function: str
    first: int
    line: int
    column: int
    change: str
    place: int
    variant: int

    @property
    def key(self) -> str:
        """A name that holds as long as the function does not change."""
        where = f"{self.module} {self.function}+{self.line - self.first}:{self.column}"
        return f"{where} {self.change} ({self.variant})"

    def code(self) -> dict[str, CodeType]:
        """The functions of the changed module by their qualified names."""
        tree = ast.parse((PACKAGE / self.module).read_text())
        *_, node = list(places(tree))[self.place]
        tree = ast.fix_missing_locations(Exchange(node, list(variants(node))[self.variant]).visit(tree))
        found, codes = [compile(tree, str(PACKAGE / self.module), "exec", dont_inherit=True)], {}
        for code in found:
            codes[code.co_qualname] = code
            found += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        return codes

    def install(self, functions: list[FunctionType]) -> None:
        """Put the changed code in place of the function's own, whoever holds that function."""
        codes, path = self.code(), str(PACKAGE / self.module)
        for held in functions:
            name = held.__code__.co_qualname
            if held.__code__.co_filename == path and f"{name}.".startswith(f"{self.function}."):
                held.__code__ = codes[name]


def mutants(module: str) -> list[Mutant]:
    """All mutants of a module but for those that compute the same."""
    found, source = [], (PACKAGE / module).read_text()
    lines = source.splitlines()
    for place, (function, first, node) in enumerate(places(ast.parse(source))):
        for variant, other in enumerate(variants(node)):
            before, after = (" ".join(ast.unparse(ast.fix_missing_locations(x)).split()) for x in (node, other))
            change = f"{before[:90]} → {after[:90]}"
            mutant = Mutant(module, function, first, node.lineno, node.col_offset, change, place, variant)
            same = [text for where, name, text, _ in EQUIVALENT if (where, name) == (module, function)]
            if not any(text in f"{lines[node.lineno - 1]} ¦ {change} ¦" for text in same):
                found.append(mutant)
    return found


class Laboratory:
    """A pytest plugin that runs the tests once as they are, and then some of them on every mutant."""

    def __init__(self, todo: list[Mutant], results: Path, jobs: int, slow: float, patience: float) -> None:
        self.todo, self.results, self.jobs, self.slow, self.patience = todo, results, jobs, slow, patience
        self.files = {str(PACKAGE / mutant.module) for mutant in todo}
        self.seen = recorded(results.with_suffix(".tests"))
        self.seconds: dict[pytest.Item, float] = {}
        self.breadth: dict[pytest.Item, int] = {}
        self.callers: dict[tuple[str, str], list[pytest.Item]] = defaultdict(list)
        self.screen = os.fdopen(os.dup(2), "w")  # pytest captures the other one

    def pytest_collection(self) -> None:
        """Hypothesis draws the same examples for every mutant, and does not look for a smaller one that fails."""
        few = {"derandomize": True, "database": None, "phases": (Phase.explicit, Phase.generate)}
        settings.register_profile("mutation", settings.default, suppress_health_check=list(HealthCheck), **few)
        settings.load_profile("mutation")

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        chain._remembered = chain._remembered.__wrapped__  # every test must build its methods itself
        for item in session.items:
            key = f"{item.nodeid} {hashlib.sha256(item.path.read_bytes()).hexdigest()[:16]}"
            self.note(item, self.seen.get(key) or self.observe(item, key))
        for path in self.files:
            importlib.import_module(".".join(Path(path).relative_to(PACKAGE.parent).with_suffix("").parts))
        self.screen.write(f"{len(self.seconds)} tests, {sum(self.seconds.values()):.0f} s of processor time\n")
        self.screen.flush()
        known = [held for held in gc.get_objects() if type(held) is FunctionType]
        self.functions = [held for held in known if held.__code__.co_filename in self.files]
        self.order = {item: place for place, item in enumerate(self.seconds)}
        self.rows = {path: row for row, path in enumerate(sorted(self.files))}
        self.kills = torch.zeros(len(self.rows), len(self.order)).share_memory_()
        gc.freeze()  # so that children share this memory
        running: dict[int, tuple[Mutant, int]] = {}
        for mutant in self.todo:
            items = self.callers[str(PACKAGE / mutant.module), mutant.function]
            items = [item for item in items if self.seconds[item] <= self.slow]
            items.sort(key=partial(self.effort, mutant))
            if len(running) == self.jobs:
                self.collect(running)
            if (child := os.fork()) == 0:
                self.experiment(mutant, items)
            running[child] = mutant, len(items)
        while running:
            self.collect(running)
        return True

    def effort(self, mutant: Mutant, item: pytest.Item) -> float:
        """Low for the tests that come first: fast ones about few functions, or that killed others of the module."""
        kills = float(self.kills[self.rows[str(PACKAGE / mutant.module)], self.order[item]])
        return (0.01 + self.seconds[item]) * self.breadth[item] / (1 + kills) ** 2

    def observe(self, item: pytest.Item, key: str) -> dict:
        """Run a test as it is, and write down which functions it calls and how long it takes."""
        called = set()
        begun = time.process_time()
        sys.settrace(lambda frame, *_: called.add((frame.f_code.co_filename, frame.f_code.co_qualname)))
        reports = runtestprotocol(item, log=False, nextitem=item.session)
        sys.settrace(None)
        ours = sorted((path, name) for path, name in called if path.startswith(str(PACKAGE)))
        fails = any(report.failed for report in reports)
        record = {"key": key, "seconds": time.process_time() - begun, "fails": fails, "calls": ours}
        write(self.results.with_suffix(".tests"), record)
        return record

    def note(self, item: pytest.Item, record: dict) -> None:
        if record["fails"]:
            self.screen.write(f"{item.nodeid} fails as it is, and is left out\n")
            return
        self.seconds[item], self.breadth[item] = record["seconds"], len(record["calls"])
        for path, name in record["calls"]:
            if path in self.files:
                self.callers[path, name].append(item)

    def experiment(self, mutant: Mutant, items: list[pytest.Item]) -> None:
        """In a child: end with 1 if a test fails, with 0 if none does; by a signal if one never ends."""
        try:
            mutant.install(self.functions)
            for item in items:
                if time.process_time() > self.patience:
                    break
                # Processor time, so that a busy machine or a frozen process kills no mutant.
                signal.setitimer(signal.ITIMER_PROF, 10 + 10 * self.seconds[item])
                signal.alarm(HANG)
                if any(report.failed for report in runtestprotocol(item, log=False, nextitem=item.session)):
                    self.kills[self.rows[str(PACKAGE / mutant.module)], self.order[item]] += 1
                    os._exit(1)
            os._exit(0)
        except BaseException:
            traceback.print_exc(file=self.screen)
            self.screen.flush()
            os._exit(2)

    def collect(self, running: dict[int, tuple[Mutant, int]]) -> None:
        """Wait for one child and write down how it ended."""
        child, status = os.wait()
        mutant, tests = running.pop(child)
        ended = os.waitstatus_to_exitcode(status)  # below 0 by a signal
        if ended > 1 or ended == -signal.SIGKILL:
            raise RuntimeError(f"{mutant.key} could not be tried")
        record = {"key": mutant.key, **vars(mutant), "killed": ended != 0, "ended": ended, "tests": tests}
        write(self.results, record)
        if not ended:
            self.screen.write(f"survives: {mutant.module}:{mutant.line} {mutant.key} ({tests} tests)\n")
            self.screen.flush()


def write(file: Path, record: dict) -> None:
    with file.open("a") as lines:
        lines.write(json.dumps(record, ensure_ascii=False) + "\n")


def recorded(results: Path) -> dict[str, dict]:
    """What the file says of each mutant or test, the last word counts."""
    lines = results.read_text().splitlines() if results.exists() else []
    return {record["key"]: record for record in map(json.loads, lines)}


def table(records: list[dict]) -> None:
    counts = Counter((record["module"], record["killed"]) for record in records)
    print("| module | mutants | killed | survived |\n|---|---|---|---|")
    for module in sorted({record["module"] for record in records}):
        killed, survived = counts[module, True], counts[module, False]
        print(f"| {module} | {killed + survived} | {killed} | {survived} |")
    for record in records:
        if not record["killed"]:
            print(f"{record['module']}:{record['line']} {record['function']}: {record['change']}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--module", action="append", help="such as parts/pulls.py; may be given several times")
    parser.add_argument("--sample", type=int, help="so many mutants of each module, drawn at random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--slow", type=float, default=5.0, help="leave out tests that take longer (seconds)")
    parser.add_argument("--patience", type=float, default=float("inf"), help="seconds of all tests of one mutant")
    parser.add_argument(
        "--tests", nargs="+", help="other tests than those that belong to the modules, such as few fast ones"
    )
    parser.add_argument("--results", type=Path, default=Path("mutants.jsonl"))
    options = parser.parse_args()
    files = [path for start in TESTS for path in sorted(PACKAGE.glob(f"{start}*.py" if start.endswith("/") else start))]
    modules = options.module or [str(path.relative_to(PACKAGE)) for path in files]
    chosen = []
    for module in modules:
        found = mutants(module)
        chosen += random.Random(options.seed).sample(found, min(options.sample or len(found), len(found)))
    known = recorded(options.results)
    todo = [mutant for mutant in chosen if not known.get(mutant.key, {"killed": False})["killed"]]
    mapped = [test for start, some in TESTS.items() if any(m.startswith(start) for m in modules) for test in some]
    tests = options.tests or list(dict.fromkeys(mapped))
    if todo:
        os.environ["PYTEST_XDIST_WORKER"] = "mutation"
        torch.set_num_threads(1)
        quickly = ["-qq", "--no-header", "--no-summary", "--tb=no", "--assert=plain"]
        arguments = [*quickly, *(str(ROOT / test) for test in tests)]
        laboratory = Laboratory(todo, options.results, options.jobs, options.slow, options.patience)
        pytest.main(arguments, plugins=[laboratory])
    known = recorded(options.results)
    records = [known[mutant.key] for mutant in chosen if mutant.key in known]
    table(records)
    return 0 if all(record["killed"] for record in records) else 1


if __name__ == "__main__":
    sys.exit(main())
