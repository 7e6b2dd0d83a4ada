"""Paths, trajectories, films and rescalings in three lines: any data, and results that print, draw and save."""

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fedflat import flatness
from fedflat.errors import FedflatError, RecipeError
from fedflat.flatness import (
    LocalRound,
    Objective,
    film,
    filter_normalised,
    interpolate,
    principal_plane,
    scale_test,
    trajectory,
)

X = torch.randn(24, 5, generator=torch.Generator().manual_seed(0))
Y = torch.arange(24) % 3


def network(seed):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@torch.no_grad()
def loss_of(model):
    return float(F.cross_entropy(model(X), Y))


def local():
    return LocalRound(2, flat(network(0)), {4: flat(network(5)), 7: flat(network(6))}, flat(network(1)))


RESULTS = {
    "path": lambda: interpolate(network(0), network(1), (X, Y), points=5, match=True),
    "trajectory": lambda: trajectory(network(0), (X, Y), models=[network(k) for k in range(4)], points=3),
    "clients": lambda: trajectory(network(0), (X, Y), models=[network(k) for k in range(3)], local=local(), points=3),
    "film": lambda: film(
        f := Objective(network(0), F.cross_entropy, [(X, Y)]), filter_normalised(f), [1, 3], [f.weights] * 2, points=3
    ),
    "rescaling": lambda: scale_test(network(0), (X, Y), factor=10.0),
}


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_prints_tabulates_draws_and_is_read_back(name, tmp_path):
    found = RESULTS[name]()
    rows = [*found.rows()]
    assert str(found).splitlines()[0] == found.caption() and all(str(key) in str(found) for key in rows[0])
    assert len(found.table()) == len(rows) and "<table>" in found._repr_html_()
    figure, axes = plt.subplots()
    assert found.plot(axes) is axes and (axes.lines or axes.patches)
    plt.close(figure)
    path = tmp_path / ("a.npz" if name in ("trajectory", "clients", "film") else "a.json")
    found.save(path)
    again = flatness.load(path)
    assert type(again) is type(found) and str(again) == str(found)


def test_a_path_is_the_same_for_a_loader_and_for_batches():
    a, b = network(0), network(1)
    loader = DataLoader(TensorDataset(X, Y), batch_size=24)
    paths = [interpolate(a.train(), b, data, points=4) for data in (loader, (X, Y), [(X, Y)])]
    for each in paths:
        np.testing.assert_allclose(each.losses, paths[0].losses, rtol=1e-6)
    assert paths[0].losses[0] == pytest.approx(loss_of(a)) and a.training
    assert f"barrier {paths[0].barrier:.4g} at α" in paths[0].caption()
    assert [row["above the chord"] for row in paths[0].rows()] == pytest.approx(paths[0].excess.tolist())


def test_modules_are_projected_as_their_weights_into_their_principal_plane():
    models = [network(k) for k in range(4)]
    found = trajectory(models[0], (X, Y), models=models, points=3)
    weights = torch.stack([flat(model) for model in models])
    np.testing.assert_allclose(found.path, principal_plane(weights).project(weights), atol=1e-6)
    assert found.losses == pytest.approx([loss_of(model) for model in models])
    assert found.rounds.tolist() == [0, 1, 2, 3] and "4 models of a run in a plane" in found.caption()
    rows = RESULTS["clients"]().rows()
    assert [row["model"] for row in rows[3:]] == ["client 4, round 2", "client 7, round 2", "average, round 2"]


def test_a_rescaling_has_one_ratio_that_is_1():
    rows = {row[""]: row for row in RESULTS["rescaling"]().rows()}
    assert rows["sharpness, adaptive (scale-invariant)"]["ratio"] == pytest.approx(1, rel=1e-3)
    assert rows["‖w‖"]["ratio"] > 2 and rows["largest change of an output"]["rescaled by 10"] < 1e-5


def test_a_mistake_is_one_sentence():
    with pytest.raises(RecipeError, match="4 models and 3 rounds"):
        trajectory(network(0), (X, Y), models=[network(k) for k in range(4)], rounds=[1, 2, 3])
    with pytest.raises(RecipeError, match="2 models do not span a plane"):
        trajectory(network(0), (X, Y), models=[network(0), network(1)])
    with pytest.raises(FedflatError, match="there are no samples"):
        interpolate(network(0), network(1), [])
    broken = network(1)
    with torch.no_grad():
        broken[0].weight[0, 0] = torch.nan
    with pytest.raises(FedflatError, match="not finite"):
        interpolate(network(0), broken, (X, Y))
    weights = torch.stack([flat(network(0)), flat(network(1)), flat(broken)])
    with pytest.raises(FedflatError, match="the weights of round 2 are not finite"):
        trajectory(network(0), (X, Y), models=weights)
