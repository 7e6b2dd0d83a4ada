"""Small networks, and the same computations in plain PyTorch."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from fedflat.local.rule import LocalRule
from fedflat.local.step import train as local_train
from fedflat.methods.chain import Method
from fedflat.methods.part import ServerView
from fedflat.methods.uploads import Upload, collect
from fedflat.models.adapters import lora
from fedflat.models.vector import Network

DOUBLE = dict(dtype=torch.float64)


def mlp():
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 7), nn.ReLU(), nn.Linear(7, 6), nn.ReLU(), nn.Linear(6, 4))


def conv():
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(3, 4, 2), nn.ReLU(), nn.Flatten(),
        nn.Linear(16, 4),
    )  # fmt: skip


def normed():
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 7), nn.LayerNorm(7), nn.ReLU(), nn.Linear(7, 4))


def adapted():
    """Adapters that have been trained for a while, one of them with a frozen A, beside biases."""
    module = lora(mlp(), 2, targets="all", also="*.bias")
    module[1].lora_a.requires_grad_(False)
    for name, parameter in module.named_parameters():
        if name.endswith("lora_b"):
            nn.init.normal_(parameter, std=0.3)
    return module


NETWORKS = pytest.mark.parametrize("make", [mlp, conv, normed])


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
