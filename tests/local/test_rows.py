"""Clients in common steps: the same as one by one, up to rounding."""

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedflat import federate, train
from fedflat.local.kernels.rows import can_share, group_size, train_together
from fedflat.local.rule import LocalRule
from fedflat.local.step import train as train_alone
from fedflat.methods.parts import ActivationNorm, Ascent, Proximal
from fedflat.models.vector import Network
from fedflat.rounds import client


@pytest.fixture(scope="module")
def many():
    """Forty clients of very different sizes, so that batches are ragged and steps unequal."""
    return federate("digits", "sizes", 40, exponent=1.0, seed=2)


@pytest.fixture
def shared_steps(monkeypatch):
    """The sizes of the groups that really went together."""
    sizes = []

    def counted(network, start, rules, batches):
        outcomes = train_together(network, start, rules, batches)
        sizes.append(len(rules))  # a group that fails is trained one by one instead
        return outcomes

    monkeypatch.setattr(client, "train_together", counted)
    return sizes


def weights(result):
    return torch.cat([p.detach().flatten() for p in result.model.parameters()])


@pytest.mark.parametrize(
    "method", ["fedavg", "fedprox(0.1)", "fedsam", "feddyn", "scaffold", "fedsmoo", "fedspeed", "fedcm", "fedlesam"]
)
def test_common_steps_give_the_weights_of_single_ones(many, method, shared_steps):
    settings = dict(
        model="mlp", model_hidden=[16], method=method, rounds=3, cohort=20, batch=8, lr=0.05, momentum=0.5,
        weight_decay=1e-3, clip=1.0, engine="inline", precision="float64",
    )  # fmt: skip
    one, together = (train(many, **settings, group=group) for group in (1, 7))
    torch.testing.assert_close(weights(together), weights(one), rtol=1e-9, atol=1e-11)
    assert [r["local_loss"] for r in together.history] == pytest.approx([r["local_loss"] for r in one.history])
    assert sorted(shared_steps) == [6] * 3 + [7] * 6, "all clients, and only those of the second run, went together"


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("method", ["fedavg", "fedprox(0.1)", "fedlesam"])
def test_steps_without_momentum_and_clip_are_those_of_single_clients_too(many, method, bias, shared_steps):
    def net():
        torch.manual_seed(0)
        widths = pairwise([64, 8, 8, 10])
        layers = [m for a, b in widths for m in (nn.Linear(a, b, bias=bias), nn.ReLU())]
        return nn.Sequential(nn.Flatten(), *layers[:-1])

    settings = dict(rounds=1, cohort=8, batch=8, weight_decay=0.1, engine="inline", precision="float64")
    one, together = (train(many, net(), method, **settings, group=group) for group in (1, 8))
    torch.testing.assert_close(weights(together), weights(one), rtol=1e-9, atol=1e-11)
    assert [r["local_loss"] for r in together.history] == pytest.approx([r["local_loss"] for r in one.history])
    assert shared_steps == [8]


def test_watched_terms_of_a_group_are_those_of_its_clients(many, shared_steps):
    settings = dict(model="mlp", rounds=2, cohort=16, batch=8, engine="inline", precision="float64")
    one, together = (train(many, method="fedavg + man(0.0)", **settings, group=group) for group in (1, 8))
    for a, b in zip(one.history, together.history, strict=True):
        assert [*a["notes"]] == ["activation/relu1"]
        assert b["notes"] == pytest.approx(a["notes"], rel=1e-9)
    assert shared_steps == [8] * 4


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("lr", [0.0, 0.1])
def test_a_client_whose_last_batch_has_one_sample_still_trains(lr, bias):
    module = nn.Sequential(nn.Linear(2, 3, bias=bias), nn.ReLU(), nn.Linear(3, 2, bias=bias))
    inputs, labels = torch.randn(2, 4, 2, dtype=torch.float64), torch.tensor([[0, 1, 0, 1]] * 2)
    shares = torch.tensor([[1.0, 0, 0, 0], [0.25] * 4], dtype=torch.float64)
    network = Network(module, torch.float64)
    start, rules = network.weights.clone(), [LocalRule(lr, 1, momentum=0.5)] * 2
    single, full = train_together(network, start, rules, [((inputs, labels, shares), [1, 4])])
    expected = F.cross_entropy(module(inputs[0, :1]), labels[0, :1]).detach()
    assert single.loss == pytest.approx(float(expected))
    assert bool(single.delta.any()) == bool(full.delta.any()) == (lr > 0)


@pytest.mark.parametrize("clients", [1, 3])
def test_every_decay_of_a_plain_step_counts_and_so_does_a_group_of_one(clients):
    layers = nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)
    network = Network(nn.Sequential(*layers), torch.float64)
    inputs, labels = torch.randn(clients, 4, 2, dtype=torch.float64), torch.zeros(clients, 4, dtype=torch.long)
    start = network.weights.clone()
    rule = ActivationNorm(0.0).plan(LocalRule(0.1, 1, decay=0.3, weight_decay=0.2), {"weights": start}, {})
    shares = torch.full((clients, 4), 0.25, dtype=torch.float64)
    together = train_together(network, start, [rule] * clients, [((inputs, labels, shares), [4] * clients)])
    for outcome, x, y in zip(together, inputs, labels, strict=True):
        one = train_alone(network, start, rule, [(x, y)], F.cross_entropy)
        torch.testing.assert_close(outcome.delta, one.delta, rtol=1e-12, atol=1e-14)
        assert one.notes and outcome.notes == pytest.approx(one.notes)


def test_what_an_ascent_carries_stands_still_once_its_client_has_finished():
    class Adding:
        rows = True

        def __call__(self, slope, carry):
            return slope(), {"sum": carry["sum"] + slope.weights.abs()}

    network = Network(nn.Sequential(nn.Linear(2, 2)), torch.float64)
    start, steps = network.weights.clone(), (4, 1, 2)
    rules = [LocalRule(0.1, n).with_ascent(Adding(), sum=torch.zeros_like(start)) for n in steps]
    inputs, labels = torch.randn(4, 3, 5, 2, dtype=torch.float64), torch.randint(2, (4, 3, 5))
    shares = [[[0.2 * (k < n)] * 5 for n in steps] for k in range(4)]
    sizes = [[5 * (k < n) for n in steps] for k in range(4)]
    batches = list(zip(zip(inputs, labels, torch.tensor(shares, dtype=torch.float64), strict=True), sizes, strict=True))
    for i, (rule, outcome) in enumerate(zip(rules, train_together(network, start, rules, batches), strict=True)):
        own = [(x[i], y[i]) for (x, y, _), _ in batches[: rule.steps]]
        alone = train_alone(network, start, rule, own, F.cross_entropy)
        torch.testing.assert_close(outcome.carry["sum"], alone.carry["sum"], rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(outcome.delta, alone.delta, rtol=1e-12, atol=1e-14)
        assert outcome.loss == pytest.approx(alone.loss)


def test_a_group_trains_in_training_mode():
    class Asked(nn.Linear):
        def forward(self, x):
            assert self.training
            return super().forward(x)

    network = Network(nn.Sequential(nn.Tanh(), Asked(2, 2)), torch.float64)
    network.module.eval()
    batch = torch.randn(2, 3, 2, dtype=torch.float64), torch.zeros(2, 3, dtype=torch.long), torch.ones(2, 3) / 3
    outcomes = train_together(network, network.weights.clone(), [LocalRule(0.1, 1)] * 2, [(batch, [3, 3])])
    assert all(bool(outcome.delta.any()) for outcome in outcomes)


def test_in_float32_they_agree_to_1e_5(many):
    settings = dict(model="mlp", model_hidden=[32], method="fedavg", rounds=3, cohort=40, batch=10, engine="inline")
    one, together = (weights(train(many, **settings, group=group)) for group in (1, 16))
    assert float((one - together).norm() / one.norm()) < 1e-5


def test_convolutions_can_share_too(many, shared_steps):
    def net():
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))

    settings = dict(rounds=2, cohort=12, engine="inline", precision="float64")
    one, together = (weights(train(many, net(), "fedsam", **settings, group=group)) for group in (1, 5))
    torch.testing.assert_close(together, one, rtol=1e-9, atol=1e-11)
    assert sorted(shared_steps) == [2, 2, 5, 5, 5, 5]


class Centred(nn.Linear):
    """A layer that subtracts the mean of the batch."""

    def forward(self, x):
        y = super().forward(x)
        return y - y.mean(0)


class Noisy(nn.Linear):
    """A layer that drops inputs without a module for it."""

    def forward(self, x):
        return super().forward(F.dropout(x, 0.5, self.training))


@pytest.mark.parametrize("zero", [False, True], ids=["", "the head begins with zeros"])
@pytest.mark.parametrize("layer", [lambda: nn.BatchNorm1d(16, track_running_stats=False), lambda: Centred(16, 16),
                                   lambda: Noisy(16, 16)], ids=["norm", "mean", "dropout"])  # fmt: skip
def test_networks_that_mix_samples_train_one_by_one_because_padding_is_a_sample(many, layer, zero, shared_steps):
    def net():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), layer(), nn.Linear(16, 10))
        nn.init.zeros_(model[-1].weight) if zero else None
        return model

    settings = dict(rounds=2, cohort=12, batch=8, engine="inline")
    one, together = (weights(train(many, net(), "fedavg", **settings, group=group)) for group in (1, 6))
    assert torch.equal(one, together) and not shared_steps


def test_a_client_whose_numbers_overflow_spoils_no_other_that_shares_its_steps(many, shared_steps):
    inputs = many.dataset.train.inputs.float()
    inputs[0] = 1e38
    samples = replace(many.dataset.train, inputs=inputs)
    spoilt = replace(many, dataset=replace(many.dataset, train=samples, mean=(), std=()))
    owner = next(c for c in range(40) if 0 in many.shard(c))
    run = train(spoilt, "mlp", rounds=1, cohort=40, batch=8, group=8, engine="inline", model_hidden=[16])
    assert [each["client"] for each in run.history[0]["refused"]] == [owner]
    assert shared_steps == [8] * 5


def test_the_number_of_workers_does_not_change_a_bit(many):
    settings = dict(model="mlp", method="feddyn", rounds=2, cohort=33, group=8)
    runs = [train(many, **settings, engine="inline")]
    runs += [train(many, **settings, engine="pool", workers=n) for n in (1, 3)]
    assert all(torch.equal(weights(run), weights(runs[0])) for run in runs[1:])


def test_what_looks_into_a_pass_goes_one_by_one():
    network = Network(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)))
    plain = LocalRule(0.1, 3)

    def shared(network, rules):
        return can_share(network, rules, F.cross_entropy, torch.tensor([0]))

    sent = {"weights": network.weights}
    assert shared(network, [plain, LocalRule(0.1, 5)])
    assert shared(network, [Proximal(0.1).plan(Ascent(0.1).plan(plain, sent, {}), sent, {})] * 2)
    assert not shared(network, [ActivationNorm(0.1).plan(plain, sent, {})] * 2)
    assert shared(network, [plain])
    assert not shared(network, [plain, LocalRule(0.2, 3)])
    assert not shared(network, [LocalRule(0.1, 3, pairs=True)] * 2)
    halved = Network(nn.Sequential(nn.Linear(4, 2)))
    halved.autocast = True
    assert not shared(halved, [plain, plain])
    assert not shared(Network(nn.Sequential(nn.Dropout(), nn.Linear(4, 2))), [plain, plain])
    assert not shared(Network(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))), [plain, plain])


def test_groups_are_for_small_models_and_large_cohorts():
    small, middle, large = (Network(nn.Sequential(nn.Linear(n, 10))) for n in (200, 2_999, 3_000))
    assert [group_size(small, cohort) for cohort in (100, 64, 20, 15)] == [16, 16, 5, 1]
    assert group_size(middle, 100) == 16
    assert group_size(large, 100) == 1
    assert [group_size(Network(nn.Sequential(nn.Tanh(), nn.Linear(n, 10))), 100) for n in (2_999, 3_000)] == [16, 1]
    assert group_size(Network(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2))), 100) == 1


def test_on_an_accelerator_larger_models_train_together_too():
    def elsewhere(width):
        module = nn.Linear(width, 1000, device="meta")
        return SimpleNamespace(module=module, weights=torch.empty(0, device="meta"))

    assert [group_size(elsewhere(4_000), cohort) for cohort in (100, 3)] == [16, 3]
    assert group_size(elsewhere(6_000), 100) == 1


def test_dropout_is_drawn_for_each_turn_and_not_from_the_global_generator(many):
    def net():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 10))

    results = []
    for engine in ("inline", "pool", "inline"):
        module = net()
        torch.manual_seed(len(results))
        before = torch.get_rng_state()
        results.append(weights(train(many, module, rounds=2, cohort=4, engine=engine)))
        assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("method", ["fedlesam(rho=0.0)", "fedsol(rho=0.0, source='scaffold')"])
def test_a_look_at_the_loss_draws_no_mask_of_dropout(many, method):
    def net():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 10))

    settings = {"rounds": 2, "cohort": 4, "engine": "inline", "group": 1}
    plain = weights(train(many, net(), "fedavg", **settings))
    assert torch.equal(weights(train(many, net(), method, **settings)), plain)
