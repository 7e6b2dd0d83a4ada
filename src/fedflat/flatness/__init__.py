"""Flatness of a minimum: curvature, sharpness, norms, loss landscapes and activity–weight duality."""

from fedflat.flatness.activities import layers_of
from fedflat.flatness.door import Door, objective_of, of_model
from fedflat.flatness.dual import binned, correlations, draw_duality
from fedflat.flatness.duality import Duality, Pairing, decompose
from fedflat.flatness.federated import FederatedHessian, HessianProduct, Portion
from fedflat.flatness.film import Film, film
from fedflat.flatness.hessian import Eigen, GaussNewton, Hessian, Operator, Trace, top_eigenvalues, trace
from fedflat.flatness.interpolation import Interpolation, interpolate
from fedflat.flatness.lab import Comparison, Sharpness, compare, duality, load, look, sharpness
from fedflat.flatness.landscape import Landscape, eigen_plane, filter_normalised, landscape
from fedflat.flatness.layers import Activity, LayerFlatness, layers
from fedflat.flatness.matching import Matching, match
from fedflat.flatness.measure import Flatness, Spectrum, measure, spectrum
from fedflat.flatness.norms import Capacity, LayerNorm, capacity, layer_norms, weight_norm
from fedflat.flatness.objective import Objective
from fedflat.flatness.pairing import DIRECTIONS, Direction, Pairs, pairs
from fedflat.flatness.projection import Plane, plane_through, principal_plane, surface
from fedflat.flatness.samples import batches_of
from fedflat.flatness.scale import Scaled, ScaleTest, scale_test
from fedflat.flatness.sharpness import AverageSharpness, adaptive_sharpness, ascent_sharpness, average_sharpness
from fedflat.flatness.spectral import draw_densities, draw_density, draw_eigenvalues
from fedflat.flatness.spectrum import Density, density, hutch_plus_plus, quadrature
from fedflat.flatness.symmetry import Hidden, hidden_layers, permuted, rescaled
from fedflat.flatness.terrain import (
    Scale,
    check_comparable,
    draw_landscape,
    draw_landscapes,
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
from fedflat.flatness.track import LocalRound, Trajectory, trajectory

__all__ = [
    "DIRECTIONS",
    "Activity",
    "AverageSharpness",
    "BlockCurvature",
    "Capacity",
    "Comparison",
    "Curvature",
    "Density",
    "Direction",
    "Door",
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
    "Scale",
    "ScaleTest",
    "Scaled",
    "Sharpness",
    "Spectrum",
    "Theory",
    "Trace",
    "Trajectory",
    "adaptive_sharpness",
    "ascent_sharpness",
    "average_sharpness",
    "batches_of",
    "binned",
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
    "draw_map",
    "draw_surface",
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
    "load",
    "look",
    "match",
    "mean_over",
    "measure",
    "objective_of",
    "of_model",
    "over",
    "pairs",
    "permuted",
    "plane_through",
    "principal_plane",
    "quadrature",
    "rescaled",
    "scale_test",
    "sharpness",
    "spectrum",
    "steep",
    "surface",
    "theory",
    "top_eigenvalues",
    "trace",
    "trajectory",
    "weight_norm",
]
