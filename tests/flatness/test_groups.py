"""The spectrum of each class's and each client's loss, against dense float64 matrices."""

from contextlib import closing

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, hessian

from fedflat.engine.inline import Inline
from fedflat.errors import DataError, RecipeError
from fedflat.flatness import HessianProduct, Objective, Portion, by_class, by_client, locality, weighted
from fedflat.flatness.locality import ClientFlatness, Locality, Place
from fedflat.methods.parser import parse
from fedflat.models.vector import Network
from fedflat.recipe import Local, Server
from fedflat.rounds.server import first_state, view
from fedflat.rounds.setup import Broadcast, Problem


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 10))


def dense(module, x, y):
    """The Hessian of the mean cross-entropy as one matrix."""
    parameters = {n: p.detach() for n, p in module.named_parameters()}
    sizes = [p.numel() for p in parameters.values()]

    def value(vector):
        views = (v.view_as(p) for v, p in zip(vector.split(sizes), parameters.values(), strict=True))
        return F.cross_entropy(functional_call(module, dict(zip(parameters, views, strict=True)), (x,)), y)

    return hessian(value)(torch.cat([p.reshape(-1) for p in parameters.values()])).detach()


def problem_of(federation, average="samples", method="fedavg"):
    made = Problem.of(
        federation.to(torch.float64), Network(small(), torch.float64), parse(method), Local(batch=0, epochs=2, lr=0.3)
    )
    made.recipe = made.recipe.model_copy(update={"server": Server(average=average)})
    return made


def test_each_class_has_the_spectrum_of_its_own_samples(digits):
    module = small().double()
    x, y = (part[:90] for part in digits.to(torch.float64).held_out("train", 0, 90))
    found = by_class(Objective(module, F.cross_entropy, [(x[:40], y[:40]), (x[40:], y[40:])]), products=60)
    assert [each.name for each in found] == [f"class {label}" for label in range(10)]
    for label, each in enumerate(found):
        own = dense(module, x[y == label], y[y == label])
        assert each.samples == int((y == label).sum())
        assert each.loss == pytest.approx(
            float(F.cross_entropy(module(x[y == label]), y[y == label]).detach()), rel=1e-9
        )
        assert each.lambda1 == pytest.approx(float(torch.linalg.eigvalsh(own)[-1]), rel=1e-3)
        assert each.trace.mean == pytest.approx(float(own.trace()), rel=1e-9), "written out: 55 parameters"
    whole = dense(module, x, y)
    assert sum(e.samples / 90 * e.trace.mean for e in found) == pytest.approx(float(whole.trace()), rel=1e-9)
    assert weighted(found) == pytest.approx(sum(e.samples / 90 * e.lambda1 for e in found))
    assert weighted(found) >= float(torch.linalg.eigvalsh(whole)[-1])


def test_a_class_counts_the_batches_that_hold_nothing_else():
    torch.manual_seed(0)
    x, y = torch.randn(9, 4, dtype=torch.float64), torch.tensor([0, 0, 0, 1, 1, 0, 1, 1, 1])
    module = nn.Linear(4, 2).double()
    found = by_class(Objective(module, F.cross_entropy, list(zip(x.split(3), y.split(3), strict=True))))
    assert [each.samples for each in found] == [4, 5]
    for label, each in enumerate(found):
        value = F.cross_entropy(module(x[y == label]), y[y == label]).item()
        assert each.loss == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize("matrix", ["hessian", "ggn"])
def test_each_client_has_the_spectrum_of_its_own_samples(digits, matrix):
    problem, portion = problem_of(digits), Portion(120)
    found = by_client(problem, portion, matrix, products=60)
    assert [each.name for each in found] == [f"client {client}" for client in range(8)]
    for client, each in enumerate(found):
        (x, y), *_ = portion.batches(problem.federation, [client])
        own = dense(problem.network.module, x, y)
        assert each.samples == len(y)
        assert (each.trace.mean == pytest.approx(float(own.trace()), rel=1e-9)) == (matrix == "hessian")


def test_labels_that_are_no_classes_and_layers_that_mix_samples_are_refused():
    x, real = torch.randn(6, 4), torch.randn(6, 2)
    with pytest.raises(DataError, match="not one class for each sample"):
        by_class(Objective(nn.Linear(4, 2), F.mse_loss, [(x, real)]))
    for labels in (real[:, 0], torch.zeros(6, 2, dtype=torch.int64)):
        with pytest.raises(DataError, match="not one class for each sample"):
            by_class(Objective(nn.Linear(4, 2), F.mse_loss, [(x, labels)]))
    mixing = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, track_running_stats=False), nn.Linear(3, 2))
    with pytest.raises(RecipeError, match="layer '1' normalises with the statistics of each batch"):
        by_class(Objective(mixing, F.cross_entropy, [(x, torch.arange(6) % 2)]))


@pytest.mark.parametrize("average", ["samples", "uniform"])
def test_local_against_global_flatness_is_that_of_dense_matrices(digits, average):
    problem, portion, rho = problem_of(digits, average, "fedsam(0.1)"), Portion(160), 0.1
    home = problem.network.weights.clone()
    found = locality(problem, portion, rho, tolerance=1e-9)
    assert torch.equal(problem.network.weights, home)
    state = first_state(problem)
    sizes = [portion.count(problem.federation, client) for client in range(8)]
    shares = [n / sum(sizes) for n in sizes] if average == "samples" else [1 / 8] * 8
    with closing(Inline(problem, HessianProduct(portion))) as engine:
        broadcast = Broadcast(0, 0.3, problem.method.broadcast(view(problem, state)))
        local = {u.client: state.weights + u.delta for u in engine.local_rounds(broadcast, range(8))}

    def seen(client, weights):
        problem.network.load(weights)
        (x, y), *_ = portion.batches(problem.federation, [client])
        objective = Objective(problem.network.module, F.cross_entropy, [(x, y)])
        slope, here = objective.gradient(), objective.value()
        with objective.at(weights + rho * slope / slope.norm()):
            rise = objective.value() - here
        return dense(problem.network.module, x, y), here, rise

    at = [seen(client, home) for client in range(8)]
    own = [seen(client, local[client]) for client in range(8)]
    tops = [[float(torch.linalg.eigvalsh(h)[-1]) for h, *_ in some] for some in (at, own)]
    whole = sum(p * h for p, (h, *_) in zip(shares, at, strict=True))
    values, vectors = torch.linalg.eigh(whole)
    u = vectors[:, -1]
    for client, each in enumerate(found.clients):
        assert (each.client, each.samples, each.weight) == (client, sizes[client], pytest.approx(shares[client]))
        assert (each.at_global.lambda1, each.at_local.lambda1) == pytest.approx((tops[0][client], tops[1][client]))
        assert (each.at_global.loss, each.at_local.loss) == pytest.approx((at[client][1], own[client][1]))
        assert (each.at_global.sharpness, each.at_local.sharpness) == pytest.approx((at[client][2], own[client][2]))
        assert each.distance == pytest.approx(float((local[client] - home).norm()))
        assert each.part == pytest.approx(shares[client] * float(u @ at[client][0] @ u), rel=1e-5, abs=1e-9)
    assert found.lambda1 == pytest.approx(float(values[-1])) == pytest.approx(sum(e.part for e in found.clients))
    total = sum(p * top for p, top in zip(shares, tops[0], strict=True))
    assert (found.clients_sum, found.explained) == pytest.approx((total, float(values[-1]) / total))
    assert 0 < found.explained <= 1
    assert found.gap == pytest.approx(total - sum(p * top for p, top in zip(shares, tops[1], strict=True)))
    lengths = [float((local[client] - home).norm()) for client in range(8)]
    assert found.distance == pytest.approx(sum(p * d for p, d in zip(shares, lengths, strict=True)))


def test_a_local_round_takes_the_given_rate_and_leaves_the_network_as_it_was(digits):
    problem, portion = problem_of(digits), Portion(80)
    same, slower = (locality(problem, portion, lr=lr) for lr in (0.3, 0.1))
    assert same == locality(problem, portion)
    assert all(0 < b.distance < a.distance for a, b in zip(same.clients, slower.clients, strict=True))
    assert not problem.network.module.training


@pytest.mark.parametrize("buffers", ["average", "local"])
def test_each_model_is_measured_with_its_own_batch_statistics(digits, buffers):
    torch.manual_seed(0)
    module = nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 10))
    federation, portion = digits.to(torch.float64), Portion(80)
    local = Local(batch=0, epochs=2, lr=0.3)
    problem = Problem.of(federation, Network(module, torch.float64), parse("fedavg"), local)
    model = problem.recipe.model.model_copy(update={"buffers": buffers})
    problem.recipe = problem.recipe.model_copy(update={"model": model})
    network, home = problem.network, problem.network.buffers.clone()
    found = locality(problem, portion)
    assert torch.equal(network.buffers, home)
    state = first_state(problem)
    sent = problem.method.broadcast(view(problem, state)) | ({"buffers": home} if buffers == "average" else {})
    with closing(Inline(problem)) as engine:
        for upload in [*engine.local_rounds(Broadcast(0, 0.3, sent), range(8))]:
            statistics = {**upload.vectors, **engine.kept(upload.client)}["buffers"]
            (x, y), *_ = portion.batches(problem.federation, [upload.client])
            for weights, kept, place in (
                (state.weights, home, found.clients[upload.client].at_global),
                (state.weights + upload.delta, statistics, found.clients[upload.client].at_local),
            ):
                network.load(weights)
                network.buffers.copy_(kept)
                assert place.loss == pytest.approx(F.cross_entropy(network.module.eval()(x), y).item(), rel=1e-9)
            assert not torch.equal(statistics, home)


@pytest.mark.parametrize(("curvature", "explained"), [(0.4, 0.5), (-1.0, None), (0.0, None)])
def test_a_share_of_the_clients_curvature_needs_a_positive_sum(curvature, explained):
    client = ClientFlatness(0, 1, 1.0, Place(1.0, curvature, 0.0), Place(1.0, 0.0, 0.0), 0.0, 0.0)
    assert Locality(0.2, [client]).explained == explained


def test_the_means_over_the_clients_are_weighted():
    places = [
        (Place(1.0, 5.0, 0.0), Place(1.0, 2.0, 0.0), 0.25, 3.0),
        (Place(1.0, 1.0, 0.0), Place(1.0, 3.0, 0.0), 0.75, 7.0),
    ]
    found = Locality(1.5, [ClientFlatness(n, 1, p, w, own, d, 0.0) for n, (w, own, p, d) in enumerate(places)])
    assert (found.clients_sum, found.explained, found.distance, found.gap) == (2.0, 0.75, 6.0, -0.75)
