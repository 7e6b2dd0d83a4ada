"""The package as a newcomer finds it: few rooms with front doors, one direction of imports, every name once."""

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

import fedflat

SOURCE = Path(fedflat.__file__).parent
# From the bottom to the top: a room imports only from those before it.
COMMON = (
    "compiled",
    "errors",
    "files",
    "drawing",
    "stored",
    "shown",
    "progress",
    "randomness",
    "recipe",
    "tokens",
    "trusted",
)
ROOMS = (
    "federation", "models", "tasks", "local", "methods", "rounds", "engine", "flatness", "runs", "report", "flower",
    "cli",
)  # fmt: skip
DOORS = ("__init__", "__main__")  # of the library and of the command
FILES = sorted(SOURCE.rglob("*.py"))
PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"


def room_of(file: Path) -> str:
    return file.relative_to(SOURCE).parts[0].removesuffix(".py")


@cache
def imports(file: Path) -> list[tuple[str, ...]]:
    """The modules of fedflat that a file imports, lazily or not, as tuples of names below the package."""
    found = []
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "fedflat":
            found += [f"fedflat.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append(node.module or "")
    ours = (name for name in found if name.split(".")[0] == "fedflat" and name != "fedflat.__version__")
    return [tuple(name.split(".")[1:]) for name in ours]


def test_there_are_no_other_rooms():
    assert {room_of(file) for file in FILES} == {*DOORS, *COMMON, *ROOMS}


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_imports_go_in_one_direction(file):
    order = (*COMMON, *ROOMS)
    room = room_of(file)
    if room in DOORS:
        return
    above = [".".join(name) for name in imports(file) if order.index(name[0]) > order.index(room)]
    assert not above, f"{room} imports from the rooms above it: {above}"


@pytest.mark.parametrize("room", [room for room in ROOMS if room != "cli"])
def test_others_enter_a_room_by_its_front_door(room):
    """Commands may reach further in, so that each loads only what it needs."""
    others = [file for file in FILES if room_of(file) not in (room, "cli", "__main__")]
    inside = [(room_of(file), ".".join(name)) for file in others for name in imports(file) if name[0] == room]
    assert not [(who, name) for who, name in inside if name != room]


def test_a_name_occurs_once():
    """A command's module is named after the command; every other name of a module is there once."""
    names = Counter(file.stem for file in FILES if file.stem not in DOORS and room_of(file) != "cli")
    assert not [name for name, times in names.items() if times > 1]
    assert not {*names} & {*ROOMS}


def neighbours() -> dict[str, set[str]]:
    """Which rooms each room imports from."""
    found: dict[str, set[str]] = {}
    for file in FILES:
        if (room := room_of(file)) not in DOORS:
            found.setdefault(room, set()).update({name[0] for name in imports(file)} - {room})
    return found


def behind(room: str, edges: dict[str, set[str]]) -> set[str]:
    """All that can be reached from a room."""
    return {far for near in edges[room] for far in {near, *behind(near, edges)}}


def test_the_map_in_the_docs_is_that_of_the_imports():
    """The map shows the arrows that do not follow from others."""
    edges = neighbours()
    needed = {
        (room, near)
        for room, others in edges.items()
        for near in others
        if not any(near in behind(other, edges) for other in others)
    }
    (drawn,) = re.findall(r"```mermaid\nflowchart TD\n(.*?)```", PAGE.read_text("utf-8"), re.S)
    assert {tuple(line.strip().split(" --> ")) for line in drawn.splitlines()} == needed


def test_the_way_of_a_round_in_the_docs_names_what_is_there():
    (drawn,) = re.findall(r"```mermaid\nsequenceDiagram\n(.*?)```", PAGE.read_text("utf-8"), re.S)
    homes = dict(re.findall(r"participant (\w) as (\S+)", drawn))
    for receiver, function in re.findall(r"->>(\w): (\w+)\(", drawn):
        home = SOURCE / homes[receiver]
        files = [home] if home.suffix == ".py" else sorted(home.glob("*.py"))
        assert any(f"def {function}(" in file.read_text("utf-8") for file in files), function
