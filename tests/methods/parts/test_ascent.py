"""Parts that take the gradient elsewhere, against their formulas in plain PyTorch."""

import pytest
import torch
import torch.nn.functional as F

from fedflat.local.rule import LocalRule
from fedflat.local.slope import Slope
from fedflat.local.step import train as local_train
from fedflat.methods.chain import Method
from fedflat.methods.part import ServerView
from fedflat.methods.parts import (
    AblatedAscent,
    AdaptiveAscent,
    Ascent,
    ConsensusAscent,
    InterpolatedAscent,
    LookbackAscent,
    MetaStep,
    ProximalAscent,
)
from fedflat.methods.parts.ascent import along
from fedflat.methods.uploads import Upload, collect
from plain import DOUBLE, MOVES, NETWORKS, W, adapted, conv, descent, gradient, losses, mlp, normed, task


@NETWORKS
@pytest.mark.parametrize(
    "part",
    [
        Ascent(0.3), AdaptiveAscent(0.3), LookbackAscent(0.3), InterpolatedAscent(0.3), MetaStep(0.3),
        ProximalAscent(rho=0.3), ProximalAscent(rho=0.3, scope="head"), ProximalAscent(rho=0.3, scope="body"),
        AblatedAscent(rho=0.3, form="A3"), AblatedAscent(rho=0.3, form="A4"), ConsensusAscent(0.3),
    ],
    ids=repr,
)  # fmt: skip
def test_after_an_ascent_the_weights_are_what_they_were_to_the_bit(make, part):
    network, batch, anchor = task(make, torch.float32)
    sent = {"weights": anchor, "perturbation": anchor, "ahead": anchor, "mix": torch.tensor([0.3])}
    memory = {"dual": 0.1 * anchor, "seen": network.weights + 1}
    drawers = {name: memory[name] for name in Method(part).memory}
    rule = Method(part).plan(LocalRule(0.1, 1, layout=network.layout, head=network.head), sent, drawers)
    before = network.weights.clone()
    with network.listening(features=True) as tap:
        slope = Slope(network, rule, F.cross_entropy, tap).at(batch)
        rule.ascent(slope, rule.carry)
    assert torch.equal(network.weights, before)


@pytest.mark.parametrize("make", [mlp, conv, normed, adapted])
@pytest.mark.parametrize(("eta", "biases"), [(0.2, False), (0.3, True), (0.0, True)])
def test_fedasam_scales_the_ball_by_the_weights(make, eta, biases):
    network, batch, anchor = task(make)
    local, _ = losses(network, batch, anchor)
    w, scale = network.weights.clone(), network.weights.abs() + eta
    for name, view in network.layout.views(scale).items():
        if name.endswith("bias") and not biases:
            view.fill_(1.0)
    g = gradient(local, w)
    ascent = 0.4 * scale**2 * g / ((scale * g).norm() + 1e-7)
    ours = descent(AdaptiveAscent(0.4, eta, biases), network, batch, anchor)
    torch.testing.assert_close(ours, gradient(local, w + ascent), rtol=1e-11, atol=1e-12)


def test_the_perturbations_of_several_clients_have_their_own_lengths():
    rows = torch.stack([W, 3 * MOVES[0], 0 * W])
    expected = torch.stack([0.5 * W / W.norm(), 0.5 * MOVES[0] / MOVES[0].norm(), 0 * W])
    torch.testing.assert_close(along(rows, 0.5), expected, rtol=1e-6, atol=0)


def test_fedlesam_looks_back_to_the_model_that_the_client_saw_last():
    part, rule = LookbackAscent(0.5), LocalRule(0.1, 1)
    first, later = torch.tensor([1.0, 2.0, 2.0]), torch.tensor([1.0, 5.0, 6.0])
    memory = part.first_memory(first)
    assert part.first_state(first) == part.broadcast(ServerView(first, first, 0, 10)) == {}
    assert part.merge(first, ServerView(first, first, 0, 10), ())[1] == {}
    assert not part.plan(rule, {"weights": first}, memory).carry["lookback"].any()
    upload, memory = part.report(Upload(0, 1, 1, 0.1, 0.0, first), {"weights": first}, memory, None)
    assert not upload.vectors
    lookback = part.plan(rule, {"weights": later}, memory).carry["lookback"]
    torch.testing.assert_close(lookback, 0.5 * torch.tensor([0.0, -3.0, -4.0]) / 5)


def test_fedlesam_on_the_server_looks_back_to_the_last_round():
    part = LookbackAscent(0.5, "server")
    assert part.first_memory(W) == {} and torch.equal(part.first_state(W)["before"], W)
    move, state = part.merge(MOVES[0], ServerView(W, W, 0, 10, part.first_state(W)), ())
    sent = part.broadcast(ServerView(W + move, W + move, 1, 10, state))
    torch.testing.assert_close(sent["back"], -MOVES[0])
    lookback = part.plan(LocalRule(0.1, 1), {"weights": W, **sent}, {}).carry["lookback"]
    torch.testing.assert_close(lookback, -0.5 * MOVES[0] / MOVES[0].norm(), rtol=1e-6, atol=0)
    assert part.report(Upload(0, 1, 1, 0.1, 0.0, W), {"weights": W}, {}, None)[1] == {}


def test_fedgfs_server_counts_the_divergent_rounds_of_its_window_and_looks_back():
    part, clients = InterpolatedAscent(rho_server=0.2, threshold=1.0, window=3), range(2)
    view, shares = ServerView(W, W, 0, 10, part.first_state(W)), []
    for round, norms in enumerate([(3.0, 0.0), (1.0, 0.5), (0.5, 1.6), (1.0, 0.9), (0.2, 0.2)]):
        sent = part.broadcast(view)
        shares.append(float(sent["mix"]))
        back = view["before"] - view.weights
        torch.testing.assert_close(sent["ahead"], view.weights + 0.2 * back / (back.norm() + 1e-7))
        uploads = [Upload(i, 1, 1, 0.1, 0.0, norms[i] * torch.tensor([0.6, -0.8], **DOUBLE)) for i in clients]
        move, state = part.merge(MOVES[0], view, collect(uploads, "uniform"))
        assert torch.equal(state["before"], view.weights)
        view = ServerView(view.arrival(move), view.arrival(move), round + 1, 10, state)
    assert shares == pytest.approx([0, 1, 1 / 2, 2 / 3, 1 / 3])


def test_fedgf_takes_the_gradient_between_the_clients_and_the_servers_perturbation():
    network, batch, anchor = task(mlp)
    local, _ = losses(network, batch, anchor)
    w, mix = network.weights.clone(), torch.tensor([0.25], **DOUBLE)
    rule = InterpolatedAscent(0.3).plan(LocalRule(1.0, 1), {"ahead": anchor, "mix": mix}, {})
    ours = -local_train(network, w, rule, [batch], F.cross_entropy).delta
    own = w + 0.3 * gradient(local, w) / gradient(local, w).norm()
    torch.testing.assert_close(ours, gradient(local, 0.25 * anchor + 0.75 * own), rtol=1e-6, atol=1e-8)
