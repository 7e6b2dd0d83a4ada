"""Methods: parts, chains of parts, and the catalogue of published methods."""

from fedflat.methods.catalogue import CATALOGUE
from fedflat.methods.chain import Method
from fedflat.methods.parser import Written, concise, explain, parse, spell
from fedflat.methods.part import Part, RobustAverage, ServerView, Wrapper, option
from fedflat.methods.parts import ActiveModel, AllModels, CentralPrivacy, MetaStep, Privacy, ProductAverage
from fedflat.methods.uploads import Upload, Uploads, collect

__all__ = [
    "CATALOGUE",
    "ActiveModel",
    "AllModels",
    "CentralPrivacy",
    "MetaStep",
    "Method",
    "Part",
    "Privacy",
    "ProductAverage",
    "RobustAverage",
    "ServerView",
    "Upload",
    "Uploads",
    "Wrapper",
    "Written",
    "collect",
    "concise",
    "explain",
    "option",
    "parse",
    "spell",
]
