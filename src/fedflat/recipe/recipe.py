"""The recipe: everything that an experiment depends on, as one table with every value in effect."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from datetime import date, time
from typing import Any, Literal

from pydantic import Field, field_validator
from pydantic.fields import FieldInfo

from fedflat.recipe.problem import Data, Lora, Model, Split
from fedflat.recipe.section import Section
from fedflat.recipe.settings import (
    Admission,
    Checkpoint,
    Deployment,
    Engine,
    Evaluation,
    Local,
    Server,
    TrackerName,
)


class Recipe(Section):
    """An experiment. Equal recipes give bit-identical results on the same kind of machine."""

    seed: int = Field(0, ge=0, description="seed of all random draws")
    method: Any = Field("fedavg", description="a name, a sum such as 'feddyn + man(0.15)', a table or a list")
    task: str | None = Field(
        None,
        description="classification, regression, multi-label, next-token or package.module:Task, perhaps (loss=…)",
    )
    precision: Literal["float32", "float64", "bf16"] = Field(
        "float32", description="type of weights and samples; bf16 computes passes in bfloat16, the rest in float32"
    )
    trackers: list[TrackerName] = Field([], description="trackers that receive every round: tensorboard, mlflow, wandb")
    data: Data = Data()
    split: Split = Split()
    model: Model = Model()
    local: Local = Local()
    server: Server = Server()
    evaluation: Evaluation = Evaluation()
    admission: Admission = Admission()
    checkpoint: Checkpoint = Checkpoint()
    deployment: Deployment = Deployment()
    engine: Engine = Engine()

    @field_validator("trackers", mode="before")
    @classmethod
    def _one_tracker(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    def essentials(self) -> dict[str, Any]:
        """Return all fields that a run's numbers depend on, so without the rounds, checkpoints and cores."""
        where = {"engine": {"name", "workers", "address"}, "data": {"dir"}, "model": {"base"}}
        aside = dict.fromkeys(("trackers", "checkpoint", "deployment"), True)
        return self.model_dump(exclude={"server": {"rounds", "stop_loss"}, **where, **aside})

    @property
    def split_seed(self) -> int:
        """The seed of the split and of everything else that decides who holds which samples."""
        return self.seed if self.split.seed is None else self.split.seed

    @property
    def metric(self) -> str:
        """The name of the metric that tables, targets and checkpoints follow."""
        return self.evaluation.metric or "accuracy"

    def rank(self, value: float) -> float:
        """Return a number that is larger the better a value of the metric is."""
        return value if self.evaluation.best == "highest" else -value

    def beside(self, other: Recipe) -> dict[str, str]:
        """Return the settings in which this recipe differs from another, by dotted name, as TOML.

        >>> Recipe(method="feddyn", local=Local(lr=0.05)).beside(Recipe())
        {'method': '"feddyn"', 'local.lr': '0.05'}
        """
        mine, theirs = self._dotted(), other._dotted()
        return {name: toml(value) for name, value in mine.items() if value != theirs.get(name) and value is not None}

    def _dotted(self) -> dict[str, Any]:
        table = self.model_dump()
        inner = {f"{name}.{field}": value for name in SECTIONS for field, value in table.pop(name).items()}
        return table | inner

    def to_toml(self) -> str:
        """Return the recipe as TOML with every value in effect; `load` reads it back."""
        top = {name: value for name, value in self if name not in SECTIONS}
        tables = (f"\n[{name}]\n{_lines(getattr(self, name).model_dump())}" for name in SECTIONS)
        return "".join([_lines(top), *tables])


TABLES = {"model.lora": Lora}  # tables inside sections
SECTIONS = tuple(name for name, f in Recipe.model_fields.items() if isinstance(f.default, Section))


def section_fields(section: str) -> dict[str, FieldInfo]:
    """Return the fields of a section of the recipe."""
    default: Section = Recipe.model_fields[section].default
    return type(default).model_fields


def _lines(table: Mapping[str, Any]) -> str:
    return "".join(f"{key} = {toml(value)}\n" for key, value in table.items() if value is not None)


def toml(value: Any) -> str:
    """Spell a value as TOML, in one line.

    >>> toml({"name": "mlp", "hidden": [8], "scale": float("inf"), "bias": False})
    '{name = "mlp", hidden = [8], scale = inf, bias = false}'
    """
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k} = {toml(v)}" for k, v in value.items() if v is not None) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(toml, value)) + "]"
    if (isinstance(value, float) and not math.isfinite(value)) or isinstance(value, date | time):
        return str(value)
    return json.dumps(value, ensure_ascii=False)
