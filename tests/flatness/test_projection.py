"""Planes of weight space against dense SVD in float64, and trajectories in them."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedflat.errors import RecipeError, RunError
from fedflat.flatness import (
    Film,
    Landscape,
    LocalRound,
    Objective,
    Trajectory,
    film,
    landscape,
    plane_through,
    principal_plane,
    surface,
    trajectory,
)


def objective(dtype=torch.float64):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).to(dtype)
    x, y = torch.randn(10, 3, dtype=dtype), torch.arange(10) % 2
    return Objective(module, F.cross_entropy, [(x, y)])


def walk(rounds, size, seed=0):
    chance = torch.Generator().manual_seed(seed)
    return torch.randn(rounds, size, generator=chance, dtype=torch.float64).cumsum(dim=0)


def test_the_principal_plane_is_that_of_a_dense_svd():
    models = walk(7, 200)
    plane = principal_plane(models)
    _, sigma, right = torch.linalg.svd(models - models.mean(dim=0), full_matrices=False)
    assert torch.allclose(plane.axes @ plane.axes.T, torch.eye(2, dtype=torch.float64), atol=1e-12)
    for axis, expected in zip(plane.axes, right, strict=False):
        assert abs(float(axis @ expected)) == pytest.approx(1, abs=1e-10)
    shares = sigma.square() / sigma.square().sum()
    assert plane.shares == pytest.approx(shares[:2].tolist(), rel=1e-9)
    assert torch.equal(plane.origin, models[-1])


@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e9])
@pytest.mark.parametrize("seed", range(4))
def test_each_axis_points_from_the_first_to_the_last_model(scale, seed):
    models = scale * (20 + walk(5, 6, seed))
    plane = principal_plane(models)
    assert bool((plane.axes @ (models[-1] - models[0]) > 0).all())
    assert plane.shares == pytest.approx(principal_plane(walk(5, 6, seed)).shares, rel=1e-6)


def test_what_lies_in_the_plane_is_projected_exactly():
    plane = principal_plane(walk(5, 60))
    points = torch.tensor([[0.0, 0.0], [1.5, -2.0], [-3.0, 0.25]], dtype=torch.float64)
    models = plane.at(points)
    torch.testing.assert_close(plane.project(models), points, rtol=0, atol=1e-12)
    assert float(plane.distances(models).max()) < 1e-12
    away = torch.linalg.svd(plane.axes).Vh[-1]  # orthogonal to the plane
    assert plane.distances(models + 2 * away).tolist() == pytest.approx([2.0] * 3)


def test_three_models_lie_in_their_plane():
    a, b, c = walk(3, 50, seed=1)
    plane = plane_through(a, b, c)
    assert float(plane.distances(torch.stack([a, b, c])).max()) < 1e-12
    (zero, first, second) = plane.project(torch.stack([a, b, c]))
    assert zero.tolist() == [0, 0]
    assert first.tolist() == pytest.approx([float((b - a).norm()), 0], abs=1e-12)
    assert float(second.norm()) == pytest.approx(float((c - a).norm())) and second[1] > 0


def test_models_that_span_no_plane_are_refused():
    line = torch.arange(4.0)[:, None] * torch.arange(1.0, 6.0)
    with pytest.raises(RecipeError, match="2 models do not span a plane"):
        principal_plane(line[:2])
    for models in (line, line * 0):
        with pytest.raises(RecipeError, match="lie on one line"):
            principal_plane(models)
        with pytest.raises(RecipeError, match="lie on one line"):
            plane_through(*models[:3])


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_a_line_is_what_is_a_million_times_as_long_as_wide(scale):
    def triangle(width):
        return scale * torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.5, width]], dtype=torch.float64)

    for made in (principal_plane, lambda models: plane_through(*models)):
        assert made(triangle(1e-5)).axes.shape == (2, 2)
        with pytest.raises(RecipeError, match="lie on one line"):
            made(triangle(1e-7))


def test_the_surface_is_the_objective_at_the_points_of_the_plane():
    f = objective()
    plane = principal_plane(walk(4, f.size))
    around = torch.tensor([[-1.0, 0.0], [2.0, 0.5]], dtype=torch.float64)
    seen = surface(f, plane, around, points=5)
    # A quarter of 3 on either side; the other axis first gets a third of 3, and then a quarter of that.
    np.testing.assert_allclose(seen.axes[:, [0, -1]], [[-1.75, 2.75], [-0.5, 1.0]])
    for i, j in ((0, 0), (2, 4), (3, 1)):
        there = plane.at(torch.tensor([[seen.axes[0][i], seen.axes[1][j]]]))[0]
        with f.at(there):
            assert seen.values[i, j] == pytest.approx(f.value(), rel=1e-12)
    with f.at(plane.origin):
        assert seen.centre == f.value()


@pytest.fixture
def found():
    f = objective()
    models = f.weights + 0.1 * walk(4, f.size)
    local = LocalRound(3, models[2], {4: models[2] + 0.1, 1: models[3] - 0.2}, models[3])
    return f, models, trajectory(f, models, [0, 1, 2, 3], principal_plane(models), local, points=5)


def test_a_trajectory_has_the_loss_of_each_model_and_of_the_last_one_in_the_plane_too(found):
    f, models, seen = found
    for model, loss in zip(models, seen.losses, strict=True):
        with f.at(model):
            assert loss == f.value()
    assert seen.surface.centre == pytest.approx(seen.losses[-1], rel=1e-12)
    plane = principal_plane(models)
    assert seen.clients.tolist() == [1, 4]
    np.testing.assert_allclose(seen.clients_path, plane.project(torch.stack([models[3] - 0.2, models[2] + 0.1])))
    np.testing.assert_allclose(seen.ends, plane.project(models[2:]).numpy())
    assert seen.off[-1] < 1e-12 < seen.off[0]


def test_the_surface_of_a_trajectory_holds_all_that_is_shown(found):
    f, models, _ = found
    far = LocalRound(3, models[0] - 5, {}, models[3] + 5)
    for local in (far, LocalRound(3, models[2], {2: models[1] + 5}, models[3])):
        seen = trajectory(f, models, [0, 1, 2, 3], None, local, points=3)
        for places in (seen.path, seen.clients_path, seen.ends):
            assert (seen.surface.axes[:, 0] < places).all() and (places < seen.surface.axes[:, -1]).all()
    assert trajectory(f, models, None, None, far, points=3).clients.tolist() == []


def test_a_trajectory_is_seen_in_the_given_plane_and_the_caption_names_the_variance_of_a_principal_one(found):
    f, models, seen = found
    plane = plane_through(*models[:3])
    other = trajectory(f, models, None, plane, points=3)
    np.testing.assert_array_equal(other.path, plane.project(models).numpy())
    assert np.isnan(other.shares).tolist() == [True, True] and other.local_round == 0
    assert other.caption() == "4 models of a run in a plane of weight space"
    one, two = principal_plane(models).shares
    assert seen.shares.tolist() == [one, two]
    assert seen.caption() == (
        "4 models of a run and 2 clients of round 3 in a plane of weight space, "
        f"with {one:.0%} and {two:.0%} of the variance"
    )


def test_a_trajectory_is_read_back_and_a_damaged_one_refused(found, tmp_path):
    *_, seen = found
    seen.save(tmp_path / "a.npz")
    again = Trajectory.load(tmp_path / "a.npz")
    for name in ("rounds", "path", "losses", "off", "shares", "clients", "clients_path", "clients_off", "ends"):
        np.testing.assert_array_equal(getattr(again, name), getattr(seen, name))
    np.testing.assert_array_equal(again.surface.values, seen.surface.values)
    assert again.local_round == 3
    content = dict(np.load(tmp_path / "a.npz"))
    wrongs = {"path": np.zeros((3, 2)), "rounds": np.zeros(4), "ends": np.zeros(2), "values": np.zeros(3)}
    # Arrays that lost their first dimension together still fit each other.
    lost = [("rounds", "path", "losses", "off"), ("clients", "clients_path", "clients_off")]
    alone = [{name: content[name][0] for name in names} for names in lost]
    for change in [*({name: wrong} for name, wrong in wrongs.items()), *alone]:
        np.savez(tmp_path / "b.npz", **content | change)
        with pytest.raises(RunError, match=r"b\.npz: its (arrays|values) do not fit"):
            Trajectory.load(tmp_path / "b.npz")
    (tmp_path / "c.npz").write_bytes((tmp_path / "a.npz").read_bytes()[:100])
    with pytest.raises(RunError, match="not a trajectory file"):
        Trajectory.load(tmp_path / "c.npz")
    with pytest.raises(RunError, match="cannot be read"):
        Trajectory.load(tmp_path / "d.npz")


def test_a_film_is_the_landscape_around_each_model_and_is_read_back(tmp_path):
    f = objective()
    models, directions = f.weights + 0.1 * walk(3, f.size), torch.eye(f.size, dtype=torch.float64)[:2]
    seen = film(f, directions, [0, 1, 5], [*models], span=0.5, points=3)
    for model, each in zip(models, seen.landscapes, strict=True):
        with f.at(model):
            np.testing.assert_array_equal(each.values, landscape(f, directions, 0.5, 3).values)
    seen.save(tmp_path / "a.npz")
    again = Film.load(tmp_path / "a.npz")
    assert again.rounds == [0, 1, 5]
    for one, two in zip(seen.landscapes, again.landscapes, strict=True):
        assert np.array_equal(one.values, two.values) and one.centre == two.centre
    content = dict(np.load(tmp_path / "a.npz"))
    empty = {"rounds": np.array([], np.int64), "centres": np.zeros(0), "values": np.zeros((0, 3, 3))}
    for wrong in (
        {"rounds": np.array([5, 2, 0])}, {"rounds": np.array([0.0, 1.0, 5.0])}, {"rounds": np.array(3)},
        {"rounds": np.array([], np.int64)}, empty, {"centres": np.zeros(2)}, {"values": np.zeros((3, 2, 3))},
    ):  # fmt: skip
        np.savez(tmp_path / "b.npz", **content | wrong)
        with pytest.raises(RunError, match="do not fit"):
            Film.load(tmp_path / "b.npz")
    Film([4], seen.landscapes[:1]).save(tmp_path / "c.npz")
    assert Film.load(tmp_path / "c.npz").rounds == [4]


def test_a_straight_trajectory_still_has_a_surface_of_some_width():
    f = objective()
    plane = principal_plane(walk(4, f.size))
    seen = surface(f, plane, torch.tensor([[-3.0, 0.0], [0.0, 0.0]]), points=3)
    assert isinstance(seen, Landscape)
    assert math.isclose(np.ptp(seen.axes[1]) * 3, np.ptp(seen.axes[0]))
