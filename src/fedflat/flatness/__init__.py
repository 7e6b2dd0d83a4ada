"""Flatness of a minimum: curvature, sharpness, norms, loss landscapes and activity–weight duality."""

from fedflat.flatness.activities import layers_of
from fedflat.flatness.duality import Duality, Pairing, duality
from fedflat.flatness.federated import FederatedHessian, HessianProduct, Portion
from fedflat.flatness.film import Film, film
from fedflat.flatness.hessian import Eigen, GaussNewton, Hessian, Operator, Trace, top_eigenvalues, trace
from fedflat.flatness.interpolation import Interpolation, interpolate
from fedflat.flatness.landscape import Landscape, eigen_plane, filter_normalised, landscape
from fedflat.flatness.layers import Activity, LayerFlatness, layers
from fedflat.flatness.matching import Matching, match
from fedflat.flatness.measure import Flatness, Spectrum, measure, spectrum
from fedflat.flatness.norms import Capacity, LayerNorm, capacity, layer_norms, weight_norm
from fedflat.flatness.objective import Objective
from fedflat.flatness.pairing import DIRECTIONS, Direction, Pairs, pairs
from fedflat.flatness.projection import Plane, plane_through, principal_plane, surface
from fedflat.flatness.scale import Scaled, ScaleTest, scale_test
from fedflat.flatness.sharpness import AverageSharpness, adaptive_sharpness, ascent_sharpness, average_sharpness
from fedflat.flatness.spectrum import Density, density, hutch_plus_plus, quadrature
from fedflat.flatness.symmetry import Hidden, hidden_layers, permuted, rescaled
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
from fedflat.flatness.track import LocalRound, Trajectory, trajectory

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
    "Film",
    "Flatness",
    "GaussNewton",
    "Hessian",
    "HessianProduct",
    "Hidden",
    "Interpolation",
    "Landscape",
    "LayerFlatness",
    "LayerNorm",
    "LocalRound",
    "Matching",
    "Objective",
    "Operator",
    "Pairing",
    "Pairs",
    "Plane",
    "Portion",
    "ScaleTest",
    "Scaled",
    "Spectrum",
    "Theory",
    "Trace",
    "Trajectory",
    "adaptive_sharpness",
    "ascent_sharpness",
    "average_sharpness",
    "capacity",
    "client_curvatures",
    "curvature",
    "density",
    "duality",
    "eigen_plane",
    "film",
    "filter_normalised",
    "hidden_layers",
    "hutch_plus_plus",
    "interpolate",
    "landscape",
    "layer_norms",
    "layers",
    "layers_of",
    "match",
    "mean_over",
    "measure",
    "over",
    "pairs",
    "permuted",
    "plane_through",
    "principal_plane",
    "quadrature",
    "rescaled",
    "scale_test",
    "spectrum",
    "surface",
    "theory",
    "top_eigenvalues",
    "trace",
    "trajectory",
    "weight_norm",
]
