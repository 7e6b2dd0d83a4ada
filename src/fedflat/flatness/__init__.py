"""Flatness of a minimum: curvature, sharpness, norms, loss landscapes and activity–weight duality."""

from fedflat.flatness.activities import layers_of
from fedflat.flatness.comparison import Difference, Measurement, compare
from fedflat.flatness.duality import Duality, Pairing, duality
from fedflat.flatness.federated import FederatedHessian, HessianProduct, Portion, Weights
from fedflat.flatness.film import Film, film
from fedflat.flatness.groups import GroupSpectrum, by_class, by_client, weighted
from fedflat.flatness.hessian import (
    MATRICES,
    Eigen,
    Fisher,
    GaussNewton,
    Hessian,
    Matrix,
    Operator,
    matrix_of,
    top_eigenvalues,
)
from fedflat.flatness.interpolation import Interpolation, interpolate
from fedflat.flatness.intervals import Interval, hall, student
from fedflat.flatness.landscape import Landscape, eigen_plane, filter_normalised, landscape
from fedflat.flatness.layers import Activity, LayerFlatness, layers
from fedflat.flatness.locality import ClientFlatness, Locality, Place, locality
from fedflat.flatness.matching import Matching, match
from fedflat.flatness.measure import Flatness, Spectrum, measure, spectrum
from fedflat.flatness.norms import Capacity, LayerNorm, capacity, layer_norms, weight_norm
from fedflat.flatness.objective import Objective
from fedflat.flatness.pairing import DIRECTIONS, Direction, Pairs, pairs
from fedflat.flatness.projection import Plane, plane_through, principal_plane, surface
from fedflat.flatness.scale import Scaled, ScaleTest, scale_test
from fedflat.flatness.sharpness import AverageSharpness, adaptive_sharpness, ascent_sharpness, average_sharpness
from fedflat.flatness.spectrum import Density, Outliers, density, outliers, quadrature
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
from fedflat.flatness.traces import Trace, trace
from fedflat.flatness.track import LocalRound, Trajectory, trajectory

__all__ = [
    "DIRECTIONS",
    "MATRICES",
    "Activity",
    "AverageSharpness",
    "BlockCurvature",
    "Capacity",
    "ClientFlatness",
    "Curvature",
    "Density",
    "Difference",
    "Direction",
    "Duality",
    "Eigen",
    "FederatedHessian",
    "Film",
    "Fisher",
    "Flatness",
    "GaussNewton",
    "GroupSpectrum",
    "Hessian",
    "HessianProduct",
    "Hidden",
    "Interpolation",
    "Interval",
    "Landscape",
    "LayerFlatness",
    "LayerNorm",
    "LocalRound",
    "Locality",
    "Matching",
    "Matrix",
    "Measurement",
    "Objective",
    "Operator",
    "Outliers",
    "Pairing",
    "Pairs",
    "Place",
    "Plane",
    "Portion",
    "ScaleTest",
    "Scaled",
    "Spectrum",
    "Theory",
    "Trace",
    "Trajectory",
    "Weights",
    "adaptive_sharpness",
    "ascent_sharpness",
    "average_sharpness",
    "by_class",
    "by_client",
    "capacity",
    "client_curvatures",
    "compare",
    "curvature",
    "density",
    "duality",
    "eigen_plane",
    "film",
    "filter_normalised",
    "hall",
    "hidden_layers",
    "interpolate",
    "landscape",
    "layer_norms",
    "layers",
    "layers_of",
    "locality",
    "match",
    "matrix_of",
    "mean_over",
    "measure",
    "outliers",
    "over",
    "pairs",
    "permuted",
    "plane_through",
    "principal_plane",
    "quadrature",
    "rescaled",
    "scale_test",
    "spectrum",
    "student",
    "surface",
    "theory",
    "top_eigenvalues",
    "trace",
    "trajectory",
    "weight_norm",
    "weighted",
]
