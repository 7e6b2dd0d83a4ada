"""How flat a minimum is: curvature, sharpness, norms, landscapes, and the duality of activities and weights."""

from fedflat.flatness.activities import layers_of
from fedflat.flatness.duality import Duality, Pairing, duality
from fedflat.flatness.federated import FederatedHessian, HessianProduct, Portion
from fedflat.flatness.hessian import Eigen, Hessian, Operator, Trace, top_eigenvalues, trace
from fedflat.flatness.landscape import Landscape, eigen_plane, filter_normalised, landscape
from fedflat.flatness.layers import Activity, LayerFlatness, layers
from fedflat.flatness.measure import Flatness, Spectrum, measure, spectrum
from fedflat.flatness.norms import Capacity, LayerNorm, capacity, layer_norms, weight_norm
from fedflat.flatness.objective import Objective
from fedflat.flatness.pairing import DIRECTIONS, Pairs, pairs
from fedflat.flatness.sharpness import AverageSharpness, adaptive_sharpness, ascent_sharpness, average_sharpness
from fedflat.flatness.spectrum import Density, density, hutch_plus_plus, quadrature

__all__ = [
    "DIRECTIONS",
    "Activity",
    "AverageSharpness",
    "Capacity",
    "Density",
    "Duality",
    "Eigen",
    "FederatedHessian",
    "Flatness",
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
    "Trace",
    "adaptive_sharpness",
    "ascent_sharpness",
    "average_sharpness",
    "capacity",
    "density",
    "duality",
    "eigen_plane",
    "filter_normalised",
    "hutch_plus_plus",
    "landscape",
    "layer_norms",
    "layers",
    "layers_of",
    "measure",
    "pairs",
    "quadrature",
    "spectrum",
    "top_eigenvalues",
    "trace",
    "weight_norm",
]
