"""The ideas of the papers, one class each; a method is a chain of them."""

from fedflat.parts.ascent import Ascent
from fedflat.parts.part import Part, ServerState, Upload, Uploads, option
from fedflat.parts.pulls import DynamicDual, Proximal
from fedflat.parts.terms import ActivationNorm

__all__ = [
    "ActivationNorm",
    "Ascent",
    "DynamicDual",
    "Part",
    "Proximal",
    "ServerState",
    "Upload",
    "Uploads",
    "option",
]
