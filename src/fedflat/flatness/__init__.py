"""Flatness of a minimum: curvature, sharpness, norms, loss landscapes and activity–weight duality."""

from fedflat.flatness.activities import layers_of
from fedflat.flatness.duality import Duality, Pairing, duality
from fedflat.flatness.federated import FederatedHessian, HessianProduct, Portion
from fedflat.flatness.hessian import Eigen, GaussNewton, Hessian, Operator, Trace, top_eigenvalues, trace
from fedflat.flatness.landscape import Landscape, eigen_plane, filter_normalised, landscape
from fedflat.flatness.layers import Activity, LayerFlatness, layers
from fedflat.flatness.measure import Flatness, Spectrum, measure, spectrum
from fedflat.flatness.norms import Capacity, LayerNorm, capacity, layer_norms, weight_norm
from fedflat.flatness.objective import Objective
from fedflat.flatness.pairing import DIRECTIONS, Direction, Pairs, pairs
from fedflat.flatness.sharpness import AverageSharpness, adaptive_sharpness, ascent_sharpness, average_sharpness
from fedflat.flatness.spectrum import Density, density, hutch_plus_plus, quadrature
from fedflat.flatness.theory import (
    BlockCurvature,
    Curvature,
    Theory,
    client_curvatures,
    curvature,
    mean_over,
    over,
    theory,
)

__all__ = [
    "DIRECTIONS",
    "Activity",
    "AverageSharpness",
    "BlockCurvature",
    "Capacity",
    "Curvature",
    "Density",
    "Direction",
    "Duality",
    "Eigen",
    "FederatedHessian",
    "Flatness",
    "GaussNewton",
    "Hessian",
    "HessianProduct",
    "Landscape",
    "LayerFlatness",
    "LayerNorm",
    "Objective",
    "Operator",
    "Pairing",
    "Pairs",
    "Portion",
    "Spectrum",
    "Theory",
    "Trace",
    "adaptive_sharpness",
    "ascent_sharpness",
    "average_sharpness",
    "capacity",
    "client_curvatures",
    "curvature",
    "density",
    "duality",
    "eigen_plane",
    "filter_normalised",
    "hutch_plus_plus",
    "landscape",
    "layer_norms",
    "layers",
    "layers_of",
    "mean_over",
    "measure",
    "over",
    "pairs",
    "quadrature",
    "spectrum",
    "theory",
    "top_eigenvalues",
    "trace",
    "weight_norm",
]
