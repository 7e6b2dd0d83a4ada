"""Parts that pull the client's steps, against their formulas."""

import pytest
import torch

from fedflat.local.rule import LocalRule, Outcome
from fedflat.methods.part import ServerView
from fedflat.methods.parts import (
    ClientMomentum,
    ControlVariates,
    DynamicDual,
)
from fedflat.methods.uploads import Upload, collect
from plain import MOVES, W


@pytest.mark.parametrize(
    ("quadratic", "pull", "decay", "spring"),
    [
        ("decay", lambda h, w: h - w, 1, 0), ("clipped", lambda h, w: h - w, 0, 1), ("none", lambda h, w: h, 0, 0),
    ],
)  # fmt: skip
@pytest.mark.parametrize(("balanced", "penalty"), [(False, 0.3), (True, 0.3 / 1.6)])
def test_feddyn_pulls_by_penalty_times_w_minus_global_plus_drift(quadratic, pull, decay, spring, balanced, penalty):
    drift, rule = MOVES[0], LocalRule(0.1, 4, share=1.6)
    rule = DynamicDual(0.3, balanced=balanced, quadratic=quadratic).plan(rule, {"weights": W}, {"drift": drift})
    torch.testing.assert_close(rule.pull, penalty * pull(drift, W))
    assert (rule.decay, rule.spring) == pytest.approx((penalty * decay, penalty * spring))


@pytest.mark.parametrize("dual", ["all", "active"])
def test_feddyns_drifts_grow_by_gain_times_the_moves(dual):
    part, uploads, drifts = DynamicDual(0.3, dual, gain=0.7), [], []
    for client, samples in enumerate((30, 10)):
        outcome = Outcome(MOVES[client], 0.0, LocalRule(0.1, 4), {}, {})
        upload = Upload(client, samples, 4, 0.1, 0.0, MOVES[client])
        upload, kept = part.report(upload, {"weights": W}, {"drift": MOVES[2]}, outcome)
        torch.testing.assert_close(kept["drift"], MOVES[2] + 0.7 * MOVES[client])
        assert ("drift" in upload.vectors) == (dual == "active")
        uploads.append(upload)
        drifts.append(kept["drift"])
    move, state = part.merge(0.5 * W, ServerView(W, W, 1, 10, {"mean_drift": MOVES[2]}), collect(uploads, "samples"))
    mean = 0.75 * drifts[0] + 0.25 * drifts[1]
    expected = MOVES[2] + 0.7 * (MOVES[0] + MOVES[1]) / 10 if dual == "all" else mean
    torch.testing.assert_close(state["mean_drift"], expected)
    torch.testing.assert_close(move, 0.5 * W + expected)


def test_feddyn_as_a_direction_only_leaves_the_server_alone():
    part = DynamicDual(0.3, direction_only=True)
    assert part.first_state(W) == {}
    move, state = part.merge(W, ServerView(W, W, 0, 10), ())
    assert torch.equal(move, W) and state == {}


@pytest.mark.parametrize(
    ("division", "divisor"), [("steps", 4 * 0.155), ("momentum", 0.155 * (4 - 0.5 * (1 - 0.5**4) / 0.5) / 0.5),
                              ("common", 7 * 0.9)],
)  # fmt: skip
@pytest.mark.parametrize(("balanced", "share"), [(False, 1.0), (True, 1.6)])
@pytest.mark.parametrize("direction_only", [False, True])
def test_scaffolds_controls_are_the_mean_gradients_without_the_correction(
    division, divisor, balanced, share, direction_only
):
    # η_k = 0.2 (1 − 0.6 k/4) has the mean 0.155.
    part = ControlVariates(division, balanced, direction_only)
    rule = LocalRule(0.2, 4, first_lr=0.9, typical_steps=7, momentum=0.5, share=1.6, lr_floor=0.4)
    c, own, delta = MOVES
    rule = part.plan(rule, {"controls": c}, {"control": own})
    torch.testing.assert_close(rule.pull, c / share - own)
    outcome = Outcome(delta, 0.0, rule, {}, {})
    upload, kept = part.report(Upload(0, 1, 4, 0.2, 0.0, delta), {"controls": c}, {"control": own}, outcome)
    new = -delta / divisor if direction_only else own - c / share - delta / divisor
    torch.testing.assert_close(kept["control"], new)
    torch.testing.assert_close(upload["control_change"], share * (new - own))
    _, state = part.merge(W, ServerView(W, W, 0, 10, {"controls": c}), collect([upload, upload], "uniform", (0, 0)))
    torch.testing.assert_close(state["controls"], c + 0.2 * share * (new - own))


def test_fedcms_direction_is_the_mean_gradient_of_the_round():
    uploads = [Upload(0, 30, 5, 0.1, 0.0, MOVES[0]), Upload(1, 10, 2, 0.1, 0.0, MOVES[1])]
    part = ClientMomentum(0.2)
    view = ServerView(W, W, 0, 10, part.first_state(W))
    _, state = part.merge(0 * W, view, collect(uploads, "samples"))
    expected = -(0.75 * MOVES[0] / (5 * 0.1) + 0.25 * MOVES[1] / (2 * 0.1))
    torch.testing.assert_close(state["direction"], expected)
    rule = part.plan(LocalRule(0.1, 1, scale=0.5), part.broadcast(ServerView(W, W, 1, 10, state)), {})
    assert rule.scale == 0.1
    torch.testing.assert_close(rule.pull, 0.8 * expected)
