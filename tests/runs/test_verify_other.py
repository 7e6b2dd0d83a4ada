"""Trajectories of another kind, a convolutional net with ragged minibatches, momentum and clipping, recorded here by
plain code that shares nothing with the library: `verify` must reproduce them too."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedflat.runs.verify import verify

SPEC = ["conv 2 3 3 pad=1", "relu", "maxpool 2", "conv 3 4 3 pad=0", "tanh", "flatten", "linear 16 5"]
LOCAL = dict(epochs=2, batch=4, lr=0.2, lr_decay=0.9, momentum=0.8, weight_decay=0.01, clip=0.7)
SIZES = (9, 6, 13, 4)
COHORTS = ((0, 1, 2), (1, 3), (0, 2, 3), (0, 1))


def plain_net():
    first, second = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 4, 3)
    return nn.Sequential(first, nn.ReLU(), nn.MaxPool2d(2), second, nn.Tanh(), nn.Flatten(), nn.Linear(16, 5)).double()


class Plain:
    """The authors' way of writing it: one client at a time, lists of tensors, everything spelled out."""

    def __init__(self, method, options, zeta):
        torch.manual_seed(3)
        self.net, self.method, self.o, self.zeta = plain_net(), method, options, zeta
        self.x = [torch.randn(n, 2, 8, 8, dtype=torch.float64) for n in SIZES]
        self.y = [torch.randint(0, 5, (n,)) for n in SIZES]
        self.w = nn.utils.parameters_to_vector(self.net.parameters()).detach()
        self.zero = torch.zeros_like(self.w)
        self.h = [self.zero.clone() for _ in SIZES]
        self.mu = [self.zero.clone() for _ in SIZES]
        self.c = [self.zero.clone() for _ in SIZES]
        self.server_c, self.s, self.direction = self.zero.clone(), self.zero.clone(), self.zero.clone()

    def grad(self, w, x, y):
        nn.utils.vector_to_parameters(w, self.net.parameters())
        loss, h = 0.0, x
        for layer in self.net:
            h = layer(h)
            if isinstance(layer, nn.ReLU | nn.Tanh):
                loss = loss + self.zeta / 2 * (h**2).mean()
        return torch.cat(
            [g.reshape(-1) for g in torch.autograd.grad(loss + F.cross_entropy(h, y), list(self.net.parameters()))]
        )

    def step_gradient(self, w, i, x, y):
        g = self.grad(w, x, y)
        if self.method == "fedsmoo":
            q = g - self.mu[i] - self.s
            ascent = self.o["rho"] * q / (q.norm() + 1e-7)
            self.mu[i] = self.mu[i] + ascent - self.s
            return self.grad(w + ascent, x, y)
        if "rho" in self.o:
            return self.grad(w + self.o["rho"] * g / (g.norm() + 1e-7), x, y)
        return g

    def meta_client(self, i, lr):
        """Per-FedAvg with pairs of batches; every gradient is a local step's whole gradient."""
        batch, epochs = LOCAL["batch"], LOCAL["epochs"]
        cuts = [slice(at, at + batch) for at in range(0, SIZES[i], batch)]
        once = -(-epochs * len(cuts) // 2)
        pairs = once if self.o["pairs"] == "once" else epochs * -(-len(cuts) // epochs)
        w, v, mu, m = self.w.clone(), self.zero, self.o["mu"], LOCAL["momentum"]

        def whole(at, cut):
            g = self.grad(at, self.x[i][cut], self.y[i][cut]) - mu * self.w
            g = g * min(1.0, LOCAL["clip"] / (float(g.norm()) + 1e-6))
            return g + (LOCAL["weight_decay"] + mu) * w

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
        for _ in range(LOCAL["epochs"]):
            for at in range(0, SIZES[i], LOCAL["batch"]):
                g = self.step_gradient(w, i, self.x[i][at : at + LOCAL["batch"]], self.y[i][at : at + LOCAL["batch"]])
                if "mix" in self.o:
                    g = self.o["mix"] * g + (1 - self.o["mix"]) * self.direction
                g = g + penalty * (self.h[i] - start)
                if self.method in ("scaffold", "fedgamma"):
                    g = g + self.server_c - self.c[i]
                g = g * min(1.0, LOCAL["clip"] / (float(g.norm()) + 1e-6))
                v = LOCAL["momentum"] * v + g + (LOCAL["weight_decay"] + penalty) * w
                w, steps = w - lr * v, steps + 1
        return w - start, steps

    def run(self):
        weights, active, everybody = [], [], []
        last = [self.w.clone() for _ in SIZES]
        for t, cohort in enumerate(COHORTS):
            lr = LOCAL["lr"] * LOCAL["lr_decay"] ** t
            total = sum(SIZES[i] for i in cohort)
            results = {i: self.client(i, lr) for i in cohort}
            move = sum(SIZES[i] / total * delta for i, (delta, _) in results.items())
            active.append((self.w + move).numpy())
            for i, (delta, _) in results.items():
                last[i] = self.w + delta
            everybody.append((sum(n * w for n, w in zip(SIZES, last, strict=True)) / sum(SIZES)).numpy())
            if self.method in ("scaffold", "fedgamma"):
                change = {i: -self.server_c - d / (k * lr) for i, (d, k) in results.items()}
                for i in cohort:
                    self.c[i] = self.c[i] + change[i]
                self.server_c = self.server_c + sum(change.values()) / len(SIZES)
            if "mix" in self.o:
                self.direction = -sum(SIZES[i] / total * d / (k * lr) for i, (d, k) in results.items())
            if "penalty" in self.o:
                for i in cohort:
                    self.h[i] = self.h[i] + results[i][0]
                move = move + sum(self.h) / len(SIZES)
            if self.method == "fedsmoo":
                mean = sum(self.mu[i] for i in cohort) / len(cohort)
                self.s = self.o["rho"] * mean / (mean.norm() + 1e-7)
            self.w = self.w + move
            weights.append(self.w.numpy().copy())
        return {"weights": np.array(weights), "active": np.array(active), "all": np.array(everybody)}


@pytest.mark.parametrize("zeta", [0.0, 0.4])
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("fedavg", {}),
        ("fedsam", {"rho": 0.2}),
        ("scaffold", {}),
        ("fedgamma", {"rho": 0.05}),
        ("feddyn", {"penalty": 0.3}),
        ("fedspeed", {"rho": 0.2, "penalty": 0.3}),
        ("fedsmoo", {"rho": 0.2, "penalty": 0.3}),
        ("fedcm", {"mix": 0.4}),
        ("mofedsam", {"rho": 0.1, "mix": 0.4}),
    ],
)
def test_a_ragged_convolutional_run_is_reproduced(tmp_path, method, options, zeta):
    parts = [{"part": "man", "zeta": zeta}] if zeta else []
    check(Plain(method, options, zeta), tmp_path / "run.npz", options, parts)


@pytest.mark.parametrize("mu", [0.0, 0.3])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("pairs", ["cycle", "once"])
def test_a_run_of_per_fedavg_is_reproduced_with_other_parts_in_both_of_its_steps(tmp_path, pairs, shared, mu):
    options = {"outer_lr": 0.05, "shared_momentum": shared, "pairs": pairs}
    plain = Plain("perfedavg", options | {"mu": mu}, 0.4)
    parts = [{"part": "man", "zeta": 0.4}] + [{"part": "fedprox", "mu": mu}] * bool(mu)
    check(plain, tmp_path / "run.npz", options, parts)


def check(plain, path, options, parts):
    recipe = dict(method=plain.method, options=options, local=LOCAL, average="samples", tolerance=1e-11, model=SPEC)
    recipe["with"] = parts
    arrays = {f"inputs_{i}": x.numpy() for i, x in enumerate(plain.x)}
    arrays |= {f"labels_{i}": y.numpy() for i, y in enumerate(plain.y)}
    arrays["initial"] = plain.w.numpy().copy()
    arrays["participants"] = np.array([[i in cohort for i in range(len(SIZES))] for cohort in COHORTS])
    np.savez(path, recipe=np.array(json.dumps(recipe)), **plain.run(), **arrays)
    verdict = verify(path)
    assert verdict.good, verdict
    assert set(verdict.deviations) == {"weights", "active", "all"}
