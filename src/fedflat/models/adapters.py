"""Low-rank adapters (LoRA, Hu et al. 2022): a frozen layer learns a small correction W + s·BA."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedflat.errors import RecipeError, shortened
from fedflat.models.blocks import Convolution
from fedflat.models.corrected import added, summed
from fedflat.models.layout import Layout
from fedflat.models.outputs import own_output, plain_output

# The factors A of our layers and of peft's, by the end of a parameter's name.
FACTOR = re.compile(r"(^|\.)lora_(a|A\.[^.]+\.weight)$")
ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)


class Adapter(nn.Module):
    """A layer with frozen weight W and trained factors A and B: it computes with W + s·BA, where s = α/r.

    A is r × inputs and B is outputs × r; for a convolution the inputs are those of a patch. B starts at 0, so the
    output of the layer does not change at first. The definition does not form the product BA: the layer adds s·B(Ax).
    """

    plain: ClassVar[type[nn.Module]]
    weight: Tensor
    lora_a: nn.Parameter
    lora_b: nn.Parameter
    lora_scale: float

    def product(self) -> Tensor:
        """Return s·BA in the shape of the layer's weight."""
        return (self.lora_scale * (self.lora_b.flatten(1) @ self.lora_a.flatten(1))).view_as(self.weight)

    def correction(self, x: Tensor) -> Tensor:
        """Return B(Ax)."""
        return F.linear(F.linear(x, self.lora_a), self.lora_b)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = type(self).plain.forward(self, x)
        return torch.add(y, self.correction(x), alpha=self.lora_scale)


class LoraLinear(Adapter, nn.Linear):
    """A linear layer with an adapter. For many rows, it is cheaper to form W + s·BA than to add s·B(Ax)."""

    plain = nn.Linear

    def forward(self, x: Tensor) -> Tensor:
        arguments = (x, self.weight, self.bias, self.lora_a, self.lora_b, self.lora_scale)
        return summed(*arguments) if self._pays(x) else added(*arguments)

    def _pays(self, x: Tensor) -> bool:
        """Whether a pass that forms W + s·BA is faster. vmap, autocast and a trained W need the definition."""
        if x.dim() < 2 or torch._C._are_functorch_transforms_active() or torch.is_autocast_enabled(x.device.type):
            return False
        frozen = not (self.weight.requires_grad or (self.bias is not None and self.bias.requires_grad))
        outputs, inputs = self.weight.shape
        return frozen and x.numel() // inputs * (inputs + outputs) > 2 * inputs * outputs


class _LoraConvolution(Adapter):
    """A convolution to r channels with the layer's own kernel size and stride, then a pointwise one."""

    def correction(self, x: Tensor) -> Tensor:
        inner: Tensor = self._conv_forward(x, self.lora_a, None)  # type: ignore[operator]
        outer: Callable[..., Tensor] = (F.conv1d, F.conv2d, F.conv3d)[self.lora_b.dim() - 3]
        return outer(inner, self.lora_b)


class LoraConv1d(_LoraConvolution, nn.Conv1d):
    plain = nn.Conv1d


class LoraConv2d(_LoraConvolution, nn.Conv2d):
    plain = nn.Conv2d


class LoraConv3d(_LoraConvolution, nn.Conv3d):
    plain = nn.Conv3d


class LoraConvolution(_LoraConvolution, Convolution):
    plain = Convolution


KINDS: dict[type[nn.Module], type[Adapter]] = {
    kind.plain: kind for kind in (LoraLinear, LoraConv1d, LoraConv2d, LoraConv3d, LoraConvolution)
}


def lora(
    module: nn.Module,
    rank: int = 8,
    alpha: float | None = None,
    targets: str | Sequence[str] = "attention",
    also: str | Sequence[str] = (),
    generator: torch.Generator | None = None,
) -> nn.Module:
    """Return a copy of a module that trains low-rank corrections of some layers; everything else is frozen.

    A chosen layer computes with W + (α/r) BA. A is drawn as PyTorch draws a linear layer's weight, and B is 0, so the
    copy has the same outputs as the module until it is trained. The names of the module's own parameters do not change.

    Args:
        module: any module with `nn.Linear` or ungrouped `nn.Conv1d`, `2d` or `3d` layers, or GPT-2's `Conv1D`.
        rank: r, at most the number of inputs and outputs of each chosen layer.
        alpha: α; 2r by default, so that s = 2.
        targets: which layers: "attention" (those inside a module whose name or class says so), "head" (the last linear
            layer), "all", or names, ends of names (`qkv`) and patterns (`blocks.*.fc1`).
        also: layers, as in `targets`, or parameters, by their names or patterns, that are trained in full instead, such
            as a new head.
        generator: the generator for A; by default torch's global one.

    Raises:
        RecipeError: an argument is wrong, a target matches no layer, a layer is too small for the rank, or the module
            has adapters already.

    >>> network = lora(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)), rank=2, targets="0")
    >>> [name for name, parameter in network.named_parameters() if parameter.requires_grad]
    ['0.lora_a', '0.lora_b']
    """
    _check(module, rank, alpha, targets, also)
    module = copy.deepcopy(module)
    layers = adaptable(module)
    chosen = _matching(targets, layers, module)
    full = _in_full(also, layers, module)
    module.requires_grad_(False)
    for name in chosen:
        _adapt(name, layers[name], rank, 2.0 * rank if alpha is None else alpha, generator)
    for parameter in module.parameters():
        parameter.requires_grad_(parameter.requires_grad or parameter in full)
    return module


def merged(module: nn.Module) -> nn.Module:
    """Return a copy of a module whose layers have the weights W + s·BA and no adapters; nothing in it is frozen.

    A module from `peft` is merged by `peft`, and a module without adapters is only copied.

    Raises:
        RecipeError: the argument is not a module.

    >>> network = lora(nn.Sequential(nn.Linear(8, 2)), rank=1, targets="all")
    >>> [name for name, _ in merged(network).named_parameters()]
    ['0.weight', '0.bias']
    """
    given: object = module
    if not isinstance(given, nn.Module):
        raise RecipeError(f"merged: is a {type(given).__name__}; give a module")
    module = copy.deepcopy(module)
    if merge := getattr(module, "merge_and_unload", None):
        wrapped = own_output(module)
        module = plain_output(merge())
        for hook in wrapped._forward_pre_hooks.values():  # such as the normalisation of raw inputs
            module.register_forward_pre_hook(hook)
    for layer in [layer for layer in module.modules() if isinstance(layer, Adapter)]:
        # A new parameter: the weight may be tied to another layer's, which has no adapter.
        layer.weight = nn.Parameter(layer.weight.detach() + layer.product().detach())
        del layer.lora_a, layer.lora_b, layer.lora_scale
        layer.__class__ = type(layer).plain  # type: ignore[assignment]
    return module.requires_grad_(True)


def _check(module: object, rank: object, alpha: object, targets: object, also: object) -> None:
    """Check the types and ranges of what a user gives to `lora`."""
    if not isinstance(module, nn.Module):
        raise RecipeError(f"lora: is a {type(module).__name__}; give a module")
    if is_adapted(module):
        raise RecipeError("lora: the module has adapters already; `merged(module)` merges them")
    if not isinstance(rank, int) or isinstance(rank, bool):
        raise RecipeError(f"lora: rank = {rank!r}, where an integer is expected")
    number = isinstance(alpha, (int, float)) and not isinstance(alpha, bool)
    if alpha is not None and not (number and 0 < alpha < math.inf):  # type: ignore[operator]
        raise RecipeError(f"lora: alpha = {alpha!r}, where a finite number above 0 is expected")
    for name, value in (("targets", targets), ("also", also)):
        if not isinstance(value, Sequence) or not all(isinstance(each, str) for each in value):
            raise RecipeError(f"lora: {name} = {value!r}, where a name or a list of names is expected")


def is_adapted(module: nn.Module) -> bool:
    """Return whether any layer of a module has an adapter, ours or peft's."""
    return bool(factors(Layout.of(module.named_parameters())))


def factors(layout: Layout) -> list[tuple[str, str]]:
    """Return the names of the factors (A, B) of every adapter in a layout, ours and peft's.

    >>> factors(Layout.of(lora(nn.Sequential(nn.Linear(8, 2)), 1, targets="all").named_parameters()))
    [('0.lora_a', '0.lora_b')]
    """
    pairs = [(name, _other(name)) for name in layout.shapes if FACTOR.search(name)]
    return [(a, b) for a, b in pairs if b in layout.shapes]


def _other(name: str) -> str:
    """Return the name of B, given the name of A."""
    return FACTOR.sub(lambda found: found[0].replace("lora_a", "lora_b").replace("lora_A", "lora_B"), name)


def adaptable(module: nn.Module) -> dict[str, nn.Module]:
    """Return the layers of a module that can have an adapter, by name.

    Subclasses of these layers (such as the output layer of `nn.MultiheadAttention`, which is never called) are left
    out, because their forward pass may be different.
    """
    return {name: layer for name, layer in module.named_modules() if _kind(layer) and getattr(layer, "groups", 1) == 1}


def _kind(layer: nn.Module) -> type[Adapter] | None:
    if _is_transposed(type(layer)):
        return _transposed(type(layer))
    return KINDS.get(type(layer))


def _is_transposed(kind: type) -> bool:
    """Whether this is GPT-2's linear layer in `transformers`, whose weight is inputs × outputs."""
    return (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D")


class LoraTransposed(Adapter):
    """The adapter of GPT-2's linear layer."""

    def product(self) -> Tensor:
        return self.lora_scale * (self.lora_b @ self.lora_a).T


def _transposed(kind: type[nn.Module]) -> type[Adapter]:
    LoraTransposed.plain = kind
    return LoraTransposed


def _adapt(name: str, layer: Any, rank: int, alpha: float, generator: torch.Generator | None) -> None:
    """Add an adapter to a layer in place; hooks and tied weights are kept."""
    kind, weight = _kind(layer), layer.weight
    assert kind is not None
    matrix = weight.T if kind is LoraTransposed else weight
    outputs, inputs = matrix.flatten(1).shape
    if not 1 <= rank <= min(outputs, inputs):
        raise RecipeError(
            f"lora: rank = {rank}, but {name} has {inputs} inputs and {outputs} outputs, so its rank is from 1 to "
            f"{min(outputs, inputs)}; lower it, or leave the layer out of the targets"
        )
    a = torch.empty(rank, *matrix.shape[1:], dtype=weight.dtype, device=weight.device)
    nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=generator)
    layer.__class__ = kind
    layer.lora_a, layer.lora_scale = nn.Parameter(a), alpha / rank
    layer.lora_b = nn.Parameter(weight.new_zeros(outputs, rank, *[1] * (matrix.dim() - 2)))


def _matching(targets: str | Sequence[str], layers: dict[str, nn.Module], module: nn.Module) -> list[str]:
    """Return the names of the layers that the targets match, in model order; every target must match one."""
    found: set[str] = set()
    for target in [targets] if isinstance(targets, str) else targets:
        some = _chosen(target, layers, module)
        if not some:
            _refuse(f"targets = {target!r} matches no layer", layers)
        found |= some
    if not found:
        _refuse("there are no targets", layers)
    return [name for name in layers if name in found]


def _refuse(why: str, layers: dict[str, nn.Module]) -> None:
    there = shortened(", ".join(layers)) if layers else "none that is an nn.Linear or an ungrouped convolution"
    raise RecipeError(f'lora: {why}; take "all", "head", "attention", or of the layers: {there}')


def _chosen(target: str, layers: dict[str, nn.Module], module: nn.Module) -> set[str]:
    if target == "all":
        return {*layers}
    if target == "head":
        return {*[name for name, layer in layers.items() if isinstance(layer, nn.Linear)][-1:]}
    if target == "attention":
        return {name for name in layers if _attends(name, module)}
    return {name for name in layers if _named(name, target)}


def _named(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}") or fnmatchcase(name, target)


def _attends(name: str, module: nn.Module) -> bool:
    """Return whether a layer is inside an attention module, judged by the names and classes of its parents."""
    steps = name.split(".")
    holders = [".".join(steps[: i + 1]) for i in range(len(steps) - 1)]
    kinds = (type(module.get_submodule(holder)).__name__ for holder in holders)
    return any(ATTENTION.search(word) for word in (*steps[:-1], *kinds))


def _in_full(also: str | Sequence[str], layers: dict[str, nn.Module], module: nn.Module) -> set[nn.Parameter]:
    """Return the parameters that are trained in full. A tied one is found by each of its names."""
    named = [*module.named_parameters(remove_duplicate=False)]
    found: set[nn.Parameter] = set()
    for each in [also] if isinstance(also, str) else also:
        parts = ("weight", "bias")
        inside = {f"{layer}.{part}".removeprefix(".") for layer in _chosen(each, layers, module) for part in parts}
        some = {parameter for name, parameter in named if name in inside or _named(name, each)}
        if not some:
            raise RecipeError(f"lora: also = {each!r} matches no layer and no parameter")
        found |= some
    return found
