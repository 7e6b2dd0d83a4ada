"""A part whose radius or weight is 0 asks for nothing: no second gradient, no memory, no other start."""

import pytest
import torch

from fedflat.methods.example import example_rule
from fedflat.methods.part import Wrapper
from fedflat.methods.parts import (
    AblatedAscent,
    ActivationNorm,
    AdaptiveAscent,
    Ascent,
    CentredClipping,
    ClientMomentum,
    ConsensusAscent,
    Distillation,
    DynamicDual,
    Extrapolation,
    LookbackAscent,
    ModelContrast,
    MovingTeacher,
    NotTrueDistillation,
    PrintedConsensus,
    Proximal,
    ProximalAscent,
    RelaxedStart,
    SparingAscent,
    TopEigenvalue,
    TopK,
)

WEIGHTS = torch.linspace(-1, 1, 43)


@pytest.mark.parametrize(
    "part",
    [
        *(Ascent(0), SparingAscent(0), AdaptiveAscent(0), LookbackAscent(0), ClientMomentum(1), Proximal(0)),
        *(AblatedAscent(rho=0, form=form, beta=0) for form in ("A1", "A2", "A3", "A4", "A5", "A6")),
        *(
            ProximalAscent(rho=0),
            AblatedAscent(rho=0, form="A1", beta=1),
            AblatedAscent(form="A2", beta=0),
            AblatedAscent(form="A5", beta=0),
        ),
        *(Distillation(beta=0), NotTrueDistillation(beta=0), ModelContrast(0), MovingTeacher(0), DynamicDual(0)),
    ],
    ids=repr,
)
def test_the_rule_stays_as_it_is(part):
    rule, sent = example_rule(), {"weights": WEIGHTS, "teacher": WEIGHTS}
    planned = part.wrap if isinstance(part, Wrapper) else part.plan
    own = (rule.blank(),) if isinstance(part, Wrapper) else ()
    assert planned(rule, *own, sent, part.first_memory(WEIGHTS)) is rule


@pytest.mark.parametrize("part", [ConsensusAscent(0), PrintedConsensus(0)], ids=repr)
def test_without_a_radius_the_ascent_of_another_part_stays(part):
    sent, memory = {"weights": WEIGHTS, "perturbation": 0 * WEIGHTS}, part.first_memory(WEIGHTS)
    other = Ascent(0.5)
    assert part.plan(example_rule().with_ascent(other), sent, memory).ascent is other
    assert part.plan(example_rule(), sent, memory).ascent is None


@pytest.mark.parametrize("part", [ActivationNorm(0), TopEigenvalue(0)], ids=repr)
def test_without_a_weight_a_term_is_only_watched(part):
    rule = part.plan(example_rule(), {"weights": WEIGHTS}, {})
    assert (len(rule.terms), len(rule.watched)) == (0, 1)


def test_without_beta_a_client_starts_where_the_server_is():
    assert RelaxedStart(0).begin({"weights": WEIGHTS}, {"last": 2 * WEIGHTS}) is None


def test_without_feedback_or_momentum_a_client_keeps_nothing():
    assert CentredClipping().first_memory(WEIGHTS) == {}
    assert [*CentredClipping(beta=0.5).first_memory(WEIGHTS)] == ["momentum"]
    assert Extrapolation(average=False).first_state(WEIGHTS) == {}, "nor does the server"
    assert TopK(0.1).first_memory(WEIGHTS) == {}
    assert [*TopK(0.1, feedback=True).first_memory(WEIGHTS)] == ["residual"]
