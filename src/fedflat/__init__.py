"""Flatness-aware federated learning: methods that find flat minima, from a recipe or in ten lines of Python."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedflat.errors import FedflatError
    from fedflat.federation.augment import Augment
    from fedflat.federation.datasets import Dataset, Samples
    from fedflat.federation.federation import Federation, federate
    from fedflat.method import Method
    from fedflat.parts import Part, option
    from fedflat.run import Result, train

__version__ = "0.1.0"

__all__ = [
    "Augment",
    "Dataset",
    "Federation",
    "FedflatError",
    "Method",
    "Part",
    "Result",
    "Samples",
    "federate",
    "option",
    "train",
]

_HOMES = {
    "fedflat.errors": ("FedflatError",),
    "fedflat.federation.augment": ("Augment",),
    "fedflat.federation.datasets": ("Dataset", "Samples"),
    "fedflat.federation.federation": ("Federation", "federate"),
    "fedflat.method": ("Method",),
    "fedflat.parts": ("Part", "option"),
    "fedflat.run": ("Result", "train"),
}


def __getattr__(name: str) -> Any:
    """Import on first use: the command line must answer before torch is loaded."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(home), name)
    raise AttributeError(f"module 'fedflat' has no attribute {name!r}")
