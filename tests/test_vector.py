"""A model and its flat vector are the same thing, for every network and precision."""

import pytest
import torch

from fedflat import models
from fedflat.vector import Layout, Network

SHAPES = {"convnet-gn": (3, 64, 64)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", models.MODELS)
def test_model_to_vector_and_back_is_the_identity(name, dtype):
    module = models.build(name, SHAPES.get(name, (3, 32, 32)), 10).to(dtype)
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
