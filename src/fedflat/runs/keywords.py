"""The settings of `train`: fields of the recipe by name, with the default recipe's values.

`Settings` is for type checkers and editors; what `help(train)` shows comes from the recipe. A test compares the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from inspect import Parameter, signature
from typing import Any, Literal, TypedDict

from fedflat.errors import RecipeError, nearest
from fedflat.recipe import BufferPolicy, Draws, Measure, Recipe, TrackerName, load, section_fields, stacked

Record = dict[str, Any]
# A name that occurs in two sections means the first of these.
SECTIONS = ("local", "server", "evaluation", "engine", "admission", "checkpoint")
TOP = ("seed", "precision", "trackers")
MODEL = ("buffers", "base", "base_sha256", "lora")


class Settings(TypedDict, total=False):
    """The keyword arguments of `train` that are fields of the recipe; docs/how-to.md describes them."""

    seed: int
    precision: Literal["float32", "float64", "bf16"]
    trackers: list[TrackerName]
    epochs: int
    steps: int | None
    batch: int
    lr: float
    lr_decay: float
    momentum: float
    nesterov: bool
    weight_decay: float
    clip: float
    clip_mode: Literal["loss_only", "official", "all"]
    rounds: int
    stop_loss: float | None
    cohort: int | float
    sampling: Literal["uniform", "bernoulli"]
    draws: Draws
    average: Literal["uniform", "samples"]
    server_lr: float
    every: int
    on: Literal["test", "train", "validation"]
    validation: float
    evaluation_model: Literal["server", "active", "all"]
    evaluation_batch: int
    measures: list[Measure]
    metric: str | None
    best: Literal["highest", "lowest"]
    margin: float
    radius: float
    target: float | None
    sharpness: int
    sharpness_samples: int
    engine: Literal["auto", "inline", "pool", "ray"]
    workers: int
    address: str | None
    device: Literal["cpu", "cuda", "mps"]
    group: int
    graph: bool
    quorum: int
    patience: int
    failures: Literal["drop", "stop"]
    deadline: float
    max_norm: float
    max_ratio: float
    outlier: float
    max_samples: int
    max_share: float
    checkpoint_every: int
    keep: int
    model_buffers: BufferPolicy
    model_base: str | None
    model_base_sha256: str | None
    model_lora: Any


@cache
def fields() -> Mapping[str, tuple[str, str]]:
    """The section and the field that each setting stands for; fields of the recipe itself have no section."""
    found = {name: ("", name) for name in TOP} | {"engine": ("engine", "name")}
    for section in SECTIONS:
        for name in section_fields(section):
            plain = name not in found and name not in ("name", "model")  # `model` is the network
            if plain:
                found[name] = (section, name)
            elif name != "name":
                found[f"{section}_{name}"] = (section, name)
    return found | {f"model_{name}": ("model", name) for name in MODEL}


def sections(settings: Mapping[str, Any], options: Mapping[str, Any] | None = None) -> Record:
    """Return the tables of a recipe for these settings.

    Args:
        settings: values by the names of `Settings`, also with the section's name in front (`evaluation_every`), and
            options of the network as `model_hidden`.
        options: more options of the network.

    Raises:
        RecipeError: if a setting is unknown.

    >>> sections({"lr": 0.1, "server_lr": 0.5, "model_hidden": [32]})
    {'local': {'lr': 0.1}, 'server': {'lr': 0.5}, 'model': {'hidden': [32]}}
    """
    table: Record = {}
    whole = {f"{section}_{name}": (section, name) for section in SECTIONS for name in section_fields(section)}
    for name, value in settings.items():
        if name.startswith("model_"):
            place = ("model", name.removeprefix("model_"))
        elif name in fields() or name in whole:
            place = fields().get(name) or whole[name]
        else:
            known = [*fields(), *whole, "model", "method", "task", "loss", "out", "resume", "callbacks", "verbose"]
            raise RecipeError(f"train: there is no setting {name!r}; {nearest(name, known)}")
        section, field = place
        (table.setdefault(section, {}) if section else table)[field] = value
    if options:
        table["model"] = {**table.get("model", {}), **options}
    return table


def on_default(table: Mapping[str, Any]) -> Recipe:
    """Return the default recipe, which `fedflat run` starts from too, with these tables on top."""
    return stacked({}, table)


def with_settings(function: Callable[..., Any]) -> None:
    """Let `help` and tab completion show every setting of a function with `**settings`, with default and type."""
    known = signature(function)
    parameters = [each for each in known.parameters.values() if each.kind is not Parameter.VAR_KEYWORD]
    function.__signature__ = known.replace(parameters=[*parameters, *_parameters()])  # type: ignore[attr-defined]


def _parameters() -> Iterator[Parameter]:
    recipe, kinds = load(), Settings.__annotations__
    for name, (section, field) in fields().items():
        default = getattr(getattr(recipe, section) if section else recipe, field)
        kind = getattr(kinds[name], "__forward_arg__", kinds[name])
        yield Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=kind)
