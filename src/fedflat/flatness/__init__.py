"""Flatness of a minimum: curvature, sharpness, norms, loss landscapes and activity–weight duality."""

from fedflat.flatness.activities import layers_of
from fedflat.flatness.comparison import Difference, Measurement, paired_differences
from fedflat.flatness.door import Door, objective_of, of_model
from fedflat.flatness.dual import binned, correlations, draw_duality
from fedflat.flatness.duality import Duality, Pairing, decompose
from fedflat.flatness.federated import FederatedHessian, HessianProduct, Portion, TopEigenvalue, Weights
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
from fedflat.flatness.intervals import LEVEL, Interval, hall, quantile, stepped, student
from fedflat.flatness.lab import Comparison, Sharpness, compare, duality, load, look, sharpness
from fedflat.flatness.landscape import Landscape, eigen_plane, filter_normalised, landscape
from fedflat.flatness.layers import Activity, LayerFlatness, layers
from fedflat.flatness.locality import ClientFlatness, Locality, Place, locality
from fedflat.flatness.matching import Matching, match
from fedflat.flatness.measure import Flatness, Spectrum, measure, spectrum
from fedflat.flatness.norms import Capacity, LayerNorm, capacity, layer_norms, weight_norm
from fedflat.flatness.objective import Objective
from fedflat.flatness.pairing import DIRECTIONS, Direction, Pairs, pairs
from fedflat.flatness.projection import Plane, plane_through, principal_plane, surface
from fedflat.flatness.routes import draw_path, draw_trajectory
from fedflat.flatness.samples import batches_of
from fedflat.flatness.scale import Scaled, ScaleTest, scale_test
from fedflat.flatness.sharpness import AverageSharpness, adaptive_sharpness, ascent_sharpness, average_sharpness
from fedflat.flatness.spectral import draw_densities, draw_density, draw_eigenvalues
from fedflat.flatness.spectrum import Density, Outliers, density, outliers, quadrature
from fedflat.flatness.symmetry import Hidden, hidden_layers, permuted, rescaled
from fedflat.flatness.terrain import (
    Scale,
    check_comparable,
    draw_landscape,
    draw_landscapes,
    draw_lines,
    draw_map,
    draw_surface,
    steep,
)
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
    "LEVEL",
    "MATRICES",
    "Activity",
    "AverageSharpness",
    "BlockCurvature",
    "Capacity",
    "ClientFlatness",
    "Comparison",
    "Curvature",
    "Density",
    "Difference",
    "Direction",
    "Door",
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
    "Scale",
    "ScaleTest",
    "Scaled",
    "Sharpness",
    "Spectrum",
    "Theory",
    "TopEigenvalue",
    "Trace",
    "Trajectory",
    "Weights",
    "adaptive_sharpness",
    "ascent_sharpness",
    "average_sharpness",
    "batches_of",
    "binned",
    "by_class",
    "by_client",
    "capacity",
    "check_comparable",
    "client_curvatures",
    "compare",
    "correlations",
    "curvature",
    "decompose",
    "density",
    "draw_densities",
    "draw_density",
    "draw_duality",
    "draw_eigenvalues",
    "draw_landscape",
    "draw_landscapes",
    "draw_lines",
    "draw_map",
    "draw_path",
    "draw_surface",
    "draw_trajectory",
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
    "load",
    "locality",
    "look",
    "match",
    "matrix_of",
    "mean_over",
    "measure",
    "objective_of",
    "of_model",
    "outliers",
    "over",
    "paired_differences",
    "pairs",
    "permuted",
    "plane_through",
    "principal_plane",
    "quadrature",
    "quantile",
    "rescaled",
    "scale_test",
    "sharpness",
    "spectrum",
    "steep",
    "stepped",
    "student",
    "surface",
    "theory",
    "top_eigenvalues",
    "trace",
    "trajectory",
    "weight_norm",
    "weighted",
]
