"""Recipes: everything that an experiment depends on, as a validated table with every value in effect."""

from fedflat.recipe.checks import validated
from fedflat.recipe.problem import BufferPolicy, Data, Lora, Model, Split
from fedflat.recipe.reading import (
    PRESETS,
    load,
    nested,
    overridden,
    parsed,
    parsed_override,
    read_table,
    read_text,
    stacked,
)
from fedflat.recipe.recipe import SECTIONS, Recipe, section_fields, toml
from fedflat.recipe.section import Draws, Section
from fedflat.recipe.settings import (
    Admission,
    Checkpoint,
    Deployment,
    Engine,
    Evaluation,
    Local,
    Measure,
    Server,
    TrackerName,
)

__all__ = [
    "PRESETS",
    "SECTIONS",
    "Admission",
    "BufferPolicy",
    "Checkpoint",
    "Data",
    "Deployment",
    "Draws",
    "Engine",
    "Evaluation",
    "Local",
    "Lora",
    "Measure",
    "Model",
    "Recipe",
    "Section",
    "Server",
    "Split",
    "TrackerName",
    "load",
    "nested",
    "overridden",
    "parsed",
    "parsed_override",
    "read_table",
    "read_text",
    "section_fields",
    "stacked",
    "toml",
    "validated",
]
