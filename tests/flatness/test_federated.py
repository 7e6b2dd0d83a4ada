"""Curvature from products that the clients compute: the pooled Hessian, on every engine, to the bit."""

from contextlib import closing
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedflat import Augment, Dataset, Federation, Samples, models
from fedflat.engine.inline import Inline
from fedflat.engine.pool import Pool
from fedflat.errors import RecipeError, TrainingError
from fedflat.federation.augment import normalise
from fedflat.flatness import (
    FederatedHessian,
    Hessian,
    HessianProduct,
    Objective,
    Portion,
    TopEigenvalue,
    layers,
    matrix_of,
    spectrum,
    top_eigenvalues,
    trace,
)
from fedflat.flatness.federated import Gradient, Margin, Rise, _within
from fedflat.methods.parser import parse
from fedflat.models.vector import Network
from fedflat.randomness import generator
from fedflat.recipe import Local, Server
from fedflat.rounds.server import conduct, first_state
from fedflat.rounds.setup import Problem

# Batches of 64 hold the samples of several clients where the data are pooled, and never where they are not.
PORTION = Portion(samples=300, seed=3, batch=64)


def mlp():
    return models.build("mlp", (1, 8, 8), 10, hidden=(8,))


def convolutional():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(27, 10))


def normalised():
    """Batch statistics as training leaves them, and dropout: both matter only outside of the evaluation mode."""
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(6)
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2.0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 6), norm, nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 10))


def problem_of(federation, module, dtype=torch.float64, **settings):
    return Problem.of(federation.to(dtype), Network(module, dtype), parse("fedavg"), Local(), **settings)


def inline(problem, state, question=None):
    return closing(Inline(problem, question))


def pool(workers, slots):
    def start(problem, state, question=None):
        return closing(Pool(problem, state, slots, workers, question))

    return start


@pytest.fixture
def case(digits):
    problem = problem_of(digits, mlp())
    return problem, first_state(problem)


def probe(state, seed=0):
    chance = torch.Generator().manual_seed(seed)
    return torch.randn(state.weights.shape, generator=chance, dtype=torch.float64).to(state.weights)


@pytest.mark.parametrize("build", [mlp, convolutional, normalised])
@pytest.mark.parametrize("start", [inline, pool(workers=2, slots=8)], ids=["inline", "pool"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_a_product_is_that_of_the_pooled_samples(digits, build, start, dtype, tolerance):
    problem = problem_of(digits, build(), dtype)
    state = first_state(problem)
    v = probe(state)
    expected = Hessian(PORTION.pooled(problem)) @ v
    with start(problem, state, HessianProduct(PORTION)) as engine:
        found = FederatedHessian(engine, state, problem, PORTION) @ v
    assert found.dtype == dtype
    assert float((found - expected).norm() / expected.norm()) < tolerance


def test_for_least_squares_it_is_the_matrix_of_all_inputs_whatever_the_clients_sizes(regression):
    federation = replace(regression, shards=tuple(torch.arange(80).split([2, 13, 30, 35])))
    problem = problem_of(federation, nn.Linear(3, 1, bias=False), loss=lambda z, y: 0.5 * (z - y).square().mean())
    state, portion = first_state(problem), Portion(samples=0)
    x = federation.dataset.train.inputs
    with inline(problem, state, HessianProduct(portion)) as engine:
        hessian = FederatedHessian(engine, state, problem, portion)
        columns = torch.stack([hessian @ unit for unit in torch.eye(3, dtype=torch.float64)])
    torch.testing.assert_close(columns, x.T @ x / 80, rtol=1e-13, atol=1e-14)


def test_engines_workers_and_slots_do_not_change_a_bit(digits):
    problem = problem_of(digits, normalised(), torch.float32)
    state = first_state(problem)
    products = []
    for start in (inline, pool(1, 8), pool(2, 8), pool(3, 8), pool(2, 3), pool(1, 1)):
        with start(problem, state, HessianProduct(PORTION)) as engine:
            hessian = FederatedHessian(engine, state, problem, PORTION)
            products.append(torch.stack([hessian @ probe(state, seed) for seed in range(3)]))
    assert all(torch.equal(product, products[0]) for product in products[1:])


@pytest.mark.parametrize("start", [inline, pool(workers=2, slots=3)], ids=["inline", "pool"])
def test_eigenvalues_and_traces_are_those_of_the_pooled_hessian(case, start):
    problem, state = case
    pooled = Hessian(PORTION.pooled(problem))
    with start(problem, state, HessianProduct(PORTION)) as engine:
        federated = FederatedHessian(engine, state, problem, PORTION)
        for measured in (
            lambda operator: top_eigenvalues(operator, k=3, tolerance=1e-8).values,
            lambda operator: torch.tensor(trace(operator, products=8, seed=2).mean),
        ):
            torch.testing.assert_close(measured(federated), measured(pooled), rtol=1e-5, atol=0)
    assert federated.products == pooled.products


@pytest.mark.parametrize(("dtype", "width"), [(torch.float64, 8), (torch.float32, 4)])
def test_every_product_crosses_once_each_way_for_each_client(digits, dtype, width):
    problem = problem_of(digits, mlp(), dtype)
    state = first_state(problem)
    with inline(problem, state, HessianProduct(PORTION)) as engine:
        hessian = FederatedHessian(engine, state, problem, PORTION)
        assert (hessian.products, hessian.bytes) == (0, 0)
        hessian @ probe(state)
        d = 64 * 8 + 8 + 8 * 10 + 10
        assert (hessian.size, hessian.bytes) == (d, 2 * 8 * d * width)
        seen = spectrum(hessian, k=2, products=6)
    assert seen.products == hessian.products > 1
    assert seen.bytes == hessian.products * 2 * 8 * d * width


def test_the_product_is_about_the_states_model_whatever_the_network_holds(digits):
    problem = problem_of(digits, normalised())
    state = first_state(problem)
    v = probe(state)
    expected = Hessian(PORTION.pooled(problem)) @ v
    problem.network.weights.zero_()
    problem.network.buffers.fill_(1.0)
    for start in (inline, pool(workers=1, slots=2)):
        with start(problem, state, HessianProduct(PORTION)) as engine:
            found = FederatedHessian(engine, state, problem, PORTION) @ v
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_batch_statistics_are_used_and_not_moved(digits):
    problem = problem_of(digits, normalised())
    state = first_state(problem)
    with inline(problem, state, HessianProduct(PORTION)) as engine:
        hessian = FederatedHessian(engine, state, problem, PORTION)
        first, again = hessian @ probe(state), hessian @ probe(state)
        other = FederatedHessian(engine, replace(state, buffers=state.buffers + 1), problem, PORTION)
        assert not torch.allclose(other @ probe(state), first)
    assert torch.equal(first, again)
    assert torch.equal(state.buffers, first_state(problem_of(digits, normalised())).buffers)


@dataclass(frozen=True)
class Scaled:
    """A question whose answer tells who gave it: v · (client + 1); one client does not know."""

    ignorant: int = -1

    def __call__(self, problem: Problem, client: int, vector: Tensor) -> Tensor:
        if client == self.ignorant:
            raise ValueError("no idea")
        return vector * (client + 1)


@pytest.mark.parametrize("start", [inline, pool(2, 8), pool(2, 3), pool(1, 1)], ids=["inline", "8", "3", "1 slot"])
def test_answers_come_in_the_order_that_was_asked_for(case, start):
    problem, state = case
    with start(problem, state, Scaled()) as engine:
        for clients in ([5, 2, 7, 0], [3], range(8)):
            told = [(client, float(answer[0])) for client, answer in engine.ask(state, probe(state) * 0 + 2, clients)]
            assert told == [(client, 2.0 * (client + 1)) for client in clients]


def test_a_client_that_cannot_answer_is_named_by_the_pool_and_raises_its_own_error_inline(case):
    problem, state = case
    for start, error, said in (
        (inline, ValueError, "no idea"),
        (pool(2, 3), TrainingError, "client 4: ValueError while evaluating: no idea"),
    ):
        with start(problem, state, Scaled(ignorant=4)) as engine, pytest.raises(error, match=said):
            list(engine.ask(state, state.weights, range(8)))


def test_an_engine_without_a_question_says_so(case):
    problem, state = case
    for start, error in ((inline, RuntimeError), (pool(1, 2), TrainingError)):
        with start(problem, state) as engine, pytest.raises(error, match="without a question"):
            FederatedHessian(engine, state, problem, PORTION) @ state.weights


def test_a_pool_can_be_asked_and_trained_and_scored_in_turn(case):
    problem, begun = case
    ends = []
    for start in (inline, pool(workers=2, slots=3)):
        state = begun
        with start(problem, state, HessianProduct(PORTION)) as engine:
            for cohort in ([0, 3, 5], [1, 3]):
                product = FederatedHessian(engine, state, problem, PORTION) @ probe(state)
                state, _ = conduct(problem, state, engine, cohort)
            ends.append((state.weights, product, engine.score(state, "test", 100).loss))
    assert torch.equal(ends[0][0], ends[1][0])
    assert torch.equal(ends[0][1], ends[1][1])
    assert ends[0][2] == ends[1][2]


def clients_of(sizes, augment=None):
    """A federation of clients of these sizes, whose samples are scattered over the training part."""
    total = sum(sizes)
    images = torch.arange(total * 4, dtype=torch.uint8).view(total, 1, 2, 2)
    samples = Samples(images, torch.arange(total) % 2)
    order = torch.randperm(total, generator=torch.Generator().manual_seed(0))
    dataset = Dataset("grid", samples, samples, 2, (0.5,), (0.25,))
    return Federation(dataset, order.split(list(sizes)), augment or Augment())


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(0, 300), st.integers(0, 5))
def test_a_portion_takes_the_same_share_of_every_client(sizes, samples, seed):
    federation, portion = clients_of(sizes), Portion(samples, seed)
    share = min(samples, sum(sizes)) / sum(sizes) if samples else 1.0
    chosen = [portion.of(federation, client).tolist() for client in range(len(sizes))]
    for client, (indices, size) in enumerate(zip(chosen, sizes, strict=True)):
        assert set(indices) <= set(federation.shards[client].tolist())
        assert 1 <= len(indices) <= size
        assert len(indices) == 1 or abs(len(indices) - share * size) <= 0.5 + 1e-9
        if not samples or samples >= sum(sizes):
            assert len(indices) == size
    everything = [index for indices in chosen for index in indices]
    assert len(everything) == len(set(everything))


def test_zero_samples_are_all_that_each_client_holds_also_where_they_share_some():
    alone = clients_of([6, 6])
    shared = replace(alone, shards=(torch.arange(12), torch.arange(8)))
    assert [Portion(0).of(shared, client).tolist() for client in range(2)] == [list(range(12)), list(range(8))]
    assert [len(Portion(10).of(shared, client)) for client in range(2)] == [6, 4]


def test_a_portion_is_drawn_by_the_seed_and_for_each_client_on_its_own():
    federation = clients_of([50, 50, 50])
    first, again, other = (Portion(60, seed).of(federation, 1).tolist() for seed in (0, 0, 1))
    assert first == again != other
    assert len(first) == len(other) == 20
    stream = torch.randperm(50, generator=generator(1, "flatness", client=1))  # recorded numbers depend on its name
    assert other == federation.shards[1][stream[:20].sort().values].tolist()
    # Where in its shard a client's samples stand is its own draw, not everybody's.
    places = [torch.isin(federation.shards[client], Portion(60).of(federation, client)).tolist() for client in range(3)]
    assert places[0] != places[1] != places[2]


def test_a_portion_is_never_augmented_and_comes_in_batches_across_clients():
    augmented = clients_of([9, 4, 7], Augment(crop=1, flip=0.5, cutout=1))
    portion = Portion(samples=0, batch=6)
    batches = portion.batches(augmented, range(3))
    assert [len(labels) for _, labels in batches] == [6, 6, 6, 2]
    indices = torch.cat([portion.of(augmented, client) for client in range(3)])
    data = augmented.dataset
    expected = normalise(data.train.inputs[indices], data.mean, data.std, torch.float32)
    assert torch.equal(torch.cat([inputs for inputs, _ in batches]), expected)
    assert torch.equal(torch.cat([labels for _, labels in batches]), data.train.labels[indices])


def test_the_pooled_objective_and_the_federated_operator_count_the_same_samples(case):
    problem, state = case
    for samples in (0, 1, 300, 10_000):
        portion = Portion(samples)
        with inline(problem, state, HessianProduct(portion)) as engine:
            counted = FederatedHessian(engine, state, problem, portion).samples
        assert counted == portion.pooled(problem).samples
        assert counted == {0: 1442, 1: 8, 10_000: 1442}.get(samples, counted)


def test_frozen_parameters_are_left_out_as_in_the_pooled_hessian(digits):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))
    module[1].weight.requires_grad_(False)
    problem = Problem.of(digits.to(torch.float64), Network(module, torch.float64), parse("fedavg"), Local())
    state, portion = first_state(problem), Portion(samples=200)
    with closing(Inline(problem, HessianProduct(portion))) as engine:
        federated, pooled = FederatedHessian(engine, state, problem, portion), Hessian(portion.pooled(problem))
        v = torch.randn(pooled.size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        assert federated.size == pooled.size
        torch.testing.assert_close(federated @ v, pooled @ v, rtol=1e-10, atol=1e-12)


def test_uniform_weights_average_the_clients_hessians_and_follow_the_recipe(digits):
    problem = problem_of(digits, mlp())
    state, v = first_state(problem), probe(first_state(problem))
    own = [Hessian(PORTION.own(problem, client)) @ v for client in range(8)]
    with inline(problem, state, HessianProduct(PORTION)) as engine:
        found = FederatedHessian(engine, state, problem, PORTION, "uniform")
        torch.testing.assert_close(found @ v, torch.stack(own).mean(dim=0), rtol=1e-10, atol=1e-12)
        assert FederatedHessian(engine, state, problem, PORTION).weights == "samples"
        problem.recipe = problem.recipe.model_copy(update={"server": Server(average="uniform")})
        assert FederatedHessian(engine, state, problem, PORTION).weights == "uniform"
        with pytest.raises(RecipeError, match="weights = 'sizes' is unknown"):
            FederatedHessian(engine, state, problem, PORTION, "sizes")


@pytest.mark.parametrize("matrix", ["ggn", "fisher"])
def test_clients_compute_products_of_other_matrices_too(case, matrix):
    problem, state = case
    expected = matrix_of(PORTION.pooled(problem), matrix) @ probe(state)
    with inline(problem, state, HessianProduct(PORTION, matrix)) as engine:
        found = FederatedHessian(engine, state, problem, PORTION, matrix=matrix)
        torch.testing.assert_close(found @ probe(state), expected, rtol=1e-9, atol=1e-12)
        assert found.matrix == matrix


def test_where_a_layer_uses_the_statistics_of_the_batch_no_batch_mixes_clients(digits):
    """Then the pooled Hessian is the clients' too; a batch of several clients' samples would have another one."""
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(6, track_running_stats=False)
    problem = problem_of(digits, nn.Sequential(nn.Flatten(), nn.Linear(64, 6), norm, nn.ReLU(), nn.Linear(6, 10)))
    state, pooled = first_state(problem), PORTION.pooled(problem)
    v, expected = probe(state), Hessian(pooled) @ probe(state)
    with inline(problem, state, HessianProduct(PORTION)) as engine:
        torch.testing.assert_close(FederatedHessian(engine, state, problem, PORTION) @ v, expected)
    mixed = Objective(pooled.module, pooled.loss, PORTION.batches(problem.federation, range(8)))
    assert not torch.allclose(Hessian(mixed) @ v, expected, rtol=1e-3)
    assert all(layer.activity.bound is None for layer in layers(pooled))


# What the server can ask one client for


def test_a_clients_gradient_rise_and_curvature_are_those_of_its_least_squares(regression):
    """fᵢ(w) = ½ mean (x w − y)², so ∇fᵢ = xᵀ(x w − y)/n and Hᵢ = xᵀx/n. A number is in the first entry."""
    problem = problem_of(regression, nn.Linear(3, 1, bias=False), loss=lambda z, y: 0.5 * (z - y).square().mean())
    w, v = first_state(problem).weights, torch.tensor([0.3, -0.5, 0.2], dtype=torch.float64)
    for client in range(4):
        samples, shard = regression.dataset.train, regression.shards[client]
        x, y = samples.inputs[shard], samples.labels[shard].flatten()
        slope, matrix = x.T @ (x @ w - y) / 20, x.T @ x / 20
        rise, top = slope @ v + v @ matrix @ v / 2, torch.linalg.eigvalsh(matrix)[-1]
        asked = Gradient(), Rise(), TopEigenvalue(Portion(0), tolerance=1e-10)
        found = [question(problem, client, v) for question in asked]
        torch.testing.assert_close(found[0], slope, rtol=1e-10, atol=1e-12)
        for answer, number in zip(found[1:], (rise, top), strict=True):
            torch.testing.assert_close(answer, torch.stack([number, *torch.zeros(2).double()]), rtol=1e-9, atol=1e-12)
        assert Margin(0.0)(problem, client, v)[0].isnan(), "there are no classes"


def test_a_margin_is_that_of_the_class_over_the_best_of_the_others():
    """The margins are 1, 0, −2 and 3."""
    logits = torch.tensor([[2.0, 1.0, 0.0], [1.0, 1.0, -5.0], [3.0, 0.0, 1.0], [-4.0, -1.0, -4.0]])
    labels = torch.tensor([0, 1, 2, 1])
    margins = {-3.0: 0, -2.0: 1, -0.5: 1, 0.0: 2, 0.9: 2, 1.0: 3, 2.9: 3, 3.0: 4}
    assert {margin: _within(logits, labels, margin) for margin in margins} == margins


def test_a_client_counts_its_samples_within_the_margin_over_all_batches(digits):
    problem = problem_of(digits, normalised())
    state, portion = first_state(problem), Portion(0, batch=16)
    inputs, labels = digits.to(torch.float64).batch(digits.shards[2], None)
    with torch.no_grad():
        logits = problem.network.module.eval()(inputs)
    problem.network.module.train()
    margins = [
        float(z[y] - max(float(other) for j, other in enumerate(z) if j != y))
        for z, y in zip(logits, labels.tolist(), strict=True)
    ]
    for margin in (-0.2, 0.0, 0.3):
        answer = Margin(margin, portion)(problem, 2, state.weights)
        expected = sum(each <= margin for each in margins)
        assert 0 < expected < len(margins)
        assert answer[0] == expected and not answer[1:].any() and answer.shape == state.weights.shape
