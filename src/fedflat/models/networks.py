"""The networks of the papers, with the same parameter counts."""

import math
from collections.abc import Callable, Sequence
from functools import partial

from torch import nn

from fedflat.errors import RecipeError
from fedflat.models.blocks import (
    ClassToken,
    Colour,
    Convolution,
    FirstToken,
    RectifiedPool,
    Residual,
    ShiftedPatches,
    TransformerBlock,
    chain,
)

Shape = tuple[int, ...]


def _image(name: str, shape: Shape, smallest: int) -> tuple[int, int, int]:
    """Return (channels, height, width) of the first convolution's input, or raise a RecipeError for other shapes."""
    if len(shape) != 3 or min(shape) < 1:
        raise RecipeError(f"Model {name} needs images (channels, height, width), not shape {shape}; use mlp for these.")
    channels, height, width = shape
    if min(height, width) < smallest:
        raise RecipeError(f"Model {name} needs images of at least {smallest}×{smallest} pixels, not {height}×{width}.")
    return 3 if channels == 1 else channels, height, width


def _kaiming(model: nn.Sequential) -> nn.Sequential:
    """Draw the convolutions from N(0, 2 / (k² · outputs)) and set their biases to zero."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return model


def _are_widths(widths: Sequence[int]) -> bool:
    """Whether an option is a list of positive whole numbers."""
    return isinstance(widths, Sequence) and all(type(width) is int and width > 0 for width in widths)


def mlp(shape: Shape, classes: int, hidden: Sequence[int] = (200, 200), bias: bool = True) -> nn.Module:
    """Fully connected layers with ReLU between them, for samples of any shape.

    Args:
        shape: shape of a sample.
        classes: number of outputs.
        hidden: widths of the hidden layers; () is logistic regression.
        bias: whether the layers have biases. Studies of activity–weight duality leave them out.

    Raises:
        RecipeError: an option is invalid.
    """
    if not _are_widths(hidden):
        raise RecipeError(f"Option hidden of model mlp must be a list of positive whole numbers, not {hidden!r}.")
    if not isinstance(bias, bool):
        raise RecipeError(f"Option bias of model mlp must be true or false, not {bias!r}.")
    layers: dict[str, nn.Module] = {"flatten": nn.Flatten()}
    inputs = math.prod(shape)
    for number, width in enumerate(hidden, start=1):
        layers |= {f"fc{number}": nn.Linear(inputs, width, bias), f"relu{number}": nn.ReLU()}
        inputs = width
    return chain(**layers, head=nn.Linear(inputs, classes, bias))


def fedavg_cnn(shape: Shape, classes: int, widths: Sequence[int] = (32, 64, 512)) -> nn.Module:
    """The CNN of McMahan et al. (2017) in FedSoL's size: 2,156,490 parameters for 32×32 pixels and 10 classes.

    Args:
        shape: shape of an image.
        classes: number of outputs.
        widths: channels of the two convolutions and units of the hidden layer.

    Raises:
        RecipeError: an option is invalid, or the shape is not that of an image.
    """
    channels, height, width = _image("fedavg-cnn", shape, smallest=4)
    if not _are_widths(widths) or len(widths) != 3:
        raise RecipeError(f"Option widths of model fedavg-cnn must be three positive whole numbers, not {widths!r}.")
    first, second, hidden = widths
    return chain(
        colour=Colour(),
        conv1=Convolution(channels, first, 5, padding=2),
        pool1=RectifiedPool(2),
        conv2=Convolution(first, second, 5, padding=2),
        pool2=RectifiedPool(2),
        flatten=nn.Flatten(),
        fc1=nn.Linear(second * (height // 4) * (width // 4), hidden),
        relu=nn.ReLU(),
        head=nn.Linear(hidden, classes),
    )


def lenet64(shape: Shape, classes: int) -> nn.Module:
    """LeNet with 64 filters, from FedDyn and MAN: 797,962 parameters for 32×32 pixels and 10 classes."""
    channels, height, width = _image("lenet64", shape, smallest=16)
    return chain(
        colour=Colour(),
        conv1=Convolution(channels, 64, 5),
        pool1=RectifiedPool(2),
        conv2=Convolution(64, 64, 5),
        pool2=RectifiedPool(2),
        flatten=nn.Flatten(),
        fc1=nn.Linear(64 * (((height - 4) // 2 - 4) // 2) * (((width - 4) // 2 - 4) // 2), 384),
        relu1=nn.ReLU(),
        fc2=nn.Linear(384, 192),
        relu2=nn.ReLU(),
        head=nn.Linear(192, classes),
    )


def convnet_gn(shape: Shape, classes: int) -> nn.Module:
    """MAN's network for Tiny-ImageNet, with 4 norm groups: 2,447,688 parameters for 64×64 pixels and 200 classes."""
    channels, height, width = _image("convnet-gn", shape, smallest=8)
    layers: dict[str, nn.Module] = {"colour": Colour()}
    for number, inputs in enumerate((channels, 64, 64), start=1):
        layers[f"conv{number}"] = Convolution(inputs, 64, 3, padding=1)
        layers[f"norm{number}"] = nn.GroupNorm(4, 64)
        layers[f"pool{number}"] = RectifiedPool(2)
    return chain(
        **layers,
        flatten=nn.Flatten(),
        fc1=nn.Linear(64 * (height // 8) * (width // 8), 512),
        relu1=nn.ReLU(),
        fc2=nn.Linear(512, 384),
        relu2=nn.ReLU(),
        head=nn.Linear(384, classes),
    )


def _resnet18(stem: dict[str, nn.Module], norm: Callable[[int], nn.Module], classes: int) -> nn.Sequential:
    """Return a stem with 64 channels, four stages of two residual blocks, average pooling and a head."""
    blocks: dict[str, nn.Module] = {}
    for stage, (inputs, outputs) in enumerate(((64, 64), (64, 128), (128, 256), (256, 512)), start=1):
        stride = 1 if inputs == outputs else 2
        blocks[f"block{stage}a"] = Residual(inputs, outputs, stride, norm)
        blocks[f"block{stage}b"] = Residual(outputs, outputs, 1, norm)
    average = chain(pool=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten())
    return chain(colour=Colour(), **stem, **blocks, average=average, head=nn.Linear(512, classes))


def _large_stem(channels: int, norm: Callable[[int], nn.Module]) -> dict[str, nn.Module]:
    """Return the stem of ResNet for large images, which halves height and width twice."""
    conv = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
    return {"conv": conv, "norm": norm(64), "pool": RectifiedPool(3, 2, 1)}


def resnet18_gn(shape: Shape, classes: int) -> nn.Module:
    """FedSMOO's ResNet-18 with the stem for large images and 2 norm groups: 11,181,642 parameters for 10 classes."""
    channels, _, _ = _image("resnet18-gn", shape, smallest=1)
    norm = partial(nn.GroupNorm, 2)
    return _kaiming(_resnet18(_large_stem(channels, norm), norm, classes))


def resnet18_pfllib(shape: Shape, classes: int) -> nn.Module:
    """PFLlib's ResNet-18 with the stem for large images and BatchNorm: 11,181,642 parameters for 10 classes.

    BatchNorm always uses the statistics of the batch, as in `resnet18`. The last feature maps of images of up to 32
    pixels have one pixel, so a batch needs at least two samples.
    """
    channels, _, _ = _image("resnet18-pfllib", shape, smallest=1)
    norm = partial(nn.BatchNorm2d, track_running_stats=False)
    return _kaiming(_resnet18(_large_stem(channels, norm), norm, classes))


def resnet18(shape: Shape, classes: int) -> nn.Module:
    """FedSoL's ResNet-18 with a 3×3 stem and BatchNorm: 11,173,962 parameters for 10 classes.

    BatchNorm always uses the statistics of the batch. There are no running statistics to aggregate, but a prediction
    depends on its batch.
    """
    # From 9 pixels on, the last feature maps are 2×2, and even a batch of one sample has a variance.
    channels, _, _ = _image("resnet18", shape, smallest=9)
    norm = partial(nn.BatchNorm2d, track_running_stats=False)
    conv = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
    return _resnet18({"conv": conv, "norm": norm(64), "relu": nn.ReLU()}, norm, classes)


def vgg11(shape: Shape, classes: int) -> nn.Module:
    """FedSoL's VGG-11 without normalisation or dropout: 9,750,922 parameters for 32×32 pixels and 10 classes.

    Images below 32 pixels are upsampled to 32 (nearest pixel).
    """
    channels, height, width = _image("vgg11", shape, smallest=1)
    layers: dict[str, nn.Module] = {"colour": Colour()}
    if min(height, width) < 32:
        height, width = max(height, 32), max(width, 32)
        layers["enlarge"] = nn.Upsample(size=(height, width))
    plan = ((64, True), (128, True), (256, False), (256, True), (512, False), (512, True), (512, False), (512, True))
    inputs = channels
    for number, (outputs, pooled) in enumerate(plan, start=1):
        layers[f"conv{number}"] = Convolution(inputs, outputs, 3, padding=1)
        layers[f"pool{number}" if pooled else f"relu{number}"] = RectifiedPool(2) if pooled else nn.ReLU()
        inputs = outputs
    return _kaiming(
        chain(
            **layers,
            flatten=nn.Flatten(),
            fc1=nn.Linear(512 * (height // 32) * (width // 32), 512),
            relu9=nn.ReLU(),
            fc2=nn.Linear(512, 512),
            relu10=nn.ReLU(),
            head=nn.Linear(512, classes),
        )
    )


def sl_vit(shape: Shape, classes: int) -> nn.Module:
    """FedSoL's vision transformer for small data sets: 6,176,275 parameters for 32×32 pixels and 10 classes.

    The image is cut into four patches per side (8 pixels each for 32, 7 for 28), of at most 16 pixels each.
    """
    channels, height, width = _image("sl-vit", shape, smallest=4)
    patch = min(height // 4, width // 4, 16)
    if height % patch or width % patch:
        raise RecipeError(f"Model sl-vit cannot cut {height}×{width} pixels into patches of {patch}×{patch}.")
    features = 192
    return chain(
        colour=Colour(),
        patches=ShiftedPatches(channels, patch, features),
        token=ClassToken((height // patch) * (width // patch), features),
        **{f"block{number}": TransformerBlock(features, 12, 64, features) for number in range(1, 10)},
        first=FirstToken(),
        norm=nn.LayerNorm(features),
        head=nn.Linear(features, classes),
    )
