"""Parts that change local training, against their formulas."""

import pytest
import torch
import torch.nn.functional as F

from fedflat.local.rule import LocalRule
from fedflat.local.step import step
from fedflat.local.step import train as local_train
from fedflat.methods.chain import Method
from fedflat.methods.parts import (
    ControlVariates,
    FallingRate,
    FrozenHead,
    MetaStep,
    Proximal,
)
from fedflat.methods.uploads import Upload
from plain import NETWORKS, W, gradient, losses, mlp, task


@NETWORKS
@pytest.mark.parametrize("shared", [True, False])
def test_per_fedavg_looks_ahead_at_the_inner_rate_and_steps_at_the_outer_one(make, shared):
    """Two pairs of batches with momentum, weight decay and another part's pull, which enter both steps."""
    network, (x, y), anchor = task(make)
    batches = [(x[i : i + 3], y[i : i + 3]) for i in (0, 3, 6, 2)]
    w, v, eta, beta, m, decay, mu = network.weights.clone(), 0.0, 0.3, 0.05, 0.7, 0.02, 0.4
    rule = LocalRule(eta, 4, momentum=m, weight_decay=decay, epochs=2)
    rule = Method(MetaStep(beta, shared), Proximal(mu)).plan(rule, {"weights": anchor}, {})
    assert (rule.steps, rule.lr, rule.mean_lr) == (2, beta, beta)
    local_train(network, w, rule, batches, F.cross_entropy)

    def whole(at, batch):
        return gradient(losses(network, batch, anchor)[0], at) + mu * (w - anchor) + decay * w

    for a, b in (batches[:2], batches[2:]):
        inner = m * v + whole(w, a) if shared else whole(w, a)
        v = m * (inner if shared else v) + whole(w - eta * inner, b)
        w = w - beta * v
    torch.testing.assert_close(network.weights, w, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("pairs", "steps", "epochs", "expected"),
    [
        ("cycle", 12, 3, 6), ("cycle", 5, 5, 5), ("cycle", 7, 1, 7),
        ("once", 12, 3, 6), ("once", 5, 5, 3), ("once", 7, 1, 4),
    ],
)  # fmt: skip
def test_per_fedavg_has_so_many_pairs(pairs, steps, epochs, expected):
    rule = MetaStep(pairs=pairs).plan(LocalRule(0.1, steps, epochs=epochs), {}, {})
    assert rule.pairs and rule.steps == expected


@pytest.mark.parametrize("shared", [True, False])
def test_the_effective_steps_of_per_fedavg_are_the_weights_of_its_gradients(shared):
    """Where every gradient is the same g, Δ = −β · effective steps · g."""
    network, batch, anchor = task(mlp)
    rule = MetaStep(0.05, shared).plan(LocalRule(0.3, 5, momentum=0.8, pull=anchor), {}, {})
    outcome = local_train(network, network.weights.clone(), rule, [batch] * 10, lambda z, _: 0 * z.sum())
    torch.testing.assert_close(outcome.delta, -0.05 * rule.effective_steps * anchor, rtol=1e-12, atol=1e-12)


def test_the_control_variates_of_per_fedavg_are_divided_by_the_outer_rate():
    network, batch, anchor = task(mlp)
    start, zero = network.weights.clone(), torch.zeros_like(anchor)
    method, memory = Method(MetaStep(0.05), ControlVariates()), {"control": zero}
    sent = {"weights": start, "controls": 0.1 * anchor}
    rule = method.plan(LocalRule(0.3, 5), sent, memory)
    outcome = local_train(network, start, rule, [batch] * 10, F.cross_entropy)
    _, kept = method.report(Upload(0, 1, 5, 0.05, 0.0, outcome.delta), sent, memory, outcome)
    torch.testing.assert_close(kept["control"], -0.1 * anchor - outcome.delta / (5 * 0.05), rtol=1e-12, atol=1e-12)


def test_a_frozen_head_stays_also_while_per_fedavg_looks_ahead():
    network, batch, _ = task(mlp)
    start, seen = network.weights.clone(), []
    hook = network.head_module.register_forward_hook(lambda *_: seen.append(network.weights - start))
    rule = LocalRule(0.3, 2, momentum=0.9, weight_decay=0.1, head=network.head)
    rule = Method(FrozenHead(), MetaStep()).plan(rule, {"weights": start}, {})
    local_train(network, start, rule, [batch] * 4, F.cross_entropy)
    hook.remove()
    assert len(seen) == 4 and all(not there[network.head].any() for there in seen)
    assert seen[1].any() and (network.weights - start).any()


def test_a_frozen_head_is_frozen_beside_what_another_part_freezes():
    frozen = torch.tensor([True, False, False, False])
    rule = FrozenHead().plan(LocalRule(0.1, 1, head=slice(2, 4), frozen=frozen), {"weights": torch.ones(4)}, {})
    assert rule.frozen.tolist() == [True, False, True, True]
    assert frozen.tolist() == [True, False, False, False]


def test_fedswas_rate_falls_linearly_within_the_round():
    rule = FallingRate(0.1).plan(LocalRule(0.5, 20), {}, {})
    assert rule.lr_at(0) == 0.5
    assert rule.lr_at(10) == pytest.approx(0.5 * 0.55)
    assert rule.lr_at(19) == pytest.approx(0.5 * (1 - 0.9 * 19 / 20))
    steps = [rule.lr_at(k) - rule.lr_at(k + 1) for k in range(19)]
    assert steps == pytest.approx([steps[0]] * 19)
    w = W.clone()
    step(w, torch.ones_like(W), None, rule, k=19)
    torch.testing.assert_close(w, W - rule.lr_at(19))
