"""The papers' networks: their sizes, what the rest of the library relies on, and the errors of a recipe."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap

from fedflat import trusted
from fedflat.errors import RecipeError
from fedflat.models import MODELS, build
from fedflat.models.blocks import LocalAttention, RectifiedPool, ShiftedPatches

CIFAR, MNIST, TINY = (3, 32, 32), (1, 28, 28), (3, 64, 64)

# A shape for every model, small where the architecture allows it.
SHAPES = {
    "fedavg-cnn": (3, 8, 8),
    "lenet64": (3, 16, 16),
    "convnet-gn": (3, 8, 8),
    "resnet18-gn": (3, 8, 8),
    "resnet18-pfllib": (3, 40, 40),
    "resnet18": (3, 9, 9),
    "vgg11": (3, 32, 32),
    "sl-vit": (3, 8, 8),
    "mlp": (3, 4, 4),
}
TEXT = {"char-lstm", "gpt"}  # test_sequences.py


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As clients train; for arrays this small a second thread only waits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def weights(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters())


def batch(shape: tuple[int, ...], samples: int = 4, seed: int = 0) -> Tensor:
    return torch.randn(samples, *shape, generator=generator(seed))


def every_model(test: Any) -> Any:
    return pytest.mark.parametrize("name", SHAPES)(test)


def test_every_model_has_a_shape_to_be_tested_with() -> None:
    assert SHAPES.keys() | TEXT == MODELS.keys()


@pytest.mark.parametrize(
    ("name", "shape", "classes", "parameters"),
    [
        ("fedavg-cnn", CIFAR, 10, 2_156_490),
        ("fedavg-cnn", MNIST, 10, 1_664_970),
        ("lenet64", CIFAR, 10, 797_962),
        ("lenet64", CIFAR, 100, 815_332),
        ("convnet-gn", TINY, 200, 2_447_688),
        ("resnet18-gn", CIFAR, 10, 11_181_642),
        ("resnet18-gn", CIFAR, 100, 11_227_812),
        ("resnet18-pfllib", CIFAR, 10, 11_181_642),
        ("resnet18", CIFAR, 10, 11_173_962),
        ("vgg11", CIFAR, 10, 9_750_922),
        ("vgg11", MNIST, 10, 9_750_922),
        ("sl-vit", CIFAR, 10, 6_176_275),
        # patches of 7: (960 − 735) inputs fewer, each with 192 weights and LayerNorm's two
        ("sl-vit", MNIST, 10, 6_176_275 - (960 - 735) * (192 + 2)),
        ("mlp", MNIST, 10, 784 * 200 + 200 + 200 * 200 + 200 + 200 * 10 + 10),
    ],
)
def test_parameter_counts_are_the_papers(name: str, shape: tuple[int, ...], classes: int, parameters: int) -> None:
    model = build(name, shape, classes)
    assert len(weights(model)) == parameters
    assert not list(model.buffers()), "weights alone are the model"
    assert model(batch(shape, 2)).shape == (2, classes)


@pytest.mark.parametrize(("name", "norm"), [("fedavg-cnn", 14.4), ("lenet64", 15.4), ("resnet18-gn", 111.8)])
def test_initial_weights_have_the_norm_of_the_papers_initialisation(name: str, norm: float) -> None:
    assert weights(build(name, CIFAR, 10)).norm().item() == pytest.approx(norm, rel=0.01)


def test_vgg_convolutions_start_with_variance_2_over_9_times_outputs_and_zero_bias() -> None:
    for conv in (module for module in build("vgg11", CIFAR, 10).modules() if isinstance(module, nn.Conv2d)):
        assert conv.weight.std().item() == pytest.approx((2 / (9 * conv.out_channels)) ** 0.5, rel=0.05)
        assert conv.bias is not None
        assert not conv.bias.any()


@every_model
def test_head_is_the_last_child_and_reads_the_features(name: str) -> None:
    model = build(name, SHAPES[name], 7)
    head = list(model.children())[-1]
    assert isinstance(head, nn.Linear)
    assert [n for n, _ in model.named_parameters()][-2:] == ["head.weight", "head.bias"]
    seen: list[tuple[Tensor, Tensor]] = []
    head.register_forward_hook(lambda _, inputs, output: seen.append((inputs[0], output)))
    logits = model(batch(SHAPES[name]))
    features, output = seen[0]
    assert features.shape == (4, head.in_features)
    assert torch.equal(logits, output)


@every_model
def test_every_activation_is_one_call_of_its_own_module(name: str) -> None:
    model = build(name, SHAPES[name], 7)
    expected = {"mlp": 2, "fedavg-cnn": 3, "lenet64": 4, "convnet-gn": 5, "vgg11": 10, "sl-vit": 9}.get(name, 17)
    calls: list[nn.Module] = []
    activations = [m for m in model.modules() if isinstance(m, nn.ReLU | nn.GELU)]
    for activation in activations:
        activation.register_forward_hook(lambda module, _, __: calls.append(module))
    model(batch(SHAPES[name]))
    assert len(activations) == expected
    assert calls == activations, "each once, in registration order"


def test_hooks_see_activations_before_the_pool() -> None:
    model = build("lenet64", CIFAR, 10)
    shapes: list[tuple[int, ...]] = []
    for module in model.modules():
        if isinstance(module, nn.ReLU):
            module.register_forward_hook(lambda _, __, output: shapes.append(tuple(output.shape)))
    model(batch(CIFAR, 2))
    assert shapes == [(2, 64, 28, 28), (2, 64, 10, 10), (2, 384), (2, 192)]


@pytest.mark.parametrize("name", ["fedavg-cnn", "convnet-gn", "resnet18-gn"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_pool_before_relu_changes_no_bit(name: str, layout: torch.memory_format) -> None:
    def outcome(*, hooked: bool) -> list[Tensor]:
        model = build(name, SHAPES[name], 10, generator(3)).to(memory_format=layout)
        for module in model.modules():
            if hooked and isinstance(module, RectifiedPool):
                module.relu.register_forward_hook(lambda *_: None)
        inputs = batch(SHAPES[name]).to(memory_format=layout).requires_grad_()
        logits = model(inputs)
        loss = F.cross_entropy(logits, torch.tensor([0, 1, 2, 3]))
        return [logits, *torch.autograd.grad(loss, [inputs, *model.parameters()])]

    for plain, hooked in zip(outcome(hooked=False), outcome(hooked=True), strict=True):
        assert torch.equal(plain, hooked)


@pytest.mark.parametrize("geometry", [(2,), (3, 2, 1)])
def test_rectified_pool_is_the_pool_of_the_relu_also_in_ties(geometry: tuple[int, ...]) -> None:
    x = torch.randint(-2, 3, (2, 3, 9, 9), generator=generator(0)).float().requires_grad_()
    expected = F.max_pool2d(F.relu(x), *geometry)
    weights = torch.randn(expected.shape, generator=generator(1))
    output = RectifiedPool(*geometry)(x)
    assert torch.equal(output, expected)
    (slope,), (expected_slope,) = (torch.autograd.grad((y * weights).sum(), x) for y in (output, expected))
    assert torch.equal(slope, expected_slope)


def test_without_a_hook_nothing_is_rectified_before_the_pool() -> None:
    pool = RectifiedPool(2)
    seen: list[tuple[int, ...]] = []
    pool.relu.register_forward_pre_hook(lambda _, inputs: seen.append(tuple(inputs[0].shape)))
    pool(batch((3, 8, 8), 2))
    assert not seen
    pool.relu.register_forward_hook(lambda *_: None)
    pool(batch((3, 8, 8), 2))
    assert seen == [(2, 3, 8, 8)]


@every_model
def test_channels_last_gives_the_same_logits(name: str) -> None:
    model = build(name, SHAPES[name], 7).double()
    inputs = batch(SHAPES[name], 2).double()
    expected = model(inputs)
    model = model.to(memory_format=torch.channels_last)
    torch.testing.assert_close(model(inputs.to(memory_format=torch.channels_last)), expected)


def loss_of(model: nn.Module, inputs: Tensor, labels: Tensor) -> Any:
    """The loss as a function of the weights."""
    return lambda weights: F.cross_entropy(functional_call(model, weights, (inputs,)), labels)


@pytest.mark.parametrize("name", ["fedavg-cnn", "lenet64", "convnet-gn", "resnet18", "sl-vit", "mlp"])
def test_gradients_of_two_weight_copies_at_once(name: str) -> None:
    copies = [build(name, SHAPES[name], 4, generator(seed)) for seed in (1, 2)]
    stacked, _ = stack_module_state(copies)
    inputs, labels = batch(SHAPES[name]), torch.tensor([0, 1, 2, 3])
    together = vmap(grad(loss_of(copies[0], inputs, labels)))(stacked)
    for number, copy in enumerate(copies):
        alone = torch.autograd.grad(F.cross_entropy(copy(inputs), labels), list(copy.parameters()))
        for (key, _), expected in zip(copy.named_parameters(), alone, strict=True):
            torch.testing.assert_close(together[key][number], expected, rtol=1e-3, atol=1e-5)


@every_model
def test_hessian_vector_product_is_the_change_of_the_gradient(name: str) -> None:
    model = build(name, SHAPES[name], 4).double()
    inputs, labels = batch(SHAPES[name], 2).double(), torch.tensor([0, 1])
    # Along the head the loss is smooth, so that differences converge; the product itself is over all weights.
    head = list(model.children())[-1].weight
    direction = torch.randn(head.shape, generator=generator(5), dtype=torch.float64)
    parameters = list(model.parameters())
    slopes = torch.autograd.grad(F.cross_entropy(model(inputs), labels), parameters, create_graph=True)
    product = torch.autograd.grad((slopes[-2] * direction).sum(), parameters)

    def slopes_at(step: float) -> tuple[Tensor, ...]:
        with torch.no_grad():
            head.add_(direction, alpha=step)
        moved = torch.autograd.grad(F.cross_entropy(model(inputs), labels), parameters)
        with torch.no_grad():
            head.sub_(direction, alpha=step)
        return moved

    step = 1e-5
    for exact, ahead, behind in zip(product, slopes_at(step), slopes_at(-step), strict=True):
        torch.testing.assert_close(exact, (ahead - behind) / (2 * step), rtol=1e-4, atol=1e-7)


@every_model
def test_weights_come_from_the_given_generator_alone(name: str) -> None:
    before = torch.random.get_rng_state()
    first = build(name, SHAPES[name], 4, generator(11))
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.rand(3)
    again, other = (build(name, SHAPES[name], 4, generator(seed)) for seed in (11, 12))
    assert torch.equal(weights(first), weights(again))
    assert not torch.equal(weights(first), weights(other))


def test_building_moves_the_given_generator_on() -> None:
    source = generator(1)
    first, second = (build("mlp", (4,), 2, source) for _ in range(2))
    assert not torch.equal(weights(first), weights(second))


@pytest.mark.parametrize("name", ["fedavg-cnn", "lenet64", "convnet-gn", "resnet18-gn", "sl-vit"])
def test_grey_is_colour_with_three_equal_channels(name: str) -> None:
    shape = (1, *SHAPES[name][1:])
    grey, colour = (build(name, (channels, *shape[1:]), 5) for channels in (1, 3))
    inputs = batch(shape)
    torch.testing.assert_close(grey(inputs), colour(inputs.repeat(1, 3, 1, 1)))


def test_vgg_takes_small_images_enlarged_and_large_ones_as_they_are() -> None:
    inputs = batch(MNIST)
    small, full = build("vgg11", MNIST, 10), build("vgg11", CIFAR, 10)
    torch.testing.assert_close(small(inputs), full(F.interpolate(inputs, size=(32, 32)).repeat(1, 3, 1, 1)))
    assert build("vgg11", (3, 64, 32), 10)(batch((3, 64, 32), 1)).shape == (1, 10)


def test_batchnorm_takes_a_batch_of_one_from_the_smallest_image_on() -> None:
    assert build("resnet18", (3, 9, 9), 4)(batch((3, 9, 9), 1)).isfinite().all()


def test_local_attention_never_attends_to_itself() -> None:
    """With two tokens each sees only the other, whatever the scores: attention returns the other's value."""
    attention = LocalAttention(width=6, heads=2, head_width=3).requires_grad_(False)
    attention.out.weight.copy_(torch.eye(6))
    attention.out.bias.zero_()
    x = batch((2, 6))
    torch.testing.assert_close(attention(x), attention.qkv(x)[..., 12:].flip(1))


def test_attention_starts_at_the_usual_temperature() -> None:
    temperature = LocalAttention(width=6, heads=2, head_width=16).temperature
    assert temperature.exp().item() == pytest.approx(16**-0.5)


def test_shifted_patches_see_the_image_and_its_four_neighbours() -> None:
    image = torch.arange(16.0).view(1, 1, 4, 4)
    tokens = ShiftedPatches(channels=1, patch=4, width=2)
    seen: list[Tensor] = []
    tokens.norm.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0]))
    tokens(image)
    still, right, left, down, up = seen[0].view(5, 4, 4)
    assert torch.equal(still, image[0, 0])
    assert torch.equal(right[:, 1:], still[:, :-1])
    assert torch.equal(left[:, :-1], still[:, 1:])
    assert torch.equal(down[1:], still[:-1])
    assert torch.equal(up[:-1], still[1:])
    border = torch.cat((right[:, 0], left[:, -1], down[0], up[-1]))
    assert not border.any()


def test_the_widths_of_the_fedavg_cnn_are_its_channels_and_hidden_units() -> None:
    shapes = {
        name: tuple(weights.shape)
        for name, weights in build("fedavg-cnn", (3, 8, 8), 10, widths=[2, 3, 5]).named_parameters()
    }
    assert shapes == {
        "conv1.weight": (2, 3, 5, 5), "conv1.bias": (2,), "conv2.weight": (3, 2, 5, 5), "conv2.bias": (3,),
        "fc1.weight": (5, 3 * 2 * 2), "fc1.bias": (5,), "head.weight": (10, 5), "head.bias": (10,),
    }  # fmt: skip


def test_mlp_takes_samples_of_any_shape_and_without_hidden_layers_is_logistic_regression() -> None:
    model = build("mlp", (6,), 4, hidden=[8])
    assert [tuple(p.shape) for p in model.parameters()] == [(8, 6), (8,), (4, 8), (4,)]
    linear = build("mlp", (2, 3), 4, hidden=())
    weight, bias = linear.parameters()
    inputs = batch((2, 3))
    torch.testing.assert_close(linear(inputs), inputs.flatten(1) @ weight.T + bias)


def test_mlp_without_biases_is_homogeneous_in_its_input() -> None:
    model = build("mlp", (1, 28, 28), 10, hidden=[30, 30], bias=False)
    assert {n: tuple(p.shape) for n, p in model.named_parameters()} == {
        "fc1.weight": (30, 784),
        "fc2.weight": (30, 30),
        "head.weight": (10, 30),
    }
    inputs = batch((1, 28, 28))
    torch.testing.assert_close(model(2 * inputs), 2 * model(inputs))
    with pytest.raises(RecipeError, match="Option bias of model mlp must be true or false, not 'no'"):
        build("mlp", (6,), 4, bias="no")


OWN = """
import torch
from torch import nn

class Plain(nn.Module):
    def __init__(self, width=3):
        super().__init__()
        self.head = nn.Linear(width, 2)

class Sized(nn.Linear):
    def __init__(self, shape, classes, *, scale):
        super().__init__(shape[0], classes)
        self.scale = scale

class Counted(nn.Linear):
    def __init__(self, classes):
        super().__init__(5, classes)

class Anything(nn.Linear):
    def __init__(self, **everything):
        super().__init__(everything["shape"][0], everything["classes"])

class Broken(nn.Module):
    def __init__(self, shape):
        raise ValueError("no such width")

def function(classes):
    return nn.Linear(5, classes)

class Number(int):
    pass

constant = 3
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_networks.py").write_text(OWN)
    (tmp_path / "my_mistake.py").write_text("def net(:")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_networks", raising=False)
    monkeypatch.setattr(trusted, "_packages", {"my_networks", "my_mistake", "nothing_here"})


@pytest.mark.usefixtures("own")
def test_a_users_own_module_gets_what_its_signature_takes() -> None:
    assert build("my_networks:Plain", (5,), 4, width=6).head.in_features == 6
    sized = build("my_networks:Sized", (5,), 4, scale=2.0)
    assert (sized.in_features, sized.out_features, sized.scale) == (5, 4, 2.0)
    assert build("my_networks:Counted", (9,), 4).out_features == 4
    assert build("my_networks:Anything", (9,), 4).in_features == 9


@pytest.mark.usefixtures("own")
def test_a_users_own_module_is_initialised_by_the_given_generator() -> None:
    first, again = (build("my_networks:Plain", (3,), 2, generator(1)) for _ in range(2))
    assert torch.equal(first.head.weight, again.head.weight)


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("lenet", {}, "there is no 'lenet'; did you mean lenet64?"),
        ("nothing_here:Net", {}, "nothing_here:Net"),
        ("my_networks:Missing", {}, "my_networks:Missing': my_networks has no Missing; known: Anything"),
        ("my_mistake:Net", {}, r"my_mistake cannot be imported \(SyntaxError: invalid syntax"),
        ("my_networks:", {}, "package.module:Class"),
        ("../my_networks:Plain", {}, "package.module:Class"),
        ("my_networks:constant", {}, "my_networks:constant': is not a class that inherits from Module"),
        ("my_networks:function", {}, "my_networks:function': is not a class that inherits from Module"),
        ("my_networks:Number", {}, "my_networks:Number': is not a class that inherits from Module"),
        ("my_networks:Broken", {}, "my_networks:Broken could not be built: no such width"),
        ("my_networks:Sized", {}, "my_networks:Sized .*'scale'"),
        ("my_networks:Plain", {"widht": 3}, "no option 'widht'; did you mean width"),
        ("mlp", {"hiden": (3,)}, "mlp has no option 'hiden'; did you mean hidden"),
        ("lenet64", {"hidden": (3,)}, "lenet64 has no option 'hidden'; it has none"),
        ("fedavg-cnn", {"widths": [8, 16]}, "widths .* three positive whole numbers, not .8, 16"),
        ("fedavg-cnn", {"widths": [8, 0, 32]}, "widths .* three positive whole numbers"),
        ("fedavg-cnn", {"widths": 8}, "widths .* three positive whole numbers, not 8"),
        ("mlp", {"hidden": [True]}, "hidden .* positive whole numbers"),
        ("mlp", {"hidden": 200}, "hidden .* positive whole numbers, not 200"),
        ("mlp", {"hidden": (200, 0)}, "hidden .* positive whole numbers"),
        ("mlp", {"hidden": "200"}, "hidden .* positive whole numbers"),
    ],
)
def test_a_wrong_model_is_named_in_one_sentence(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message) as caught:
        build(name, CIFAR, 10, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("fedavg-cnn", (784,), r"fedavg-cnn needs images .* \(784,\)"),
        ("fedavg-cnn", (3, 3, 32), "at least 4×4 pixels, not 3×32"),
        ("lenet64", (3, 15, 15), "at least 16×16"),
        ("convnet-gn", (3, 7, 7), "at least 8×8"),
        ("resnet18", (3, 8, 8), "at least 9×9"),
        ("sl-vit", (3, 30, 30), "cannot cut 30×30 pixels into patches of 7×7"),
    ],
)
def test_a_shape_that_the_architecture_does_not_allow(name: str, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        build(name, shape, 10)


def test_a_model_needs_a_class() -> None:
    with pytest.raises(RecipeError, match="classes = 0"):
        build("mlp", (3,), 0)
