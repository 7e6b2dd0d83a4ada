"""Landscapes against closed forms, their directions, and what is left behind: nothing but a file."""

import io
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import nn

from fedflat.errors import RecipeError, RunError
from fedflat.flatness import Hessian, Objective, top_eigenvalues
from fedflat.flatness.landscape import Landscape, eigen_plane, filter_normalised, landscape, plane_of


def half_square(z, y):
    return 0.5 * (z - y).square().mean()


@pytest.fixture(scope="module")
def quadratic():
    """An objective at its minimum, f(w* + v) = ½ vᵀAv, and A."""
    chance = torch.Generator().manual_seed(0)
    x = torch.randn(50, 6, generator=chance, dtype=torch.float64)
    module = nn.Linear(6, 1, bias=False).double()
    y = x @ module.weight.detach().T
    return Objective(module, half_square, [(x[:13], y[:13]), (x[13:], y[13:])]), x.T @ x / 50


def conv_net(dtype=torch.float64):
    torch.manual_seed(0)
    layers = nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)
    x, y = torch.randn(12, 2, 4, 4, dtype=dtype), torch.randint(0, 3, (12,))
    return Objective(nn.Sequential(*layers).to(dtype), F.cross_entropy, [(x[:5], y[:5]), (x[5:], y[5:])])


def filters(objective, vector):
    """The norm of every filter, by the name of its weights."""
    views = objective.layout.views(vector)
    return {name: view.flatten(1).norm(dim=1) for name, view in views.items() if view.ndim > 1}


def test_on_a_quadratic_each_value_is_half_the_quadratic_form(quadratic):
    objective, matrix = quadratic
    one, two = torch.randn(2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    seen = landscape(objective, [one, two], span=0.7, points=5)
    assert seen.axes.tolist() == [[-0.7, -0.35, 0.0, 0.35, 0.7]] * 2
    for i, a in enumerate(seen.axes[0]):
        for j, b in enumerate(seen.axes[1]):
            v = a * one + b * two
            assert seen.values[i, j] == pytest.approx(float(v @ matrix @ v / 2), abs=1e-10)


def test_one_direction_makes_the_middle_row_of_two(quadratic):
    objective, _ = quadratic
    plane = torch.eye(6, dtype=torch.float64)[:2]
    curve, surface = (landscape(objective, plane[:k], span=2.0, points=7) for k in (1, 2))
    assert curve.values.shape == (7,) and surface.values.shape == (7, 7)
    np.testing.assert_array_equal(curve.values, surface.values[:, 3])


def test_the_eigen_plane_bends_by_the_two_top_eigenvalues(quadratic):
    objective, matrix = quadratic
    eigen = top_eigenvalues(Hessian(objective), k=3, tolerance=1e-12)
    h = 0.5
    f = landscape(objective, eigen_plane(eigen), span=h, points=3).values
    expected = torch.linalg.eigvalsh(matrix).flip(0)
    assert (f[0, 1] - 2 * f[1, 1] + f[2, 1]) / h**2 == pytest.approx(float(expected[0]), rel=1e-9)
    assert (f[1, 0] - 2 * f[1, 1] + f[1, 2]) / h**2 == pytest.approx(float(expected[1]), rel=1e-9)
    assert f[2, 2] + f[0, 0] - f[0, 2] - f[2, 0] == pytest.approx(0, abs=1e-10)  # eigenvectors do not mix


@given(span=st.floats(0.01, 100), half=st.integers(1, 6))
def test_the_grid_has_its_ends_and_its_centre_to_the_bit(span, half, quadratic):
    objective, _ = quadratic
    seen = landscape(objective, [torch.ones(6)], span, points=2 * half + 1)
    axis = seen.axes[0]
    assert (axis[0], axis[half], axis[-1]) == (-span, 0, span)
    assert np.array_equal(axis, -axis[::-1])
    assert seen.values[half] == seen.centre == objective.value()


def test_filters_are_as_long_as_the_weights_and_biases_and_norms_stand_still():
    objective = conv_net()
    expected = filters(objective, objective.weights)
    still = objective.layout.mask(lambda name: name not in expected)
    assert still.sum() == 4 + 4 + 4 + 3
    for direction in filter_normalised(objective, 2, seed=3):
        seen = filters(objective, direction)
        assert seen.keys() == {"0.weight", "4.weight"}
        for name, norms in expected.items():
            torch.testing.assert_close(seen[name], norms, rtol=1e-8, atol=0)
        assert not direction[still].any()


def test_orthogonal_directions_keep_the_first_and_the_norms():
    objective = conv_net()
    free, orthogonal = (filter_normalised(objective, 2, seed=3, orthogonal=flag) for flag in (False, True))
    assert abs(float(free[0] @ free[1])) > 1e-3
    assert float(orthogonal[0] @ orthogonal[1]) == pytest.approx(0, abs=1e-12)
    torch.testing.assert_close(orthogonal[0], free[0], rtol=1e-8, atol=1e-12)
    for name, norms in filters(objective, objective.weights).items():
        torch.testing.assert_close(filters(objective, orthogonal[1])[name], norms, rtol=1e-8, atol=0)


def test_a_filter_of_one_weight_has_no_second_orthogonal_direction():
    objective = Objective(nn.Linear(1, 5), half_square, [(torch.ones(2, 1), torch.ones(2, 5))])
    one, two = filter_normalised(objective, 2, orthogonal=True)
    assert one.any() and not two.any()


def test_directions_follow_the_seed_and_not_the_precision_or_the_global_generator():
    torch.manual_seed(1)
    first = filter_normalised(conv_net(), 1, seed=7)
    torch.manual_seed(2)
    assert torch.equal(first, filter_normalised(conv_net(), 1, seed=7))
    assert not torch.equal(first, filter_normalised(conv_net(), 1, seed=8))

    single = conv_net(torch.float32)
    double = conv_net(torch.float32)
    double.module.double()
    torch.testing.assert_close(filter_normalised(single, seed=7).double(), filter_normalised(double, seed=7))


def test_a_layer_alone_moves_alone():
    objective = conv_net()
    layer = objective.of(["4.weight"])
    direction = filter_normalised(layer, 1, seed=0)
    whole = torch.zeros(objective.size, dtype=torch.float64)
    objective.layout.views(whole)["4.weight"].copy_(direction.view(3, 16))
    alone, among = landscape(layer, direction, points=3), landscape(objective, [whole], points=3)
    np.testing.assert_array_equal(alone.values, among.values)


def test_the_weights_come_back_to_the_bit_even_if_the_loss_raises():
    objective = conv_net(torch.float32)
    before, calls = objective.weights, []

    def failing(z, y):
        calls.append(float(z.sum()))
        if len(calls) > 9:
            raise ValueError("no more")
        return F.cross_entropy(z, y)

    broken = Objective(objective.module, failing, objective.batches)
    plane = filter_normalised(objective)
    with pytest.raises(ValueError, match="no more"):
        landscape(broken, plane, points=5)
    assert len(set(calls)) > 5  # it had been elsewhere
    assert torch.equal(objective.weights, before)
    landscape(objective, plane, points=3)
    assert torch.equal(objective.weights, before)


def test_only_forward_passes_two_batches_a_point():
    objective, graphs = conv_net(), []

    def watching(z, y):
        graphs.append(z.requires_grad)
        return F.cross_entropy(z, y)

    watched = Objective(objective.module, watching, objective.batches)
    landscape(watched, filter_normalised(watched), points=3)
    assert len(graphs) == 2 * (9 + 1)  # and once at the centre
    assert not any(graphs)


def test_overflow_stays_in_the_values_and_makes_the_rise_infinite(quadratic):
    objective, _ = quadratic
    seen = landscape(objective, [torch.full((6,), 1e200, dtype=torch.float64)], points=3)
    assert seen.values.tolist() == [math.inf, seen.centre, math.inf]
    assert seen.rise == math.inf
    assert Landscape(seen.axes, np.array([1.0, 0.5, math.nan]), 0.5).rise == math.inf
    assert Landscape(seen.axes, np.array([1.0, 0.5, 3.0]), 0.5).rise == 2.5


@given(
    values=arrays.arrays(np.float64, st.sampled_from([(3,), (5,), (3, 3), (4, 4)]), elements=st.floats()),
    centre=st.floats(),
)
def test_what_is_saved_is_loaded(values, centre, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "run.npz"
    axes = np.tile(np.linspace(-1, 1, len(values)), (values.ndim, 1))
    Landscape(axes, values, centre).save(path)
    loaded = Landscape.load(path)
    np.testing.assert_array_equal(loaded.axes, axes)
    np.testing.assert_array_equal(loaded.values, values)
    np.testing.assert_array_equal(loaded.centre, centre)


def npz(**content):
    file = io.BytesIO()
    np.savez(file, **content)
    return file.getvalue()


GOOD = dict(axes=np.array([[-1.0, 0.0, 1.0]] * 2), values=np.zeros((3, 3)), centre=np.float64(0))
BAD = {
    "empty": b"",
    "text": b"loss, 0.5",
    "truncated": npz(**GOOD)[:-40],
    "no values": npz(axes=np.zeros((1, 3)), centre=0.0),
    "objects": npz(**GOOD | dict(values=np.array([None, {}, "x"]))),
    "another grid": npz(**GOOD | dict(values=np.zeros((3, 4)))),
    "a curve for a plane": npz(**GOOD | dict(values=np.zeros(3))),
    "flat axes": npz(**GOOD | dict(axes=np.zeros(3))),
    "integers": npz(**GOOD | dict(values=np.zeros((3, 3), dtype=int))),
    "three directions": npz(**GOOD | dict(axes=np.array([[-1.0, 0.0, 1.0]] * 3), values=np.zeros((3, 3, 3)))),
    "no points": npz(**GOOD | dict(axes=np.zeros((1, 0)), values=np.zeros(0))),
    "axes that do not rise": npz(**GOOD | dict(axes=np.zeros((2, 3)))),
    "two centres": npz(**GOOD | dict(centre=np.zeros(2))),
}


@pytest.mark.parametrize("content", BAD.values(), ids=BAD)
def test_a_file_that_is_no_landscape_gives_one_sentence_with_its_name(content, tmp_path):
    path = tmp_path / "run.npz"
    path.write_bytes(npz(**GOOD))
    assert Landscape.load(path).values.shape == (3, 3)
    path.write_bytes(content)
    with pytest.raises(RunError, match=r"run\.npz: .* measure the landscape again$"):
        Landscape.load(path)


def test_a_place_that_is_not_there_gives_one_sentence(quadratic, tmp_path):
    path = tmp_path / "nowhere" / "run.npz"
    with pytest.raises(RunError, match=r"run\.npz: the landscape cannot be read \(No such file or directory\)"):
        Landscape.load(path)
    with pytest.raises(RunError, match=r"run\.npz: the landscape cannot be written \(No such file or directory\)"):
        landscape(quadratic[0], [torch.ones(6)], points=3).save(path)


@pytest.mark.parametrize(
    ("directions", "options", "sentence"),
    [
        (torch.zeros(3, 6), {}, "3 directions given; give one for a curve or two for a surface"),
        ([], {}, "0 directions given"),
        ([torch.zeros(5)], {}, r"a direction has shape \(5,\); for this model it must be \(6,\)"),
        (torch.zeros(6), {}, "6 directions given"),
        (torch.zeros(1, 6), {"span": 0.0}, "span is 0.0; it must be a positive number"),
        (torch.zeros(1, 6), {"span": math.nan}, "span is nan"),
        (torch.zeros(1, 6), {"points": 2}, "points is 2; it must be at least 3"),
    ],
)
def test_a_wrong_request_is_named(directions, options, sentence, quadratic):
    with pytest.raises(RecipeError, match=f"landscape: {sentence}"):
        landscape(quadratic[0], directions, **options)


@pytest.mark.parametrize("seed", [1, 2])
def test_a_named_plane_has_the_top_eigenvectors_or_orthogonal_filters_of_its_seed(seed):
    objective = conv_net()
    top = top_eigenvalues(Hessian(objective), 2, seed=seed)
    assert torch.equal(plane_of(objective, "eigen", seed=seed), eigen_plane(top))
    assert not torch.equal(plane_of(objective, "eigen", seed=0), eigen_plane(top))
    (curve,) = plane_of(objective, "eigen", 1, seed)
    assert torch.equal(curve, eigen_plane(top)[0]) and float(curve.norm()) == pytest.approx(1, rel=1e-12)
    for count in (1, 2):
        drawn = filter_normalised(objective, count, seed, orthogonal=True)
        assert torch.equal(plane_of(objective, "random", count, seed), drawn)


def test_a_caption_says_how_many_points_there_are():
    axes = np.array([[-0.5, 0.0, 0.5]])
    assert Landscape(axes, np.ones(3), 1.0).caption() == "Loss on a curve of 3 points from -0.5 to 0.5"
    plane = Landscape(np.repeat(axes, 2, axis=0), np.ones((3, 3)), 1.0)
    assert plane.caption() == "Loss on a plane of 3 × 3 points from -0.5 to 0.5"


def test_one_eigenvector_is_no_plane(quadratic):
    with pytest.raises(RecipeError, match="one eigenvector does not span a plane"):
        eigen_plane(top_eigenvalues(Hessian(quadratic[0]), k=1))


class Trap:
    """Unpickled, it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_a_file_with_pickled_objects_is_refused_before_any_of_them_is_made(tmp_path):
    axes, trap = np.linspace(-1, 1, 3)[None], np.array([Trap(tmp_path / "sprung")], dtype=object)
    np.savez(tmp_path / "planted.npz", axes=axes, values=trap, centre=1.0)
    with pytest.raises(RunError, match=r"planted\.npz: not a landscape file"):
        Landscape.load(tmp_path / "planted.npz")
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("kind", [np.float32, np.int64])
@pytest.mark.parametrize("wrong", ["axes", "values", "centre"])
def test_a_file_with_other_numbers_than_float64_is_refused(kind, wrong, tmp_path):
    content = {"axes": np.array([[-1.0, 0.0, 1.0]]), "values": np.ones(3), "centre": np.array(1.0)}
    np.savez(tmp_path / "other.npz", **content | {wrong: content[wrong].astype(kind)})
    with pytest.raises(RunError, match=r"other\.npz: its values do not fit its axes"):
        Landscape.load(tmp_path / "other.npz")


def test_a_file_whose_axes_have_a_dimension_too_many_is_refused(tmp_path):
    np.savez(tmp_path / "deep.npz", axes=np.array([[[-1.0], [0.0], [1.0]]]), values=np.ones((3, 1)), centre=1.0)
    with pytest.raises(RunError, match=r"deep\.npz: its values do not fit its axes"):
        Landscape.load(tmp_path / "deep.npz")
