"""Methods that must coincide, invariants that must hold after every round, optima that must be reached.

Two methods that the mathematics makes equal are compared to the bit: an idea that is switched off leaves no trace.
"""

from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from torch import nn

from fedflat import federate, models, train
from fedflat.engine.inline import Inline
from fedflat.errors import RecipeError
from fedflat.methods.chain import Method
from fedflat.methods.parser import parse
from fedflat.methods.parts import (
    AblatedAscent,
    AdaptiveAscent,
    Ascent,
    ConsensusAscent,
    ControlVariates,
    Distillation,
    DynamicDual,
    FallingRate,
    InterpolatedAscent,
    LookbackAscent,
    MetaStep,
    NormalisedAveraging,
    ProximalAscent,
    RelaxedStart,
    ServerMomentum,
    TrimmedMean,
    WeightAveraging,
)
from fedflat.models.vector import Network
from fedflat.recipe import Local
from fedflat.rounds.server import conduct, first_state
from fedflat.rounds.setup import Problem

LOCAL = dict(batch=32, lr=0.1, lr_decay=0.99, momentum=0.9, weight_decay=1e-3, clip=1.0)
COHORTS = ([0, 1, 2], [2, 5], [1, 3, 7], [0, 2, 5])


def small_mlp():
    return models.build("mlp", (1, 8, 8), 10, hidden=(16,))


def trained(federation, method, rounds=3, **settings):
    """The global weights after a few rounds with 3 of 8 clients."""
    fixed = dict(rounds=rounds, cohort=3, evaluation_every=0, engine="inline")
    result = train(federation, small_mlp(), method, **{**LOCAL, **fixed, **settings})
    return torch.cat([p.detach().reshape(-1) for p in result.model.parameters()])


def equal_sizes():
    """Seven clients with 206 samples each."""
    return federate("digits", "iid", 7)


# --------------------------------------------------------------------------------------------------------------------
# Methods that coincide
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method",
    [
        "fedprox(mu=0)",
        "fedsam(rho=0)",
        "fedasam(rho=0)",
        "fedsol(rho=0)",
        "fedsol(rho=0, scope='head')",
        "fedsol(rho=0, scope='body', radius='layer')",
        "fedsol(rho=0, source='moon')",
        "man(zeta=0)",
        "top_eigenvalue(weight=0)",
        "fedntd(beta=0)",
        "moon(mu=0)",
        "fedcm(mix=1.0)",
        "mofedsam(rho=0, mix=1.0)",
        "fedlesam(rho=0)",
        "fedavgm(beta=0)",
        "fednsam(rho=0, beta=0)",
        "fedswa(alpha=1.0, floor=1.0)",
        "fedsol_ablation('A0')",
        "fedsol_ablation('A5', beta=0)",
    ],
)
def test_without_its_idea_a_method_is_fedavg_to_the_bit(digits, method):
    assert torch.equal(trained(digits, method), trained(digits, "fedavg"))


@pytest.mark.parametrize(
    ("method", "same"),
    [
        ("fedsmoo(rho=0)", "feddyn"),
        ("fedspeed(rho=0)", "feddyn"),
        ("fedgloss(rho=0, rho_server=0)", "feddyn"),
        ("fedlesam_d(rho=0)", "feddyn"),
        ("fedgamma(rho=0)", "scaffold"),
        ("fedlesam_s(rho=0)", "scaffold"),
        ("mofedsam(rho=0)", "fedcm"),
        ("fednsam(rho=0.05, beta=0)", "fedsam(0.05)"),
        ("fedsol_ablation('A1')", "fedsol"),
        ("fedsol(source='kl')", "fedsol"),
        ("fedsam(0.1) + feddyn(0.1)", "fedspeed(0.1, 0.1)"),
    ],
)
@pytest.mark.parametrize("clip_mode", ["loss_only", "official", "all"])
def test_these_methods_are_the_same_to_the_bit(digits, method, same, clip_mode):
    assert torch.equal(trained(digits, method, clip_mode=clip_mode), trained(digits, same, clip_mode=clip_mode))


def test_the_comparison_would_see_a_difference(digits):
    fedavg = trained(digits, "fedavg")
    for method in ("fedprox(1e-3)", "fedsam(1e-3)", "man(1e-3)", "fedsol(0.1)", "fedcm(0.99)", "fedavgm(0.01)"):
        assert not torch.equal(trained(digits, method), fedavg), method


def test_scaffold_is_fedavg_to_the_bit_in_its_first_round_only(digits):
    assert torch.equal(trained(digits, "scaffold", rounds=1), trained(digits, "fedavg", rounds=1))
    assert not torch.equal(trained(digits, "scaffold", rounds=2), trained(digits, "fedavg", rounds=2))


def test_fedlesam_is_fedavg_to_the_bit_until_a_client_comes_back(digits):
    first = trained(digits, "fedlesam(0.5)", rounds=1)
    assert torch.equal(first, trained(digits, "fedavg", rounds=1))
    again = dict(rounds=2, cohort=8)
    assert not torch.equal(trained(digits, "fedlesam(0.5)", **again), trained(digits, "fedavg", **again))


def test_feddyn_without_penalty_moves_by_fedavgs_average_and_the_mean_drift(digits):
    # λ = 0 frees the clients of the dual; the server still adds h̄, which after one round is Σ Δᵢ/m.
    start = torch.cat([p.detach().reshape(-1) for p in small_mlp().parameters()])
    fedavg, feddyn = (trained(digits, m, rounds=1, average="uniform") - start for m in ("fedavg", "feddyn(penalty=0)"))
    torch.testing.assert_close(feddyn, fedavg * (1 + 3 / 8), rtol=1e-5, atol=1e-6)


def test_fedgf_is_fedsam_as_long_as_no_round_counts_as_divergent(digits):
    # Up to rounding: FedSAM adds ρ/‖g‖ · g to the weights in one operation, FedGF makes the perturbation first.
    fedgf, fedsam = (trained(digits, m) for m in ("fedgf(rho=0.05, threshold=1e9)", "fedsam(0.05)"))
    torch.testing.assert_close(fedgf, fedsam, rtol=1e-6, atol=1e-6)
    assert not torch.allclose(trained(digits, "fedgf(rho=0.05, threshold=0)"), fedsam, rtol=1e-3, atol=1e-3)


def test_feddc_on_clients_of_equal_size_is_feddyn_and_scaffold():
    # To the bit but for the order in which λ w and the pull are added.
    federation, constant = equal_sizes(), dict(lr_decay=1.0)  # FedDC divides by the learning rate of round 0
    both = trained(federation, "feddyn(0.1) + scaffold", **constant)
    torch.testing.assert_close(trained(federation, "feddc(0.1)", **constant), both)


@pytest.mark.parametrize("average", ["uniform", "samples"])
def test_fednova_is_fedavg_when_all_clients_make_as_many_steps(digits, average):
    # Up to rounding, because FedNova weighs by τ pᵢ/a with τ = Σ pᵢ a, and this need not be pᵢ to the last bit.
    nova, fedavg = (trained(digits, m, steps=5, average=average) for m in ("fednova", "fedavg"))
    torch.testing.assert_close(nova, fedavg, rtol=1e-6, atol=1e-6)


def test_fednova_is_not_fedavg_when_they_do_not():
    federation = federate("digits", "sizes", 8, exponent=1.0)
    assert (trained(federation, "fednova") - trained(federation, "fedavg")).norm() > 1e-2


@dataclass(frozen=True)
class WithoutConsensus(ConsensusAscent):
    """FedSMOO's ascent with μ and s frozen at zero."""

    def __call__(self, slope, carry):
        zeros = {name: torch.zeros_like(vector) for name, vector in carry.items()}
        return super().__call__(slope, zeros)[0], carry

    def merge(self, move, server, uploads):
        return move, {}


def test_fedsmoo_without_its_consensus_is_fedspeed_to_the_bit(digits):
    frozen = Method(DynamicDual(0.1), WithoutConsensus(0.1))
    assert torch.equal(trained(digits, frozen), trained(digits, "fedspeed(0.1, 0.1)"))
    assert not torch.equal(trained(digits, "fedsmoo(0.1, 0.1)"), trained(digits, "fedspeed(0.1, 0.1)"))


# --------------------------------------------------------------------------------------------------------------------
# Invariants of the state
# --------------------------------------------------------------------------------------------------------------------


def played(federation, method, cohorts=COHORTS, **local):
    """Round after round in float64: the cohort, the server's state, and every client's memory before and after."""
    network = Network(small_mlp(), torch.float64)
    settings = Local(**{**LOCAL, **local})
    problem = Problem.of(federation.to(torch.float64), network, parse(method), settings)
    state, clients = first_state(problem), range(federation.clients)
    blank = problem.method.first_memory(network.weights.clone())
    with closing(Inline(problem)) as engine:

        def memories():
            kept = [engine.memory[i] or blank for i in clients]
            return [{name: vector.clone() for name, vector in memory.items()} for memory in kept]

        before = memories()
        for cohort in cohorts:
            state, _ = conduct(problem, state, engine, cohort)
            yield cohort, state, before, (before := memories())


def mean_of(memories, name, weights=None):
    weights = weights or [1.0] * len(memories)
    return sum(w * memory[name] for w, memory in zip(weights, memories, strict=True)) / len(memories)


@pytest.mark.parametrize("method", ["scaffold", "scaffold(momentum_aware=True)", "fedgamma", "fedlesam_s", "feddc"])
def test_scaffolds_c_is_the_mean_of_all_clients_controls_after_every_round(digits, method):
    shares = [digits.share(i) if method == "feddc" else 1.0 for i in range(8)]
    for _, state, _, memories in played(digits, method):
        assert state.vectors["controls"].norm() > 0
        torch.testing.assert_close(
            state.vectors["controls"], mean_of(memories, "control", shares), rtol=1e-12, atol=1e-12
        )


@pytest.mark.parametrize("method", ["feddyn", "fedspeed", "fedsmoo", "feddc", "fedgloss", "fedlesam_d"])
def test_feddyns_mean_drift_is_the_mean_of_all_clients_drifts_after_every_round(digits, method):
    for _, state, _, memories in played(digits, method):
        assert state.vectors["mean_drift"].norm() > 0
        torch.testing.assert_close(state.vectors["mean_drift"], mean_of(memories, "drift"), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "method", ["scaffold", "feddyn", "feddc", "fedsmoo", "moon", "fedlesam", "fedinit", "top_k(0.3, True)"]
)
def test_the_memory_of_who_does_not_take_part_stays_as_it_is_to_the_bit(digits, method):
    for cohort, _, before, after in played(digits, method):
        for client, (old, new) in enumerate(zip(before, after, strict=True)):
            for name in old:
                same = old[name].numpy().tobytes() == new[name].numpy().tobytes()
                assert same == (client not in cohort), (client, name)


@pytest.mark.parametrize(("crowd", "rho"), [("active", 0.1), ("all", 0.1), ("active", 0.7)])
def test_fedsmoos_s_is_zero_at_first_and_of_length_rho_after_every_round(digits, crowd, rho):
    method = parse(f"fedsmoo(rho={rho}, crowd='{crowd}')")
    assert not method.first_state(torch.ones(3))["perturbation"].any()
    for cohort, state, _, memories in played(digits, method):
        assert float(state.vectors["perturbation"].norm()) == pytest.approx(rho, rel=1e-5)
        chosen = memories if crowd == "all" else [memories[i] for i in cohort]
        dual = mean_of(chosen, "dual")
        torch.testing.assert_close(state.vectors["perturbation"], rho * dual / dual.norm(), rtol=1e-5, atol=1e-8)


# --------------------------------------------------------------------------------------------------------------------
# Optima of least-squares clients
# --------------------------------------------------------------------------------------------------------------------


def distance_to_optimum(federation, method, cohort=1.0, rounds=60):
    data = federation.dataset.train
    optimum = torch.linalg.lstsq(data.inputs, data.labels).solution.T
    module = nn.Linear(3, 1, bias=False)
    nn.init.constant_(module.weight, 0.1)
    result = train(
        federation, module, method, loss=lambda outputs, targets: 0.5 * (outputs - targets).square().mean(),
        rounds=rounds, steps=5, batch=0, lr=0.3, cohort=cohort, precision="float64", average="uniform",
        evaluation_every=0, engine="inline",
    )  # fmt: skip
    return float((result.model.weight.detach() - optimum).norm())


@pytest.mark.parametrize(
    "method", ["scaffold", "feddyn(0.6)", "feddc(0.6)", "fedspeed(rho=0, penalty=0.6)", "fedsmoo(rho=0, penalty=0.6)"]
)
def test_methods_that_correct_the_drift_reach_the_global_optimum(regression, method):
    assert distance_to_optimum(regression, method) < 1e-6


def test_scaffold_reaches_it_also_when_only_half_of_the_clients_take_part(regression):
    assert distance_to_optimum(regression, "scaffold", cohort=2, rounds=100) < 1e-6


@pytest.mark.parametrize("method", ["fedavg", "fedsam", "fedcm", "fedavgm(0.5)"])
def test_methods_that_do_not_correct_it_stop_elsewhere(regression, method):
    assert distance_to_optimum(regression, method) > 1e-2


# --------------------------------------------------------------------------------------------------------------------
# Parts that cannot stand side by side
# --------------------------------------------------------------------------------------------------------------------

ASCENTS = [Ascent(), AdaptiveAscent(), ConsensusAscent(), LookbackAscent(), InterpolatedAscent(), ProximalAscent(),
           AblatedAscent(), MetaStep()]  # fmt: skip


@pytest.mark.parametrize(
    ("one", "other", "claim"),
    [
        *((a, b, "set the ascent") for a, b in pairwise(ASCENTS)),
        (Ascent(0.1), Ascent(0.1), "set the ascent"),
        (NormalisedAveraging(), NormalisedAveraging(), "replace the average"),
        (NormalisedAveraging(), TrimmedMean(), "replace the average"),
        (WeightAveraging(), WeightAveraging(), "say which model to evaluate"),
        (FallingRate(), FallingRate(0.2), "set the schedule of the learning rate"),
        (RelaxedStart(0.1), RelaxedStart(0.2), "say where a client starts"),
    ],
)
def test_two_parts_with_one_claim_are_refused_by_name(one, other, claim):
    for first, second in ((one, other), (other, one)):
        names = f"{type(first).__name__} and {type(second).__name__}"
        with pytest.raises(RecipeError) as caught:
            Method(first, second)
        assert str(caught.value) == f"method: {names} both {claim}; a method can have only one"


def test_parts_with_different_claims_add_up_in_any_order():
    parts = [Ascent(0.1), DynamicDual(0.1), ControlVariates(), Distillation(), ServerMomentum(), NormalisedAveraging()]
    assert set(Method(*parts).parts) == set(Method(*reversed(parts)).parts)
    assert Method(*parts).parts[0] == NormalisedAveraging()
    assert Method(*parts).parts[-1] == ServerMomentum()
