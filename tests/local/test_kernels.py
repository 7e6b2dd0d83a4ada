"""Every kernel against the definition, on every method, and which of them runs where."""

from collections import Counter
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedflat
from fedflat import federate
from fedflat.engine.inline import Inline
from fedflat.local import LocalRule, can_share, definition_only
from fedflat.local.kernels import Kernels, choose
from fedflat.local.kernels.head import HeadPass
from fedflat.local.kernels.linear import ChainGradient, ChainStep, Rows
from fedflat.local.kernels.sgd import DirectStep, FusedUpdate
from fedflat.local.step import step, train
from fedflat.methods.catalogue import CATALOGUE
from fedflat.methods.parser import parse
from fedflat.methods.parts import Ascent
from fedflat.models.vector import Network
from fedflat.recipe import Local, Server
from fedflat.rounds import client
from fedflat.rounds.server import conduct, first_state
from fedflat.rounds.setup import Problem

# The catalogue by what a method does to the local step. The table below says which kernels that leaves.
PLAIN = {
    "fedavg", "fednova", "fedadam", "fedyogi", "fedadagrad", "fedavgm", "fedswa", "median", "trimmed_mean",
    "geometric_median", "centred_clipping", "krum", "multi_krum", "norm_bound", "bucketing",
    "central_dp", "local_dp", "swa", "fedexp", "fedinit", "top_k",
}  # fmt: skip
TERMS = {"fedntd", "moon", "man", "top_eigenvalue"}
DESCENT = {"adamw", "muon", "fedadamw", "fedmuon"}
HEAD = {"fedsol(scope='head')", "fedsol(scope='head', source='moon')", "fedsol(scope='head') + man(0.1)"}
# A pull beside a term, or an ascent that looks at the features: only the update has a kernel.
WATCHING = {"fedgmt", "fedsol(source='moon')", "fedsol(scope='head', source='fedprox')", "fedsam + man(0.1)"}
METHODS = [*CATALOGUE, *sorted((HEAD | WATCHING) - {*CATALOGUE})]
# Those whose clients cannot share steps; FedDC's have weights by their sizes.
ALONE = {"fedasam", "fedsol", "fedsol_ablation", "fedgf", "fedbabu", "perfedavg", "fedswa", "fedmoswa", "feddc"}
ALONE |= {"looksam"} | TERMS | DESCENT | HEAD | WATCHING


def expected(method, chain, momentum, group):
    """The kernels that must run, by name."""
    if group > 1 and method not in ALONE:
        if chain and method in PLAIN and not momentum:
            return {"rows", "Rows.descend"}
        return {"rows", "FusedUpdate", *(["Rows.gradient"] if chain else [])}
    if method in TERMS or (method in PLAIN and not chain):
        return {"DirectStep"}
    if method in HEAD:
        return {"HeadPass", "FusedUpdate"}
    if method in PLAIN and not momentum:
        return {"ChainStep"}
    update = set() if method in DESCENT else {"FusedUpdate"}
    return update | ({"ChainGradient"} if chain and method not in WATCHING else set())


@pytest.fixture
def ran(monkeypatch):
    """How often each kernel was called."""
    counts = Counter()

    def count(owner, function, name):
        kernel = getattr(owner, function)
        monkeypatch.setattr(owner, function, lambda *a, **also: counts.update([name]) or kernel(*a, **also))

    for kernel in (ChainStep, DirectStep, ChainGradient, FusedUpdate):
        count(kernel, "__call__", kernel.__name__)
    count(HeadPass, "at_head", "HeadPass")
    count(client, "train_together", "rows")
    for function in ("gradient", "descend"):  # rows of a chain; other networks use vmap
        count(Rows, function, f"Rows.{function}")
    return counts


@pytest.fixture(scope="module")
def clients():
    """Four clients of unequal sizes, in double precision."""
    federation = federate("digits", "sizes", 4, exponent=1.0, seed=2)
    shards = tuple(shard[: 5 + 4 * i] for i, shard in enumerate(federation.shards))
    return replace(federation, shards=shards, dtype=torch.float64)


def network(chain):
    torch.manual_seed(0)
    between = nn.ReLU() if chain else nn.Tanh()
    return Network(nn.Sequential(nn.Flatten(), nn.Linear(64, 6), between, nn.Linear(6, 10)), torch.float64)


def two_rounds(clients, method, chain, momentum, group):
    """The weights, state and memory after two rounds, and what was reported of them."""
    local = Local(epochs=1, batch=5, lr=0.1, momentum=momentum, weight_decay=1e-3)
    problem = Problem.of(clients, network(chain), parse(method), local, group=group, measures=["cosine", "lambda"])
    vectors, numbers = {}, {}
    with closing(Inline(problem)) as engine:
        state = first_state(problem)
        for round in range(2):
            state, report = conduct(problem, state, engine, range(4), Server(cohort=4))
            numbers |= {f"{round}.{name}": value for name, value in report.notes.items()}
            numbers[f"{round}.loss"] = report.local_loss
        for i in range(4):
            vectors |= {f"{i}.{name}": v.clone() for name, v in (engine.memory[i] or {}).items()}
    return {**vectors, **state.vectors, "weights": state.weights}, numbers


SETTINGS = {
    "chain": (True, 0.0, 1), "chain with momentum": (True, 0.5, 1), "other": (False, 0.5, 1),
    "chain, grouped": (True, 0.0, 2), "other, grouped": (False, 0.5, 2),
}  # fmt: skip


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("method", METHODS)
def test_the_kernels_that_claim_a_method_run_and_compute_the_definition(clients, ran, method, setting):
    with definition_only():
        by_definition = two_rounds(clients, method, *SETTINGS[setting])
    assert not ran
    vectors, numbers = two_rounds(clients, method, *SETTINGS[setting])
    assert {*ran} == expected(method, *SETTINGS[setting])
    assert vectors.keys() == by_definition[0].keys()
    for name, vector in vectors.items():
        torch.testing.assert_close(vector, by_definition[0][name], rtol=1e-12, atol=1e-12, equal_nan=True, msg=name)
    assert numbers == pytest.approx(by_definition[1], rel=1e-12, abs=1e-12, nan_ok=True)


def test_clients_share_steps_also_where_torch_has_no_fused_update(clients, ran, monkeypatch):
    fused, _ = two_rounds(clients, "fedsam", *SETTINGS["chain, grouped"])
    assert {*ran} == {"rows", "Rows.gradient", "FusedUpdate"}
    ran.clear()
    monkeypatch.setattr("fedflat.local.kernels.sgd.DEVICES", ())
    defined, _ = two_rounds(clients, "fedsam", *SETTINGS["chain, grouped"])
    assert {*ran} == {"rows", "Rows.gradient"}
    torch.testing.assert_close(defined["weights"], fused["weights"], rtol=1e-12, atol=1e-12)


def test_the_definition_comes_back_for_the_length_of_a_context():
    facts = network(True), LocalRule(0.1, 1), F.cross_entropy, torch.tensor([0])
    assert isinstance(choose(*facts).step, ChainStep)
    with definition_only():
        assert choose(*facts) == Kernels()
        assert not can_share(facts[0], [facts[1]] * 2, *facts[2:])
    assert can_share(facts[0], [facts[1]] * 2, *facts[2:])


@pytest.mark.parametrize(
    ("loss", "labels"),
    [(lambda z, y: F.cross_entropy(z, y), torch.tensor([0])), (F.cross_entropy, torch.zeros(1, 10))],
    ids=["own loss", "soft labels"],
)
def test_chains_and_rows_are_for_the_cross_entropy_of_classes_only(loss, labels):
    chain, plain, ascent = network(True), LocalRule(0.1, 1), Ascent(0.1).plan(LocalRule(0.1, 1), {}, {})
    assert isinstance(choose(chain, plain, loss, labels).step, DirectStep)
    assert choose(chain, ascent, loss, labels).gradient is None
    assert not can_share(chain, [plain, plain], loss, labels)


def test_the_body_runs_once_if_the_head_alone_is_perturbed_and_nothing_draws_masks():
    def fits(*layers, scope="head"):
        model = Network(nn.Sequential(nn.Linear(4, 4), *layers, nn.Linear(4, 3)))
        rule = LocalRule(0.1, 1, layout=model.layout, head=model.head)
        rule = parse(f"fedsol(scope='{scope}')").plan(rule, {"weights": model.weights}, {})
        return choose(model, rule, F.cross_entropy, torch.tensor([0])).head is not None

    assert fits(nn.Tanh()) and not fits(nn.Tanh(), nn.Dropout())
    ascent = Ascent(0.1).plan(LocalRule(0.1, 1), {}, {})
    assert choose(network(True), ascent, F.cross_entropy, torch.tensor([0])).head is None
    assert not fits(nn.Tanh(), scope="all") and not fits(nn.Tanh(), scope="body")


class Tempered(nn.Module):
    """Divides the output of its last linear layer by a temperature that it learns."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.temperature = nn.Linear(64, 8), nn.Linear(8, 10), nn.Parameter(torch.tensor(0.2))

    def forward(self, x):
        return self.head(torch.tanh(self.body(x.flatten(1)))) / self.temperature


def test_a_network_that_does_more_behind_its_head_runs_its_body_twice(digits):
    torch.manual_seed(0)
    settings = dict(method="fedsol(rho=0.5, scope='head')", rounds=1, cohort=3, lr=0.1, measures=[])
    ours = fedflat.train(digits, Tempered(), **settings, engine="inline")
    torch.manual_seed(0)
    with definition_only():
        defined = fedflat.train(digits, Tempered(), **settings, engine="inline")
    for one, other in zip(ours.model.parameters(), defined.model.parameters(), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("nesterov", [False, True])
def test_the_update_and_its_fused_kernel_are_those_of_torch(momentum, nesterov):
    w = torch.randn(5, dtype=torch.float64)
    rule = LocalRule(0.1, 1, momentum=momentum, nesterov=nesterov, weight_decay=0.2)
    parameter, ours, defined = nn.Parameter(w.clone()), w.clone(), w.clone()
    velocity, other = (torch.zeros_like(w) if momentum else None for _ in range(2))
    theirs = torch.optim.SGD([parameter], 0.1, momentum, weight_decay=0.2, nesterov=nesterov and momentum > 0)
    for g in torch.randn(3, 5, dtype=torch.float64):
        parameter.grad = g.clone()
        theirs.step()
        FusedUpdate(None, rule)(ours, g.clone(), velocity, 0.1, 0.2)
        step(defined, g.clone(), other, rule)
    torch.testing.assert_close(ours, parameter.data, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(defined, parameter.data, rtol=1e-12, atol=1e-14)


def test_fused_updates_are_for_sgd_and_for_devices_that_torch_has_the_kernel_for():
    facts = F.cross_entropy, torch.tensor([0])
    here, elsewhere = network(False), SimpleNamespace(weights=torch.empty(0, device="meta"))
    rule = LocalRule(0.1, 1)
    assert FusedUpdate.fits(here, rule, *facts)
    assert not FusedUpdate.fits(here, replace(rule, descent=object()), *facts)
    assert not FusedUpdate.fits(elsewhere, rule, *facts)
    assert not DirectStep.fits(elsewhere, rule, *facts)


def test_a_direct_step_has_the_decay_of_the_parts_too():
    model, rule = network(False), LocalRule(0.1, 1, decay=0.3, weight_decay=0.2)
    x, y = torch.randn(6, 64, dtype=model.weights.dtype), torch.arange(6) % 10
    start = model.weights.clone()
    fast = train(model, start, rule, [(x, y)], F.cross_entropy).delta
    with definition_only():
        slow = train(model, start, rule, [(x, y)], F.cross_entropy).delta
    torch.testing.assert_close(fast, slow)
    assert float(fast.norm()) > 0


def test_kernels_are_chosen_once_per_client(clients, monkeypatch):
    fedsam, asked = parse("fedsam"), Counter()  # making a method tries it on an example, which chooses kernels too
    for kernel in (ChainStep, DirectStep, ChainGradient, FusedUpdate, HeadPass):
        fits = kernel.fits
        monkeypatch.setattr(kernel, "fits", lambda *a, kernel=kernel, fits=fits: asked.update([kernel]) or fits(*a))
    two_rounds(clients, fedsam, False, 0.5, 1)
    assert {kernel.__name__: n for kernel, n in asked.items()} == {
        "ChainStep": 8, "DirectStep": 8, "ChainGradient": 8, "HeadPass": 8, "FusedUpdate": 8,
    }  # fmt: skip


class Cooled(nn.Module):
    """A network whose output is not that of its last linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(64, 6), nn.Linear(6, 10)

    def forward(self, x):
        return 5 * self.head(torch.tanh(self.body(x.flatten(1))))


def test_the_head_alone_does_not_stand_for_a_model_that_changes_its_output(digits):
    """A pass through the head alone would leave the factor out."""
    method = "fedsol(rho=0.5, radius='fixed', scope='head')"
    settings = dict(method=method, rounds=1, cohort=2, steps=4, engine="inline")
    torch.manual_seed(0)
    module = Cooled()
    fast = fedflat.train(digits, module, **settings)
    with definition_only():
        slow = fedflat.train(digits, module, **settings)
    for ours, defined in zip(fast.model.parameters(), slow.model.parameters(), strict=True):
        torch.testing.assert_close(ours, defined)
