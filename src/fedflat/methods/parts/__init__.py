"""The parts: one class for each idea of the papers. A method is a chain of parts."""

from fedflat.methods.parts.ascent import AdaptiveAscent, Ascent, InterpolatedAscent, LookbackAscent, SparingAscent
from fedflat.methods.parts.carried_descent import CarriedAdamW, CarriedMuon
from fedflat.methods.parts.compression import TopK
from fedflat.methods.parts.consensus import ConsensusAscent, PrintedConsensus
from fedflat.methods.parts.descent import LocalAdamW, LocalMuon
from fedflat.methods.parts.local_work import FallingRate, FrozenHead, MetaStep, RelaxedStart
from fedflat.methods.parts.low_rank import ProductAverage
from fedflat.methods.parts.protection import CentralPrivacy, LocalPrivacy, Privacy
from fedflat.methods.parts.proximal import AblatedAscent, ProximalAscent
from fedflat.methods.parts.pulls import ClientMomentum, ControlVariates, DynamicDual, MomentumControls, Proximal
from fedflat.methods.parts.robust import (
    Bucketing,
    CentredClipping,
    GeometricMedian,
    Krum,
    NormBound,
    TrimmedMean,
)
from fedflat.methods.parts.server_step import (
    ActiveModel,
    AdaptiveServer,
    AllModels,
    Extrapolation,
    NormalisedAveraging,
    ServerAscent,
    ServerMomentum,
    ServerStep,
    WeightAveraging,
)
from fedflat.methods.parts.terms import (
    ActivationNorm,
    Distillation,
    ModelContrast,
    MovingTeacher,
    NotTrueDistillation,
    TopEigenvalue,
)
from fedflat.methods.parts.weighted_momentum import WeightedMomentum

__all__ = [
    "AblatedAscent",
    "ActivationNorm",
    "ActiveModel",
    "AdaptiveAscent",
    "AdaptiveServer",
    "AllModels",
    "Ascent",
    "Bucketing",
    "CarriedAdamW",
    "CarriedMuon",
    "CentralPrivacy",
    "CentredClipping",
    "ClientMomentum",
    "ConsensusAscent",
    "ControlVariates",
    "Distillation",
    "DynamicDual",
    "Extrapolation",
    "FallingRate",
    "FrozenHead",
    "GeometricMedian",
    "InterpolatedAscent",
    "Krum",
    "LocalAdamW",
    "LocalMuon",
    "LocalPrivacy",
    "LookbackAscent",
    "MetaStep",
    "ModelContrast",
    "MomentumControls",
    "MovingTeacher",
    "NormBound",
    "NormalisedAveraging",
    "NotTrueDistillation",
    "PrintedConsensus",
    "Privacy",
    "ProductAverage",
    "Proximal",
    "ProximalAscent",
    "RelaxedStart",
    "ServerAscent",
    "ServerMomentum",
    "ServerStep",
    "SparingAscent",
    "TopEigenvalue",
    "TopK",
    "TrimmedMean",
    "WeightAveraging",
    "WeightedMomentum",
]
