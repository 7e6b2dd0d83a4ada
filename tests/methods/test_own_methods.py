"""Methods of a user's own (tests/own), written from docs/how-to.md alone: short, right, and first-class everywhere."""

import ast
import inspect
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from typer.testing import CliRunner

from fedflat import Method, models, train, trust
from fedflat.cli import app
from fedflat.local import LocalRule
from fedflat.methods import ServerView, parse
from fedflat.methods.parts import LocalPrivacy, ProximalAscent
from fedflat.models import Network
from fedflat.randomness import Secret, generator
from fedflat.recipe import Local
from fedflat.rounds import Broadcast, Problem, Worker
from own.fedvarp import FedVARP
from own.local_adamw import MyAdamW
from own.quantile_clip import QuantileClip, RunningMean
from own.random_sam import RandomSAM
from own.top_k import TopK

TESTS = Path(__file__).parents[1]
OWN = [RandomSAM, FedVARP, MyAdamW, TopK, QuantileClip, RunningMean]
METHODS = {
    "own.random_sam:RandomSAM(rho=0.05)": Method(RandomSAM(0.05)),
    "own.fedvarp:FedVARP": Method(FedVARP()),
    "fedsol(rho=0.5) + own.local_adamw:MyAdamW(beta1=0.8)": Method(ProximalAscent(rho=0.5), MyAdamW(0.8)),
    "own.top_k:TopK(share=0.2)": Method(TopK(0.2)),
    "own.top_k:TopK(share=0.2) + local_dp(clip=0.5, noise=0.01)": Method(TopK(0.2), LocalPrivacy(0.5, 0.01)),
    "own.quantile_clip:QuantileClip + own.quantile_clip:RunningMean": Method(QuantileClip(), RunningMean()),
}
NAMES = dict(
    argvalues=METHODS, ids=["random-sam", "fedvarp", "fedsol-adamw", "top-k", "top-k-private", "quantile-clip"]
)
QUICK = dict(rounds=3, steps=2, batch=16, lr=0.05, cohort=4, engine="inline", model_hidden=[8])
DOUBLE = dict(rounds=4, steps=3, batch=0, lr=0.05, cohort=3, average="uniform", engine="inline", group=1)
DOUBLE |= dict(precision="float64")


@pytest.fixture(autouse=True)
def own_code() -> None:
    trust("own")


def vector(module: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def net() -> nn.Module:
    return models.build("mlp", (1, 8, 8), 10, torch.Generator().manual_seed(0), hidden=(6,))


# --------------------------------------------------------------------------------------------------------------------
# As a user has them
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", OWN)
def test_each_takes_at_most_25_lines_and_enters_by_the_front_door(part):
    assert len(inspect.getsource(part).splitlines()) <= 25
    imported = [
        n for n in ast.walk(ast.parse(Path(inspect.getfile(part)).read_text())) if isinstance(n, ast.ImportFrom)
    ]
    assert {n.module for n in imported} == {"dataclasses", "fedflat"}


@pytest.mark.parametrize("written", **NAMES)
def test_in_python_and_by_its_path_it_is_the_same_method_on_every_engine(digits, written):
    first = train(digits, "mlp", METHODS[written], **QUICK)
    again = train(digits, "mlp", written, **QUICK)
    pooled = train(digits, "mlp", METHODS[written], **QUICK | dict(engine="pool", workers=2))
    assert torch.equal(vector(first.model), vector(again.model))
    assert torch.equal(vector(first.model), vector(pooled.model))
    assert first.recipe.method == str(first.recipe.method) and repr(parse(first.recipe.method)) == repr(
        METHODS[written]
    )


SMALL = ["--set", "model.hidden=[8]", "local.steps=2", "split.clients=8", "server.cohort=4", "engine=inline"]


@pytest.mark.parametrize("written", **NAMES)
def test_a_run_of_it_is_resumed_measured_and_reported(tmp_path, monkeypatch, written):
    def fedflat(command: str, *arguments: str) -> str:
        done = CliRunner().invoke(app, [command, "--trust", *arguments])
        assert done.exit_code == 0, done.output
        return done.stdout

    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text(f"method = {json.dumps(written)}\n")
    fedflat("run", "mine.toml", *SMALL, "server.rounds=4", "--out", "whole")
    fedflat("run", "--method", written, *SMALL, "server.rounds=2", "--out", "run")
    fedflat("resume", "run", "--set", "server.rounds=4")
    assert Path("whole/model.safetensors").read_bytes() == Path("run/model.safetensors").read_bytes()
    assert "trace" in fedflat("flatness", "run", "--samples", "20", "--json")
    fedflat("report", "run", "-o", "report.html")
    assert "own." in Path("report.html").read_text("utf-8")


def test_the_command_line_finds_it_through_pythonpath(tmp_path):
    path = os.pathsep.join([str(TESTS), *filter(None, sys.path)])
    command = [sys.executable, "-m", "fedflat.cli", "run", "--trust", "--method", "own.top_k:TopK(share=0.2)", *SMALL]
    settings = dict(cwd=tmp_path, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False)
    done = subprocess.run([*command, "server.rounds=2"], **settings)
    assert done.returncode == 0, done.stderr
    assert "own.top_k:TopK(share=0.2)" in done.stdout


# --------------------------------------------------------------------------------------------------------------------
# Oracles: plain loops over clients, each with one batch of all its samples
# --------------------------------------------------------------------------------------------------------------------


class Plain:
    """Plain federated training in float64: K steps on all samples of a client, uniform averages."""

    def __init__(self, federation):
        self.federation, self.net = federation.to(torch.float64, "cpu"), net().double()
        self.parameters = list(self.net.parameters())
        self.w = vector(self.net)

    def gradient(self, client, w, loss=F.cross_entropy):
        """∇ loss(logits, labels) of a client at w."""
        inputs, labels = self.federation.batch(self.federation.shard(client), None)
        nn.utils.vector_to_parameters(w, self.parameters)
        gradients = torch.autograd.grad(loss(self.net(inputs), labels), self.parameters)
        return torch.cat([g.flatten() for g in gradients])

    def moved(self, client, step=None):
        """Δ of a client after K steps; `step(w)` is the gradient to go against."""
        w = self.w.clone()
        for _ in range(DOUBLE["steps"]):
            w = w - DOUBLE["lr"] * (step(w) if step else self.gradient(client, w))
        return w - self.w


def test_random_sam_takes_the_gradient_at_a_distance_rho_in_a_new_direction_each_step(digits):
    result = train(digits, net(), RandomSAM(0.3), **DOUBLE)
    plain = Plain(digits)
    for round, record in enumerate(result.history):
        moves = []
        for client in record["cohort"]:
            rule = problem_of(digits, RandomSAM(0.3)).rule(round, client)
            chance = rule.generator("RandomSAM")

            def step(w, chance=chance, client=client):
                u = torch.randn(len(w), generator=chance).double()
                return plain.gradient(client, w + 0.3 * u / u.norm())

            moves.append(plain.moved(client, step))
        plain.w = plain.w + torch.stack(moves).mean(0)
    torch.testing.assert_close(vector(result.model), plain.w, rtol=0, atol=1e-11)


def test_random_sam_repeats_itself_and_without_a_radius_is_fedavg_to_the_bit(digits):
    def weights(method, **changes):
        return vector(train(digits, "mlp", method, **QUICK | dict(group=1, momentum=0.5) | changes).model)

    assert torch.equal(weights(RandomSAM(0.0)), weights("fedavg"))
    assert torch.equal(weights(RandomSAM(0.2)), weights(RandomSAM(0.2)))
    assert not torch.equal(weights(RandomSAM(0.2)), weights("fedavg"))


def test_every_client_round_seed_and_purpose_has_draws_of_its_own(digits):
    rules = [problem_of(digits, RandomSAM(), seed).rule(r, c) for seed in (0, 1) for r in (0, 1) for c in (0, 1)]
    draws = {float(torch.rand(1, generator=rule.generator(name))) for rule in rules for name in ("a", "b")}
    assert len(draws) == 16


@pytest.mark.parametrize("seed", [5, Secret(2**200 + 5)], ids=["seed", "secret"])
def test_a_part_draws_from_all_bits_of_the_seed(seed):
    weights = torch.zeros(3)
    givers = {2: LocalRule(0.1, 1, seed=seed, round=3, client=2), 0: ServerView(weights, weights, 3, 4, seed=seed)}
    for client, giver in givers.items():
        expected = torch.rand(9, generator=generator(seed, "part/mine", 3, client))
        assert torch.equal(torch.rand(9, generator=giver.generator("mine")), expected)


def test_fedvarp_is_its_paper_and_with_everybody_there_fedavg(digits):
    result = train(digits, net(), FedVARP(), **DOUBLE)
    plain, last = Plain(digits), torch.zeros(digits.clients, len(Plain(digits).w), dtype=torch.float64)
    for record in result.history:
        cohort, mean = record["cohort"], last.mean(0)
        moves = torch.stack([plain.moved(client) for client in cohort])
        plain.w = plain.w + mean + (moves - last[cohort]).mean(0)
        last[cohort] = moves
    assert len({tuple(record["cohort"]) for record in result.history}) > 1
    torch.testing.assert_close(vector(result.model), plain.w, rtol=0, atol=1e-11)
    everybody = [vector(train(digits, net(), m, **DOUBLE | dict(cohort=8)).model) for m in (FedVARP(), "fedavg")]
    torch.testing.assert_close(*everybody, rtol=0, atol=1e-12)


def test_a_clip_that_clients_remember_and_a_running_mean_on_the_server(digits):
    result = train(digits, net(), Method(QuantileClip(0.3), RunningMean()), **DOUBLE)
    plain, limits = Plain(digits), [0.5] * digits.clients
    mean = plain.w
    for record in result.history:

        def step(w, client):
            g, c = plain.gradient(client, w), limits[client]
            limits[client] = c * math.exp(0.3 if g.norm() > c else -0.3)
            return g * min(1.0, c / float(g.norm()))

        moves = [plain.moved(client, lambda w, client=client: step(w, client)) for client in record["cohort"]]
        plain.w = plain.w + torch.stack(moves).mean(0)
        mean = (mean + plain.w) / 2
    assert len({*limits}) > 2
    torch.testing.assert_close(vector(result.model), mean, rtol=0, atol=1e-11)


def test_adamw_under_fedsol_is_torchs_on_the_gradient_of_fedsol(digits):
    method = "fedsol(rho=0.5, tau=3.0) + own.local_adamw:MyAdamW(beta1=0.8, beta2=0.95)"
    result = train(digits, net(), method, weight_decay=0.1, **DOUBLE)
    plain = Plain(digits)
    for record in result.history:
        plain.w = plain.w + torch.stack([fedsol_with_adamw(plain, client) for client in record["cohort"]]).mean(0)
    torch.testing.assert_close(vector(result.model), plain.w, rtol=0, atol=1e-9)
    shipped = train(digits, net(), "fedsol(rho=0.5) + adamw(0.8, 0.95)", weight_decay=0.1, **DOUBLE)
    torch.testing.assert_close(vector(result.model), vector(shipped.model), rtol=0, atol=1e-12)


def fedsol_with_adamw(plain, client):
    """K steps of torch's AdamW on ∇f(w + ρ Λ ⊙ g_p/‖g_p‖), with g_p = ∇ KL(softmax(z_g/3) ‖ softmax(z/3))."""
    inputs, _ = plain.federation.batch(plain.federation.shard(client), None)
    nn.utils.vector_to_parameters(plain.w, plain.parameters)
    teacher = F.log_softmax(plain.net(inputs).detach() / 3, dim=1)

    def proximal(logits, labels):
        return F.kl_div(F.log_softmax(logits / 3, dim=1), teacher, reduction="batchmean", log_target=True)

    w = nn.Parameter(plain.w.clone())
    adamw = torch.optim.AdamW([w], lr=DOUBLE["lr"], betas=(0.8, 0.95), eps=1e-8, weight_decay=0.1)
    for _ in range(DOUBLE["steps"]):
        here, ascent = w.detach(), torch.zeros_like(plain.w)
        g = plain.gradient(client, here, proximal)
        if g.norm() > 1e-6:
            shapes = [p.shape for p in plain.parameters]
            tensors = (here - plain.w).abs().split([s.numel() for s in shapes])
            radii = [F.normalize(t.view(s), dim=0).flatten() for t, s in zip(tensors, shapes, strict=True)]
            ascent = 0.5 * torch.cat(radii) * g / g.norm()
        w.grad = plain.gradient(client, here + ascent)
        adamw.step()
    return w.detach() - plain.w


# --------------------------------------------------------------------------------------------------------------------
# Top-k: what leaves the client, and what stays
# --------------------------------------------------------------------------------------------------------------------


class problem_of:  # noqa: N801 - reads like the function that it is
    """One client's rounds with a method, by hand."""

    def __init__(self, federation, method, seed=0):
        network = Network(net(), torch.float64)
        self.start = network.weights.clone()
        local = Local(steps=DOUBLE["steps"], batch=0, lr=DOUBLE["lr"])
        self.worker = Worker(Problem.of(federation.to(torch.float64, "cpu"), network, parse(method), local, seed=seed))

    def broadcast(self, round):
        return Broadcast(round, DOUBLE["lr"], {"weights": self.start * (1 + round / 10)})

    def rule(self, round, client):
        return self.worker._plan(self.broadcast(round), client, None)[2]

    def uploads(self, client, rounds=4):
        """(Δ as uploaded, what is kept) of some rounds, each from another start."""
        memory = None
        for round in range(rounds):
            upload, memory = self.worker.local_round(self.broadcast(round), client, memory)
            yield upload.delta, memory


def test_what_top_k_uploads_and_what_it_keeps_is_the_true_update(digits):
    error, uploaded, true = 0.0, 0.0, 0.0
    rounds = zip(problem_of(digits, TopK(0.1)).uploads(5), problem_of(digits, "fedavg").uploads(5), strict=True)
    for (sparse, kept), (delta, _) in rounds:
        assert int(sparse.count_nonzero()) == round(0.1 * len(delta))
        assert torch.equal(sparse + kept["error"], delta + error)
        assert float(sparse[sparse != 0].abs().min()) >= float(kept["error"].abs().max())
        error, uploaded, true = kept["error"], uploaded + sparse, true + delta
    torch.testing.assert_close(uploaded + error, true, rtol=0, atol=1e-15)


def test_with_all_entries_top_k_is_fedavg_to_the_bit(digits):
    runs = [vector(train(digits, "mlp", method, **QUICK).model) for method in (TopK(1.0), "fedavg")]
    assert torch.equal(*runs)


@pytest.mark.parametrize("order", [1, -1])
def test_under_local_dp_only_the_clipped_and_noised_sparse_update_leaves_the_client(digits, order):
    guard = LocalPrivacy(clip=0.01, noise=0.5)
    private = problem_of(digits, Method(*[TopK(0.1), guard][::order]))
    alone = problem_of(digits, TopK(0.1))
    pairs = zip(private.uploads(2), alone.uploads(2), strict=True)
    for round, ((upload, kept), (sparse, error)) in enumerate(pairs):
        noise = guard.drawn(upload, 0, round, 2)
        assert float(sparse.norm()) > guard.clip
        torch.testing.assert_close(upload, sparse * (guard.clip / sparse.norm()) + noise, rtol=0, atol=1e-15)
        assert float((upload - noise).norm()) <= guard.clip * (1 + 1e-12)
        # Neither the clip nor the noise enters the memory: it holds what top-k has left of the true updates.
        assert torch.equal(kept["error"], error["error"])
