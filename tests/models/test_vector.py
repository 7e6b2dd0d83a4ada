"""A model and its flat vector are the same thing, for every network and precision."""

import hashlib
import pickle
from collections import OrderedDict
from contextlib import suppress
from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fedflat import models, train
from fedflat.errors import RecipeError
from fedflat.models import Layout
from fedflat.models.vector import Network

TEXT = ("char-lstm", "gpt")
SHAPES = {"convnet-gn": (3, 64, 64), **dict.fromkeys(TEXT, (12,))}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", models.MODELS)
def test_model_to_vector_and_back_is_the_identity(name, dtype):
    module = models.build(name, SHAPES.get(name, (3, 32, 32)), 10, vocabulary=20 if name in TEXT else 0).to(dtype)
    tensors = {key: tensor.clone() for key, tensor in module.named_parameters()}
    network = Network(module, dtype)
    assert network.weights.dtype == dtype
    assert torch.equal(network.weights, torch.cat([tensor.reshape(-1) for tensor in tensors.values()]))
    views = network.layout.views(network.weights)
    assert all(torch.equal(views[key], tensor) for key, tensor in tensors.items())
    assert torch.equal(network.layout.flatten(views), network.weights)
    network.weights.zero_()
    assert not any(parameter.any() for parameter in module.parameters())


def test_gradients_land_in_the_flat_vector_in_the_same_places():
    network = Network(models.build("mlp", (1, 4, 4), 3, hidden=(5,)), torch.float64)
    gradient = network.differentiate(network.module(torch.ones(2, 1, 4, 4, dtype=torch.float64)).square().sum())
    expected = torch.autograd.grad(
        network.module(torch.ones(2, 1, 4, 4, dtype=torch.float64)).square().sum(), list(network.module.parameters())
    )
    assert torch.equal(gradient, torch.cat([g.reshape(-1) for g in expected]))


def test_a_mask_marks_the_tensors_by_name():
    layout = Layout({"a.weight": torch.Size([2, 2]), "a.bias": torch.Size([3])})
    assert layout.mask(lambda name: name.endswith("bias")).tolist() == [False] * 4 + [True] * 3


def partly_frozen():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
    module[2].requires_grad_(False)
    return module


def test_frozen_parameters_are_not_in_the_vector():
    module = partly_frozen()
    frozen, tensors = module[2].weight.clone(), dict(module.named_parameters())
    network = Network(module, torch.float64)
    assert [*network.layout.shapes] == ["0.weight", "0.bias", "4.weight", "4.bias"]
    assert network.size == network.weights.numel() == 15 + 8
    assert network.head == slice(15, 23)
    assert [*network.base] == ["2.weight", "2.bias"]
    assert all(network.base[name] is tensors[name] for name in network.base)
    network.weights.zero_()
    network.bind(torch.ones(23))
    assert torch.equal(module[2].weight, frozen.double()) and module[2].weight.dtype == torch.float64
    assert bool((module[0].weight == 1).all())


def test_the_gradient_is_that_of_the_trained_parameters():
    network = Network(partly_frozen(), torch.float64)
    x = torch.randn(5, 4, dtype=torch.float64)
    trained = [parameter for parameter in network.module.parameters() if parameter.requires_grad]
    expected = torch.cat([g.reshape(-1) for g in torch.autograd.grad(network.module(x).square().sum(), trained)])
    assert torch.equal(network.differentiate(network.module(x).square().sum()), expected)
    partials = network.partials(network.module(x).square().sum())
    assert torch.equal(torch.cat([g.reshape(-1) for g in partials]), expected)
    assert torch.equal(network.differentiate_head(network.module(x).square().sum()), expected[network.head])


def test_the_gradient_of_an_unused_parameter_is_zero_and_an_old_gradient_does_not_count():
    network = Network(partly_frozen(), torch.float64)
    first, last = network.module[0], network.module[4]
    # Freed memory full of ones, so that a gradient that is not written shows.
    del (freed := [torch.ones(network.size, dtype=torch.float64) for _ in range(50)])[:]
    first.weight.grad = torch.ones_like(first.weight)
    gradient = network.differentiate(first.weight.square().sum())
    assert torch.equal(gradient[:12], 2 * first.weight.detach().flatten()) and not gradient[12:].any()
    assert not freed and all(parameter.grad is None for parameter in (*first.parameters(), *last.parameters()))


class Twice(nn.Module):
    """A layer that is recomputed twice, by a re-entrant backward pass each."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return x


def test_recomputed_layers_that_are_used_twice_add_their_gradients():
    network = Network(Twice(), torch.float64)
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    layer = network.module.layer
    expected = torch.autograd.grad(layer(layer(x)).square().sum(), layer.parameters())
    gradient = network.differentiate(network.module(x).square().sum())
    torch.testing.assert_close(gradient, torch.cat([g.reshape(-1) for g in expected]))


class Fails(torch.autograd.Function):
    """The identity, whose gradient cannot be computed."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, slope):
        raise ZeroDivisionError


@pytest.mark.parametrize("taken", ["differentiate", "partials"])
def test_a_gradient_that_failed_half_way_leaves_nothing_to_the_next_one(taken):
    network = Network(partly_frozen(), torch.float64)
    x, first, rest = torch.randn(5, 4, dtype=torch.float64), network.module[0], network.module[1:]

    def gradient(between):
        found = getattr(network, taken)(rest(between(first(x))).square().sum())
        return torch.cat([part.reshape(-1) for part in found])

    expected = gradient(lambda hidden: hidden)
    with pytest.raises(ZeroDivisionError):
        gradient(Fails.apply)
    assert torch.equal(gradient(lambda hidden: hidden), expected)


class FrozenInTraining(nn.Sequential):
    """Freezes its first layer whenever it is set to train."""

    def train(self, mode=True):
        self[0].requires_grad_(not mode)
        return super().train(mode)


@pytest.mark.parametrize("taken", ["differentiate", "partials"])
def test_the_gradient_of_what_a_module_freezes_while_it_trains_is_zero(taken):
    network = Network(FrozenInTraining(nn.Linear(4, 3), nn.Linear(3, 2)), torch.float64)
    network.module.train()
    found = getattr(network, taken)(network.module(torch.randn(5, 4, dtype=torch.float64)).square().sum())
    gradient = torch.cat([part.reshape(-1) for part in found])
    assert not gradient[:15].any() and bool(gradient[15:].any())


def test_other_weights_take_the_place_of_the_networks_for_a_while():
    network = Network(partly_frozen(), torch.float64)
    own, before = network.weights, network.weights.clone()
    with suppress(ZeroDivisionError), network.moved_to(torch.ones_like(before)):
        assert bool((network.module[0].weight == 1).all()) and torch.equal(own, before)
        raise ZeroDivisionError
    assert network.weights is own and torch.equal(own, before)
    assert network.module[0].weight.data_ptr() == own.data_ptr()


def test_the_digest_tells_bases_apart():
    first = Network(partly_frozen())
    assert Network(nn.Linear(2, 2)).base_digest == ""
    digest = hashlib.sha256()
    for name, tensor in first.base.items():
        digest.update(repr((name, tuple(tensor.shape), "torch.float32")).encode())
        digest.update(tensor.detach().numpy().tobytes())
    assert first.base_digest == digest.hexdigest()

    shifted, renamed, fewer, more = (partly_frozen() for _ in range(4))
    with torch.no_grad():
        bias = shifted[2].bias
        bias[0] = torch.nextafter(bias[0], torch.tensor(9.0))
    renamed = nn.Sequential(OrderedDict((f"layer{name}", layer) for name, layer in renamed.named_children()))
    fewer[2].bias.requires_grad_(True)
    more[0].bias.requires_grad_(False)
    wide = Network(partly_frozen(), torch.float64)
    found = {wide.base_digest, first.base_digest, *(Network(m).base_digest for m in (shifted, renamed, fewer, more))}
    assert len(found) == 6
    first.weights.zero_()
    assert first.base_digest == digest.hexdigest()


def test_a_base_may_hold_anything():
    module = partly_frozen()
    module.register_parameter("scale", nn.Parameter(torch.tensor(2.0), requires_grad=False))
    module.register_parameter("codes", nn.Parameter(torch.tensor([1, -3], dtype=torch.int8), requires_grad=False))
    module.register_parameter("none", nn.Parameter(torch.zeros(0, 3), requires_grad=False))
    network = Network(module, torch.float64)
    assert network.size == 23 and network.base["codes"].dtype == torch.int8
    before = network.base_digest
    network.base["codes"].data[0] = 2
    assert network.base_digest != before


def test_another_process_gets_the_base_too():
    network = Network(partly_frozen())
    network.ends_in_head = False
    other = pickle.loads(pickle.dumps(network))
    assert other.base_digest == network.base_digest and other.head == network.head and not other.ends_in_head
    assert torch.equal(other.weights, network.weights)
    other.weights.zero_()
    assert bool(network.weights.any())


def test_a_model_that_trains_nothing_is_refused():
    sentence = r"^model: all of its parameters are frozen \(requires_grad = False\), so there is nothing to train$"
    with pytest.raises(RecipeError, match=sentence):
        Network(partly_frozen().requires_grad_(False))


class Tied(nn.Module):
    """An autoencoder's two layers, of which the second is the head, with one weight for both."""

    def __init__(self, head_first: bool) -> None:
        super().__init__()
        names = ("head", "body") if head_first else ("body", "head")
        for name in names:
            self.add_module(name, nn.Linear(3, 3))
        self.head.weight = self.body.weight

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))


@pytest.mark.parametrize("head_first", [False, True])
def test_a_tied_parameter_is_there_once_and_is_not_the_heads_own(head_first):
    network = Network(Tied(head_first), torch.float64)
    network.choose_head(torch.ones(1, 3, dtype=torch.float64))
    assert network.size == 9 + 3 + 3
    assert network.head_module is network.module.head and network.head == slice(0, 0)
    network.weights.zero_()
    assert not network.module.head.weight.any() and network.module.head.weight is network.module.body.weight
    network.module.body.weight.requires_grad_(False)
    frozen = Network(network.module, torch.float64)
    assert frozen.size == 6 and len(frozen.base) == 1 and frozen.head == slice(0, 0)


def test_a_frozen_head_has_no_place_in_the_vector_and_half_of_one_has_the_rest():
    module = partly_frozen()
    module[4].weight.requires_grad_(False)
    network = Network(module)
    assert network.head_module is module[4] and network.head == slice(15, 17)
    module[4].requires_grad_(False)
    assert Network(module).head == slice(0, 0)


def test_a_head_with_two_names_is_still_a_head():
    module = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    module.add_module("classifier", module[1])
    module.forward = lambda x: module[1](module[0](x))
    network = Network(module)
    network.choose_head(torch.ones(1, 4))
    assert network.size == 23 and network.head == slice(15, 23)


def test_a_module_of_ones_own_that_returns_an_object_with_logits_is_trained_like_a_plain_one(digits):
    """FedSoL looks at the head too, whose output is in the object."""

    class Answer(nn.Module):
        def __init__(self, net):
            super().__init__()
            self.net = net

        def forward(self, x):
            return SimpleNamespace(logits=self.net(x), hidden=None)

    plain = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))
    settings = dict(method="fedsol(scope='head')", rounds=2, cohort=3, lr=0.1, engine="inline")
    ours, theirs = (train(digits, each, **settings) for each in (Answer(deepcopy(plain)), deepcopy(plain)))
    assert ours.history[-1]["accuracy"] == theirs.history[-1]["accuracy"] > ours.history[0]["accuracy"]
    for name, parameter in theirs.model.named_parameters():
        assert torch.equal(ours.model.get_parameter(f"net.{name}"), parameter)
    x = torch.zeros(2, 1, 8, 8)
    assert torch.equal(ours.model(x).logits, theirs.model(x))  # it is the user's module again
