"""All numbers about one minimum: each is what its own function says, and the record can be written as JSON."""

import json
import math
from dataclasses import asdict

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedflat.cli.flatness import plain
from fedflat.flatness import (
    Flatness,
    Hessian,
    Objective,
    Outliers,
    Spectrum,
    Trace,
    adaptive_sharpness,
    ascent_sharpness,
    average_sharpness,
    capacity,
    density,
    layers,
    matrix_of,
    measure,
    outliers,
    spectrum,
    top_eigenvalues,
    trace,
    weight_norm,
)
from fedflat.flatness.layers import Activity, LayerFlatness


def linear():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.ReLU(), nn.Linear(5, 10))


def convolutional():
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.GroupNorm(1, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(27, 10)
    )


@pytest.fixture(params=[linear, convolutional])
def objective(digits, request):
    torch.manual_seed(0)
    batches = [digits.held_out("train", start, start + 60) for start in (0, 60)]
    return Objective(request.param(), F.cross_entropy, batches)


def test_each_number_is_that_of_its_own_function(objective):
    found = measure(objective, k=3, products=16, rho=0.1, adaptive_rho=0.3, seed=7)
    average = average_sharpness(objective, 0.1, seed=7)
    eigen = top_eigenvalues(Hessian(objective), 3, seed=7)
    assert found.samples == 120
    assert found.loss == objective.value()
    assert found.spectrum.eigenvalues == eigen.values.tolist()
    assert found.spectrum.residuals == eigen.residuals.tolist()
    assert found.spectrum.ratio == pytest.approx(eigen.ratio)
    assert found.spectrum.trace == trace(Hessian(objective), 16, seed=7)
    assert found.ascent_sharpness == ascent_sharpness(objective, 0.1)
    assert (found.average_sharpness, found.average_sharpness_error) == (average.mean, average.error)
    assert (found.average_sharpness_low, found.average_sharpness_high) == (average.low, average.high)
    assert found.adaptive_sharpness == adaptive_sharpness(objective, 0.3)
    assert found.weight_norm == weight_norm(objective.module)
    assert found.log10_capacity == capacity(objective.module, objective.batches[0][0]).log10


def test_all_products_are_counted_and_none_of_them_crosses_a_wire(objective):
    hessian = Hessian(objective)
    seen = spectrum(hessian, k=2, products=8, steps=6)
    lanczos = top_eigenvalues(Hessian(objective), 2).products
    traced, quadrature = 8, 6
    assert seen.products == hessian.products == lanczos + traced + quadrature
    assert seen.bytes == 0


def test_density_and_layers_are_made_only_if_asked_for(objective):
    plain = measure(objective, k=1, products=6)
    assert (plain.layers, plain.spectrum.density) == ([], None)
    full = measure(objective, k=1, products=6, by_layer=True, steps=8, seed=2)
    assert full.layers == layers(objective, seed=2)
    expected = density(Hessian(objective), 8, probes=1, seed=2)
    assert torch.equal(full.spectrum.density.nodes[0], expected.nodes[0])
    assert torch.equal(full.spectrum.density.weights[0], expected.weights[0])
    # The largest node of the quadrature is a Ritz value: it never lies above λ₁.
    assert float(expected.nodes[0].max()) <= full.spectrum.eigenvalues[0] * (1 + 1e-5)


def test_a_density_takes_no_more_steps_than_there_are_dimensions():
    x = torch.randn(30, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    module = nn.Linear(3, 1, bias=False).double()
    objective = Objective(module, lambda z, y: 0.5 * (z - y).square().mean(), [(x, x[:, :1])])
    seen = spectrum(Hessian(objective), k=3, products=6, steps=100)
    expected = torch.linalg.eigvalsh(x.T @ x / 30)
    torch.testing.assert_close(seen.density.nodes[0], expected)
    assert seen.outliers == outliers(seen.density)
    torch.testing.assert_close(torch.tensor(seen.eigenvalues, dtype=torch.float64), expected.flip(0))
    assert seen.ratio == pytest.approx(float(expected[2] / expected[0]))


def test_the_record_has_the_ratio_or_the_reason_why_there_is_none():
    def of(*values):
        found = Spectrum(list(values), [0.0] * len(values), Trace(1, 0, 1, 1, 1), products=1)
        return found.ratio, found.record().get("ratio_missing")

    assert of(6.0, 3.0, 1.5) == (4.0, None)
    assert of(6.0, -2.0) == (None, "λ2 = -2 is not positive")


def spectrum_of(*values, apart=None):
    residuals = [value / 100 for value in values]
    return Spectrum(list(values), residuals, Trace(10.0, 1.0, 8, 7.0, 14.0), products=20, outliers=apart)


def cells(found):
    return [tuple(row.values()) for row in found.rows()]


def test_the_rows_of_a_spectrum_are_its_numbers():
    total = ("trace", 10.0, 1.0, 7.0, 14.0)
    assert list(spectrum_of(6.0).rows()[0]) == ["quantity", "value", "±", "low", "high"]
    assert cells(spectrum_of(6.0)) == [("λ1", 6.0, 0.06, None, None), total]
    assert cells(spectrum_of(6.0, 3.0, apart=Outliers([6.0], 3.0))) == [
        ("λ1", 6.0, 0.06, None, None),
        ("λ2", 3.0, 0.03, None, None),
        ("λ1/λ2", 2.0, None, None, None),
        ("outliers above the bulk", 1, None, None, None),
        total,
    ]


def test_the_rows_of_a_measurement_are_its_numbers():
    def layer(name):
        return LayerFlatness(name, 4, [5.0, 4.0], Trace(9.0, 0.5, 8, 8.0, 11.0), Activity(1, 1, 1, 7.0, False), True)

    numbers = dict(ascent_sharpness=0.2, adaptive_sharpness=0.3, weight_norm=30.0, log10_capacity=2.5)
    average = {"": 0.5, "_error": 0.1, "_low": 0.4, "_high": 0.7}
    numbers |= {f"average_sharpness{end}": value for end, value in average.items()}
    found = Flatness(samples=1200, loss=1.5, spectrum=spectrum_of(6.0), layers=[layer("fc"), layer("")], **numbers)
    assert cells(found) == [
        ("loss", 1.5, None, None, None),
        *cells(found.spectrum),
        ("sharpness, one ascent", 0.2, None, None, None),
        ("sharpness, average", 0.5, 0.1, 0.4, 0.7),
        ("sharpness, adaptive (scale-invariant)", 0.3, None, None, None),
        ("‖w‖", 30.0, None, None, None),
        ("capacity, log10 V_L", 2.5, None, None, None),
        ("fc: λ1 of its block", 5.0, None, None, None),
        ("fc: trace of its block", 9.0, 0.5, 8.0, 11.0),
        ("fc: MAN's bound on λ1", 7.0, None, None, None),
        ("the model: λ1 of its block", 5.0, None, None, None),
        ("the model: trace of its block", 9.0, 0.5, 8.0, 11.0),
        ("the model: MAN's bound on λ1", 7.0, None, None, None),
    ]
    assert found.record() == asdict(found) | {"spectrum": found.spectrum.record()}
    assert found.record()["spectrum"]["ratio"] == 1.0


class Viewed(nn.Module):
    """A model that cannot process an empty batch, because −1 is then not a number."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(64, 10)

    def forward(self, x):
        return self.fc(x.view(len(x), -1))


def test_the_capacity_is_computed_with_a_sample(digits):
    torch.manual_seed(0)
    objective = Objective(Viewed(), F.cross_entropy, [digits.held_out("train", 0, 9)])
    square = float(objective.module.fc.weight.detach().square().sum())  # ‖W‖² · ‖W‖_F²/‖W‖² of a single layer
    assert measure(objective, k=1, products=6).log10_capacity == pytest.approx(math.log10(square), rel=1e-5)


@pytest.mark.parametrize("matrix", ["ggn", "fisher"])
def test_another_matrix_has_its_own_spectrum(objective, matrix):
    found = measure(objective, k=2, products=16, matrix=matrix).spectrum
    expected = spectrum(matrix_of(objective, matrix), 2, 16)
    assert found == expected and found.matrix == matrix
    assert found.eigenvalues != measure(objective, k=2, products=16).spectrum.eigenvalues


def test_a_wanted_relative_error_is_passed_on(objective):
    found = measure(objective, k=1, products=8, relative_error=0.2).spectrum.trace
    assert found == trace(Hessian(objective), 8, relative_error=0.2) and found.products > 8


def test_measuring_leaves_the_model_where_it_was_to_the_bit(objective):
    before = {name: tensor.clone() for name, tensor in objective.module.state_dict().items()}
    measure(objective, k=1, products=6, by_layer=True, steps=3)
    assert all(torch.equal(tensor, before[name]) for name, tensor in objective.module.state_dict().items())


def test_the_same_seed_repeats_the_numbers_and_another_changes_only_what_is_drawn(objective):
    first, again, other = (measure(objective, k=1, products=16, seed=seed) for seed in (0, 0, 1))
    assert first == again
    assert first.spectrum.trace != other.spectrum.trace
    assert first.average_sharpness != other.average_sharpness
    assert first.spectrum.eigenvalues == pytest.approx(other.spectrum.eigenvalues, rel=1e-4)
    assert (first.loss, first.ascent_sharpness) == (other.loss, other.ascent_sharpness)


def test_the_record_becomes_json_with_every_number(objective):
    found = measure(objective, k=2, products=6, by_layer=True, steps=4)
    read = json.loads(json.dumps(plain(asdict(found)), allow_nan=False))
    assert read["spectrum"]["eigenvalues"] == found.spectrum.eigenvalues
    assert read["spectrum"]["trace"]["mean"] == found.spectrum.trace.mean
    assert read["spectrum"]["density"]["nodes"] == [nodes.tolist() for nodes in found.spectrum.density.nodes]
    assert [layer["name"] for layer in read["layers"]] == [layer.name for layer in found.layers]
    assert read["layers"][0]["activity"]["bound"] == found.layers[0].activity.bound


def test_what_is_not_finite_becomes_null_in_json():
    assert plain({"a": math.inf, "b": (math.nan, torch.tensor([1.5, -math.inf])), "c": None, "d": "x"}) == {
        "a": None,
        "b": [None, [1.5, None]],
        "c": None,
        "d": "x",
    }


def test_blocks_are_measured_without_biases_if_asked_for(objective):
    found = measure(objective, k=1, products=6, by_layer=True, bias=False).layers
    assert found == layers(objective, bias=False) and not any(layer.bias for layer in found)
