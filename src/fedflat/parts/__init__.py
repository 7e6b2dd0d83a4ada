"""The ideas of the papers, one class each; a method is a chain of them."""

from fedflat.parts.ascent import AdaptiveAscent, Ascent, ConsensusAscent, InterpolatedAscent, LookbackAscent
from fedflat.parts.local_work import FallingRate, FrozenHead, MetaStep
from fedflat.parts.part import Part, Range, ServerState, Upload, Uploads, option
from fedflat.parts.privacy import CentralPrivacy, LocalPrivacy, Privacy
from fedflat.parts.proximal import AblatedAscent, ProximalAscent
from fedflat.parts.pulls import ClientMomentum, ControlVariates, DynamicDual, Proximal
from fedflat.parts.robust import TrimmedMean
from fedflat.parts.server import (
    AdaptiveServer,
    NormalisedAveraging,
    ServerAscent,
    ServerMomentum,
    ServerStep,
    WeightAveraging,
)
from fedflat.parts.terms import ActivationNorm, Distillation, ModelContrast, NotTrueDistillation, TopEigenvalue

__all__ = [
    "AblatedAscent",
    "ActivationNorm",
    "AdaptiveAscent",
    "AdaptiveServer",
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
    "LocalPrivacy",
    "LookbackAscent",
    "MetaStep",
    "ModelContrast",
    "NormalisedAveraging",
    "NotTrueDistillation",
    "Part",
    "Privacy",
    "Proximal",
    "ProximalAscent",
    "Range",
    "ServerAscent",
    "ServerMomentum",
    "ServerState",
    "ServerStep",
    "TopEigenvalue",
    "TrimmedMean",
    "Upload",
    "Uploads",
    "WeightAveraging",
    "option",
]
