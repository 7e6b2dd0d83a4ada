"""SAM with fewer gradients: against a walk by torch's autograd, and against SAM where the two are the same."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from fedflat import train
from fedflat.local import LocalRule
from fedflat.local import train as train_client
from fedflat.local.slope import Slope
from fedflat.methods.parser import parse
from fedflat.methods.parts import SparingAscent
from fedflat.models.vector import Network


def module():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def batches(count, size=7):
    chance = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, size, 6, generator=chance, dtype=torch.float64)
    return list(zip(inputs, torch.randint(3, (count, size), generator=chance), strict=True))


def walked(part, steps, lr=0.1):
    """The paper's algorithm, written down once more with a gradient of its own."""
    net = module()
    w, h = parameters_to_vector(net.parameters()).detach(), None

    def gradient(at, inputs, labels):
        vector_to_parameters(at, net.parameters())
        found = torch.autograd.grad(F.cross_entropy(net(inputs), labels), tuple(net.parameters()))
        return torch.cat([g.flatten() for g in found])

    for k, (inputs, labels) in enumerate(batches(steps)):
        if k % part.every == 0:
            some = math.ceil(part.fraction * len(labels))
            g = gradient(w, inputs[:some], labels[:some])
            step = gradient(w + part.rho * g / g.norm(), inputs, labels)
            cosine = (step @ g) / (step.norm() * g.norm())
            h = step - step.norm() * cosine * g / g.norm()
        else:
            g = gradient(w, inputs, labels)
            step = g + part.mix * g.norm() / h.norm() * h
        w = w - lr * step
    return w


@pytest.mark.parametrize(
    "part",
    [
        SparingAscent(0.3, 1, 0.5),
        SparingAscent(0.3, 2, 1.0, 0.7),
        SparingAscent(0.3, 3, 0.3, 0.2),
        SparingAscent(0.3, 2, 1, 0),
    ],
    ids=["half of the batch", "every second step", "both", "plain steps between"],
)
def test_the_walk_is_the_papers(part):
    network = Network(module(), torch.float64)
    start = network.weights.clone()
    rule = part.plan(LocalRule(lr=0.1, steps=7), {"weights": start}, {})
    outcome = train_client(network, start, rule, batches(7), F.cross_entropy)
    # The guard of 1e-7 against a zero norm is all that the two may differ by.
    torch.testing.assert_close(start + outcome.delta, walked(part, 7), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("sparing", ["looksam(0.3, 1)", "looksam(0.3, 1, 0.99)", "looksam(0.3, 1, 1.0, mix=0.0)"])
def test_with_every_step_and_all_samples_it_is_sam_to_the_bit(digits, sparing):
    settings = dict(rounds=2, cohort=4, batch=16, lr=0.1, momentum=0.5, engine="inline")
    runs = [train(digits, "mlp", method, **settings) for method in (sparing, "fedsam(0.3)")]
    ours, sam = (parameters_to_vector(run.model.parameters()) for run in runs)
    assert torch.equal(ours, sam)


def test_the_first_step_of_every_round_is_sams(digits):
    settings = dict(rounds=2, cohort=4, batch=16, steps=1, lr=0.1, engine="inline")
    runs = [train(digits, "mlp", method, **settings) for method in ("looksam(0.3, every=9)", "fedsam(0.3)")]
    assert torch.equal(*(parameters_to_vector(run.model.parameters()) for run in runs))


@pytest.mark.parametrize(
    ("every", "fraction", "samples"), [(1, 1.0, 14 * 6), (1, 0.5, 11 * 6), (3, 1.0, 14 * 2 + 7 * 4)]
)
def test_it_sees_so_many_samples_and_no_more(monkeypatch, every, fraction, samples):
    seen, gradient = [], Slope._gradient
    monkeypatch.setattr(Slope, "_gradient", lambda s, *a, **k: seen.append(len(s.batch[1])) or gradient(s, *a, **k))
    network = Network(module(), torch.float64)
    start = network.weights.clone()
    rule = SparingAscent(0.3, every, fraction).plan(LocalRule(lr=0.1, steps=6), {"weights": start}, {})
    train_client(network, start, rule, batches(6), F.cross_entropy)
    assert sum(seen) == samples


@pytest.mark.parametrize(("method", "kept"), [("looksam(0.3, 1, 0.5)", ["step"]), ("looksam(0.3, 1)", [])])
def test_without_steps_between_no_direction_is_kept(method, kept):
    rule = parse(method).parts[0].plan(LocalRule(lr=0.1, steps=6), {"weights": torch.zeros(43)}, {})
    assert [*rule.carry] == kept


@pytest.mark.parametrize(("share", "size", "some"), [(0.56, 25, 14), (0.5, 7, 4), (1e-12, 7, 1), (0.99, 7, 7)])
def test_a_share_of_a_batch_is_rounded_up_and_not_by_the_error_of_its_product(share, size, some):
    """0.56 · 25 is a little more than 14 in floating point."""
    network, (batch,) = Network(module(), torch.float64), batches(1, size)
    with network.listening() as tap:
        slope = Slope(network, LocalRule(lr=0.1, steps=1), F.cross_entropy, tap).at(batch)
        with slope.first(share):
            assert len(slope.batch[0]) == len(slope.batch[1]) == some
        assert slope.batch is batch
