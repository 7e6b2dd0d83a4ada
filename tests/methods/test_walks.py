"""Methods against NumPy: each walk below is a paper's equations, written without fedflat, on softmax regression.

The four clients and their softmax regression are in tests/walking.py. Methods that look for flat minima are in
test_walks_flat.py.
"""

import math

import numpy as np
import pytest
import torch

from fedflat.local.rule import LocalRule
from fedflat.methods.parser import parse
from fedflat.methods.part import ServerView
from fedflat.methods.parts import TopK, WeightedMomentum
from fedflat.methods.uploads import Upload, collect
from walking import (
    BIAS,
    CLASSES,
    CLIENTS,
    COHORTS,
    FEATURES,
    LR,
    MATRIX,
    WD,
    D,
    data,
    gradient,
    mean,
    rate,
    rounds,
    sgd,
    softmax,
    stream,
    through,
    unit,
)

# --------------------------------------------------------------------------------------------------------------------
# The walks: each yields (w, the model that is evaluated) after every round
# --------------------------------------------------------------------------------------------------------------------


def fedinit(w, beta):
    last = dict.fromkeys(range(CLIENTS), w)
    for r, cohort in enumerate(COHORTS):
        moves = []
        for i in cohort:
            start = w + beta * (w - last[i])
            moves.append(sgd(start, i, r))
            last[i] = start + moves[-1]
        w = w + mean(moves)
        yield w, w


def fedexp(w, eps):
    for r, cohort in enumerate(COHORTS):
        moves = [sgd(w, i, r) for i in cohort]
        factor = sum(m @ m for m in moves) / (2 * len(moves) * (mean(moves) @ mean(moves) + eps))
        before, w = w, w + max(1.0, factor) * mean(moves)
        yield w, (w + before) / 2 if r else w


def fedmoswa(w, alpha, floor, gamma):
    c, own = np.zeros(D), {i: np.zeros(D) for i in range(CLIENTS)}
    for r, cohort in enumerate(COHORTS):
        moves, changes = [], []
        for i in cohort:
            v, steps, walked = w, len(stream(i)), 0.0
            for k, batch in enumerate(stream(i)):
                eta = rate(r) * (1 - (1 - floor) * k / steps)
                v = v - eta * (gradient(v, batch) + c - own[i] + WD * v)
                walked += eta
            moves.append(v - w)
            own[i] = own[i] - c - moves[-1] / walked
            changes.append(own[i] - c)
        w, c = w + alpha * mean(moves), c + gamma * mean(changes)
        yield w, w


def fedadamw(w, align, blocks, beta1, beta2, eps):
    direction, square = np.zeros(D), np.zeros(D)
    for r, cohort in enumerate(COHORTS):
        moves, squares, slopes = [], [], []
        for i in cohort:
            x, m, v, steps = w, np.zeros(D), square, len(stream(i))
            for k, batch in enumerate(stream(i), start=1):
                g = gradient(x, batch)
                m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g**2
                step = (m / (1 - beta1**k)) / (np.sqrt(v / (1 - beta2 ** (r * steps + k))) + eps)
                x = x * (1 - rate(r) * WD) - rate(r) * (step + align * direction)
            moves.append(x - w)
            slopes.append(-(x - w) / (steps * rate(r)))
            means = np.concatenate([np.full(D - CLASSES, v[MATRIX].mean()), np.full(CLASSES, v[BIAS].mean())])
            squares.append(means if blocks else v)
        w, direction, square = w + mean(moves), mean(slopes), mean(squares)
        yield w, w


def newton_schulz(m, steps):
    """Muon's iteration on a matrix with more rows than columns, and its factor."""
    x = m.T / np.linalg.norm(m)
    for _ in range(steps):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T * math.sqrt(CLASSES / FEATURES)


def fedmuon(w, align, momentum, iterations):
    direction, buffer = np.zeros(D), np.zeros(D)
    for r, cohort in enumerate(COHORTS):
        moves, buffers, slopes = [], [], []
        for i in cohort:
            x, big, m, v, steps = w, buffer, np.zeros(D), np.zeros(D), len(stream(i))
            for k, batch in enumerate(stream(i), start=1):
                g = gradient(x, batch)
                big, m, v = momentum * big + g, 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
                step = (m / (1 - 0.9**k)) / (np.sqrt(v / (1 - 0.999**k)) + 1e-8)
                step[MATRIX] = newton_schulz(big[MATRIX].reshape(CLASSES, FEATURES), iterations).ravel()
                x = x * (1 - rate(r) * WD) - rate(r) * ((1 - align) * step + align * direction)
            moves.append(x - w)
            buffers.append(big)
            slopes.append(-(x - w) / (steps * rate(r)))
        w, direction, buffer = w + mean(moves), mean(slopes), mean(buffers)
        yield w, w


def fedgmt(w, gamma, tau, alpha, penalty):
    teacher, drift = w, {i: np.zeros(D) for i in range(CLIENTS)}
    for r, cohort in enumerate(COHORTS):
        ends = []
        for i in cohort:
            v = w
            for x, y in stream(i):
                term = gamma * tau * through(x, softmax(v, x, tau) - softmax(teacher, x, tau))
                v = v - rate(r) * (gradient(v, (x, y)) + term + penalty * drift[i] + WD * v)
            ends.append(v)
        for i, v in zip(cohort, ends, strict=True):
            drift[i] = drift[i] + v - w
        w = mean(ends) + mean([*drift.values()])
        teacher = alpha * teacher + (1 - alpha) * w
        yield w, w


def fedwmsam(w, rho, mix, follow, sign):
    direction, c, own = np.zeros(D), np.zeros(D), {i: np.zeros(D) for i in range(CLIENTS)}
    for r, cohort in enumerate(COHORTS):
        moves, slopes, changes, seen = [], [], [], []
        for i in cohort:
            mine, x = direction + mix / (1 - mix) * (c - own[i]), w
            for b, batch in enumerate(stream(i)):
                g = gradient(x + sign * rho * unit(w + b * mine - x), batch)
                x = x - rate(r) * (mix * g + (1 - mix) * mine + WD * x)
            moves.append(x - w)
            slopes.append(-(x - w) / (len(stream(i)) * rate(r)))
            changes.append(slopes[-1] - c)
            own[i] = own[i] + changes[-1]
            if direction.any():
                seen.append(1 + moves[-1] @ direction / np.linalg.norm(moves[-1]) / np.linalg.norm(direction))
        w, direction, c = w + mean(moves), mean(slopes), c + sum(changes) / CLIENTS
        mix = (1 - follow) * mix + follow * np.clip(mean(seen) if seen else 0.0, 0.1, 0.9)
        yield w, w


def top_k(w, share, feedback):
    kept = {i: np.zeros(D) for i in range(CLIENTS)}
    for r, cohort in enumerate(COHORTS):
        sent = []
        for i in cohort:
            whole = sgd(w, i, r) + (kept[i] if feedback else 0)
            order = np.argsort(-abs(whole))
            sent.append(np.where(np.isin(np.arange(D), order[: math.ceil(share * D)]), whole, 0.0))
            kept[i] = whole - sent[-1]
        w = w + mean(sent)
        yield w, w


WALKS = [
    ("fedinit(0.3)", fedinit, (0.3,)),
    ("fedexp(1e-6)", fedexp, (1e-6,)),
    ("fedexp(0.02)", fedexp, (0.02,)),
    ("fedmoswa(1.3, 0.2, 0.4)", fedmoswa, (1.3, 0.2, 0.4)),
    ("fedadamw(0.4, True, 0.8, 0.95, 1e-3)", fedadamw, (0.4, True, 0.8, 0.95, 1e-3)),
    ("fedadamw(0.4, False, 0.8, 0.95, 1e-3)", fedadamw, (0.4, False, 0.8, 0.95, 1e-3)),
    ("fedmuon(0.3, 0.9, 4)", fedmuon, (0.3, 0.9, 4)),
    ("fedgmt(0.7, 2.0, 0.6, 0.3)", fedgmt, (0.7, 2.0, 0.6, 0.3)),
    ("fedwmsam(0.2, 0.3, 0.2)", fedwmsam, (0.2, 0.3, 0.2, 1)),
    ("fedwmsam(0.2, 0.3, 0.2, -1)", fedwmsam, (0.2, 0.3, 0.2, -1)),
    ("top_k(0.3)", top_k, (0.3, False)),
    ("top_k(0.3, feedback=True)", top_k, (0.3, True)),
]


@pytest.mark.parametrize(("method", "walk", "options"), WALKS, ids=[method for method, *_ in WALKS])
def test_three_rounds_are_the_papers_equations(method, walk, options):
    for (ours, shown), (theirs, expected) in zip(rounds(method), walk(data()[1], *options), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)
        np.testing.assert_allclose(shown, expected, rtol=0, atol=1e-12)
    *_, (plain, _) = rounds("fedavg")
    assert abs(ours - plain).max() > 1e-3


def test_fedexps_factor_is_at_work_and_at_its_bound():
    """With a small ε the server goes further than the average, with a large one exactly as far."""
    (first, _), *_ = rounds("fedexp(1e-6)")
    (plain, _), *_ = rounds("fedavg")
    (bound, _), *_ = rounds("fedexp(1e6)")
    start = data()[1]
    assert np.linalg.norm(first - start) > 1.01 * np.linalg.norm(plain - start)
    assert (bound == plain).all()


@pytest.mark.parametrize(
    ("method", "host"),
    [
        ("fedinit(0.0)", "fedavg"),
        ("fedexp(1e9, average=False)", "fedavg"),
        ("top_k(1.0)", "fedavg"),
        ("top_k(1.0, feedback=True)", "fedavg"),
        ("fedwmsam(0.0, 1.0, 0.0)", "scaffold"),
        ("fedwmsam(0.2, 1.0, 0.0)", "scaffold"),
        ("dp_fedsam(0.2, 0.3, 0.5, 0.7)", "local_dp(0.5, 0.7) + top_k(0.3) + fedsam(0.2)"),
        ("dp_fedsam(0.2, 1.0, 1e9, 0.0)", "fedsam(0.2)"),
    ],
)
def test_without_its_idea_a_method_is_its_host_to_the_bit(method, host):
    for (ours, shown), (theirs, expected) in zip(rounds(method), rounds(host), strict=True):
        assert (ours == theirs).all() and (shown == expected).all()


@pytest.mark.parametrize("method", ["fedwmsam(0.0)", "fedwmsam(0.2, 1.0)"])
def test_without_a_radius_or_a_momentum_fedwmsam_sets_no_ascent(method):
    chain, w = parse(method), torch.ones(D)
    rule = chain.plan(LocalRule(0.1, 4), chain.first_state(w) | {"weights": w}, chain.first_memory(w))
    assert rule.ascent is None and not rule.carry


def test_fedwmsams_share_multiplies_the_scale_that_other_parts_have_set():
    chain, w = parse("fedwmsam(0.2, 0.3)"), torch.ones(D)
    rule = chain.plan(LocalRule(0.1, 4, scale=0.5), chain.first_state(w) | {"weights": w}, chain.first_memory(w))
    assert rule.scale == pytest.approx(0.15)


@pytest.mark.parametrize(
    ("momentum", "moves", "expected"),
    [
        ((2, 0), [(-3, 4), (-4, -3), (-1, 0)], 1 - (0.6 + 0.8 + 1) / 3),  # their mean cosine is −0.8
        ((2, 0), [(-3, 4), (0, 5)], 0.7),
        ((2, 0), [(-1, 0), (-2, 0.1)], 0.1),  # they follow the momentum
        ((2, 0), [(3, 4), (0, 1)], 0.9),
        ((0, 0), [(3, 4), (0, 1)], 0.1),  # there is none yet
    ],
)
def test_fedwmsams_share_grows_with_the_mean_cosine_within_its_bounds(momentum, moves, expected):
    zeros, momentum = torch.zeros(2, dtype=torch.float64), torch.tensor(momentum, dtype=torch.float64)
    state = {"direction": momentum, "controls": zeros, "mix": torch.tensor([0.3], dtype=torch.float64)}
    moves = [torch.tensor(move, dtype=torch.float64) for move in moves]
    uploads = collect([Upload(i, 1, 2, 0.1, 0.0, m, {"control_change": zeros}) for i, m in enumerate(moves)], "uniform")
    _, state = WeightedMomentum(rate=1.0).merge(zeros, ServerView(zeros, zeros, 1, 4, state), uploads)
    assert float(state["mix"]) == pytest.approx(expected)


def test_fedmoswa_with_all_clients_and_gamma_one_is_scaffold():
    everybody = [[*range(CLIENTS)]] * 3
    for (ours, _), (theirs, _) in zip(
        rounds("fedmoswa(1.0, 1.0, 1.0)", everybody), rounds("scaffold", everybody), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-13)


def test_in_the_first_round_fedadamw_has_nothing_to_share():
    (first, _), (second, _), _ = rounds("fedadamw")
    (plain, _), (later, _), _ = rounds("adamw")
    assert (first == plain).all()
    assert abs(second - later).max() > 1e-3


def test_with_one_client_fedadamws_second_moment_runs_through_the_rounds():
    """Without blocks and without β₁ two rounds of a single client are one run of AdamW that is twice as long."""
    *_, (ours, _) = rounds("fedadamw(0.0, False, 0.0, 0.95, 1e-3)", [[2], [2]], lr_decay=1.0)
    x, v = data()[1], np.zeros(D)
    for t, batch in enumerate(stream(2) * 2, start=1):
        g = gradient(x, batch)
        v = 0.95 * v + 0.05 * g**2
        x = x * (1 - LR * WD) - LR * g / (np.sqrt(v / (1 - 0.95**t)) + 1e-3)
    np.testing.assert_allclose(ours, x, rtol=0, atol=1e-12)


def test_with_one_client_fedmuons_momentum_runs_through_the_rounds():
    """Without Δ_G two rounds of a single client are one run of the iteration on M ← μ M + g, but for the biases."""
    *_, (ours, _) = rounds("fedmuon(0.0, 0.9, 3)", [[2], [2]], lr_decay=1.0)
    x, big = data()[1], np.zeros(D)
    for _ in range(2):
        m, v = np.zeros(D), np.zeros(D)
        for k, batch in enumerate(stream(2), start=1):
            g = gradient(x, batch)
            big, m, v = 0.9 * big + g, 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
            step = (m / (1 - 0.9**k)) / (np.sqrt(v / (1 - 0.999**k)) + 1e-8)
            step[MATRIX] = newton_schulz(big[MATRIX].reshape(CLASSES, FEATURES), 3).ravel()
            x = x * (1 - LR * WD) - LR * step
    np.testing.assert_allclose(ours, x, rtol=0, atol=1e-12)


def test_what_top_k_with_feedback_uploads_and_keeps_adds_up_to_all_updates():
    """After T rounds of the same client, Σ uploads + eᵢ = Σ Δᵢ; without feedback the rest is lost."""
    part, chance = TopK(0.25, feedback=True), np.random.default_rng(1)
    memory, sent, moved = part.first_memory(torch.zeros(20, dtype=torch.float64)), 0.0, 0.0
    for _ in range(6):
        delta = torch.from_numpy(chance.normal(size=20))
        upload, memory = part.report(Upload(0, 1, 1, 0.1, 0.0, delta), {}, memory, LocalRule(0.1, 1).outcome(delta))
        assert int((upload.delta != 0).sum()) == 5
        sent, moved = sent + upload.delta, moved + delta
    torch.testing.assert_close(sent + memory["residual"], moved, rtol=0, atol=1e-14)
    assert parse("top_k(feedback=True)").memory == ("residual",) and not parse("top_k").memory
