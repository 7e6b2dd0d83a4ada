"""FedSoL's perturbation and its ablations against plain PyTorch."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedflat.local.rule import LocalRule
from fedflat.local.step import train as local_train
from fedflat.methods.catalogue.flat import fedsol
from fedflat.methods.chain import Method
from fedflat.methods.part import Part
from fedflat.methods.parts import (
    AblatedAscent,
    ActivationNorm,
    Distillation,
    DynamicDual,
    Proximal,
    ProximalAscent,
)
from fedflat.methods.parts.proximal import shape
from plain import DOUBLE, NETWORKS, descent, forward, gradient, losses, mlp, of_length, task, visited, within


@NETWORKS
@pytest.mark.parametrize("scope", ["all", "head", "body"])
def test_fedsol_is_the_plain_computation(make, scope):
    network, batch, anchor = task(make)
    local, proximal = losses(network, batch, anchor)
    ascent = of_length(within(network, gradient(proximal, network.weights), scope), 0.7)
    ours = descent(fedsol(rho=0.7, radius="fixed", scope=scope), network, batch, anchor)
    torch.testing.assert_close(ours, gradient(local, network.weights + ascent), rtol=1e-12, atol=1e-12)


@NETWORKS
@pytest.mark.parametrize("radius", ["layer", "dim0"])
@pytest.mark.parametrize("scope", ["all", "head", "body"])
def test_fedsols_adaptive_radius_scales_the_perturbation(make, radius, scope):
    network, batch, anchor = task(make)
    local, proximal = losses(network, batch, anchor)
    scale = shape(network.weights - anchor, network.layout, radius)
    ascent = scale * of_length(within(network, gradient(proximal, network.weights), scope), 0.7)
    ours = descent(fedsol(rho=0.7, scope=scope, radius=radius), network, batch, anchor)
    torch.testing.assert_close(ours, gradient(local, network.weights + ascent), rtol=1e-12, atol=1e-12)


@NETWORKS
@pytest.mark.parametrize("scope", ["head", "body"])
def test_fedsol_perturbs_nothing_outside_of_its_scope(make, scope):
    network, batch, anchor = task(make)
    first, ascent = visited(fedsol(rho=0.7, radius="fixed", scope=scope), network, batch, anchor)
    assert not first.any()
    assert torch.equal(within(network, ascent, scope), ascent)
    assert float(ascent.norm()) == pytest.approx(0.7)


@NETWORKS
@pytest.mark.parametrize("scope", ["all", "head"])
def test_man_is_part_of_the_loss_that_fedsol_descends_by(make, scope):
    network, batch, anchor = task(make)
    local, proximal = losses(network, batch, anchor)
    ascent = of_length(within(network, gradient(proximal, network.weights), scope), 0.7)

    def objective(w):
        return local(w) + 0.15 * sum(a.square().mean() for a in forward(network, w, batch[0])[1])

    ours = descent(fedsol(rho=0.7, radius="fixed", scope=scope) + ActivationNorm(0.3), network, batch, anchor)
    torch.testing.assert_close(ours, gradient(objective, network.weights + ascent), rtol=1e-12, atol=1e-12)


@NETWORKS
@pytest.mark.parametrize("scope", ["all", "head", "body"])
@pytest.mark.parametrize("source", ["fedprox", "kl"])
@pytest.mark.parametrize("radius", ["fixed", "dim0"])
def test_fedsol_does_not_perturb_at_the_global_model(make, scope, source, radius):
    network, batch, _ = task(make, torch.float32)
    ours = visited(fedsol(2.0, radius, scope, source=source), network, batch, network.weights.clone())
    assert not torch.stack(ours).any()


@NETWORKS
def test_with_zero_0_fedsol_scales_rounding_noise_up_to_the_full_radius_as_the_authors_code_does(make):
    network, batch, _ = task(make, torch.float32)
    anchor = network.weights.clone()
    noise = descent(Method(Distillation()), network, batch, anchor) - descent(Method(), network, batch, anchor)
    ascent = visited(fedsol(2.0, "fixed", zero=0.0), network, batch, anchor)[-1]
    if not ascent.any():
        pytest.skip("here the gradient of the KL at the global model is exactly zero")
    assert float(noise.norm()) < 1e-5
    # ρ ‖g‖/(‖g‖ + 10⁻¹²) with ‖g‖ of about 10⁻⁸.
    assert float(ascent.norm()) == pytest.approx(2.0, rel=1e-2)


@pytest.mark.parametrize("source", ["fedprox", "feddyn", "scaffold"])
def test_a_linear_source_perturbs_along_its_pull(source):
    network, batch, anchor = task(mlp)
    drift = torch.linspace(-1, 1, network.size, **DOUBLE)
    memory = {"drift": drift, "control": drift}
    sent = {"weights": anchor, "controls": drift.flip(0) ** 2}
    away = network.weights - anchor
    direction = {"fedprox": away, "feddyn": away + drift, "scaffold": sent["controls"] - drift}[source]
    local, _ = losses(network, batch, anchor)
    start = network.weights.clone()
    rule = fedsol(0.7, "fixed", source=source).plan(
        LocalRule(1.0, 1, layout=network.layout, head=network.head), sent, memory
    )
    assert rule.pull is None and not rule.decay
    ours = -local_train(network, start, rule, [batch], F.cross_entropy).delta
    expected = gradient(local, start + 0.7 * direction / direction.norm())
    torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("quadratic", ["decay", "clipped"])
def test_the_quadratic_of_a_source_points_the_same_way_wherever_it_stands(quadratic):
    network, batch, anchor = task(mlp)
    local, _ = losses(network, batch, anchor)
    drift, start = torch.linspace(-1, 1, network.size, **DOUBLE), network.weights.clone()
    part = ProximalAscent(DynamicDual(0.2, quadratic=quadratic, direction_only=True), 0.7, "fixed")
    rule = Method(part).plan(LocalRule(1.0, 1, layout=network.layout), {"weights": anchor}, {"drift": drift})
    ours = -local_train(network, start, rule, [batch], F.cross_entropy).delta
    expected = gradient(local, start + of_length(start - anchor + drift, 0.7))
    torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-10)


@NETWORKS
def test_the_layer_radius_has_unit_norm_in_every_tensor(make):
    network, _, anchor = task(make)
    difference = network.weights - anchor
    scale = network.layout.views(shape(difference, network.layout, "layer"))
    for name, tensor in network.layout.views(difference).items():
        assert float(scale[name].norm()) == pytest.approx(1.0)
        torch.testing.assert_close(scale[name], tensor.abs() / tensor.norm())
    assert not shape(torch.zeros_like(anchor), network.layout, "layer").any()


@NETWORKS
def test_the_dim0_radius_has_unit_norm_over_the_outputs(make):
    network, _, anchor = task(make)
    difference = network.weights - anchor
    scale = network.layout.views(shape(difference, network.layout, "dim0"))
    for name, tensor in network.layout.views(difference).items():
        torch.testing.assert_close(scale[name], F.normalize(tensor.abs(), dim=0))
        torch.testing.assert_close(scale[name].norm(dim=0), torch.ones_like(tensor[0]))
    assert not shape(torch.zeros_like(anchor), network.layout, "dim0").any()


class Both(Part):
    """A source with a term and a pull."""

    def plan(self, rule, sent, memory):
        return Proximal(0.6).plan(Distillation(3.0).plan(rule, sent, memory), sent, memory)


@NETWORKS
@pytest.mark.parametrize("form", ["A1", "A2", "A3", "A4", "A5", "A6"])
@pytest.mark.parametrize("source", [Distillation(3.0), Proximal(0.6), Both()])
def test_the_ablations_of_table_6_are_the_plain_computation(make, form, source):
    network, batch, anchor = task(make)
    local, divergence = losses(network, batch, anchor)

    def proximal(w):
        kl = 0.0 if isinstance(source, Proximal) else divergence(w)
        return kl + (0.0 if isinstance(source, Distillation) else 0.3 * (w - anchor).square().sum())

    w, rho, beta = network.weights.clone(), 0.7, 0.4
    along_p = w + of_length(gradient(proximal, w), rho)
    along_both = w + of_length(gradient(proximal, w) + gradient(local, w), rho)
    f, p = {"A1": (along_p, None), "A2": (w, along_p), "A3": (along_p, along_p), "A4": (along_both, along_both),
            "A5": (w, w), "A6": (along_p, w)}[form]  # fmt: skip
    expected = gradient(local, f) + (0 if p is None else beta * gradient(proximal, p))
    ours = descent(AblatedAscent(source, rho, "fixed", form=form, beta=beta), network, batch, anchor)
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


def test_lambda_of_a_parameter_without_a_layer_has_the_parameters_name():
    class Shifted(nn.Module):
        def __init__(self):
            super().__init__()
            self.shift, self.fc = nn.Parameter(torch.ones(36)), nn.Linear(36, 4)

        def forward(self, x):
            return self.fc(x.flatten(1) + self.shift)

    network, batch, anchor = task(Shifted)
    rule = LocalRule(1.0, 1, layout=network.layout, head=network.head, measures=["lambda"])
    rule = Method(ProximalAscent(rho=0.1)).plan(rule, {"weights": anchor}, {})
    outcome = local_train(network, network.weights.clone(), rule, [batch], F.cross_entropy)
    assert {*outcome.notes} == {"lambda/shift", "lambda/fc"}


@pytest.mark.parametrize("form", ["A1", "A4"])
@pytest.mark.parametrize("scope", ["head", "body"])
def test_an_ablation_perturbs_its_scope_alone(form, scope):
    network, batch, anchor = task(mlp)
    local, proximal = losses(network, batch, anchor)
    w, rho, beta, both = network.weights.clone(), 0.7, 0.4, form == "A4"
    direction = gradient(proximal, w) + (gradient(local, w) if both else 0)
    there = w + of_length(within(network, direction, scope), rho)
    expected = gradient(local, there) + (beta * gradient(proximal, there) if both else 0)
    part = AblatedAscent(Distillation(3.0), rho, "fixed", scope, form=form, beta=beta)
    torch.testing.assert_close(descent(part, network, batch, anchor), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("form", ["A1", "A3", "A5"])
@pytest.mark.parametrize("scope", ["all", "head", "body"])
def test_an_ablation_notes_the_angle_of_its_step_and_the_proximal_gradient_within_the_scope(form, scope):
    network, batch, anchor = task(mlp)
    _, proximal = losses(network, batch, anchor)
    start, part = network.weights.clone(), AblatedAscent(Distillation(3.0), 0.7, "fixed", scope, form=form)
    rule = LocalRule(1.0, 1, layout=network.layout, head=network.head, measures=["cosine"])
    outcome = local_train(network, start, Method(part).plan(rule, {"weights": anchor}, {}), [batch], F.cross_entropy)
    g, g_p = (within(network, x, scope) for x in (-outcome.delta, gradient(proximal, start)))
    assert outcome.notes == {"cosine": pytest.approx(float(g @ g_p / (g.norm() * g_p.norm())), rel=1e-10)}
    silent = Method(part).plan(LocalRule(1.0, 1, layout=network.layout, head=network.head), {"weights": anchor}, {})
    assert local_train(network, start, silent, [batch], F.cross_entropy).notes == {}
    nowhere = Method(part).plan(rule, {"weights": start}, {})  # at the global model g_p = 0 has no direction
    assert local_train(network, start, nowhere, [batch], F.cross_entropy).notes == {}
