"""The base classes of a recipe's sections."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, model_validator

Draws = Literal["fedflat", "fedsol", "fl-simulator", "fedman"]


class Section(BaseModel):
    """A table of the recipe: immutable, without unknown fields or silent conversions."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Named(Section):
    """A section that can also be written as a bare name: `data = "digits"`."""

    @model_validator(mode="before")
    @classmethod
    def _bare_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value
