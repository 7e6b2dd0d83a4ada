"""Records of a forward pass: the logits, the input of the head, the hidden activations and their mean squares."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedflat.errors import RecipeError
from fedflat.models.blocks import Activation, AttentionOutput
from fedflat.models.faster import faster_operations
from fedflat.tokens import is_tokens

# The last linear layer of an attention of BERT's and of GPT-2's kind.
LAST = re.compile(r"(attention\.output\.dense|attn\.c_proj)$")
ACTIVATIONS = (nn.ReLU, nn.GELU, nn.Tanh, nn.SiLU, nn.ELU, nn.LeakyReLU, nn.Sigmoid, Activation)


@dataclass(frozen=True)
class Forward:
    """The results of one pass over a batch: logits, input of the head, hidden activations a and mean(a²)."""

    logits: Tensor
    features: Tensor | None
    activations: dict[str, Tensor]
    squares: dict[str, Tensor]


class Watched(torch.autograd.Function):
    """a ↦ (a, mean(a²)), with the gradient g + 2a/n · s computed in one pass over a.

    Computing `a.square().mean()` separately costs several times as much, because it copies a.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor) -> tuple[Tensor, Tensor]:
        norm = torch.linalg.vector_norm(a, dtype=torch.promote_types(a.dtype, torch.float32))
        return a.view_as(a), norm.square() / a.numel()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor, s: Tensor) -> Tensor:
        (a,) = ctx.saved_tensors
        return torch.addcmul(g, a, s * (2 / a.numel()))


class Tap:
    """Runs a module and keeps what its hooks recorded in that pass."""

    def __init__(self, module: nn.Module, dtype: torch.dtype, autocast: bool) -> None:
        self._module, self._dtype, self._autocast = module, dtype, autocast
        self._features: Tensor | None = None
        self._activations: dict[str, Tensor] = {}
        self._squares: dict[str, Tensor] = {}
        self._inputs: Tensor | None = None

    def __call__(self, inputs: Tensor) -> Forward:
        self._features, self._activations, self._squares, self._inputs = None, {}, {}, inputs
        logits = self.through(self._module, inputs)
        return Forward(logits, self._of_the_text(logits), self._activations, self._squares)

    def through(self, module: nn.Module, inputs: Tensor) -> Tensor:
        """Run the module or its head, in the network's precision."""
        with faster_operations():
            if not self._autocast:
                output: Tensor = module(inputs)
                return output
            with torch.autocast(inputs.device.type, torch.bfloat16):
                output = module(inputs)
        return output.to(self._dtype)

    def _of_the_text(self, logits: Tensor) -> Tensor | None:
        """Return the input of the head. If it is that of every token, and a text has one output, take its token's."""
        features, tokens = self._features, self._inputs
        if features is None or tokens is None or features.dim() != logits.dim() + 1 or not is_tokens(tokens):
            return features
        if features.shape[:2] != tokens.shape:
            return features
        return features[torch.arange(len(tokens), device=tokens.device), read_token(self._module, tokens)]

    def enter_head(self, module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        self._features = arguments[0]

    def leave(self, name: str) -> Any:
        def keep(module: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor:
            # A module that is used twice in one pass has two outputs, and both count.
            twice = sum(seen == name or seen.startswith(f"{name}#") for seen in self._activations)
            key = f"{name}#{twice + 1}" if twice else name
            self._activations[key], self._squares[key] = self._squared(output)
            return self._activations[key]

        return keep

    def enter(self, name: str) -> Any:
        keep = self.leave(name)

        def before(module: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return keep(module, (), arguments[0]), *arguments[1:]

        return before

    def _squared(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """Return a and mean(a²); in a padded batch of texts the mean is over the positions of tokens alone."""
        there = _places(self._inputs, output)
        if there is None:
            pair: tuple[Tensor, Tensor] = Watched.apply(output)  # type: ignore[no-untyped-call]
            return pair
        return output, output[there].to(torch.promote_types(output.dtype, torch.float32)).square().mean()


def _places(inputs: Tensor | None, output: Tensor) -> Tensor | None:
    """Return which entries of an output are those of tokens; None if all are, or if it is not for every token.

    Some models, such as OPT, join the texts of a batch to one row of tokens.
    """
    if inputs is None or not is_tokens(inputs):
        return None
    there = inputs >= 0
    if bool(there.all()):
        return None
    if output.dim() > 2 and output.shape[:2] == there.shape:
        return there
    return there.flatten() if output.shape[:-1] == (there.numel(),) else None


def read_token(module: nn.Module, tokens: Tensor) -> Tensor:
    """Return the place of the token of each text whose output is the text's, in classifiers of GPT-2's kind."""
    padding = getattr(getattr(module, "config", None), "pad_token_id", None)
    there = tokens >= 0 if padding is None else (tokens >= 0) & (tokens != padding)
    return (torch.arange(tokens.shape[1], device=tokens.device) * there).argmax(dim=1)


def _is_activation(module: nn.Module) -> bool:
    """Whether this is an activation of PyTorch, of ours, or of `transformers`, which has its own classes for GELU."""
    kind = type(module)
    theirs = kind.__module__ == "transformers.activations" and kind.__name__ != "LinearActivation"
    return theirs or isinstance(module, ACTIVATIONS)


def activation_modules(module: nn.Module, attention: bool) -> list[tuple[str, nn.Module]]:
    """Return the modules whose outputs count as activations, with their names.

    Args:
        module: the module to search.
        attention: whether to include the outputs of attention (`AttentionOutput`).

    Raises:
        RecipeError: there are none, or `attention` is true and there is no attention, also none of `transformers`.
    """
    found: list[tuple[str, nn.Module]] = [
        (name, each)
        for name, each in module.named_modules()
        if _is_activation(each) or (attention and isinstance(each, AttentionOutput))
    ]
    if attention and not any(isinstance(m, AttentionOutput) for _, m in found) and not attention_layers(module):
        raise RecipeError(
            "model: no attention to look at; a network of your own marks it by fedflat.models.AttentionOutput"
        )
    if not found:
        known = ", ".join(kind.__name__ for kind in ACTIVATIONS)
        raise RecipeError(
            f"model: no activation module to look at; use modules such as nn.ReLU ({known}), not functions"
        )
    return found


def attention_layers(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the last linear layers of the attentions of `transformers`, whose inputs are what the heads have mixed."""
    found = [(name, each) for name, each in module.named_modules() if LAST.search(name)]
    return [(name, each) for name, each in found if _holder(name, module).__module__.startswith("transformers.")]


def _holder(name: str, module: nn.Module) -> type[nn.Module]:
    return type(module.get_submodule(name.rpartition(".")[0]))
