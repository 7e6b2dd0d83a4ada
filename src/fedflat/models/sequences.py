"""Networks for text: rows of token ids, padded with −1 at their end."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedflat.errors import RecipeError
from fedflat.models.blocks import Activation, AttentionOutput, chain
from fedflat.models.networks import Shape

Function = Callable[..., Tensor]


def _tokens(name: str, shape: Shape, vocabulary: int) -> int:
    """Return the length of a sample, or raise a RecipeError if samples are not rows of tokens."""
    if len(shape) != 1 or vocabulary < 1:
        raise RecipeError(f"Model {name} needs rows of token ids, not samples of shape {tuple(shape)}.")
    return shape[0]


def _positive(name: str, **options: int) -> None:
    for option, value in options.items():
        if not isinstance(value, int) or value < 1:
            raise RecipeError(f"Option {option} of model {name} must be a positive whole number, not {value!r}.")


def last(x: Tensor, tokens: Tensor) -> Tensor:
    """Return the vector of each row's last token."""
    return x[torch.arange(x.shape[0], device=x.device), (tokens >= 0).sum(dim=1) - 1]


def _unrolled(x: Tensor, weight_x: Tensor, weight_h: Tensor, bias: Tensor) -> Tensor:
    """Return the hidden states (N, T, H) of an LSTM for inputs (N, T, I), by the definition."""
    h = c = x.new_zeros(x.shape[0], weight_h.shape[1])
    hidden = []
    for entered in F.linear(x, weight_x, bias).unbind(dim=1):
        i, f, g, o = torch.addmm(entered, h, weight_h.t()).chunk(4, dim=1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        hidden.append(h)
    return torch.stack(hidden, dim=1)


class _Fused(torch.autograd.Function):
    """Computes a function with a fast kernel of torch that cannot be differentiated twice.

    Second derivatives use the definition.
    """

    @staticmethod
    def forward(ctx: Any, kernel: Function, definition: Function, *arguments: Tensor) -> Tensor:
        ctx.save_for_backward(*arguments)
        ctx.definition = definition
        with torch.enable_grad():
            ctx.inside = [a.detach().requires_grad_(a.requires_grad) for a in arguments]
            ctx.outside = kernel(*ctx.inside)
        value: Tensor = ctx.outside.detach()
        return value

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            inputs, output = ctx.saved_tensors, ctx.definition(*ctx.saved_tensors)
        else:
            inputs, output = ctx.inside, ctx.outside
        sought = [each for each in inputs if each.requires_grad]
        slopes = iter(
            torch.autograd.grad(output, sought, slope, retain_graph=True, create_graph=torch.is_grad_enabled())
        )
        return None, None, *(next(slopes) if each.requires_grad else None for each in inputs)


def _fused(kernel: Function, definition: Function, *arguments: Tensor) -> Tensor:
    """Return the kernel's value. vmap and exporters do not support custom gradients and get the definition."""
    if torch._C._are_functorch_transforms_active() or torch.compiler.is_compiling():
        return definition(*arguments)
    value: Tensor = _Fused.apply(kernel, definition, *arguments)  # type: ignore[no-untyped-call]
    return value


def _lstm(x: Tensor, weight_x: Tensor, weight_h: Tensor, bias: Tensor) -> Tensor:
    """Return the same as `_unrolled`, computed by torch's LSTM, which is twice as fast."""
    zeros = [x.new_zeros(1, len(x), weight_h.shape[1])] * 2
    weights = [weight_x, weight_h, bias, torch.zeros_like(bias)]
    hidden: Tensor = torch._VF.lstm(x, zeros, weights, True, 1, 0.0, True, False, True)[0]
    return hidden


class Lstm(nn.Module):
    """A layer of LSTM cells with one bias, whose forget gate starts open:

    i, f, g, o = W x_t + U h_{t−1} + b        c_t = σ(f) c_{t−1} + σ(i) tanh(g)        h_t = σ(o) tanh(c_t)
    """

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.weight_x = nn.Parameter(torch.empty(4 * hidden, inputs))
        self.weight_h = nn.Parameter(torch.empty(4 * hidden, hidden))
        self.bias = nn.Parameter(torch.zeros(4 * hidden))
        bound = math.sqrt(6 / (inputs + 5 * hidden))  # Glorot's bound for the matrix [W U]
        for weight in (self.weight_x, self.weight_h):
            nn.init.uniform_(weight, -bound, bound)
        with torch.no_grad():
            self.bias[hidden : 2 * hidden] = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return _fused(_lstm, _unrolled, x, self.weight_x, self.weight_h, self.bias)


class CharLstm(nn.Module):
    """An embedding, layers of LSTM cells, and a linear head on the last hidden state or on all of them."""

    def __init__(
        self, vocabulary: int, classes: int, embedding: int, hidden: int, layers: int, per_token: bool
    ) -> None:
        super().__init__()
        self.per_token = per_token
        self.embedding = nn.Embedding(vocabulary, embedding)
        sizes = [embedding] + [hidden] * layers
        self.layers = nn.Sequential(*(chain(lstm=Lstm(size, hidden), hidden=Activation()) for size in sizes[:-1]))
        self.head = nn.Linear(hidden, classes)
        for weight in (self.embedding.weight, self.head.weight):
            nn.init.xavier_uniform_(weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.layers(self.embedding(tokens.clamp(min=0)))
        logits: Tensor = self.head(x if self.per_token else last(x, tokens))
        return logits


def char_lstm(
    shape: Shape,
    classes: int,
    vocabulary: int,
    per_token: bool = False,
    embedding: int = 8,
    hidden: int = 256,
    layers: int = 2,
) -> nn.Module:
    """LEAF's LSTM for Shakespeare: 817,872 parameters for 80 characters. It reads a text of any length.

    Args:
        shape: shape of a sample: the number of tokens.
        classes: number of outputs.
        vocabulary: number of tokens.
        per_token: whether every token has an output, or only the last one.
        embedding: width of the embedding.
        hidden: width of a layer.
        layers: number of layers.

    Raises:
        RecipeError: samples are not rows of tokens, or an option is invalid.
    """
    _tokens("char-lstm", shape, vocabulary)
    _positive("char-lstm", embedding=embedding, hidden=hidden, layers=layers)
    return CharLstm(vocabulary, classes, embedding, hidden, layers, per_token)


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return softmax(QKᵀ/√d) V by the definition, where a token attends to itself and earlier tokens."""
    later = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).masked_fill(later, -torch.inf)
    mixed: Tensor = scores.softmax(-1) @ v
    return mixed


class CausalAttention(nn.Module):
    """Causal attention with several heads: softmax(QKᵀ/√d) V, where a token attends to itself and earlier tokens."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.mixed = AttentionOutput()
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind()
        mixed = _fused(partial(F.scaled_dot_product_attention, is_causal=True), _attention, q, k, v)
        y: Tensor = self.out(self.mixed(mixed.transpose(1, 2).flatten(2)))
        return y


class CausalBlock(nn.Module):
    """A pre-norm block: x + attention(norm(x)), then x + mlp(norm(x)) with GELU."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = chain(norm=nn.LayerNorm(width), attention=CausalAttention(width, heads))
        self.mlp = chain(
            norm=nn.LayerNorm(width), fc1=nn.Linear(width, 4 * width), gelu=nn.GELU(), fc2=nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        y: Tensor = x + self.mlp(x)
        return y


class Gpt(nn.Module):
    """Token and position embeddings, causal blocks, a last norm and a linear head with weights of its own.

    Padding comes after all tokens of a row, so causal attention never uses it.
    """

    def __init__(
        self, vocabulary: int, classes: int, context: int, width: int, heads: int, layers: int, per_token: bool
    ) -> None:
        super().__init__()
        self.per_token = per_token
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(CausalBlock(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                # As in GPT-2, the more branches add to the residual stream, the smaller their initial weights.
                inner = name.endswith(("out.weight", "fc2.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if inner else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens.clamp(min=0)) + self.position.weight[: tokens.shape[1]]
        x = self.blocks(x)
        logits: Tensor = self.head(self.norm(x if self.per_token else last(x, tokens)))
        return logits


def gpt(
    shape: Shape,
    classes: int,
    vocabulary: int,
    per_token: bool = False,
    width: int = 128,
    heads: int = 4,
    layers: int = 5,
) -> nn.Module:
    """A small GPT-2 without dropout: 1,022,336 parameters for 80 characters and windows of 80.

    Args:
        shape: shape of a sample: the number of tokens, which is the context.
        classes: number of outputs.
        vocabulary: number of tokens.
        per_token: whether every token has an output, or only the last one.
        width: width of the residual stream.
        heads: number of attention heads.
        layers: number of blocks.

    Raises:
        RecipeError: samples are not rows of tokens, or an option is invalid.
    """
    context = _tokens("gpt", shape, vocabulary)
    _positive("gpt", width=width, heads=heads, layers=layers)
    if width % heads:
        raise RecipeError(f"Option heads of model gpt must divide the width {width}, not {heads}.")
    return Gpt(vocabulary, classes, context, width, heads, layers, per_token)
