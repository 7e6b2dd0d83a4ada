"""Softmax regression on four clients, in NumPy and by fedflat: what the walks of tests/methods are written with.

The clients have unequal sizes and minibatches in a fixed order, so that their numbers of steps differ, and take part in
changing cohorts. Everything is float64.
"""

from contextlib import closing

import numpy as np
import torch
from torch import nn

from fedflat import Dataset, Federation, Samples
from fedflat.engine.inline import Inline
from fedflat.methods.parser import parse
from fedflat.models.vector import Network
from fedflat.recipe import Local, Server
from fedflat.rounds.server import conduct, first_state, view
from fedflat.rounds.setup import Problem

SIZES, FEATURES, CLASSES, BATCH, EPOCHS = (5, 8, 11, 6), 3, 4, 4, 2
LR, DECAY, WD, CLIENTS = 0.3, 0.9, 0.02, len(SIZES)
COHORTS = ([0, 2], [1, 2, 3], [0, 1, 2])
D = CLASSES * FEATURES + CLASSES
MATRIX, BIAS = slice(0, CLASSES * FEATURES), slice(CLASSES * FEATURES, D)


def data():
    """The samples of each client, with two of the classes each, and the initial weights."""
    chance = np.random.default_rng(0)
    clients = []
    for i, n in enumerate(SIZES):
        clients.append((chance.normal(size=(n, FEATURES)), (chance.integers(0, 2, n) + i) % CLASSES))
    return clients, chance.normal(size=D) / 3


def stream(client):
    """The minibatches of a client's round."""
    x, y = data()[0][client]
    cuts = range(0, len(y), BATCH)
    return [(x[a : a + BATCH], y[a : a + BATCH]) for _ in range(EPOCHS) for a in cuts]


def gradient(w, batch):
    """∇ of the mean cross-entropy of softmax(W x + b)."""
    x, y = batch
    return through(x, softmax(w, x) - np.eye(CLASSES)[y])


def softmax(w, x, tau=1.0):
    z = (x @ w[MATRIX].reshape(CLASSES, FEATURES).T + w[BIAS]) / tau
    p = np.exp(z - z.max(1, keepdims=True))
    return p / p.sum(1, keepdims=True)


def through(x, slope):
    """∇ of the mean over the samples, from the slopes of the logits."""
    slope = slope / len(x)
    return np.concatenate([(slope.T @ x).ravel(), slope.sum(0)])


def unit(v):
    return v / (np.linalg.norm(v) + 1e-7)


def rate(r):
    return LR * DECAY**r


def mean(vectors):
    return sum(vectors) / len(vectors)


def sgd(w, client, r, pull=0.0):
    """A client's Δ by SGD with weight decay and a constant pull."""
    start = w
    for batch in stream(client):
        w = w - rate(r) * (gradient(w, batch) + pull + WD * w)
    return w - start


def rounds(method, cohorts=COHORTS, **facts):
    """The weights and the evaluated model of fedflat after every round."""
    samples, initial = data()
    inputs, labels = (torch.from_numpy(np.concatenate(part)) for part in zip(*samples, strict=True))
    both = Samples(inputs, labels)
    shards = tuple(torch.arange(sum(SIZES)).split(list(SIZES)))
    federation = Federation(Dataset("walk", both, both, CLASSES, (), ()), shards, dtype=torch.float64)
    network = Network(nn.Sequential(nn.Linear(FEATURES, CLASSES)), torch.float64)
    network.weights.copy_(torch.from_numpy(initial))
    local = Local(**{"epochs": EPOCHS, "batch": BATCH, "lr": LR, "lr_decay": DECAY, "weight_decay": WD, **facts})
    problem = Problem.of(federation, network, parse(method), local, shuffle=False)
    server, state = Server(cohort=CLIENTS, average="uniform"), first_state(problem)
    with closing(Inline(problem)) as engine:
        for cohort in cohorts:
            state, report = conduct(problem, state, engine, cohort, server)
            assert report.cohort == cohort
            yield state.weights.numpy(), problem.method.evaluated(view(problem, state, server)).numpy()
