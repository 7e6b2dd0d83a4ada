"""Parts that add a term to the loss, against their formulas in plain PyTorch."""

import math
from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, hessian, vmap

from fedflat import models, train
from fedflat.errors import RecipeError
from fedflat.local.rule import LocalRule
from fedflat.local.step import train as local_train
from fedflat.methods.parts import (
    ActivationNorm,
    ModelContrast,
    MovingTeacher,
    NotTrueDistillation,
)
from fedflat.methods.uploads import Upload
from fedflat.models.vector import Network
from plain import (
    DOUBLE,
    NETWORKS,
    W,
    descent,
    forward,
    gradient,
    losses,
    mlp,
    served,
    task,
)


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
