"""Flatness-aware federated learning: methods that find flat minima, from a recipe or in ten lines of Python."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedflat import flatness, methods, models, report
    from fedflat.errors import FedflatError
    from fedflat.federation import Augment, Dataset, Federation, Samples, federate
    from fedflat.methods import Method, Part, option
    from fedflat.runs import Result, train
    from fedflat.tasks import Metric, Task
    from fedflat.trusted import trust

__version__ = "0.2.0"

__all__ = [
    "Augment",
    "Dataset",
    "Federation",
    "FedflatError",
    "Method",
    "Metric",
    "Part",
    "Result",
    "Samples",
    "Task",
    "federate",
    "flatness",
    "methods",
    "models",
    "option",
    "report",
    "train",
    "trust",
]

ROOMS = ("flatness", "methods", "models", "report")  # subpackages that are part of the public namespace
_HOMES = {
    "fedflat.errors": ("FedflatError",),
    "fedflat.federation": ("Augment", "Dataset", "Federation", "Samples", "federate"),
    "fedflat.methods": ("Method", "Part", "option"),
    "fedflat.runs": ("Result", "train"),
    "fedflat.tasks": ("Metric", "Task"),
    "fedflat.trusted": ("trust",),
}


def __getattr__(name: str) -> Any:
    """Import a name on first use, so that the command line responds before torch is loaded."""
    if name in ROOMS:
        return import_module(f"fedflat.{name}")
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(home), name)
    raise AttributeError(f"module 'fedflat' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
