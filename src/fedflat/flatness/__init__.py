"""Flatness of a minimum: curvature, sharpness, norms, loss landscapes and activity–weight duality."""

from fedflat.flatness.activities import layers_of
from fedflat.flatness.door import Door, objective_of, of_model
from fedflat.flatness.dual import binned, correlations, draw_duality
from fedflat.flatness.duality import Duality, Pairing, decompose
from fedflat.flatness.federated import FederatedHessian, HessianProduct, Portion
from fedflat.flatness.hessian import Eigen, GaussNewton, Hessian, Operator, Trace, top_eigenvalues, trace
from fedflat.flatness.lab import Comparison, Sharpness, compare, duality, load, look, sharpness
from fedflat.flatness.landscape import Landscape, eigen_plane, filter_normalised, landscape
from fedflat.flatness.layers import Activity, LayerFlatness, layers
from fedflat.flatness.measure import Flatness, Spectrum, measure, spectrum
from fedflat.flatness.norms import Capacity, LayerNorm, capacity, layer_norms, weight_norm
from fedflat.flatness.objective import Objective
from fedflat.flatness.pairing import DIRECTIONS, Direction, Pairs, pairs
from fedflat.flatness.samples import batches_of
from fedflat.flatness.sharpness import AverageSharpness, adaptive_sharpness, ascent_sharpness, average_sharpness
from fedflat.flatness.spectral import draw_densities, draw_density, draw_eigenvalues
from fedflat.flatness.spectrum import Density, density, hutch_plus_plus, quadrature
from fedflat.flatness.terrain import draw_landscape, draw_landscapes
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
    "Comparison",
    "Curvature",
    "Density",
    "Direction",
    "Door",
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
    "Sharpness",
    "Spectrum",
    "Theory",
    "Trace",
    "adaptive_sharpness",
    "ascent_sharpness",
    "average_sharpness",
    "batches_of",
    "binned",
    "capacity",
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
    "duality",
    "eigen_plane",
    "filter_normalised",
    "hutch_plus_plus",
    "landscape",
    "layer_norms",
    "layers",
    "layers_of",
    "load",
    "look",
    "mean_over",
    "measure",
    "objective_of",
    "of_model",
    "over",
    "pairs",
    "quadrature",
    "sharpness",
    "spectrum",
    "theory",
    "top_eigenvalues",
    "trace",
    "weight_norm",
]
