"""Flatness of a minimum: curvature, sharpness, norms, loss landscapes and activity–weight duality."""

from fedflat.flatness.activities import layers_of
from fedflat.flatness.comparison import Difference, Measurement, compare
from fedflat.flatness.duality import Duality, Pairing, duality
from fedflat.flatness.federated import FederatedHessian, HessianProduct, Portion, Weights
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
from fedflat.flatness.intervals import Interval, hall, student
from fedflat.flatness.landscape import Landscape, eigen_plane, filter_normalised, landscape
from fedflat.flatness.layers import Activity, LayerFlatness, layers
from fedflat.flatness.locality import ClientFlatness, Locality, Place, locality
from fedflat.flatness.measure import Flatness, Spectrum, measure, spectrum
from fedflat.flatness.norms import Capacity, LayerNorm, capacity, layer_norms, weight_norm
from fedflat.flatness.objective import Objective
from fedflat.flatness.pairing import DIRECTIONS, Direction, Pairs, pairs
from fedflat.flatness.sharpness import AverageSharpness, adaptive_sharpness, ascent_sharpness, average_sharpness
from fedflat.flatness.spectrum import Density, Outliers, density, outliers, quadrature
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
    "Fisher",
    "Flatness",
    "GaussNewton",
    "GroupSpectrum",
    "Hessian",
    "HessianProduct",
    "Interval",
    "Landscape",
    "LayerFlatness",
    "LayerNorm",
    "Locality",
    "Matrix",
    "Measurement",
    "Objective",
    "Operator",
    "Outliers",
    "Pairing",
    "Pairs",
    "Place",
    "Portion",
    "Spectrum",
    "Theory",
    "Trace",
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
    "filter_normalised",
    "hall",
    "landscape",
    "layer_norms",
    "layers",
    "layers_of",
    "locality",
    "matrix_of",
    "mean_over",
    "measure",
    "outliers",
    "over",
    "pairs",
    "quadrature",
    "spectrum",
    "student",
    "theory",
    "top_eigenvalues",
    "trace",
    "weight_norm",
    "weighted",
]
