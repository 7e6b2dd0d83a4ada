"""Reads recipes: files, presets and overrides, one on top of the other."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from fedflat.errors import RecipeError, nearest, shortened
from fedflat.files import opened
from fedflat.recipe.checks import DEEPEST, validated
from fedflat.recipe.recipe import Recipe

PRESETS = ("default", "smoo", "sol", "man")
LONGEST_FILE = 2**20  # bytes
DOTS = 200  # limit per line


def load(source: str | Path | None = None, overrides: Iterable[str] = ()) -> Recipe:
    """Load a recipe from a file or a preset (default: the default recipe) and apply `section.field=value` overrides.

    A file can itself begin with `preset = "sol"` and state only what differs.

    Raises:
        RecipeError: if the file cannot be read, or the recipe or an override is not valid.

    >>> load("sol", ["local.lr=0.05"]).local.lr
    0.05
    """
    table = _read(source) if source is not None else {}
    if isinstance(table.get("grid"), Mapping):
        raise RecipeError(f"{source}: is a sweep file (it has a [grid]); train it with `fedflat sweep {source}`")
    return stacked(table, *map(parsed_override, overrides))


def stacked(base: Mapping[str, Any], *layers: Mapping[str, Any]) -> Recipe:
    """Build a recipe from a table, which may name a preset as its base, and from further tables on top."""
    table = _preset(base.get("preset", "default"))
    for layer in ({name: value for name, value in base.items() if name != "preset"}, *layers):
        table = _merged(table, layer)
    return validated(table)


def overridden(recipe: Recipe, overrides: Iterable[str]) -> Recipe:
    """Apply `section.field=value` overrides to a complete recipe."""
    table = recipe.model_dump(exclude_none=True)
    for override in overrides:
        table = _merged(table, parsed_override(override))
    return validated(table)


def _read(source: str | Path) -> dict[str, Any]:
    if str(source) in PRESETS:
        return {"preset": str(source)}
    try:
        return parsed(read_text(Path(source)), str(source))
    except FileNotFoundError:
        raise RecipeError(
            f"{source}: no such recipe file, and no preset of that name; {nearest(str(source), PRESETS)}"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{source}: cannot be read ({error})") from None


def read_text(path: Path) -> str:
    """Read a text file, up to a size limit.

    Raises:
        RecipeError: if the file is larger.
    """
    with opened(path) as file:
        content = file.read(LONGEST_FILE + 1)
    if len(content) > LONGEST_FILE:
        raise RecipeError(f"{path}: has more than {LONGEST_FILE:,} bytes, too many for a recipe")
    return content.decode("utf-8-sig")  # editors on Windows begin a file with a byte order mark


def read_table(path: Path) -> dict[str, Any]:
    """Read a TOML file as a table.

    Raises:
        RecipeError: if the file cannot be read, or is not valid TOML.
    """
    try:
        return parsed(read_text(path), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: cannot be read ({error})") from None


def parsed(text: str, source: str) -> dict[str, Any]:
    """Parse TOML to a table; errors name `source` as its origin.

    Raises:
        RecipeError: if the text is not valid TOML.
    """
    # The time for a key of n dotted parts grows with n²: a small file could take minutes.
    if any(line.count(".") > DOTS for line in text.splitlines()):
        raise RecipeError(f"{source}: not valid TOML: a line has more than {DOTS} dots")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"{source}: not valid TOML: {error}") from None
    except RecursionError:
        raise RecipeError(f"{source}: not valid TOML: it is nested too deeply") from None
    except ValueError as error:  # such as a number with more digits than Python reads
        raise RecipeError(f"{source}: not valid TOML: {shortened(error)}") from None


def _preset(name: Any) -> dict[str, Any]:
    if name == "none":  # for a complete recipe: missing values stay missing
        return {}
    if name not in PRESETS:
        raise RecipeError(f"preset = {name!r}: there is none of that name; {nearest(str(name), PRESETS)}")
    return tomllib.loads((resources.files("fedflat") / "presets" / f"{name}.toml").read_text("utf-8"))


# What a section keeps when its name changes; all other fields are options of the old name.
LASTING = {
    "data": {"dir", "normalise", "crop", "crop_probability", "crop_fill", "flip", "cutout"},
    "split": {"clients", "seed", "draws"},
    "model": {"buffers"},
    "engine": {"workers", "address", "device", "group", "graph"},
}


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge `over` on top of `base`, section by section."""
    result = dict(base)
    for key, value in over.items():
        value = {"name": value} if key in LASTING and isinstance(value, str) else value
        old = result.get(key)
        if not (isinstance(value, Mapping) and isinstance(old, Mapping)):
            result[key] = value
        elif value.get("name", old.get("name")) == old.get("name"):
            result[key] = {**old, **value, **_tables(old, value)}
        else:
            result[key] = {**{k: v for k, v in old.items() if k in LASTING.get(key, ())}, **value}
    return result


def _tables(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """The tables inside two sections (`model.lora`), merged field by field."""
    both = {name: (old[name], new[name]) for name in old.keys() & new.keys()}
    return {k: {**a, **b} for k, (a, b) in both.items() if isinstance(a, Mapping) and isinstance(b, Mapping)}


def parsed_override(text: str) -> dict[str, Any]:
    """Parse `section.field=value` to a table.

    Raises:
        RecipeError: if the text is not of this form.
    """
    path, equals, value = text.partition("=")
    if not equals:
        raise RecipeError(f"--set {text}: write it as section.field=value, for example local.lr=0.05")
    if path.count(".") > DEEPEST:
        raise RecipeError(f"--set {shortened(text)}: there is no such field")
    try:
        given = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        given = value.strip()
    except (RecursionError, ValueError):
        raise RecipeError(f"--set {shortened(text)}: its value cannot be read") from None
    return nested(path.strip(), given)


def nested(path: str, value: Any) -> dict[str, Any]:
    """Return a table with a value under a dotted path.

    >>> nested("split.alpha", 0.1)
    {'split': {'alpha': 0.1}}
    """
    for name in reversed(path.split(".")):
        value = {name: value}
    return dict(value)
