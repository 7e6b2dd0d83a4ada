"""Parts of the server's step, against their formulas by hand."""

import math

import pytest
import torch

from fedflat.local.rule import LocalRule, Outcome
from fedflat.local.step import step
from fedflat.methods.part import ServerView
from fedflat.methods.parts import (
    ActiveModel,
    AdaptiveServer,
    AllModels,
    NormalisedAveraging,
    ServerAscent,
    ServerMomentum,
    ServerStep,
    WeightAveraging,
)
from fedflat.methods.parts.server_step import MANY
from fedflat.methods.uploads import Upload, collect
from plain import (
    DOUBLE,
    MOVES,
    W,
    served,
)


@pytest.mark.parametrize(
    ("rule", "second"),
    [
        ("adam", lambda v, u: 0.8 * v + 0.2 * u**2),
        ("yogi", lambda v, u: v - 0.2 * u**2 * math.copysign(1, v - u**2)),
        ("adagrad", lambda v, u: v + u**2),
    ],
)
def test_the_adaptive_servers_have_the_moments_of_the_paper(rule, second):
    states = served(AdaptiveServer(rule, server_lr=0.3, beta1=0.6, beta2=0.8, tau=0.05, v0=0.04))
    w, m, v = W.tolist(), [0.0, 0.0], [0.04, 0.04]
    for state, u in zip(states, MOVES, strict=True):
        for i in range(2):
            m[i] = 0.6 * m[i] + 0.4 * float(u[i])
            v[i] = second(v[i], float(u[i]))
            w[i] += 0.3 * m[i] / (math.sqrt(v[i]) + 0.05)
        assert state.weights.tolist() == pytest.approx(w, rel=1e-12)


def test_fedavgm_is_heavy_ball():
    w, m = W, 0 * W
    for state, move in zip(served(ServerMomentum(0.9)), MOVES, strict=True):
        m = 0.9 * m + move
        w = w + m
        assert ServerMomentum(0.9).broadcast(state) == {}
        torch.testing.assert_close(state.weights, w)


def test_fednsam_starts_ahead_and_keeps_the_old_momentum():
    part = ServerMomentum(0.85, lookahead=True)
    w, m = W, 0 * W
    for state, move in zip(served(part), MOVES, strict=True):
        m = 0.85 * m + move
        w = w + m
        torch.testing.assert_close(state.weights, w)
        torch.testing.assert_close(part.broadcast(state)["weights"], w + 0.85 * m)


def test_fedswas_server_goes_further_than_the_average():
    first, *_ = served(ServerStep(1.5))
    torch.testing.assert_close(first.weights, W + 1.5 * MOVES[0])


def test_swa_shows_the_mean_of_the_models_since_its_start():
    part, models = WeightAveraging(start=2), []
    states = served(part, [*MOVES, *MOVES])
    for done, state in enumerate(states, start=1):
        models.append(state.weights)
        torch.testing.assert_close(part.evaluated(state), torch.stack(models[2:] if done > 2 else models[-1:]).mean(0))


def test_swa_takes_every_third_model_if_told_so():
    part = WeightAveraging(start=1, every=3)
    states = list(served(part, [*MOVES, *MOVES, W]))
    models, shown = [state.weights for state in states], [part.evaluated(state) for state in states]
    expected = [models[0]] * 3 + [models[3]] * 3 + [(models[3] + models[6]) / 2]
    torch.testing.assert_close(torch.stack(shown), torch.stack(expected))


def test_the_active_model_is_where_the_clients_began_plus_their_average():
    part, ahead = ActiveModel(), W + 1
    view = ServerView(W, ahead, 0, 10, part.first_state(W))
    assert torch.equal(part.evaluated(view), W)
    uploads = collect([Upload(i, 3 - i, 1, 0.1, 0.0, MOVES[i]) for i in range(2)], "samples")
    move, state = part.merge(W, view, uploads)
    assert torch.equal(move, W)
    shown = part.evaluated(ServerView(W, W, 1, 10, state))
    torch.testing.assert_close(shown, ahead + 0.6 * MOVES[0] + 0.4 * MOVES[1])


@pytest.mark.parametrize("by", ["uniform", "samples"])
def test_all_models_have_the_mean_of_the_clients_last_ones(by):
    part, sizes, rounds = AllModels(by), [1, 2, 3, 4], [[0, 1], [1, 3]]
    memories = [part.first_memory(W) for _ in sizes]
    view, weights = ServerView(W, W, 0, 4, part.first_state(W)), W
    for round, cohort in enumerate(rounds):
        uploads = []
        for client in cohort:
            delta, share = MOVES[round] * (client + 1), sizes[client] * 4 / sum(sizes)
            outcome = Outcome(delta, 0.0, LocalRule(0.1, 1, share=share), {}, {})
            upload = Upload(client, sizes[client], 1, 0.1, 0.0, delta)
            upload, memories[client] = part.report(upload, {"weights": weights}, memories[client], outcome)
            torch.testing.assert_close(memories[client]["last"], weights + delta)
            uploads.append(upload)
        _, state = part.merge(W, view, collect(uploads, "samples"))
        view, weights = ServerView(weights, weights, round + 1, 4, state), weights + MOVES[2]
        p = [size / sum(sizes) for size in sizes] if by == "samples" else [1 / 4] * 4
        expected = sum(share * memory["last"] for share, memory in zip(p, memories, strict=True))
        torch.testing.assert_close(part.evaluated(view), expected)


def test_fedgloss_sends_a_point_uphill_and_steps_from_the_point_below():
    part = ServerAscent(0.2)
    assert torch.equal(part.broadcast(ServerView(W, W, 0, 10, part.first_state(W)))["weights"], W)
    for state, move in zip(served(part), MOVES, strict=True):
        torch.testing.assert_close(
            part.broadcast(state)["weights"], state.weights - 0.2 * move / move.norm(), rtol=1e-6, atol=0
        )


def test_fedgloss_ramps_its_radius():
    part = ServerAscent(0.5, start=0.1, ramp=4)
    radii = []
    for round in range(7):
        state = ServerView(0 * W, 0 * W, round, 10, {"pseudo_gradient": W})
        radii.append(float(part.broadcast(state)["weights"].norm()))
    assert radii == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.5, 0.5], rel=1e-6)


def walked(rule, drift=1.0):
    """How far a client goes whose loss has the gradient 1 everywhere."""
    w, velocity = torch.zeros(1, **DOUBLE), torch.zeros(1, **DOUBLE)
    for k in range(rule.steps):
        step(w, torch.full_like(w, drift), velocity, rule, k)
    return float(w)


@pytest.mark.parametrize(
    "rule", [LocalRule(0.1, 7), LocalRule(0.1, 7, momentum=0.9), LocalRule(0.1, 7, decay=0.3, spring=0.2)]
)
def test_fednovas_normaliser_counts_what_a_unit_gradient_amounts_to(rule):
    upload = Upload(0, 1, rule.steps, rule.lr, 0.0, W)
    upload, _ = NormalisedAveraging().report(upload, {}, {}, Outcome(W, 0.0, rule, {}, {}))
    a, tau = upload["normaliser"].tolist()
    assert a == pytest.approx(-walked(rule) / rule.lr, rel=1e-12)
    assert tau == pytest.approx(7 if rule.decay else a)


@pytest.mark.parametrize("facts", [dict(), dict(momentum=0.9), dict(decay=0.5), dict(decay=0.1, spring=0.3)])
def test_fednova_averages_updates_per_step(facts):
    part, uploads, total, tau = NormalisedAveraging(), [], 0 * W, 0.0
    for client, (steps, samples) in enumerate([(3, 20), (8, 60), (5, 20)]):
        rule, p = LocalRule(0.1, steps, **facts), samples / 100
        upload = Upload(client, samples, steps, 0.1, 0.0, MOVES[client])
        uploads.append(part.report(upload, {}, {}, Outcome(MOVES[client], 0.0, rule, {}, {}))[0])
        a = -walked(rule) / 0.1
        total = total + p * MOVES[client] / a
        tau += p * (steps if "decay" in facts else a)
    move, _ = part.merge(0 * W, ServerView(W, W, 0, 10), collect(uploads, "samples"))
    torch.testing.assert_close(move, tau * total, rtol=1e-12, atol=0)


def normaliser(rule):
    upload, _ = NormalisedAveraging().report(
        Upload(0, 1, rule.steps, rule.lr, 0.0, W), {}, {}, Outcome(W, 0.0, rule, {}, {})
    )
    return upload["normaliser"][0].item()


def test_fednovas_normaliser_goes_on_beyond_the_steps_that_are_summed_one_by_one():
    """a ← (1 − η μ) a + 1 from the last sum to the first closed form; a step that is no contraction counts as one."""
    last, first = (normaliser(LocalRule(0.1, MANY + more, decay=2e-5, spring=1e-5)) for more in (0, 1))
    assert first == pytest.approx((1 - 3e-6) * last + 1, rel=1e-9)
    assert first < 0.9 * MANY
    assert normaliser(LocalRule(0.1, MANY + 1, decay=15.0)) == pytest.approx(1 / 1.5), (
        "a step beyond the anchor and back"
    )
    assert [normaliser(LocalRule(0.1, MANY + 1, decay=decay)) for decay in (1e-30, 20.0, 50.0)] == [MANY + 1] * 3
