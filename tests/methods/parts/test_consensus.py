"""FedSMOO's perturbation against its formulas."""

import gc

import pytest
import torch
import torch.nn.functional as F

from fedflat.local.rule import LocalRule
from fedflat.local.step import train as local_train
from fedflat.methods.chain import Method
from fedflat.methods.part import ServerView
from fedflat.methods.parts import ConsensusAscent, DynamicDual, PrintedConsensus
from fedflat.methods.uploads import Upload, collect
from plain import MOVES, W, gradient, losses, mlp, task


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("upload", ["dual", "less"])
@pytest.mark.parametrize("crowd", ["active", "all"])
def test_fedsmoo_perturbs_by_rho_along_g_minus_dual_minus_s_and_integrates_it(sign, upload, crowd):
    network, batch, anchor = task(mlp)
    local, _ = losses(network, batch, anchor)
    w, dual, s, told = network.weights.clone(), 0.05 * anchor, 0.02 * anchor.flip(0), 0.03 * anchor
    part = ConsensusAscent(0.3, sign, crowd, upload)
    memory = {"dual": dual, "told": told}
    rule = part.plan(LocalRule(1.0, 2), {"perturbation": s}, memory)
    outcome = local_train(network, w, rule, [batch, batch], F.cross_entropy)
    for _ in range(2):
        q = gradient(local, w) - dual + sign * s
        ascent = 0.3 * q / (q.norm() + 1e-7)
        w, dual = w - gradient(local, w + ascent), dual + ascent - s
    torch.testing.assert_close(outcome.carry["dual"], dual, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(network.weights, w, rtol=1e-12, atol=1e-12)
    sent, kept = part.report(Upload(0, 1, 2, 1.0, 0.0, outcome.delta), {}, memory, outcome)
    up = dual - ascent if upload == "less" else dual
    before = {"active": 0.0, "all": told if upload == "less" else memory["dual"]}[crowd]
    torch.testing.assert_close(sent["dual"], up - before, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(kept["dual"], dual, rtol=1e-12, atol=1e-12)
    tells = crowd == "all" and upload == "less"  # only the change of μᵢ − ŝ goes up
    assert part.first_memory(anchor).keys() == kept.keys() == ({"dual", "told"} if tells else {"dual"})
    if tells:
        torch.testing.assert_close(kept["told"], up, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("crowd", "total"), [("active", lambda s, u: u / 2), ("all", lambda s, u: s + u / 10)])
def test_fedsmoos_server_sends_the_mean_dual_at_length_rho(crowd, total):
    part = ConsensusAscent(0.3, crowd=crowd)
    uploads = [Upload(i, 1 + i, 1, 0.1, 0.0, 0 * W, {"dual": MOVES[i]}) for i in range(2)]
    known = {"mean_dual": MOVES[2]} if crowd == "all" else {}  # the mean over the round is new in every round
    move, state = part.merge(W, ServerView(W, W, 0, 10, known), collect(uploads, "samples"))
    mean = total(MOVES[2], MOVES[0] + MOVES[1])
    assert torch.equal(move, W) and state.keys() == part.first_state(W).keys() == {"perturbation", *known}
    torch.testing.assert_close(state.get("mean_dual", mean), mean)
    torch.testing.assert_close(state["perturbation"], 0.3 * mean / mean.norm(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("printed", [True, False])
@pytest.mark.parametrize(("rho", "alpha"), [(0.05, 2.0), (0.05, 0.5), (1e3, 2.0)])
def test_fedsmoo_of_the_slides_is_the_plain_computation(rho, alpha, printed):
    """Two steps of one client; with the large radius no projection is active, and the μ that is printed stays."""
    network, batch, anchor = task(mlp)
    local, _ = losses(network, batch, anchor)
    w, dual, s = network.weights.clone(), 0.05 * anchor, 0.02 * anchor.flip(0)
    part, first = PrintedConsensus(rho, alpha, printed), dual.clone()
    rule = part.plan(LocalRule(0.7, 2), {"perturbation": s}, {"dual": dual})
    outcome = local_train(network, w, rule, [batch, batch], F.cross_entropy)
    assert torch.equal(dual, first)
    for _ in range(2):
        wish = alpha * (gradient(local, w) - dual) - s
        found = wish * min(1.0, rho / (float(wish.norm()) + 1e-7))
        residual = found - (wish if printed else s)
        w, dual = w - 0.7 * gradient(local, w + found), dual + residual / (2 * alpha)
    torch.testing.assert_close(network.weights, w, rtol=1e-12, atol=1e-12)
    sent, kept = part.report(Upload(0, 1, 2, 0.7, 0.0, outcome.delta), {}, {}, outcome)
    torch.testing.assert_close(kept["dual"], dual, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(sent["wish"], found - alpha * dual, rtol=1e-12, atol=1e-12)
    assert torch.equal(dual, first) == (printed and rho == 1e3)


@pytest.mark.parametrize("rho", [0.1, 1e3])
def test_the_printed_server_projects_the_mean_of_what_the_rounds_clients_wish(rho):
    part = PrintedConsensus(rho)
    assert not part.first_state(W)["perturbation"].any() and not part.first_memory(W)["dual"].any()
    uploads = [Upload(i, 1 + i, 1, 0.1, 0.0, 0 * W, {"wish": MOVES[i]}) for i in range(2)]
    move, state = part.merge(W, ServerView(W, W, 0, 10), collect(uploads, "samples"))
    mean = (MOVES[0] + MOVES[1]) / 2
    assert torch.equal(move, W)
    torch.testing.assert_close(state["perturbation"], mean * min(1.0, rho / float(mean.norm())), rtol=1e-5, atol=0)
    assert torch.equal(part.broadcast(ServerView(W, W, 1, 10, state))["perturbation"], state["perturbation"])


def test_fedsmoos_steps_hold_two_vectors_beside_the_weights_and_the_plan():
    """v, and at the second gradient w + ε in the place of q; nothing of the step before."""
    network, batch, anchor = task(mlp)
    method = Method(DynamicDual(0.1), ConsensusAscent(0.3))
    sent, memory = {"weights": network.weights.clone(), "perturbation": anchor}, {"drift": anchor, "dual": anchor}
    rule = method.plan(LocalRule(0.1, 3, momentum=0.9), sent, memory)

    def vectors():
        tensors = [x for x in gc.get_objects() if type(x) in (torch.Tensor, torch.nn.Parameter)]
        spaces = [x.untyped_storage() for x in tensors if x.layout is torch.strided]
        return {space.data_ptr() for space in spaces if space.nbytes() == anchor.nbytes}

    def loss(logits, labels):
        more.append(len(vectors() - before))
        return F.cross_entropy(logits, labels)

    gc.collect()
    before, more = vectors(), []
    local_train(network, sent["weights"], rule, [batch] * 3, loss)
    assert more == [1, 2] * 3


def test_fedsmoos_perturbation_has_length_rho_in_every_step():
    network, batch, anchor = task(mlp)
    start, seen = network.weights.clone(), []
    hook = network.head_module.register_forward_hook(lambda *_: seen.append(network.weights.clone()))
    sent, memory = {"perturbation": torch.zeros_like(anchor)}, {"dual": torch.zeros_like(anchor)}
    local_train(
        network, start, ConsensusAscent(0.3).plan(LocalRule(0.1, 4), sent, memory), [batch] * 4, F.cross_entropy
    )
    hook.remove()
    lengths = [float((there - here).norm()) for here, there in zip(seen[::2], seen[1::2], strict=True)]
    assert lengths == pytest.approx([0.3] * 4, rel=1e-5)
