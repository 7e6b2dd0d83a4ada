"""Trajectories of another kind, a convolutional net with ragged minibatches, momentum and clipping, recorded here by
plain code that shares nothing with the library: `verify` must reproduce them too, for every method and option that a
recording can name."""

import json
import math
from itertools import product

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedflat.runs.verify import verify

SPEC = ["conv 2 3 3 pad=1", "relu", "maxpool 2", "conv 3 4 3 pad=0", "tanh", "flatten", "linear 16 5"]
LOCAL = dict(epochs=2, batch=4, lr=0.2, lr_decay=0.9, momentum=0.8, weight_decay=0.01, clip=0.7)
WHOLE = LOCAL | dict(epochs=3, batch=0, momentum=0.0, clip=None)
SIZES = (9, 6, 13, 5)
COHORTS = ((0, 1, 2), (1, 3), (0, 2, 3), (0, 1))
CLIENTS, TOTAL = len(SIZES), sum(SIZES)
HEAD = 16 * 5 + 5


def plain_net():
    first, second = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 4, 3)
    return nn.Sequential(first, nn.ReLU(), nn.MaxPool2d(2), second, nn.Tanh(), nn.Flatten(), nn.Linear(16, 5)).double()


def kl(theirs, ours):
    """KL(p ‖ q) of two rows of logits, the mean over the rows."""
    p, q = torch.log_softmax(theirs, 1), torch.log_softmax(ours, 1)
    return (p.exp() * (p - q)).sum(1).mean()


def others(logits, labels):
    return torch.stack([torch.cat([z[:y], z[y + 1 :]]) for z, y in zip(logits, labels.tolist(), strict=True)])


class Plain:
    """The authors' way of writing it: one client at a time, everything spelled out."""

    def __init__(self, method, options, zeta, local=LOCAL, average="samples"):
        torch.manual_seed(3)
        self.net, self.method, self.o, self.zeta = plain_net(), method, options, zeta
        self.local, self.average = local, average
        self.x = [torch.randn(n, 2, 8, 8, dtype=torch.float64) for n in SIZES]
        self.y = [torch.randint(0, 5, (n,)) for n in SIZES]
        self.w = nn.utils.parameters_to_vector(self.net.parameters()).detach()
        self.zero = torch.zeros_like(self.w)
        self.h, self.mu, self.c = ([self.zero.clone() for _ in SIZES] for _ in range(3))
        self.server_c, self.s, self.direction = self.zero.clone(), self.zero.clone(), self.zero.clone()
        self.first, self.second = self.zero.clone(), self.zero + options.get("v0", 0.0)
        self.last = [self.w.clone() for _ in SIZES]
        self.seen, self.before, self.teacher = [None] * CLIENTS, None, self.w.clone()

    # -- one gradient ------------------------------------------------------------------------------------------------

    def passed(self, w, x):
        """The features, the logits and MAN's term of the net with these weights (which carry no gradient)."""
        nn.utils.vector_to_parameters(w, self.net.parameters())
        man, h, features = 0.0, x, None
        for layer in self.net:
            features, h = h, layer(h)
            if isinstance(layer, nn.ReLU | nn.Tanh):
                man = man + self.zeta / 2 * (h**2).mean()
        return features, h, man

    def frozen(self, w, x):
        with torch.no_grad():
            return self.passed(w, x)[:2]

    def slope(self, loss):
        return torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(self.net.parameters()))])

    def grad(self, w, x, y, i):
        o, anchors = self.o, {}
        if self.method in ("fedntd", "moon"):
            anchors = {"global": self.frozen(self.w, x), "last": self.frozen(self.last[i], x)}
        if self.method == "fedgmt":
            anchors = {"global": self.frozen(self.teacher, x)}
        features, z, man = self.passed(w, x)
        loss = F.cross_entropy(z, y) + man
        if self.method == "fedntd":
            theirs = others(anchors["global"][1], y)
            loss = loss + o["beta"] * o["tau"] ** 2 * kl(theirs / o["tau"], others(z, y) / o["tau"])
        if self.method == "fedgmt":
            loss = loss + o["gamma"] * o["tau"] ** 2 * kl(anchors["global"][1] / o["tau"], z / o["tau"])
        if self.method == "moon":
            good, bad = (torch.cosine_similarity(features, anchors[a][0]).div(o["tau"]).exp() for a in anchors)
            loss = loss - o["mu"] * (good / (good + bad)).log().mean()
        return self.slope(loss)

    def proximal(self, w, x):
        """The gradient of FedSoL's KL at the temperature 3, on the scope."""
        anchor = self.frozen(self.w, x)[1]
        g = self.slope(kl(anchor / 3, self.passed(w, x)[1] / 3)).clone()
        if self.o["scope"] == "head":
            g[:-HEAD] = 0
        if self.o["scope"] == "body":
            g[-HEAD:] = 0
        return g

    def radii(self, w):
        if self.o["radius"] == "fixed":
            return torch.ones_like(w)
        found, at = [], 0
        for p in self.net.parameters():
            moved = (w - self.w)[at : at + p.numel()].view_as(p).abs()
            norm = moved.norm(dim=0, keepdim=True) if self.o["radius"] == "dim0" else moved.norm()
            found.append((moved / norm.clamp(min=1e-12)).reshape(-1))
            at += p.numel()
        return torch.cat(found)

    def scales(self, w):
        """ASAM's T: |w| + η, or 1 for biases."""
        parts, at = [], 0
        for name, p in self.net.named_parameters():
            here = w[at : at + p.numel()].abs() + self.o["eta"]
            parts.append(here if self.o["biases"] or "bias" not in name else torch.ones_like(here))
            at += p.numel()
        return torch.cat(parts)

    def step_gradient(self, w, i, x, y):
        o, method = self.o, self.method
        if method == "fedsol":
            g = self.proximal(w, x)
            ascent = o["rho"] * self.radii(w) * g / (g.norm() + 1e-12) if g.norm() > 1e-6 else self.zero
            return self.grad(w + ascent, x, y, i)
        if method == "fedlesam_d":
            old = self.before if o["direction"] == "server" else self.seen[i]
            back = self.zero if old is None else old - self.w
            return self.grad(w + o["rho"] * back / (back.norm() + 1e-7), x, y, i)
        g = self.grad(w, x, y, i)
        if method == "fedsmoo":
            q = g - self.mu[i] - self.s
            self.hat = o["rho"] * q / (q.norm() + 1e-7)
            self.mu[i] = self.mu[i] + self.hat - self.s
            return self.grad(w + self.hat, x, y, i)
        if method == "fedasam":
            t = self.scales(w)
            return self.grad(w + o["rho"] * t * t * g / ((t * g).norm() + 1e-7), x, y, i)
        return self.grad(w + o["rho"] * g / (g.norm() + 1e-7), x, y, i) if "rho" in o else g

    # -- one client --------------------------------------------------------------------------------------------------

    def share(self, i):
        return SIZES[i] * CLIENTS / TOTAL

    def clipped(self, g):
        return g if self.local["clip"] is None else g * min(1.0, self.local["clip"] / (float(g.norm()) + 1e-6))

    def cuts(self, i):
        size = self.local["batch"] or SIZES[i]
        return [slice(at, at + size) for at in range(0, SIZES[i], size)]

    def meta_client(self, i, lr):
        """Per-FedAvg with pairs of batches; every gradient is a local step's whole gradient."""
        cuts, epochs = self.cuts(i), self.local["epochs"]
        once = -(-epochs * len(cuts) // 2)
        pairs = once if self.o["pairs"] == "once" else epochs * -(-len(cuts) // epochs)
        w, v, mu, m = self.w.clone(), self.zero, self.o["mu"], self.local["momentum"]

        def whole(at, cut):
            g = self.clipped(self.grad(at, self.x[i][cut], self.y[i][cut], i) - mu * self.w)
            return g + (self.local["weight_decay"] + mu) * w

        for k in range(pairs):
            g = whole(w, cuts[2 * k % len(cuts)])
            if self.o["shared_momentum"]:
                v = m * v + g
            ahead = w - lr * (v if self.o["shared_momentum"] else g)
            v = m * v + whole(ahead, cuts[(2 * k + 1) % len(cuts)])
            w = w - self.o["outer_lr"] * v
        return w - self.w, pairs

    def client(self, i, lr):
        if self.method == "perfedavg":
            return self.meta_client(i, lr)
        start, w, v, steps = self.w, self.w.clone(), self.zero, 0
        penalty = self.o.get("penalty", 0.0)
        if self.method == "feddc" or self.o.get("balanced"):
            penalty = penalty / self.share(i)
        mu = self.o["mu"] if self.method == "fedprox" else 0.0
        outside = self.local["weight_decay"] + mu + (penalty if self.method not in ("feddc", "fedgmt") else 0.0)
        for cut in self.cuts(i) * self.local["epochs"]:
            g = self.step_gradient(w, i, self.x[i][cut], self.y[i][cut])
            if "mix" in self.o:
                g = self.o["mix"] * g + (1 - self.o["mix"]) * self.direction
            g = g + penalty * self.h[i] - mu * start
            if self.method != "fedgmt":
                g = g - penalty * start
            if self.method == "feddc":
                g = g + penalty * w + self.server_c / self.share(i) - self.c[i]
            if self.method in ("scaffold", "fedgamma"):
                g = g + self.server_c - self.c[i]
            g = self.clipped(g) + outside * w
            if self.method == "fedbabu":
                g[-HEAD:] = 0
            v = self.local["momentum"] * v + g
            w, steps = w - lr * v, steps + 1
        return w - start, steps

    # -- the server --------------------------------------------------------------------------------------------------

    def effective(self, steps):
        b = self.local["momentum"]
        return (steps - b * (1 - b**steps) / (1 - b)) / (1 - b)

    def merged(self, results, p, lr):
        """The server's move, from each participant's Δ and number of steps; keeps what the method remembers."""
        o, cohort, move = self.o, [*results], sum(p[i] * delta for i, (delta, _) in results.items())
        count = self.effective if o.get("momentum_aware") else lambda steps: steps
        if self.method in ("scaffold", "fedgamma"):
            change = {i: -self.server_c - d / (count(k) * lr) for i, (d, k) in results.items()}
            self.c = [c + change.get(i, 0) for i, c in enumerate(self.c)]
            self.server_c = self.server_c + sum(change.values()) / CLIENTS
        if self.method == "feddc":
            batch = self.local["batch"] or TOTAL
            typical = self.local["epochs"] * math.ceil(TOTAL / CLIENTS / batch)
            change = {
                i: -self.server_c / self.share(i) - d / (typical * self.local["lr"]) for i, (d, _) in results.items()
            }
            self.c = [c + change.get(i, 0) for i, c in enumerate(self.c)]
            self.server_c = self.server_c + sum(self.share(i) * change[i] for i in cohort) / CLIENTS
        if "mix" in o:
            self.direction = -sum(p[i] * d / (count(k) * lr) for i, (d, k) in results.items())
        if self.method == "fednova":
            a = {i: self.effective(k) for i, (_, k) in results.items()}
            move = sum(p[i] * a[i] for i in cohort) * sum(p[i] * results[i][0] / a[i] for i in cohort)
        if self.method == "fedadam":
            self.first = o["beta1"] * self.first + (1 - o["beta1"]) * move
            self.second = o["beta2"] * self.second + (1 - o["beta2"]) * move**2
            move = o["server_lr"] * self.first / (self.second.sqrt() + o["tau"])
        if "penalty" in o:
            self.h = [h + results[i][0] if i in results else h for i, h in enumerate(self.h)]
            move = move + sum(self.h) / CLIENTS
        if self.method == "fedsmoo":
            mean = sum(self.mu[i] - (self.hats[i] if o.get("upload") == "less" else 0) for i in cohort) / len(cohort)
            self.s = o["rho"] * mean / (mean.norm() + (1e-16 if o.get("upload") == "less" else 1e-7))
        return move

    def run(self):
        found = {name: [] for name in ("weights", "active", "all", "consistency")}
        for t, cohort in enumerate(COHORTS):
            lr = self.local["lr"] * self.local["lr_decay"] ** t
            results, self.hats = {}, {}
            for i in cohort:
                results[i] = self.client(i, lr)
                self.hats[i], self.seen[i] = getattr(self, "hat", None), self.w
            sizes = SIZES if self.average == "samples" else (1,) * CLIENTS
            p = {i: sizes[i] / sum(sizes[j] for j in cohort) for i in cohort}
            for i in cohort:
                self.last[i] = self.w + results[i][0]
            self.before, self.w = self.w, self.w + self.merged(results, p, lr)
            if self.method == "fedgmt":
                self.teacher = self.o["alpha"] * self.teacher + (1 - self.o["alpha"]) * self.w
            found["active"].append(sum(p[i] * self.last[i] for i in cohort))
            found["all"].append(sum(n * w for n, w in zip(sizes, self.last, strict=True)) / sum(sizes))
            found["consistency"].append(sum((self.last[i] - self.w).norm() ** 2 for i in cohort) / len(cohort))
            found["weights"].append(self.w)
        return {name: torch.stack(rows).numpy() for name, rows in found.items()}


METHODS = [
    ("fedavg", {}),
    ("fednova", {}),
    ("fedprox", {"mu": 0.3}),
    ("fedadam", {"server_lr": 0.05, "beta1": 0.8, "beta2": 0.95, "tau": 0.02, "v0": 0.001}),
    ("scaffold", {}),
    ("scaffold", {"momentum_aware": True}),
    ("feddyn", {"penalty": 0.3}),
    ("feddyn", {"penalty": 0.3, "balanced": True}),
    ("feddc", {"penalty": 0.3}),
    ("fedgmt", {"gamma": 0.7, "tau": 2.0, "alpha": 0.6, "penalty": 0.3}),
    ("fedlesam_d", {"rho": 0.2, "penalty": 0.3, "direction": "client"}),
    ("fedlesam_d", {"rho": 0.2, "penalty": 0.3, "direction": "server"}),
    ("fedcm", {"mix": 0.4}),
    ("fedcm", {"mix": 0.4, "momentum_aware": True}),
    ("mofedsam", {"rho": 0.1, "mix": 0.4}),
    ("fedsam", {"rho": 0.2}),
    ("fedgamma", {"rho": 0.05}),
    *(("fedasam", {"rho": 0.5, "eta": eta, "biases": biases}) for eta, biases in product((0.0, 0.2), (False, True))),
    ("fedspeed", {"rho": 0.2, "penalty": 0.3}),
    ("fedspeed", {"rho": 0.2, "penalty": 0.3, "balanced": True}),
    ("fedsmoo", {"rho": 0.2, "penalty": 0.3}),
    ("fedsmoo", {"rho": 0.2, "penalty": 0.3, "upload": "less"}),
    ("fedntd", {"beta": 0.6, "tau": 2.0}),
    ("moon", {"mu": 0.8, "tau": 0.5}),
    ("fedbabu", {}),
    *(
        ("fedsol", {"rho": 0.5, "radius": radius, "scope": scope})
        for radius, scope in product(("fixed", "layer", "dim0"), ("all", "head", "body"))
    ),
]


@pytest.mark.parametrize(("method", "options"), METHODS)
def test_a_ragged_convolutional_run_is_reproduced(tmp_path, method, options):
    # No author's code freezes a head and clips, so no recording says whose norm is clipped.
    local = LOCAL | {"clip": None} if method == "fedbabu" else LOCAL
    check(Plain(method, options, 0.0, local), tmp_path / "run.npz")


@pytest.mark.parametrize(("method", "options"), METHODS)
def test_a_run_with_man_and_whole_batches_and_a_uniform_average_is_reproduced(tmp_path, method, options):
    check(Plain(method, options, 0.4, WHOLE, "uniform"), tmp_path / "run.npz", [{"part": "man", "zeta": 0.4}])


@pytest.mark.parametrize("mu", [0.0, 0.3])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("pairs", ["cycle", "once"])
def test_a_run_of_per_fedavg_is_reproduced_with_other_parts_in_both_of_its_steps(tmp_path, pairs, shared, mu):
    options = {"outer_lr": 0.05, "shared_momentum": shared, "pairs": pairs}
    parts = [{"part": "man", "zeta": 0.4}] + [{"part": "fedprox", "mu": mu}] * bool(mu)
    check(Plain("perfedavg", options | {"mu": mu}, 0.4), tmp_path / "run.npz", parts, options)


def check(plain, path, parts=(), options=None):
    recipe = dict(method=plain.method, options=plain.o if options is None else options, local=plain.local)
    recipe |= {"average": plain.average, "tolerance": 1e-11, "model": SPEC, "with": [*parts]}
    arrays = {f"inputs_{i}": x.numpy() for i, x in enumerate(plain.x)}
    arrays |= {f"labels_{i}": y.numpy() for i, y in enumerate(plain.y)}
    arrays["initial"] = plain.w.numpy().copy()
    arrays["participants"] = np.array([[i in cohort for i in range(CLIENTS)] for cohort in COHORTS])
    np.savez(path, recipe=np.array(json.dumps(recipe)), **plain.run(), **arrays)
    verdict = verify(path)
    assert verdict.good, verdict
    assert set(verdict.deviations) == {"weights", "active", "all", "consistency"}
