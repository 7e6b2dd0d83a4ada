"""Methods that look for flat minima against NumPy, and servers that step further than the average.

Each walk is a paper's equations, written without fedflat, on the softmax regression of tests/walking.py.
"""

from functools import partial

import numpy as np
import pytest

from walking import (
    CLASSES,
    CLIENTS,
    COHORTS,
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


def client(w, i, r, sharp, pull=0.0, spring=0.0):
    """A client's Δ by SGD with weight decay, a pull and λ w, where `sharp(w, batch)` takes the gradient's place."""
    start = w
    for batch in stream(i):
        w = w - rate(r) * (sharp(w, batch) + pull + (WD + spring) * w)
    return w - start


def sam(w, batch, rho):
    return gradient(w + rho * unit(gradient(w, batch)), batch)


def zeros():
    return {i: np.zeros(D) for i in range(CLIENTS)}


def fedgloss(w, rho, rho_server, penalty, ramp):
    h, pseudo = zeros(), np.zeros(D)
    for r, cohort in enumerate(COHORTS):
        radius = 0.001 + (rho_server - 0.001) * min(r / ramp, 1) if ramp else rho_server
        start, sharp = w + radius * unit(pseudo), partial(sam, rho=rho)
        moves = {i: client(start, i, r, sharp, penalty * (h[i] - start), penalty) for i in cohort}
        for i, move in moves.items():
            h[i] = h[i] + move
        pseudo = -mean([*moves.values()])
        w = w - pseudo + mean([*h.values()])
        yield w, w


def fedgf(w, rho, rho_server, threshold, window):
    before, seen = w, []
    for r, cohort in enumerate(COHORTS):
        c = mean(seen[-window:]) if seen else 0.0
        ahead = w + rho_server * unit(before - w)

        def between(v, batch, c=c, ahead=ahead):
            return gradient(c * ahead + (1 - c) * (v + rho * unit(gradient(v, batch))), batch)

        moves = [client(w, i, r, between) for i in cohort]
        seen.append(float(mean([np.linalg.norm(move) for move in moves]) > threshold))
        before, w = w, w + mean(moves)
        yield w, w


def momentum(w, beta, rho, ahead):
    """FedAvgM, and FedNSAM, whose clients start ahead and perturb."""
    m = np.zeros(D)
    for r, cohort in enumerate(COHORTS):
        start = w + ahead * beta * m
        m = beta * m + mean([client(start, i, r, partial(sam, rho=rho)) for i in cohort])
        w = w + m
        yield w, w


def lookback(w, rho, controls):
    """FedLESAM, and FedLESAM-S with control variates."""
    seen, c, own = {}, np.zeros(D), zeros()
    for r, cohort in enumerate(COHORTS):
        moves, changes = [], []
        for i in cohort:
            back = rho * unit(seen.get(i, w) - w)
            moves.append(
                client(w, i, r, lambda v, batch, back=back: gradient(v + back, batch), controls * (c - own[i]))
            )
            seen[i] = w
            changes.append(-c - moves[-1] / (len(stream(i)) * rate(r)))
            own[i] = own[i] + changes[-1]
        w, c = w + mean(moves), c + sum(changes) / CLIENTS
        yield w, w


def looksam(w, rho, every, fraction, mix):
    for r, cohort in enumerate(COHORTS):
        moves = []
        for i in cohort:
            v = w
            for k, (x, y) in enumerate(stream(i)):
                some = slice(int(np.ceil(fraction * len(y))))
                if k % every == 0:
                    g = gradient(v, (x[some], y[some]))
                    step = gradient(v + rho * unit(g), (x, y))
                    sharp = unit(step - (step @ unit(g)) * unit(g))
                else:
                    g = gradient(v, (x, y))
                    step = g + mix * np.linalg.norm(g) * sharp
                v = v - rate(r) * (step + WD * v)
            moves.append(v - w)
        w = w + mean(moves)
        yield w, w


def slides(w, rho, penalty, alpha, printed):
    """FedSMOO as its slides print it."""

    def ball(v):
        return v * min(1.0, rho / (np.linalg.norm(v) + 1e-7))

    gain = 1 / (2 * alpha * penalty) if printed else 1.0
    h, dual, s = zeros(), zeros(), np.zeros(D)
    for r, cohort in enumerate(COHORTS):
        ends, wishes = [], []
        for i in cohort:
            v = w
            for batch in stream(i):
                wish = alpha * (gradient(v, batch) - dual[i]) - s
                hat = ball(wish)
                dual[i] = dual[i] + (hat - (wish if printed else s)) / (2 * alpha)
                v = v - rate(r) * (gradient(v + hat, batch) + penalty * (v - w + h[i]) + WD * v)
            ends.append(v)
            wishes.append(hat - alpha * dual[i])
        for i, v in zip(cohort, ends, strict=True):
            h[i] = h[i] + gain * (v - w)
        w, s = mean(ends) + mean([*h.values()]), ball(mean(wishes))
        yield w, w


def smoo(w, rho, penalty, sign, crowd, upload):
    """FedSMOO with the options that no recording has: the sign of s, whose duals are averaged, and what goes up."""
    h, dual, told, s = zeros(), zeros(), zeros(), np.zeros(D)
    for r, cohort in enumerate(COHORTS):
        ends = []
        for i in cohort:
            v = w
            for batch in stream(i):
                hat = rho * unit(gradient(v, batch) - dual[i] + sign * s)
                dual[i] = dual[i] + hat - s
                v = v - rate(r) * (gradient(v + hat, batch) + penalty * (v - w + h[i]) + WD * v)
            ends.append(v)
            told[i] = dual[i] - hat if upload == "less" else dual[i]
        for i, v in zip(cohort, ends, strict=True):
            h[i] = h[i] + v - w
        middle = mean([told[i] for i in (cohort if crowd == "active" else range(CLIENTS))])
        w, s = mean(ends) + mean([*h.values()]), rho * middle / (np.linalg.norm(middle) + 1e-7 * (upload == "dual"))
        yield w, w


def speed(w, rho, penalty):
    """FedSpeed as its paper has it: the server adds the mean dual of the round's clients."""
    h = zeros()
    for r, cohort in enumerate(COHORTS):
        moves = [client(w, i, r, partial(sam, rho=rho), penalty * (h[i] - w), penalty) for i in cohort]
        for i, move in zip(cohort, moves, strict=True):
            h[i] = h[i] + move
        w = w + mean(moves) + mean([h[i] for i in cohort])
        yield w, w


def ablation(w, form, rho, beta, tau, radius):
    """Table 6 of FedSoL: where the local loss and the KL to the global model are taken."""

    def shape(moved):
        if radius == "fixed":
            return 1.0
        tensors = [abs(moved[:-CLASSES]).reshape(CLASSES, -1), abs(moved[-CLASSES:])]
        if radius == "dim0":
            return np.concatenate([(t / np.maximum(np.linalg.norm(t, axis=0), 1e-12)).ravel() for t in tensors])
        return np.concatenate([(t / (np.linalg.norm(t) + 1e-12)).ravel() for t in tensors])

    for r, cohort in enumerate(COHORTS):

        def ablated(v, batch, anchor=w):
            x, _ = batch

            def pulled(at):
                return through(x, softmax(at, x, tau) - softmax(anchor, x, tau)) / tau

            direction = pulled(v) + (gradient(v, batch) if form == "A4" else 0)
            length = np.linalg.norm(direction)
            ascent = rho * shape(v - anchor) * direction / (length + 1e-12) if length > 1e-6 else 0 * v
            local = v if form in ("A2", "A5") else v + ascent
            proximal = v if form in ("A5", "A6") else v + ascent
            return gradient(local, batch) + (0 if form == "A1" else beta * pulled(proximal))

        w = w + mean([client(w, i, r, ablated) for i in cohort])
        yield w, w


def stepping(w, rule, lr, beta1, beta2, tau, v0):
    """FedYogi and FedAdagrad."""
    m, v = np.zeros(D), np.full(D, v0)
    for r, cohort in enumerate(COHORTS):
        move = mean([sgd(w, i, r) for i in cohort])
        m = beta1 * m + (1 - beta1) * move
        v = v + move**2 if rule == "adagrad" else v - (1 - beta2) * move**2 * np.sign(v - move**2)
        w = w + lr * m / (np.sqrt(v) + tau)
        yield w, w


def averaging(w, alpha, floor, start):
    """FedSWA, shown as the average of its models from a round on."""
    models = []
    for r, cohort in enumerate(COHORTS):
        moves = []
        for i in cohort:
            v, steps = w, len(stream(i))
            for k, batch in enumerate(stream(i)):
                v = v - rate(r) * (1 - (1 - floor) * k / steps) * (gradient(v, batch) + WD * v)
            moves.append(v - w)
        w = w + alpha * mean(moves)
        models = [*models, w] if r + 1 > start else []
        yield w, mean(models) if models else w


WALKS = [
    ("fedgloss(0.1, 0.4, 0.2)", fedgloss, (0.1, 0.4, 0.2, 0)),
    ("fedgloss(0.1, 0.4, 0.2, ramp=2)", fedgloss, (0.1, 0.4, 0.2, 2)),
    ("fedgf(0.1, 0.3, 0.5, 30)", fedgf, (0.1, 0.3, 0.5, 30)),
    ("fedgf(0.1, 0.3, 0.0, 1)", fedgf, (0.1, 0.3, 0.0, 1)),
    ("fednsam(0.2, 0.7)", momentum, (0.7, 0.2, 1)),
    ("fedavgm(0.7)", momentum, (0.7, 0.0, 0)),
    ("fedlesam(0.3)", lookback, (0.3, 0)),
    ("fedlesam_s(0.3)", lookback, (0.3, 1)),
    ("looksam(0.3, 3, 1.0, 0.6)", looksam, (0.3, 3, 1.0, 0.6)),
    ("looksam(0.3, 2, 0.5, 0.6)", looksam, (0.3, 2, 0.5, 0.6)),
    *(
        (f"fedsmoo(0.2, 0.3, {sign}, '{crowd}', '{upload}')", smoo, (0.2, 0.3, sign, crowd, upload))
        for sign, crowd, upload in ((1, "active", "dual"), (-1, "all", "dual"), (-1, "all", "less"))
    ),
    ("fedspeed(0.2, 0.3, 'active')", speed, (0.2, 0.3)),
    ("fedsmoo_slides(0.2, 0.3, 0.7)", slides, (0.2, 0.3, 0.7, False)),
    ("fedsmoo_slides(0.2, 0.3, 2.0, True)", slides, (0.2, 0.3, 2.0, True)),
    *(
        (f"fedsol_ablation('{form}', 0.8, 0.6, 2.0, '{radius}')", ablation, (form, 0.8, 0.6, 2.0, radius))
        for form, radius in zip(("A1", "A2", "A3", "A4", "A5", "A6"), ("dim0", "layer", "fixed") * 2, strict=True)
    ),
    ("fedyogi(0.2, 0.8, 0.9, 0.05)", stepping, ("yogi", 0.2, 0.8, 0.9, 0.05, 1e-4)),
    ("fedadagrad(0.2, 0.3, 0.05)", stepping, ("adagrad", 0.2, 0.3, 0.0, 0.05, 1e-4)),
    ("fedswa(1.3, 0.2) + swa(1)", averaging, (1.3, 0.2, 1)),
]


@pytest.mark.parametrize(("method", "walk", "options"), WALKS, ids=[method for method, *_ in WALKS])
def test_three_rounds_are_the_papers_equations(method, walk, options):
    for (ours, shown), (theirs, expected) in zip(rounds(method), walk(data()[1], *options), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)
        np.testing.assert_allclose(shown, expected, rtol=0, atol=1e-12)
    *_, (plain, _) = rounds("fedavg")
    assert abs(ours - plain).max() > 1e-3
