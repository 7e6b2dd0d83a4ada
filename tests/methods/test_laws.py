"""Laws that hold for every method of the catalogue, for all pairs of parts, and for triples of them."""

import re
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedflat import Dataset, Federation, Samples, federate, models, train
from fedflat.engine.inline import Inline
from fedflat.errors import RecipeError
from fedflat.local.kernels.rows import train_together
from fedflat.local.rule import Outcome
from fedflat.methods import trial
from fedflat.methods.catalogue import CATALOGUE
from fedflat.methods.chain import Method
from fedflat.methods.parser import parse
from fedflat.methods.part import Part
from fedflat.methods.parts import (
    AblatedAscent,
    ActivationNorm,
    AdaptiveAscent,
    AdaptiveServer,
    Ascent,
    CarriedAdamW,
    CentralPrivacy,
    ClientMomentum,
    ConsensusAscent,
    ControlVariates,
    Distillation,
    DynamicDual,
    Extrapolation,
    FallingRate,
    FrozenHead,
    InterpolatedAscent,
    LocalAdamW,
    LocalMuon,
    LocalPrivacy,
    LookbackAscent,
    MetaStep,
    ModelContrast,
    MovingTeacher,
    NormalisedAveraging,
    NotTrueDistillation,
    PrintedConsensus,
    ProductAverage,
    Proximal,
    ProximalAscent,
    RelaxedStart,
    ServerAscent,
    ServerMomentum,
    ServerStep,
    TopEigenvalue,
    TopK,
    TrimmedMean,
    WeightAveraging,
    WeightedMomentum,
)
from fedflat.methods.uploads import Upload
from fedflat.models.vector import Network
from fedflat.recipe import Local, Server
from fedflat.rounds import client, flat_record
from fedflat.rounds.server import conduct, first_state
from fedflat.rounds.setup import Problem

LOCAL = dict(steps=3, batch=8, lr=0.1, momentum=0.5, weight_decay=1e-3, lr_decay=0.9, clip=2.0, cohort=5)
FAST = dict(rounds=3, evaluation_every=0, measures=[], engine="inline", **LOCAL)
# One of each kind, with options whose effect shows in three rounds.
PARTS = [
    AblatedAscent(rho=0.5, form="A3"), ActivationNorm(0.5), AdaptiveAscent(0.5), AdaptiveServer(), Ascent(0.5),
    CarriedAdamW(), CentralPrivacy(1.0, 0.1), ClientMomentum(0.5), ConsensusAscent(0.5), ControlVariates(),
    Distillation(beta=2.0), DynamicDual(0.3), Extrapolation(), FallingRate(),
    FrozenHead(), InterpolatedAscent(0.5, 0.5, threshold=0.0),
    LocalAdamW(), LocalMuon(), LocalPrivacy(0.5, 0.1), LookbackAscent(0.5), MetaStep(), ModelContrast(1.0),
    MovingTeacher(alpha=0.5),
    NormalisedAveraging(), NotTrueDistillation(), PrintedConsensus(0.5), Proximal(1.0), ProximalAscent(rho=0.5),
    RelaxedStart(0.5), ServerAscent(0.5), ServerMomentum(), ServerMomentum(0.5, lookahead=True), ServerStep(),
    TopEigenvalue(0.1), TopK(0.3, feedback=True), TrimmedMean(0.25), WeightAveraging(start=0), WeightedMomentum(0.5),
]  # fmt: skip


@pytest.fixture(scope="module")
def clients():
    """Five clients of very different sizes and classes."""
    return federate("digits", "lda", 5, alpha=0.3, seed=3, min_size=40)


def net():
    return models.build("mlp", (1, 8, 8), 10, torch.Generator().manual_seed(0), hidden=(12,))


def weights(result):
    return torch.cat([p.detach().flatten() for p in result.model.parameters()])


def trained(clients, method, **more):
    return weights(train(clients, net(), method, **{**FAST, **more}))


@pytest.fixture(scope="module")
def known(clients):
    """The weights of a method named in the catalogue, trained once for all laws that compare with it."""
    return cache(lambda method: trained(clients, method))


def adapted(clients, method, **more):
    """The adapters of a run that trains nothing else; `ProductAverage` needs some."""
    result = train(clients, net(), method, model_lora={"rank": 2, "targets": "all"}, **{**FAST, "rounds": 2, **more})
    return torch.cat([p.detach().flatten() for p in result.model.parameters() if p.requires_grad])


def name(part):
    return type(part).__name__


def composed(*parts):
    """The method of these parts and no refusal, or no method and the sentence that refuses it."""
    try:
        return Method(*parts), ""
    except RecipeError as refusal:
        return None, str(refusal)


# --------------------------------------------------------------------------------------------------------------------
# Where an option is zero, the method is its host
# --------------------------------------------------------------------------------------------------------------------

SOURCES = ["kl", "fedprox", "feddyn", "scaffold", "moon", "fednova"]
HOSTS = [
    *((f"fedsol(0.0, '{radius}', '{scope}', '{source}')", "fedavg")
      for source in SOURCES for radius in ("dim0", "layer", "fixed") for scope in ("all", "head", "body")),
    *((f"fedsol_ablation('{form}', rho=0.0, beta=0.0)", "fedavg") for form in ("A0", "A1", "A2", "A3", "A6")),
    ("fedprox(0.0)", "fedavg"), ("fedsam(0.0)", "fedavg"), ("fedasam(0.0)", "fedavg"), ("fedlesam(0.0)", "fedavg"),
    ("fedlesam(0.0, 'server')", "fedavg"), ("man(0.0)", "fedavg"), ("moon(0.0)", "fedavg"), ("fedntd(0.0)", "fedavg"),
    ("fedcm(1.0)", "fedavg"), ("fedavgm(0.0)", "fedavg"), ("fednsam(0.0, 0.0)", "fedavg"),
    ("fedswa(1.0, 1.0)", "fedavg"), ("top_eigenvalue(0.0)", "fedavg"), ("local_dp(1e9, 0.0)", "fedavg"),
    ("mofedsam(0.0, 0.5)", "fedcm(0.5)"), ("mofedsam(0.5, 1.0)", "fedsam(0.5)"), ("fedgamma(0.0)", "scaffold"),
    ("fedlesam_s(0.0)", "scaffold"), ("fedspeed(0.0, 0.3)", "feddyn(0.3)"), ("fedsmoo(0.0, 0.3)", "feddyn(0.3)"),
    ("fedsmoo(0.0, 0.3, upload='less')", "feddyn(0.3)"), ("fedlesam_d(0.0, 0.3)", "feddyn(0.3)"),
    ("fedgloss(0.0, 0.0, 0.3)", "feddyn(0.3)"), ("fedgf(0.5, threshold=1e9)", "fedsam(0.5)"),
    ("fedinit(0.0)", "fedavg"), ("fedexp(1e9, average=False)", "fedavg"), ("top_k(1.0, feedback=True)", "fedavg"),
    ("fedwmsam(0.0, 1.0, 0.0)", "scaffold"), ("looksam(0.0)", "fedavg"), ("looksam(0.5, 1)", "fedsam(0.5)"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "host"), HOSTS)
def test_at_zero_a_method_is_its_host_to_the_bit(clients, known, method, host):
    assert torch.equal(trained(clients, method), known(host))


@pytest.fixture(scope="module")
def many():
    """Forty clients of very different sizes, of whom cohorts of 16 share steps on a small model."""
    return federate("digits", "sizes", 40, exponent=1.0, seed=2)


# How the bits could come apart: plain steps have a kernel of their own, clients may share steps, passes draw masks.
GROUPED = dict(rounds=2, cohort=16, epochs=1, batch=8, lr=0.05, evaluation_every=0, engine="inline", measures=[])
SETTINGS = {
    "grouped": {},
    "grouped, momentum and clip": dict(momentum=0.5, weight_decay=1e-3, clip=2.0),
    "grouped, watched": dict(measures=["cosine", "lambda"], cohort=4, group=4),
    "one by one": dict(group=1),
    "dropout": dict(momentum=0.5, cohort=6),
    "dropout, watched": dict(momentum=0.5, cohort=3, measures=["cosine", "lambda"]),
    "dropout alone, in groups": dict(group=3, cohort=6, clip=1.0),
}


def with_dropout(setting):
    torch.manual_seed(0)
    # The norm also counts its batches; without it the clients may share their steps.
    norm = nn.Identity() if "groups" in setting else nn.BatchNorm1d(16, momentum=None)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), norm, nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 10))


def run_in(setting, many, method):
    module = with_dropout(setting) if "dropout" in setting else net()
    return train(many, module, method, **{**GROUPED, **SETTINGS[setting]})


@pytest.fixture(scope="module")
def hosts(many):
    """The weights of the host methods, each run once in each setting."""
    return cache(lambda setting, host: weights(run_in(setting, many, host)))


# FedGF does not share steps; batch statistics, which the dropout's model has, cannot be protected.
# FedSoL's radii and scopes are all tried above; here one of them stands for the others.
ELSEWHERE = [(m, host) for m, host in HOSTS if not re.match("fedgf|local_dp|fedsol.*(head|body|layer|fixed)", m)]
ELSEWHERE += [("fedsol(0.0, scope='head')", "fedavg"), ("fedsol(0.0, scope='body', source='moon')", "fedavg")]
FEW = re.compile("watched|dropout alone")  # settings for the methods that could draw or measure at w + ε
CASES = [(s, *pair) for s in SETTINGS for pair in ELSEWHERE if not FEW.search(s) or re.match("fedsol|man", pair[0])]


@pytest.mark.parametrize(("setting", "method", "host"), CASES)
def test_at_zero_a_method_is_its_host_to_the_bit_also_in_groups_and_with_dropout(many, hosts, setting, method, host):
    assert torch.equal(weights(run_in(setting, many, method)), hosts(setting, host))


@pytest.mark.parametrize("method", ["fedavg", "fedsol(0.0)", "man(0.0)", "fedlesam(0.0)", "fedprox(0.0)"])
def test_the_clients_of_the_grouped_setting_do_share_steps(many, method, monkeypatch):
    sizes = []
    monkeypatch.setattr(client, "train_together", lambda *a: sizes.append(len(a[2])) or train_together(*a))
    run_in("grouped", many, method)
    assert sizes == [4] * 8


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize(("zero", "tiny"), [("fedsol(0.0)", "fedsol(1e-9)"), ("man(0.0)", "man(1e-9)")])
def test_what_has_no_part_in_the_step_is_noted_all_the_same(many, group, zero, tiny):
    """MAN at ζ = 0 and FedSoL at ρ = 0 report what they do not change, in groups as one by one."""
    run, other = (train(many, net(), m, **{**GROUPED, "measures": ["cosine"], "group": group}) for m in (zero, tiny))
    for record, expected in zip(map(flat_record, run.history), map(flat_record, other.history), strict=True):
        noted = [name for name in expected if name == "cosine" or name.startswith("activation/")]
        assert noted
        assert [record[name] for name in noted] == pytest.approx([expected[name] for name in noted], rel=1e-4)


@pytest.mark.parametrize(
    ("method", "passes"),
    [("fedsam(0.0)", (1, 0)), ("fedsam", (2, 0)), ("fedsol(0.0)", (1, 0)), ("moon(0.0)", (1, 0)), ("man(0.0)", (1, 0))],
)
def test_a_part_at_zero_costs_no_pass(method, passes):
    assert trial.passes(parse(method)) == passes


@pytest.mark.parametrize(
    ("method", "gradients"), [("looksam", 6 / 5), ("looksam(every=2)", 1.5), ("looksam(every=1)", 2)]
)
def test_an_ascent_in_every_kth_step_costs_one_gradient_in_k_steps(method, gradients):
    assert trial.passes(parse(method)) == (gradients, 0)


@pytest.mark.parametrize("host", [n for n in CATALOGUE if n not in ("man", "top_eigenvalue")])
def test_man_with_zeta_zero_changes_no_bit_of_any_method(clients, known, host):
    assert torch.equal(trained(clients, f"{host} + man(0.0)"), known(host))


# --------------------------------------------------------------------------------------------------------------------
# Pairs and triples
# --------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone(clients):
    known = {}

    def of(part):
        if part not in known:
            known[part] = trained(clients, Method(part), steps=2, rounds=2, cohort=4)
        return known[part]

    return of


@pytest.mark.parametrize("one", PARTS, ids=repr)
def test_every_pair_shows_both_effects_or_is_refused_with_both_names(clients, alone, one):
    for other in PARTS[PARTS.index(one) :]:
        method, refusal = composed(one, other)
        if method is None:
            assert name(one) in refusal and name(other) in refusal, refusal
            continue
        both = trained(clients, method, steps=2, rounds=2, cohort=4)
        assert torch.isfinite(both).all(), (one, other)
        if one == other and isinstance(one, TopK):  # a projection: taken twice it is itself
            assert torch.equal(both, alone(one))
            continue
        assert not torch.equal(both, alone(one)), f"{other} has no effect beside {one}"
        assert not torch.equal(both, alone(other)), f"{one} has no effect beside {other}"


@pytest.fixture(scope="module")
def products(clients):
    return adapted(clients, ProductAverage())


@pytest.mark.parametrize("other", [part for part in PARTS if not isinstance(part, FrozenHead)], ids=repr)
def test_the_average_of_products_shows_its_effect_beside_every_part_or_is_refused(clients, products, other):
    """On adapters, where it applies. Frozen heads are left out: the adapters of a model have no head."""
    method, refusal = composed(ProductAverage(), other)
    if method is None:
        assert 'model.lora.average = "product"' in refusal and name(other) in refusal, refusal
        return
    both = adapted(clients, method)
    assert torch.isfinite(both).all()
    assert not torch.equal(both, adapted(clients, Method(other))), "the products have no effect"
    assert not torch.equal(both, products), f"{other} has no effect beside them"


@given(st.permutations(PARTS).map(lambda parts: parts[:3]))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_triples_train_in_any_order_or_are_refused_with_two_names(clients, parts):
    method, refusal = composed(*parts)
    if method is None:
        assert sum(bool(re.search(rf"\b{name(part)}\b", refusal)) for part in parts) >= 2, refusal
        assert composed(*reversed(parts))[0] is None
        return
    assert torch.isfinite(trained(clients, method, rounds=2)).all()


@pytest.mark.parametrize("task", ["regression", "multi-label"])
@pytest.mark.parametrize("method", ["fedntd", "fedgmt", "fedsol", "man + fedsol_ablation('A2')"])
def test_a_method_that_compares_probabilities_of_classes_needs_classes(task, method):
    inputs = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
    samples = Samples(inputs, (inputs[:, :2] > 0).float())
    data = Federation(Dataset("two", samples, samples, 2, (), (), task=task), [torch.arange(20)])
    with pytest.raises(RecipeError, match=f"compares probabilities of classes, and task = '{task}' has none"):
        train(data, nn.Linear(3, 2), method, rounds=1, engine="inline")
    train(data, nn.Linear(3, 2), "fedsol(source='fedprox')", rounds=1, engine="inline")


def report(method, delta):
    """What is uploaded for a client that moved by Δ."""
    from fedflat.methods.example import LAYOUT, example_rule  # the facts of the example that methods are observed on

    zeros = torch.zeros_like(delta)
    sent = {name: delta.new_zeros(size) for name, size in method.sent_sizes(LAYOUT).items()}
    rule = method.plan(example_rule(), sent, method.first_memory(zeros))
    upload = Upload(0, 1, 1, 0.1, 0.0, delta)
    return method.report(upload, sent, method.first_memory(zeros), Outcome(delta, 0.0, rule, rule.carry, {}))[0]


class Louder(Part):
    """Uploads a thousand times what the client moved by."""

    def report(self, upload, sent, memory, outcome):
        return upload.update(delta=1000 * upload.delta), memory


@pytest.mark.parametrize("other", [*PARTS, Louder()], ids=repr)
def test_an_upload_stays_within_the_clip_of_local_privacy_in_every_order(other):
    guard = LocalPrivacy(clip=0.5, noise=0.0)
    for parts in ([guard, other, Louder()], [Louder(), other, guard], [other, guard, Louder()]):
        method, refusal = composed(*parts)
        if method is None:
            assert name(guard) in refusal
            continue
        upload = report(method, torch.full((43,), 3.0))
        assert float(upload.delta.norm()) <= 0.5 + 1e-6
        assert not upload.vectors, "nothing else leaves the client"


# --------------------------------------------------------------------------------------------------------------------
# What careless parts of one's own would do
# --------------------------------------------------------------------------------------------------------------------


class SetsPull(Part):
    def plan(self, rule, sent, memory):
        return replace(rule, pull=torch.ones_like(sent["weights"]))


class OwnAscent(Part):
    """An ascent that declares nothing."""

    def plan(self, rule, sent, memory):
        return replace(rule, ascent=lambda slope, carry: (slope(), carry))


class Peeks(Part):
    def merge(self, move, server, uploads):
        return move + uploads[0].delta, {}


def test_a_part_that_drops_anothers_pull_is_refused():
    with pytest.raises(RecipeError, match="SetsPull drops the pull that DynamicDual has set"):
        Method(DynamicDual(), SetsPull())
    Method(SetsPull(), DynamicDual())  # the other way round nothing is lost


def test_a_second_ascent_that_declares_nothing_is_seen():
    for parts in ((Ascent(), OwnAscent()), (OwnAscent(), Ascent())):
        with pytest.raises(RecipeError, match=f"{name(parts[0])} and {name(parts[1])} both set the ascent"):
            Method(*parts)


def test_a_part_that_looks_at_single_uploads_must_say_so():
    with pytest.raises(RecipeError, match='Peeks: its merge looks at single uploads; declare `sees = "each"`'):
        Method(Peeks())


def test_two_gradients_of_one_step_are_two_vectors(clients):
    seen = []

    class Difference(Part):
        def plan(self, rule, sent, memory):
            return rule.with_ascent(self)

        def __call__(self, slope, carry):
            here, there = slope(), slope(torch.full_like(slope.weights, 0.1))
            seen.append(float((there - here).norm()))
            return here, carry

    trained(clients, Difference(), rounds=1)
    assert min(seen) > 1e-3


def test_two_parts_of_one_class_have_drawers_of_their_own(clients):
    method = Method(DynamicDual(0.1), DynamicDual(0.2))
    assert method.memory == ("drift", "drift.2") and method.state == ("mean_drift", "mean_drift.2")
    # Both hᵢ are the same sum, so that the pulls add up to that of one part; the server adds h̄ twice.
    assert not torch.equal(trained(clients, method), trained(clients, "feddyn(0.3)"))


# --------------------------------------------------------------------------------------------------------------------
# State, engines, checkpoints
# --------------------------------------------------------------------------------------------------------------------

EVERY = [
    *CATALOGUE,
    "fedcm(momentum_aware=True)",
    *(f"fedsol(source='{source}')" for source in SOURCES[1:]),
    "fedlesam(0.1, 'server')",
    "top_k(feedback=True)",
]


@pytest.mark.parametrize("method", EVERY)
def test_state_and_memory_stay_bounded_at_a_tiny_learning_rate(clients, method):
    momentum = (
        0.0 if method in ("fedcm", "mofedsam", "fedwmsam") else 0.5
    )  # their Δᵗ is a mean gradient without it only
    problem = Problem.of(clients, Network(net()), parse(method), Local(steps=3, batch=8, lr=1e-5, momentum=momentum))
    # The dual of FedSMOO's slides, FedMuon's momentum and FedWMSAM's controls have at first to grow to their lengths.
    early, late = (30, 45) if method in ("fedsmoo_slides", "fedmuon", "fedwmsam") else (4, 12)
    norms = {}
    with closing(Inline(problem)) as engine:
        state = first_state(problem)
        for round in range(1, late + 1):
            state, _ = conduct(problem, state, engine, range(5), Server(cohort=5))
            if round in (early, late):
                kept = {f"{c}.{n}": v for c in range(5) for n, v in (engine.memory[c] or {}).items()}
                norms[round] = {n: float(v.nan_to_num().norm()) for n, v in {**state.vectors, **kept}.items()}
    slack = 0.05 * float(state.weights.norm())
    for key, norm in norms[late].items():
        assert norm <= 1.6 * norms[early][key] + slack, (key, norms[early][key], norm)


@pytest.mark.parametrize("method", EVERY)
def test_workers_change_no_bit(clients, method):
    inline = trained(clients, method, rounds=2)
    assert torch.equal(inline, trained(clients, method, rounds=2, engine="pool", workers=2))


@pytest.mark.parametrize("method", EVERY)
def test_a_run_cut_in_the_middle_goes_on_to_the_same_bits(clients, known, method, tmp_path: Path):
    class CutError(Exception):
        pass

    def cut(record):
        if record["round"] == 2:
            raise CutError

    more = dict(checkpoint_every=1, out=tmp_path / "run")
    with pytest.raises(CutError):
        trained(clients, method, callbacks=[cut], **more)
    assert torch.equal(trained(clients, method, resume=True, **more), known(method))
