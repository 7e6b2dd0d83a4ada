"""Every part against its formula, written out in plain PyTorch or by hand."""

import math
from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, hessian, vmap

from fedflat import models, train
from fedflat.errors import RecipeError
from fedflat.local.rule import LocalRule, Outcome
from fedflat.local.slope import Slope
from fedflat.local.step import step
from fedflat.local.step import train as local_train
from fedflat.methods.catalogue.flat import fedsol
from fedflat.methods.chain import Method
from fedflat.methods.part import Part, ServerView
from fedflat.methods.parts import (
    AblatedAscent,
    ActivationNorm,
    ActiveModel,
    AdaptiveAscent,
    AdaptiveServer,
    AllModels,
    Ascent,
    ClientMomentum,
    ConsensusAscent,
    ControlVariates,
    Distillation,
    DynamicDual,
    FallingRate,
    FrozenHead,
    InterpolatedAscent,
    LookbackAscent,
    MetaStep,
    ModelContrast,
    MovingTeacher,
    NormalisedAveraging,
    NotTrueDistillation,
    PrintedConsensus,
    Proximal,
    ProximalAscent,
    ServerAscent,
    ServerMomentum,
    ServerStep,
    WeightAveraging,
)
from fedflat.methods.parts.ascent import along
from fedflat.methods.parts.proximal import shape
from fedflat.methods.parts.server_step import MANY
from fedflat.methods.uploads import Upload, collect
from fedflat.models.vector import Network
from fedflat.rounds.interface import one_thread

DOUBLE = dict(dtype=torch.float64)


@pytest.fixture(autouse=True)
def _one_thread():
    with one_thread():
        yield


# --------------------------------------------------------------------------------------------------------------------
# Small networks, and the same computations in plain PyTorch
# --------------------------------------------------------------------------------------------------------------------


def mlp():
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 7), nn.ReLU(), nn.Linear(7, 6), nn.ReLU(), nn.Linear(6, 4))


def conv():
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(3, 4, 2), nn.ReLU(), nn.Flatten(),
        nn.Linear(16, 4),
    )  # fmt: skip


NETWORKS = pytest.mark.parametrize("make", [mlp, conv])


def task(make, dtype=torch.float64):
    """A network, a batch, and an anchor some way off the network's weights."""
    torch.manual_seed(3)
    network = Network(make(), dtype)
    batch = torch.randn(9, 1, 6, 6, dtype=dtype), torch.randint(0, 4, (9,))
    return network, batch, network.weights + 0.1 * torch.randn(network.size, dtype=dtype)


def descent(method, network, batch, anchor, **facts):
    """The gradient by which one step of the method descends."""
    start = network.weights.clone()
    rule = LocalRule(1.0, 1, layout=network.layout, head=network.head, **facts)
    rule = (method if isinstance(method, Method) else Method(method)).plan(rule, {"weights": anchor}, {})
    outcome = local_train(network, start, rule, [batch], F.cross_entropy)
    network.weights.copy_(start)
    return -outcome.delta


def visited(method, network, batch, anchor):
    """The perturbation ε of every pass through the head in one step."""
    start, seen = network.weights.clone(), []

    def look(module, *_):
        if module.training:  # and not the frozen model
            seen.append(network.weights - start)

    hook = network.head_module.register_forward_hook(look)
    descent(method, network, batch, anchor)
    hook.remove()
    return seen


def forward(network, weights, x):
    """Logits and activations of a network whose layers stand one after the other."""
    activations, views = [], network.layout.views(weights)
    for name, layer in network.module.named_children():
        own = {n.removeprefix(f"{name}."): v for n, v in views.items() if n.startswith(f"{name}.")}
        x = functional_call(layer, own, (x,))
        if isinstance(layer, nn.ReLU | nn.Tanh):
            activations.append(x)
    return x, activations


def gradient(function, weights):
    weights = weights.detach().clone().requires_grad_()
    return torch.autograd.grad(function(weights), weights)[0]


def losses(network, batch, anchor, tau=3.0):
    """The local loss and the proximal loss KL( softmax(z_g/τ) ‖ softmax(z/τ) ) as functions of the weights."""
    x, y = batch

    def local(w):
        return F.cross_entropy(forward(network, w, x)[0], y)

    def proximal(w):
        ours, theirs = (forward(network, v, x)[0].div(tau).softmax(1) for v in (w, anchor))
        return (theirs * (theirs.log() - ours.log())).sum(1).mean()

    return local, proximal


def within(network, vector, scope):
    """The vector, zero outside of the scope."""
    kept = torch.zeros_like(vector) if scope == "head" else vector.clone()
    kept[network.head] = vector[network.head] if scope in ("all", "head") else 0.0
    return kept


def of_length(vector, rho):
    return rho * vector / (vector.norm() + 1e-12)


# --------------------------------------------------------------------------------------------------------------------
# FedSoL
# --------------------------------------------------------------------------------------------------------------------


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


# --------------------------------------------------------------------------------------------------------------------
# Other ascents
# --------------------------------------------------------------------------------------------------------------------


@NETWORKS
@pytest.mark.parametrize(
    "part",
    [
        Ascent(0.3), AdaptiveAscent(0.3), LookbackAscent(0.3), InterpolatedAscent(0.3), MetaStep(0.3),
        ProximalAscent(rho=0.3), ProximalAscent(rho=0.3, scope="head"), ProximalAscent(rho=0.3, scope="body"),
        AblatedAscent(rho=0.3, form="A3"), AblatedAscent(rho=0.3, form="A4"), ConsensusAscent(0.3),
    ],
    ids=repr,
)  # fmt: skip
def test_after_an_ascent_the_weights_are_what_they_were_to_the_bit(make, part):
    network, batch, anchor = task(make, torch.float32)
    sent = {"weights": anchor, "perturbation": anchor, "ahead": anchor, "mix": torch.tensor([0.3])}
    memory = {"dual": 0.1 * anchor, "seen": network.weights + 1}
    drawers = {name: memory[name] for name in Method(part).memory}
    rule = Method(part).plan(LocalRule(0.1, 1, layout=network.layout, head=network.head), sent, drawers)
    before = network.weights.clone()
    with network.listening(features=True) as tap:
        slope = Slope(network, rule, F.cross_entropy, tap).at(batch)
        rule.ascent(slope, rule.carry)
    assert torch.equal(network.weights, before)


@NETWORKS
@pytest.mark.parametrize("shared", [True, False])
def test_per_fedavg_looks_ahead_at_the_inner_rate_and_steps_at_the_outer_one(make, shared):
    """Two pairs of batches with momentum, weight decay and another part's pull, which enter both steps."""
    network, (x, y), anchor = task(make)
    batches = [(x[i : i + 3], y[i : i + 3]) for i in (0, 3, 6, 2)]
    w, v, eta, beta, m, decay, mu = network.weights.clone(), 0.0, 0.3, 0.05, 0.7, 0.02, 0.4
    rule = LocalRule(eta, 4, momentum=m, weight_decay=decay, epochs=2)
    rule = Method(MetaStep(beta, shared), Proximal(mu)).plan(rule, {"weights": anchor}, {})
    assert (rule.steps, rule.lr, rule.mean_lr) == (2, beta, beta)
    local_train(network, w, rule, batches, F.cross_entropy)

    def whole(at, batch):
        return gradient(losses(network, batch, anchor)[0], at) + mu * (w - anchor) + decay * w

    for a, b in (batches[:2], batches[2:]):
        inner = m * v + whole(w, a) if shared else whole(w, a)
        v = m * (inner if shared else v) + whole(w - eta * inner, b)
        w = w - beta * v
    torch.testing.assert_close(network.weights, w, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("pairs", "steps", "epochs", "expected"),
    [
        ("cycle", 12, 3, 6), ("cycle", 5, 5, 5), ("cycle", 7, 1, 7),
        ("once", 12, 3, 6), ("once", 5, 5, 3), ("once", 7, 1, 4),
    ],
)  # fmt: skip
def test_per_fedavg_has_so_many_pairs(pairs, steps, epochs, expected):
    rule = MetaStep(pairs=pairs).plan(LocalRule(0.1, steps, epochs=epochs), {}, {})
    assert rule.pairs and rule.steps == expected


@pytest.mark.parametrize("shared", [True, False])
def test_the_effective_steps_of_per_fedavg_are_the_weights_of_its_gradients(shared):
    """Where every gradient is the same g, Δ = −β · effective steps · g."""
    network, batch, anchor = task(mlp)
    rule = MetaStep(0.05, shared).plan(LocalRule(0.3, 5, momentum=0.8, pull=anchor), {}, {})
    outcome = local_train(network, network.weights.clone(), rule, [batch] * 10, lambda z, _: 0 * z.sum())
    torch.testing.assert_close(outcome.delta, -0.05 * rule.effective_steps * anchor, rtol=1e-12, atol=1e-12)


def test_the_control_variates_of_per_fedavg_are_divided_by_the_outer_rate():
    network, batch, anchor = task(mlp)
    start, zero = network.weights.clone(), torch.zeros_like(anchor)
    method, memory = Method(MetaStep(0.05), ControlVariates()), {"control": zero}
    sent = {"weights": start, "controls": 0.1 * anchor}
    rule = method.plan(LocalRule(0.3, 5), sent, memory)
    outcome = local_train(network, start, rule, [batch] * 10, F.cross_entropy)
    _, kept = method.report(Upload(0, 1, 5, 0.05, 0.0, outcome.delta), sent, memory, outcome)
    torch.testing.assert_close(kept["control"], -0.1 * anchor - outcome.delta / (5 * 0.05), rtol=1e-12, atol=1e-12)


def test_a_frozen_head_stays_also_while_per_fedavg_looks_ahead():
    network, batch, _ = task(mlp)
    start, seen = network.weights.clone(), []
    hook = network.head_module.register_forward_hook(lambda *_: seen.append(network.weights - start))
    rule = LocalRule(0.3, 2, momentum=0.9, weight_decay=0.1, head=network.head)
    rule = Method(FrozenHead(), MetaStep()).plan(rule, {"weights": start}, {})
    local_train(network, start, rule, [batch] * 4, F.cross_entropy)
    hook.remove()
    assert len(seen) == 4 and all(not there[network.head].any() for there in seen)
    assert seen[1].any() and (network.weights - start).any()


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("upload", ["dual", "less"])
@pytest.mark.parametrize("crowd", ["active", "all"])
def test_fedsmoo_perturbs_by_rho_along_g_minus_dual_minus_s_and_integrates_it(sign, upload, crowd):
    network, batch, anchor = task(mlp)
    local, _ = losses(network, batch, anchor)
    w, dual, s, told = network.weights.clone(), 0.05 * anchor, 0.02 * anchor.flip(0), 0.03 * anchor
    part = ConsensusAscent(0.3, sign, crowd, upload)
    memory = {"dual": dual, "told": told}
    rule = part.plan(LocalRule(1.0, 2), {"perturbation": s}, memory)
    outcome = local_train(network, w, rule, [batch, batch], F.cross_entropy)
    for _ in range(2):
        q = gradient(local, w) - dual + sign * s
        ascent = 0.3 * q / (q.norm() + 1e-7)
        w, dual = w - gradient(local, w + ascent), dual + ascent - s
    torch.testing.assert_close(outcome.carry["dual"], dual, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(network.weights, w, rtol=1e-12, atol=1e-12)
    sent, kept = part.report(Upload(0, 1, 2, 1.0, 0.0, outcome.delta), {}, memory, outcome)
    up = dual - ascent if upload == "less" else dual
    before = {"active": 0.0, "all": told if upload == "less" else memory["dual"]}[crowd]
    torch.testing.assert_close(sent["dual"], up - before, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(kept["dual"], dual, rtol=1e-12, atol=1e-12)
    tells = crowd == "all" and upload == "less"  # only the change of μᵢ − ŝ goes up
    assert part.first_memory(anchor).keys() == kept.keys() == ({"dual", "told"} if tells else {"dual"})
    if tells:
        torch.testing.assert_close(kept["told"], up, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("crowd", "total"), [("active", lambda s, u: u / 2), ("all", lambda s, u: s + u / 10)])
def test_fedsmoos_server_sends_the_mean_dual_at_length_rho(crowd, total):
    part = ConsensusAscent(0.3, crowd=crowd)
    uploads = [Upload(i, 1 + i, 1, 0.1, 0.0, 0 * W, {"dual": MOVES[i]}) for i in range(2)]
    move, state = part.merge(W, ServerView(W, W, 0, 10, {"mean_dual": MOVES[2]}), collect(uploads, "samples"))
    mean = total(MOVES[2], MOVES[0] + MOVES[1])
    assert torch.equal(move, W)
    torch.testing.assert_close(state["mean_dual"], mean)
    torch.testing.assert_close(state["perturbation"], 0.3 * mean / mean.norm(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("printed", [True, False])
@pytest.mark.parametrize(("rho", "alpha"), [(0.05, 2.0), (0.05, 0.5), (1e3, 2.0)])
def test_fedsmoo_of_the_slides_is_the_plain_computation(rho, alpha, printed):
    """Two steps of one client; with the large radius no projection is active, and the μ that is printed stays."""
    network, batch, anchor = task(mlp)
    local, _ = losses(network, batch, anchor)
    w, dual, s = network.weights.clone(), 0.05 * anchor, 0.02 * anchor.flip(0)
    part, first = PrintedConsensus(rho, alpha, printed), dual.clone()
    rule = part.plan(LocalRule(0.7, 2), {"perturbation": s}, {"dual": dual})
    outcome = local_train(network, w, rule, [batch, batch], F.cross_entropy)
    assert torch.equal(dual, first)
    for _ in range(2):
        wish = alpha * (gradient(local, w) - dual) - s
        found = wish * min(1.0, rho / (float(wish.norm()) + 1e-7))
        residual = found - (wish if printed else s)
        w, dual = w - 0.7 * gradient(local, w + found), dual + residual / (2 * alpha)
    torch.testing.assert_close(network.weights, w, rtol=1e-12, atol=1e-12)
    sent, kept = part.report(Upload(0, 1, 2, 0.7, 0.0, outcome.delta), {}, {}, outcome)
    torch.testing.assert_close(kept["dual"], dual, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(sent["wish"], found - alpha * dual, rtol=1e-12, atol=1e-12)
    assert torch.equal(dual, first) == (printed and rho == 1e3)


@pytest.mark.parametrize("rho", [0.1, 1e3])
def test_the_printed_server_projects_the_mean_of_what_the_rounds_clients_wish(rho):
    part = PrintedConsensus(rho)
    assert not part.first_state(W)["perturbation"].any() and not part.first_memory(W)["dual"].any()
    uploads = [Upload(i, 1 + i, 1, 0.1, 0.0, 0 * W, {"wish": MOVES[i]}) for i in range(2)]
    move, state = part.merge(W, ServerView(W, W, 0, 10), collect(uploads, "samples"))
    mean = (MOVES[0] + MOVES[1]) / 2
    assert torch.equal(move, W)
    torch.testing.assert_close(state["perturbation"], mean * min(1.0, rho / float(mean.norm())), rtol=1e-5, atol=0)
    assert torch.equal(part.broadcast(ServerView(W, W, 1, 10, state))["perturbation"], state["perturbation"])


def test_fedsmoos_perturbation_has_length_rho_in_every_step():
    network, batch, anchor = task(mlp)
    start, seen = network.weights.clone(), []
    hook = network.head_module.register_forward_hook(lambda *_: seen.append(network.weights.clone()))
    sent, memory = {"perturbation": torch.zeros_like(anchor)}, {"dual": torch.zeros_like(anchor)}
    local_train(
        network, start, ConsensusAscent(0.3).plan(LocalRule(0.1, 4), sent, memory), [batch] * 4, F.cross_entropy
    )
    hook.remove()
    lengths = [float((there - here).norm()) for here, there in zip(seen[::2], seen[1::2], strict=True)]
    assert lengths == pytest.approx([0.3] * 4, rel=1e-5)


@NETWORKS
@pytest.mark.parametrize(("eta", "biases"), [(0.2, False), (0.3, True), (0.0, True)])
def test_fedasam_scales_the_ball_by_the_weights(make, eta, biases):
    network, batch, anchor = task(make)
    local, _ = losses(network, batch, anchor)
    w, scale = network.weights.clone(), network.weights.abs() + eta
    for name, view in network.layout.views(scale).items():
        if name.endswith("bias") and not biases:
            view.fill_(1.0)
    g = gradient(local, w)
    ascent = 0.4 * scale**2 * g / ((scale * g).norm() + 1e-7)
    ours = descent(AdaptiveAscent(0.4, eta, biases), network, batch, anchor)
    torch.testing.assert_close(ours, gradient(local, w + ascent), rtol=1e-11, atol=1e-12)


def test_the_perturbations_of_several_clients_have_their_own_lengths():
    rows = torch.stack([W, 3 * MOVES[0], 0 * W])
    expected = torch.stack([0.5 * W / W.norm(), 0.5 * MOVES[0] / MOVES[0].norm(), 0 * W])
    torch.testing.assert_close(along(rows, 0.5), expected, rtol=1e-6, atol=0)


def test_a_frozen_head_is_frozen_beside_what_another_part_freezes():
    frozen = torch.tensor([True, False, False, False])
    rule = FrozenHead().plan(LocalRule(0.1, 1, head=slice(2, 4), frozen=frozen), {"weights": torch.ones(4)}, {})
    assert rule.frozen.tolist() == [True, False, True, True]
    assert frozen.tolist() == [True, False, False, False]


def test_fedlesam_looks_back_to_the_model_that_the_client_saw_last():
    part, rule = LookbackAscent(0.5), LocalRule(0.1, 1)
    first, later = torch.tensor([1.0, 2.0, 2.0]), torch.tensor([1.0, 5.0, 6.0])
    memory = part.first_memory(first)
    assert part.first_state(first) == part.broadcast(ServerView(first, first, 0, 10)) == {}
    assert part.merge(first, ServerView(first, first, 0, 10), ())[1] == {}
    assert not part.plan(rule, {"weights": first}, memory).carry["lookback"].any()
    upload, memory = part.report(Upload(0, 1, 1, 0.1, 0.0, first), {"weights": first}, memory, None)
    assert not upload.vectors
    lookback = part.plan(rule, {"weights": later}, memory).carry["lookback"]
    torch.testing.assert_close(lookback, 0.5 * torch.tensor([0.0, -3.0, -4.0]) / 5)


def test_fedlesam_on_the_server_looks_back_to_the_last_round():
    part = LookbackAscent(0.5, "server")
    assert part.first_memory(W) == {} and torch.equal(part.first_state(W)["before"], W)
    move, state = part.merge(MOVES[0], ServerView(W, W, 0, 10, part.first_state(W)), ())
    sent = part.broadcast(ServerView(W + move, W + move, 1, 10, state))
    torch.testing.assert_close(sent["back"], -MOVES[0])
    lookback = part.plan(LocalRule(0.1, 1), {"weights": W, **sent}, {}).carry["lookback"]
    torch.testing.assert_close(lookback, -0.5 * MOVES[0] / MOVES[0].norm(), rtol=1e-6, atol=0)
    assert part.report(Upload(0, 1, 1, 0.1, 0.0, W), {"weights": W}, {}, None)[1] == {}


def test_fedgfs_server_counts_the_divergent_rounds_of_its_window_and_looks_back():
    part, clients = InterpolatedAscent(rho_server=0.2, threshold=1.0, window=3), range(2)
    view, shares = ServerView(W, W, 0, 10, part.first_state(W)), []
    for round, norms in enumerate([(3.0, 0.0), (1.0, 0.5), (0.5, 1.6), (1.0, 0.9), (0.2, 0.2)]):
        sent = part.broadcast(view)
        shares.append(float(sent["mix"]))
        back = view["before"] - view.weights
        torch.testing.assert_close(sent["ahead"], view.weights + 0.2 * back / (back.norm() + 1e-7))
        uploads = [Upload(i, 1, 1, 0.1, 0.0, norms[i] * torch.tensor([0.6, -0.8], **DOUBLE)) for i in clients]
        move, state = part.merge(MOVES[0], view, collect(uploads, "uniform"))
        assert torch.equal(state["before"], view.weights)
        view = ServerView(view.arrival(move), view.arrival(move), round + 1, 10, state)
    assert shares == pytest.approx([0, 1, 1 / 2, 2 / 3, 1 / 3])


def test_fedgf_takes_the_gradient_between_the_clients_and_the_servers_perturbation():
    network, batch, anchor = task(mlp)
    local, _ = losses(network, batch, anchor)
    w, mix = network.weights.clone(), torch.tensor([0.25], **DOUBLE)
    rule = InterpolatedAscent(0.3).plan(LocalRule(1.0, 1), {"ahead": anchor, "mix": mix}, {})
    ours = -local_train(network, w, rule, [batch], F.cross_entropy).delta
    own = w + 0.3 * gradient(local, w) / gradient(local, w).norm()
    torch.testing.assert_close(ours, gradient(local, 0.25 * anchor + 0.75 * own), rtol=1e-6, atol=1e-8)


# --------------------------------------------------------------------------------------------------------------------
# Pulls, by hand
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quadratic", "pull", "decay", "spring"),
    [
        ("decay", lambda h, w: h - w, 1, 0), ("clipped", lambda h, w: h - w, 0, 1), ("none", lambda h, w: h, 0, 0),
    ],
)  # fmt: skip
@pytest.mark.parametrize(("balanced", "penalty"), [(False, 0.3), (True, 0.3 / 1.6)])
def test_feddyn_pulls_by_penalty_times_w_minus_global_plus_drift(quadratic, pull, decay, spring, balanced, penalty):
    drift, rule = MOVES[0], LocalRule(0.1, 4, share=1.6)
    rule = DynamicDual(0.3, balanced=balanced, quadratic=quadratic).plan(rule, {"weights": W}, {"drift": drift})
    torch.testing.assert_close(rule.pull, penalty * pull(drift, W))
    assert (rule.decay, rule.spring) == pytest.approx((penalty * decay, penalty * spring))


@pytest.mark.parametrize("dual", ["all", "active"])
def test_feddyns_drifts_grow_by_gain_times_the_moves(dual):
    part, uploads, drifts = DynamicDual(0.3, dual, gain=0.7), [], []
    for client, samples in enumerate((30, 10)):
        outcome = Outcome(MOVES[client], 0.0, LocalRule(0.1, 4), {}, {})
        upload = Upload(client, samples, 4, 0.1, 0.0, MOVES[client])
        upload, kept = part.report(upload, {"weights": W}, {"drift": MOVES[2]}, outcome)
        torch.testing.assert_close(kept["drift"], MOVES[2] + 0.7 * MOVES[client])
        assert ("drift" in upload.vectors) == (dual == "active")
        uploads.append(upload)
        drifts.append(kept["drift"])
    move, state = part.merge(0.5 * W, ServerView(W, W, 1, 10, {"mean_drift": MOVES[2]}), collect(uploads, "samples"))
    mean = 0.75 * drifts[0] + 0.25 * drifts[1]
    expected = MOVES[2] + 0.7 * (MOVES[0] + MOVES[1]) / 10 if dual == "all" else mean
    torch.testing.assert_close(state["mean_drift"], expected)
    torch.testing.assert_close(move, 0.5 * W + expected)


def test_feddyn_as_a_direction_only_leaves_the_server_alone():
    part = DynamicDual(0.3, direction_only=True)
    assert part.first_state(W) == {}
    move, state = part.merge(W, ServerView(W, W, 0, 10), ())
    assert torch.equal(move, W) and state == {}


@pytest.mark.parametrize(
    ("division", "divisor"), [("steps", 4 * 0.155), ("momentum", 0.155 * (4 - 0.5 * (1 - 0.5**4) / 0.5) / 0.5),
                              ("common", 7 * 0.9)],
)  # fmt: skip
@pytest.mark.parametrize(("balanced", "share"), [(False, 1.0), (True, 1.6)])
@pytest.mark.parametrize("direction_only", [False, True])
def test_scaffolds_controls_are_the_mean_gradients_without_the_correction(
    division, divisor, balanced, share, direction_only
):
    # η_k = 0.2 (1 − 0.6 k/4) has the mean 0.155.
    part = ControlVariates(division, balanced, direction_only)
    rule = LocalRule(0.2, 4, first_lr=0.9, typical_steps=7, momentum=0.5, share=1.6, lr_floor=0.4)
    c, own, delta = MOVES
    rule = part.plan(rule, {"controls": c}, {"control": own})
    torch.testing.assert_close(rule.pull, c / share - own)
    outcome = Outcome(delta, 0.0, rule, {}, {})
    upload, kept = part.report(Upload(0, 1, 4, 0.2, 0.0, delta), {"controls": c}, {"control": own}, outcome)
    new = -delta / divisor if direction_only else own - c / share - delta / divisor
    torch.testing.assert_close(kept["control"], new)
    torch.testing.assert_close(upload["control_change"], share * (new - own))
    _, state = part.merge(W, ServerView(W, W, 0, 10, {"controls": c}), collect([upload, upload], "uniform", (0, 0)))
    torch.testing.assert_close(state["controls"], c + 0.2 * share * (new - own))


# --------------------------------------------------------------------------------------------------------------------
# FedNTD, MOON and FedGMT
# --------------------------------------------------------------------------------------------------------------------


@NETWORKS
def test_fedntd_adds_the_divergence_over_the_classes_that_are_not_true_times_beta_tau_squared(make):
    network, (x, y), anchor = task(make)
    beta, tau, start = 0.6, 1.7, network.weights.clone()
    others = torch.stack([torch.tensor([c for c in range(4) if c != label]) for label in y.tolist()])

    def objective(w):
        ours, theirs = (forward(network, v, x)[0].gather(1, others).div(tau).softmax(1) for v in (w, anchor))
        kl = (theirs * (theirs.log() - ours.log())).sum(1).mean()
        return F.cross_entropy(forward(network, w, x)[0], y) + beta * tau**2 * kl

    ours = descent(NotTrueDistillation(beta, tau), network, (x, y), anchor)
    torch.testing.assert_close(ours, gradient(objective, start), rtol=1e-11, atol=1e-12)


@NETWORKS
def test_moon_contrasts_the_features_with_the_global_and_the_clients_last_model(make):
    network, (x, y), anchor = task(make)
    mu, tau, start, previous = 0.7, 0.4, network.weights.clone(), anchor.flip(0)

    def features(w):
        body, views = network.module[:-1], network.layout.views(w)
        return functional_call(body, {name: views[name] for name, _ in body.named_parameters()}, (x,))

    def objective(w):
        near, far = (torch.exp(F.cosine_similarity(features(w), features(v)) / tau) for v in (anchor, previous))
        return F.cross_entropy(forward(network, w, x)[0], y) - mu * torch.log(near / (near + far)).mean()

    part, sent, memory = ModelContrast(mu, tau), {"weights": anchor}, {"previous": previous}
    rule = part.plan(LocalRule(1.0, 1), sent, memory)
    outcome = local_train(network, start, rule, [(x, y)], F.cross_entropy)
    torch.testing.assert_close(-outcome.delta, gradient(objective, start), rtol=1e-10, atol=1e-11)
    _, kept = part.report(Upload(0, 1, 1, 1.0, 0.0, outcome.delta), sent, memory, outcome)
    assert torch.equal(kept["previous"], anchor + outcome.delta) and torch.equal(part.first_memory(W)["previous"], W)


@NETWORKS
def test_fedgmt_adds_the_divergence_from_the_teacher_times_gamma_tau_squared(make):
    network, batch, anchor = task(make)
    local, proximal = losses(network, batch, anchor, tau=1.5)
    rule = MovingTeacher(gamma=0.4, tau=1.5).plan(LocalRule(1.0, 1), {"weights": 0 * anchor, "teacher": anchor}, {})
    start = network.weights.clone()
    ours = -local_train(network, start, rule, [batch], F.cross_entropy).delta
    expected = gradient(local, start) + 0.4 * 1.5**2 * gradient(proximal, start)
    torch.testing.assert_close(ours, expected, rtol=1e-11, atol=1e-12)


def test_fedgmts_teacher_is_a_moving_average_of_the_new_global_models():
    part, teacher = MovingTeacher(alpha=0.8), W
    for state in served(part):
        teacher = 0.8 * teacher + 0.2 * state.weights
        torch.testing.assert_close(state["teacher"], teacher)
        assert torch.equal(part.broadcast(state)["teacher"], state["teacher"])


# --------------------------------------------------------------------------------------------------------------------
# MAN
# --------------------------------------------------------------------------------------------------------------------


def penalty(module, x):
    """mean(a²) of each layer as MAN reports it."""
    network = Network(deepcopy(module), torch.float64)
    rule = ActivationNorm(0.1).plan(LocalRule(0.1, 1), {}, {})
    return local_train(network, network.weights.clone(), rule, [(x, x.sum(1).long() * 0)], F.cross_entropy).notes


def test_mans_penalty_depends_on_neither_batch_size_nor_width():
    torch.manual_seed(0)
    x = torch.randn(8, 5, **DOUBLE)
    narrow, wide = (nn.Sequential(nn.Linear(5, n), nn.ReLU(), nn.Linear(n, 3)) for n in (6, 12))
    with torch.no_grad():
        for kind in ("weight", "bias"):
            getattr(wide[0], kind).copy_(torch.cat([getattr(narrow[0], kind)] * 2))
    expected = penalty(narrow, x)
    assert expected["activation/1"] > 0
    assert penalty(narrow, torch.cat([x, x])) == pytest.approx(expected, rel=1e-12)
    assert penalty(wide, x) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("width", [500, 1000])
@pytest.mark.parametrize("batch", [200, 400])
def test_mans_penalty_of_independent_activations_is_their_second_moment(width, batch):
    # x ~ N(0, 1) through an identity has E[relu(x)²] = 1/2, with a standard error of √(5/4 / (batch · width)).
    module = nn.Sequential(nn.Linear(width, width, bias=False), nn.ReLU(), nn.Linear(width, 2))
    nn.init.eye_(module[0].weight)
    x = torch.randn(batch, width, generator=torch.Generator().manual_seed(width + batch), **DOUBLE)
    assert penalty(module, x)["activation/1"] == pytest.approx(0.5, abs=4 * math.sqrt(1.25 / (batch * width)))


@NETWORKS
def test_mans_gradient_is_that_of_finite_differences(make):
    network, (x, y), _ = task(make)
    start, h = network.weights.clone(), 1e-6
    ours = descent(ActivationNorm(0.7), network, (x, y), start)

    @torch.no_grad()
    def objective(w):
        logits, activations = forward(network, w, x)
        return F.cross_entropy(logits, y) + 0.35 * sum(a.square().mean() for a in activations)

    for i in range(0, network.size, 5):
        unit = torch.zeros_like(start)
        unit[i] = h
        assert float(ours[i]) == pytest.approx(
            float(objective(start + unit) - objective(start - unit)) / (2 * h), abs=1e-7
        )


def test_activations_shrink_as_zeta_grows(digits):
    def norm(zeta):
        module = models.build("mlp", (1, 8, 8), 10, hidden=(16,))
        method = ActivationNorm(zeta)
        history = train(digits, module, method, rounds=3, cohort=8, evaluation_every=0, engine="inline").history
        return history[-1]["notes"]["activation/relu1"]

    norms = [norm(zeta) for zeta in (0.0, 0.05, 0.3, 1.0)]
    assert norms == sorted(norms, reverse=True)
    assert norms[-1] < 0.5 * norms[0]


def test_mans_official_list_for_convnet_gn_is_conv1_conv2_fc1_fc2_and_the_variance_of_fc2():
    network = Network(models.build("convnet-gn", (1, 8, 8), 10), torch.float64)
    chance = torch.Generator().manual_seed(0)
    x, y = torch.randn(4, 1, 8, 8, generator=chance, **DOUBLE), torch.arange(4)
    ours = descent(ActivationNorm(0.4, "official_convnet"), network, (x, y), network.weights)
    layers, hidden = dict(network.module.named_children()), []

    def through(*names):
        nonlocal x
        for name in names:
            x = layers[name](x)

    through("colour")
    for n in (1, 2, 3):
        through(f"conv{n}", f"norm{n}")
        hidden.append(x.relu())
        x = F.max_pool2d(hidden[-1], 2)
    through("flatten", "fc1")
    hidden.append(x.relu())
    x = hidden[-1]
    through("fc2")
    hidden.append(x.relu())
    x = hidden[-1]
    through("head")
    conv1, conv2, _, fc1, fc2 = (a.square().mean() for a in hidden)
    objective = F.cross_entropy(x, y) + 0.2 * (conv1 + conv2 + fc1 + fc2 + hidden[-1].var(dim=0).mean())
    torch.testing.assert_close(ours, network.differentiate(objective), rtol=1e-10, atol=1e-12)


def test_mans_official_list_takes_no_variance_of_a_batch_of_one():
    network = Network(models.build("convnet-gn", (1, 8, 8), 10), torch.float64)
    batch = torch.randn(1, 1, 8, 8, generator=torch.Generator().manual_seed(0), **DOUBLE), torch.tensor([3])
    twins = tuple(torch.cat([each, each]) for each in batch)  # their variance is 0 too
    one, two = (descent(ActivationNorm(0.4, "official_convnet"), network, b, network.weights) for b in (batch, twins))
    assert one.any()
    torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-14)


def test_mans_official_list_is_refused_for_other_networks():
    network, batch, anchor = task(mlp)
    with pytest.raises(RecipeError, match=r"official_convnet.*2 activations"):
        descent(ActivationNorm(0.4, "official_convnet"), network, batch, anchor)


@pytest.mark.parametrize(("name", "count"), [("resnet18-gn", 17), ("vgg11", 10), ("sl-vit", 9)])
def test_man_counts_every_activation_of_the_large_networks(name, count):
    network = Network(models.build(name, (1, 8, 8), 10))
    batch = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1])
    rule = ActivationNorm(0.1).plan(LocalRule(0.1, 1), {}, {})
    outcome = local_train(network, network.weights.clone(), rule, [batch], F.cross_entropy)
    activations = [m for m in network.module.modules() if isinstance(m, nn.ReLU | nn.GELU)]
    assert len(outcome.notes) == len(activations) == count
    assert all(value > 0 for value in outcome.notes.values())
    assert torch.isfinite(outcome.delta).all() and outcome.delta.any()


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh])
def test_the_curvature_of_a_layer_is_bounded_by_its_inputs_norm(digits, activation):
    # The Hessian block of z = W a is E[∇²_z ℓ ⊗ a aᵀ], so λ_max ≤ E[‖a‖² λ_max(∇²_z ℓ)]: what MAN makes small.
    torch.manual_seed(0)
    first, second, third = (nn.Linear(*s, bias=False) for s in ((16, 8), (8, 6), (6, 10)))
    coarse = nn.Sequential(nn.AvgPool2d(2), nn.Flatten())
    module = nn.Sequential(coarse, first, activation(), second, activation(), third)
    settings = dict(precision="float64", rounds=5, evaluation_every=0, engine="inline")
    module = train(digits, module, "man(0.05)", **settings).model
    x, y = digits.to(torch.float64).held_out("train", 0, 120)
    blocks = []
    for layer in (1, 3, 5):
        a, rest = module[:layer](x).detach(), module[layer + 1 :]

        def loss(z, y, rest=rest):
            return F.cross_entropy(rest(z), y)

        weight = module[layer].weight.detach()
        block = hessian(lambda w, a=a, loss=loss: loss(a @ w.T, y))(weight)
        curvature = vmap(hessian(loss))(a @ weight.T, y)
        torch.testing.assert_close(block, torch.einsum("nop,ni,nj->oipj", curvature, a, a) / len(a))
        top = torch.linalg.eigvalsh(block.reshape(weight.numel(), -1))[-1]
        tops = torch.linalg.eigvalsh(curvature)[:, -1].clamp(min=0)
        bound = (a.square().sum(1) * tops).mean()
        assert 0 < top <= bound
        blocks.append((top, a.square().sum(1).mean()))
    top, norm = blocks[-1]
    assert top <= norm / 2  # the softmax's own curvature is at most 1/2


# --------------------------------------------------------------------------------------------------------------------
# The server, by hand
# --------------------------------------------------------------------------------------------------------------------

W = torch.tensor([1.0, -2.0], **DOUBLE)
MOVES = [torch.tensor(v, **DOUBLE) for v in ([0.5, -0.1], [-0.25, 0.3], [0.125, 0.2])]


def served(part, moves=MOVES):
    """The server's state round after round, when the averages of the rounds are given."""
    view = ServerView(W, W, 0, 10, part.first_state(W))
    for round, move in enumerate(moves):
        moved, state = part.merge(move, view, collect([Upload(0, 1, 1, 0.1, 0.0, move)], "uniform"))
        weights = view.arrival(moved)
        view = ServerView(weights, weights, round + 1, 10, {**view.vectors, **state})
        yield view


@pytest.mark.parametrize(
    ("rule", "second"),
    [
        ("adam", lambda v, u: 0.8 * v + 0.2 * u**2),
        ("yogi", lambda v, u: v - 0.2 * u**2 * math.copysign(1, v - u**2)),
        ("adagrad", lambda v, u: v + u**2),
    ],
)
def test_the_adaptive_servers_have_the_moments_of_the_paper(rule, second):
    states = served(AdaptiveServer(rule, server_lr=0.3, beta1=0.6, beta2=0.8, tau=0.05, v0=0.04))
    w, m, v = W.tolist(), [0.0, 0.0], [0.04, 0.04]
    for state, u in zip(states, MOVES, strict=True):
        for i in range(2):
            m[i] = 0.6 * m[i] + 0.4 * float(u[i])
            v[i] = second(v[i], float(u[i]))
            w[i] += 0.3 * m[i] / (math.sqrt(v[i]) + 0.05)
        assert state.weights.tolist() == pytest.approx(w, rel=1e-12)


def test_fedavgm_is_heavy_ball():
    w, m = W, 0 * W
    for state, move in zip(served(ServerMomentum(0.9)), MOVES, strict=True):
        m = 0.9 * m + move
        w = w + m
        assert ServerMomentum(0.9).broadcast(state) == {}
        torch.testing.assert_close(state.weights, w)


def test_fednsam_starts_ahead_and_keeps_the_old_momentum():
    part = ServerMomentum(0.85, lookahead=True)
    w, m = W, 0 * W
    for state, move in zip(served(part), MOVES, strict=True):
        m = 0.85 * m + move
        w = w + m
        torch.testing.assert_close(state.weights, w)
        torch.testing.assert_close(part.broadcast(state)["weights"], w + 0.85 * m)


def test_fedswas_server_goes_further_than_the_average():
    first, *_ = served(ServerStep(1.5))
    torch.testing.assert_close(first.weights, W + 1.5 * MOVES[0])


def test_fedswas_rate_falls_linearly_within_the_round():
    rule = FallingRate(0.1).plan(LocalRule(0.5, 20), {}, {})
    assert rule.lr_at(0) == 0.5
    assert rule.lr_at(10) == pytest.approx(0.5 * 0.55)
    assert rule.lr_at(19) == pytest.approx(0.5 * (1 - 0.9 * 19 / 20))
    steps = [rule.lr_at(k) - rule.lr_at(k + 1) for k in range(19)]
    assert steps == pytest.approx([steps[0]] * 19)
    w = W.clone()
    step(w, torch.ones_like(W), None, rule, k=19)
    torch.testing.assert_close(w, W - rule.lr_at(19))


def test_swa_shows_the_mean_of_the_models_since_its_start():
    part, models = WeightAveraging(start=2), []
    states = served(part, [*MOVES, *MOVES])
    for done, state in enumerate(states, start=1):
        models.append(state.weights)
        torch.testing.assert_close(part.evaluated(state), torch.stack(models[2:] if done > 2 else models[-1:]).mean(0))


def test_swa_takes_every_third_model_if_told_so():
    part = WeightAveraging(start=1, every=3)
    states = list(served(part, [*MOVES, *MOVES, W]))
    models, shown = [state.weights for state in states], [part.evaluated(state) for state in states]
    expected = [models[0]] * 3 + [models[3]] * 3 + [(models[3] + models[6]) / 2]
    torch.testing.assert_close(torch.stack(shown), torch.stack(expected))


def test_the_active_model_is_where_the_clients_began_plus_their_average():
    part, ahead = ActiveModel(), W + 1
    view = ServerView(W, ahead, 0, 10, part.first_state(W))
    assert torch.equal(part.evaluated(view), W)
    uploads = collect([Upload(i, 3 - i, 1, 0.1, 0.0, MOVES[i]) for i in range(2)], "samples")
    move, state = part.merge(W, view, uploads)
    assert torch.equal(move, W)
    shown = part.evaluated(ServerView(W, W, 1, 10, state))
    torch.testing.assert_close(shown, ahead + 0.6 * MOVES[0] + 0.4 * MOVES[1])


@pytest.mark.parametrize("by", ["uniform", "samples"])
def test_all_models_have_the_mean_of_the_clients_last_ones(by):
    part, sizes, rounds = AllModels(by), [1, 2, 3, 4], [[0, 1], [1, 3]]
    memories = [part.first_memory(W) for _ in sizes]
    view, weights = ServerView(W, W, 0, 4, part.first_state(W)), W
    for round, cohort in enumerate(rounds):
        uploads = []
        for client in cohort:
            delta, share = MOVES[round] * (client + 1), sizes[client] * 4 / sum(sizes)
            outcome = Outcome(delta, 0.0, LocalRule(0.1, 1, share=share), {}, {})
            upload = Upload(client, sizes[client], 1, 0.1, 0.0, delta)
            upload, memories[client] = part.report(upload, {"weights": weights}, memories[client], outcome)
            torch.testing.assert_close(memories[client]["last"], weights + delta)
            uploads.append(upload)
        _, state = part.merge(W, view, collect(uploads, "samples"))
        view, weights = ServerView(weights, weights, round + 1, 4, state), weights + MOVES[2]
        p = [size / sum(sizes) for size in sizes] if by == "samples" else [1 / 4] * 4
        expected = sum(share * memory["last"] for share, memory in zip(p, memories, strict=True))
        torch.testing.assert_close(part.evaluated(view), expected)


def test_fedgloss_sends_a_point_uphill_and_steps_from_the_point_below():
    part = ServerAscent(0.2)
    assert torch.equal(part.broadcast(ServerView(W, W, 0, 10, part.first_state(W)))["weights"], W)
    for state, move in zip(served(part), MOVES, strict=True):
        torch.testing.assert_close(
            part.broadcast(state)["weights"], state.weights - 0.2 * move / move.norm(), rtol=1e-6, atol=0
        )


def test_fedgloss_ramps_its_radius():
    part = ServerAscent(0.5, start=0.1, ramp=4)
    radii = []
    for round in range(7):
        state = ServerView(0 * W, 0 * W, round, 10, {"pseudo_gradient": W})
        radii.append(float(part.broadcast(state)["weights"].norm()))
    assert radii == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.5, 0.5], rel=1e-6)


def test_fedcms_direction_is_the_mean_gradient_of_the_round():
    uploads = [Upload(0, 30, 5, 0.1, 0.0, MOVES[0]), Upload(1, 10, 2, 0.1, 0.0, MOVES[1])]
    part = ClientMomentum(0.2)
    view = ServerView(W, W, 0, 10, part.first_state(W))
    _, state = part.merge(0 * W, view, collect(uploads, "samples"))
    expected = -(0.75 * MOVES[0] / (5 * 0.1) + 0.25 * MOVES[1] / (2 * 0.1))
    torch.testing.assert_close(state["direction"], expected)
    rule = part.plan(LocalRule(0.1, 1, scale=0.5), part.broadcast(ServerView(W, W, 1, 10, state)), {})
    assert rule.scale == 0.1
    torch.testing.assert_close(rule.pull, 0.8 * expected)


def walked(rule, drift=1.0):
    """How far a client goes whose loss has the gradient 1 everywhere."""
    w, velocity = torch.zeros(1, **DOUBLE), torch.zeros(1, **DOUBLE)
    for k in range(rule.steps):
        step(w, torch.full_like(w, drift), velocity, rule, k)
    return float(w)


@pytest.mark.parametrize(
    "rule", [LocalRule(0.1, 7), LocalRule(0.1, 7, momentum=0.9), LocalRule(0.1, 7, decay=0.3, spring=0.2)]
)
def test_fednovas_normaliser_counts_what_a_unit_gradient_amounts_to(rule):
    upload = Upload(0, 1, rule.steps, rule.lr, 0.0, W)
    upload, _ = NormalisedAveraging().report(upload, {}, {}, Outcome(W, 0.0, rule, {}, {}))
    a, tau = upload["normaliser"].tolist()
    assert a == pytest.approx(-walked(rule) / rule.lr, rel=1e-12)
    assert tau == pytest.approx(7 if rule.decay else a)


@pytest.mark.parametrize("facts", [dict(), dict(momentum=0.9), dict(decay=0.5), dict(decay=0.1, spring=0.3)])
def test_fednova_averages_updates_per_step(facts):
    part, uploads, total, tau = NormalisedAveraging(), [], 0 * W, 0.0
    for client, (steps, samples) in enumerate([(3, 20), (8, 60), (5, 20)]):
        rule, p = LocalRule(0.1, steps, **facts), samples / 100
        upload = Upload(client, samples, steps, 0.1, 0.0, MOVES[client])
        uploads.append(part.report(upload, {}, {}, Outcome(MOVES[client], 0.0, rule, {}, {}))[0])
        a = -walked(rule) / 0.1
        total = total + p * MOVES[client] / a
        tau += p * (steps if "decay" in facts else a)
    move, _ = part.merge(0 * W, ServerView(W, W, 0, 10), collect(uploads, "samples"))
    torch.testing.assert_close(move, tau * total, rtol=1e-12, atol=0)


def normaliser(rule):
    upload, _ = NormalisedAveraging().report(
        Upload(0, 1, rule.steps, rule.lr, 0.0, W), {}, {}, Outcome(W, 0.0, rule, {}, {})
    )
    return upload["normaliser"][0].item()


def test_fednovas_normaliser_goes_on_beyond_the_steps_that_are_summed_one_by_one():
    """a ← (1 − η μ) a + 1 from the last sum to the first closed form; a step that is no contraction counts as one."""
    last, first = (normaliser(LocalRule(0.1, MANY + more, decay=2e-5, spring=1e-5)) for more in (0, 1))
    assert first == pytest.approx((1 - 3e-6) * last + 1, rel=1e-9)
    assert first < 0.9 * MANY
    assert normaliser(LocalRule(0.1, MANY + 1, decay=15.0)) == pytest.approx(1 / 1.5), (
        "a step beyond the anchor and back"
    )
    assert [normaliser(LocalRule(0.1, MANY + 1, decay=decay)) for decay in (1e-30, 20.0, 50.0)] == [MANY + 1] * 3
