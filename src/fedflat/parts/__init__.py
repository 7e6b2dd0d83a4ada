"""The ideas of the papers, one class each; a method is a chain of them."""

from fedflat.parts.ascent import AdaptiveAscent, Ascent, InterpolatedAscent, LookbackAscent
from fedflat.parts.consensus import ConsensusAscent, PrintedConsensus
from fedflat.parts.descent import LocalAdamW, LocalMuon
from fedflat.parts.local_work import FallingRate, FrozenHead, MetaStep
from fedflat.parts.part import Part, Range, ServerView, Wrapper, option
from fedflat.parts.privacy import CentralPrivacy, LocalPrivacy, Privacy
from fedflat.parts.proximal import AblatedAscent, ProximalAscent
from fedflat.parts.pulls import ClientMomentum, ControlVariates, DynamicDual, Proximal
from fedflat.parts.robust import TrimmedMean
from fedflat.parts.server import (
    ActiveModel,
    AdaptiveServer,
    AllModels,
    NormalisedAveraging,
    ServerAscent,
    ServerMomentum,
    ServerStep,
    WeightAveraging,
)
from fedflat.parts.terms import (
    ActivationNorm,
    Distillation,
    ModelContrast,
    MovingTeacher,
    NotTrueDistillation,
    TopEigenvalue,
)
from fedflat.parts.uploads import Sums, Upload, Uploads, collect

__all__ = [
    "AblatedAscent",
    "ActivationNorm",
    "ActiveModel",
    "AdaptiveAscent",
    "AdaptiveServer",
    "AllModels",
    "Ascent",
    "CentralPrivacy",
    "ClientMomentum",
    "ConsensusAscent",
    "ControlVariates",
    "Distillation",
    "DynamicDual",
    "FallingRate",
    "FrozenHead",
    "InterpolatedAscent",
    "LocalAdamW",
    "LocalMuon",
    "LocalPrivacy",
    "LookbackAscent",
    "MetaStep",
    "ModelContrast",
    "MovingTeacher",
    "NormalisedAveraging",
    "NotTrueDistillation",
    "Part",
    "PrintedConsensus",
    "Privacy",
    "Proximal",
    "ProximalAscent",
    "Range",
    "ServerAscent",
    "ServerMomentum",
    "ServerStep",
    "ServerView",
    "Sums",
    "TopEigenvalue",
    "TrimmedMean",
    "Upload",
    "Uploads",
    "WeightAveraging",
    "Wrapper",
    "collect",
    "option",
]
