"""A model as one flat vector: its trained parameters are views into it.

The methods do all of their mathematics on these vectors of size d; the module only runs the network.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from fedflat.errors import RecipeError
from fedflat.models.blocks import Activation, AttentionOutput
from fedflat.models.outputs import plain_output, take_logits

ACTIVATIONS = (nn.ReLU, nn.GELU, nn.Tanh, nn.SiLU, nn.ELU, nn.LeakyReLU, nn.Sigmoid, Activation)


@dataclass(frozen=True)
class Layout:
    """Maps each named tensor to a slice of the flat vector: in model order, C order, without gaps.

    >>> layout = Layout.of(nn.Linear(2, 3).named_parameters())
    >>> layout.size, layout.slices["bias"]
    (9, slice(6, 9, None))
    """

    shapes: Mapping[str, torch.Size]

    @classmethod
    def of(cls, tensors: Iterable[tuple[str, Tensor]]) -> Layout:
        return cls({name: tensor.shape for name, tensor in tensors})

    @cached_property
    def slices(self) -> dict[str, slice]:
        ends, end = {}, 0
        for name, shape in self.shapes.items():
            ends[name] = slice(end, end + shape.numel())
            end += shape.numel()
        return ends

    @cached_property
    def size(self) -> int:
        return sum(shape.numel() for shape in self.shapes.values())

    def views(self, vector: Tensor) -> dict[str, Tensor]:
        """Return the named tensors inside a vector; they share its memory."""
        return {name: vector[part].view(self.shapes[name]) for name, part in self.slices.items()}

    def mask(self, chosen: Callable[[str], bool]) -> Tensor:
        """Return a boolean vector that is true in the tensors whose names are chosen."""
        return torch.cat([torch.full((shape.numel(),), chosen(name)) for name, shape in self.shapes.items()])

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return a vector with copies of the named tensors."""
        return torch.cat([tensors[name].detach().reshape(-1) for name in self.shapes])


@dataclass(frozen=True)
class Forward:
    """The results of one pass over a batch: logits, input of the head, hidden activations a and mean(a²)."""

    logits: Tensor
    features: Tensor | None
    activations: dict[str, Tensor]
    squares: dict[str, Tensor]


class Watched(torch.autograd.Function):
    """a ↦ (a, mean(a²)), with the gradient g + 2a/n · s computed in one pass over a.

    Using `a.square().mean()` beside a costs several times as much, in copies of a.
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


class Network:
    """A module whose trained parameters live in the vector `weights`.

    A parameter is trained if it has `requires_grad` when the network is made. The others are the *base*: they stay in
    the module, in the network's precision, and never change. `base_digest` identifies them.

    With `autocast`, passes compute in bfloat16 where torch considers it safe; weights, gradients and logits keep their
    dtype.

    `head` is the slice of the linear layer whose output is the module's output; the rest is the body. The slice is
    empty if that layer is frozen or shares a parameter with another one. Floating-point buffers (batch-norm statistics)
    live in the vector `buffers`; integer buffers are counters and masks, which stay with the module.

    >>> module = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> Network(module).size
    23
    >>> module[0].requires_grad_(False)
    Linear(in_features=4, out_features=3, bias=True)
    >>> Network(module).size
    8
    """

    def __init__(
        self, module: nn.Module, dtype: torch.dtype = torch.float32, device: str = "cpu", autocast: bool = False
    ) -> None:
        self.autocast = autocast
        self.module = plain_output(module.to(device=device, dtype=dtype))
        named = dict(self.module.named_parameters())
        trained = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
        if not trained:
            why = "all of its parameters are frozen (requires_grad = False)" if named else "it has no parameters"
            raise RecipeError(f"model: {why}, so there is nothing to train")
        self.trained: list[Tensor] = list(trained.values())
        self.layout = Layout.of(trained.items())
        self.base = {name: parameter for name, parameter in named.items() if name not in trained}
        self.buffer_layout = Layout.of((n, b) for n, b in self.module.named_buffers() if b.is_floating_point())
        self.choose_head(None)
        self.weights = self.layout.flatten(trained)
        self.buffers = _joined(dict(self.module.named_buffers()), self.buffer_layout, self.weights)
        self.bind(self.weights)
        views = self.buffer_layout.views(self.buffers)
        for name, buffer in self.module.named_buffers():
            buffer.data = views[name] if name in views else buffer.clone()
        whole = [buffer for buffer in self.module.buffers() if not buffer.is_floating_point()]
        self._integers = [(buffer, buffer.clone() if buffer.dim() else torch.zeros_like(buffer)) for buffer in whole]

    @property
    def size(self) -> int:
        """d, the number of trained parameters."""
        return self.layout.size

    @property
    def base_digest(self) -> str:
        """SHA-256 over names, shapes, dtypes and bytes of the frozen parameters; empty if there are none."""
        if not self.base:
            return ""
        digest = hashlib.sha256()
        for name, parameter in self.base.items():
            tensor = parameter.detach().cpu().contiguous()
            digest.update(repr((name, tuple(tensor.shape), str(tensor.dtype))).encode())
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()

    @torch.no_grad()
    def choose_head(self, sample: Tensor | None) -> None:
        """Set the head to the linear layer whose output is the model's output for this sample; else the last one."""
        linear = [(name, m) for name, m in self.module.named_modules() if isinstance(m, nn.Linear)]
        if not linear:
            raise RecipeError("model: no nn.Linear found to serve as the head; the last layer must be one")
        if sample is not None:
            outputs: dict[str, Tensor] = {}
            with ExitStack() as hooks:
                for name, m in linear:
                    keep = partial(_keep_output, outputs, name)
                    hooks.callback(m.register_forward_hook(keep).remove)
                logits = self.module.eval()(sample)
            if hasattr(logits, "logits"):
                take_logits(self.module)
                logits = logits.logits
            linear = [entry for entry in linear if outputs.get(entry[0]) is logits] or linear
        self._use_head(linear[-1][0])

    def _use_head(self, name: str) -> None:
        self._head_name, self.head_module = name, self.module.get_submodule(name)
        self.head = self._span(name)

    def __reduce__(self) -> Any:
        """Give another process its own vectors: torch would share memory that both could write to."""
        device = str(self.weights.device)
        return _revived, (self.module, self.weights.dtype, device, self.autocast, self._head_name)

    def reset_counters(self) -> None:
        """Reset the integer buffers, which are neither sent nor kept.

        A single number counts the batches of a client's round and returns to 0. A table, such as a mask, returns to
        what it was when the network was made.
        """
        for buffer, first in self._integers:
            buffer.copy_(first)

    def bind(self, weights: Tensor) -> None:
        """Make the trained parameters views into `weights`."""
        self.weights = weights
        for parameter, view in zip(self.trained, self.layout.views(weights).values(), strict=True):
            parameter.data = view

    def load(self, weights: Tensor) -> None:
        """Copy these weights into the network's own."""
        if self.weights.stride() != (1,):
            self.bind(torch.empty_like(weights, device=self.weights.device))
        self.weights.copy_(weights)

    def put_away(self) -> None:
        """Free the memory of the weights while the network is not needed; `load` restores it."""
        self.bind(self.weights.new_zeros(1).expand(self.size))

    @contextmanager
    def standing_at(self, weights: Tensor, buffers: Tensor) -> Iterator[None]:
        """Temporarily turn the module into a frozen model: other weights and statistics, in evaluation mode."""
        own, statistics, training = self.weights, self.buffers.clone(), self.module.training
        self.bind(weights)
        self.buffers.copy_(buffers)
        self.module.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.bind(own)
            self.buffers.copy_(statistics)
            self.module.train(training)

    def differentiate(self, objective: Tensor) -> Tensor:
        """Return the gradient of a scalar with respect to the weights, in a new vector."""
        gradient = torch.zeros_like(self.weights)
        for parameter, view in zip(self.trained, self.layout.views(gradient).values(), strict=True):
            parameter.grad = view
        objective.backward()
        for parameter in self.trained:
            parameter.grad = None
        return gradient

    def partials(self, objective: Tensor) -> list[Tensor]:
        """Return the gradient as autograd computes it, one tensor per trained parameter; zeros for unused parameters.

        This uses `backward`, because `autograd.grad` does not support modules with re-entrant activation checkpointing.
        """
        objective.backward()
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for p in self.trained]
        for parameter in self.trained:
            parameter.grad = None
        return [gradient.contiguous() for gradient in gradients]

    def differentiate_head(self, objective: Tensor) -> Tensor:
        """Return the gradient with respect to the head alone; the graph is kept, so that the pass can be used again."""
        parameters = [parameter for parameter in self.head_module.parameters() if parameter.requires_grad]
        grads = torch.autograd.grad(objective, parameters, retain_graph=True, allow_unused=True)
        # The input of the head does not depend on the head, so a term of the features alone has no gradient here.
        pairs = zip(parameters, grads, strict=True)
        return torch.cat([p.new_zeros(p.numel()) if g is None else g.reshape(-1) for p, g in pairs])

    def _span(self, name: str) -> slice:
        """The slice of a module's trained parameters; empty if it has none, or shares one with another module."""
        inside = {*self.module.get_submodule(name).modules()}
        shared = {p for m in self.module.modules() if m not in inside for p in m.parameters(recurse=False)}
        slices = [s for n, s in self.layout.slices.items() if n.startswith(f"{name}." if name else "")]
        if not slices or not shared.isdisjoint(self.module.get_submodule(name).parameters()):
            return slice(0, 0)
        return slice(slices[0].start, slices[-1].stop)

    @contextmanager
    def listening(self, features: bool = False, activations: bool = False, attention: bool = False) -> Iterator[Tap]:
        """Within this context a pass also records the input of the head, or the output of each activation module.

        With `attention`, the mixed values of each attention count as activations too (`AttentionOutput`).
        """
        tap = Tap(self.module, self.weights.dtype, self.autocast)
        with ExitStack() as hooks:
            if features:
                hooks.callback(self.head_module.register_forward_pre_hook(tap.enter_head).remove)
            if activations or attention:
                for name, module in _activation_modules(self.module, attention):
                    hooks.callback(module.register_forward_hook(tap.leave(name)).remove)
            yield tap


class Tap:
    """Runs a module and keeps what its hooks recorded in that pass."""

    def __init__(self, module: nn.Module, dtype: torch.dtype, autocast: bool) -> None:
        self._module, self._dtype, self._autocast = module, dtype, autocast
        self._features: Tensor | None = None
        self._activations: dict[str, Tensor] = {}
        self._squares: dict[str, Tensor] = {}

    def __call__(self, inputs: Tensor) -> Forward:
        self._features, self._activations, self._squares = None, {}, {}
        logits = self.through(self._module, inputs)
        return Forward(logits, self._features, self._activations, self._squares)

    def through(self, module: nn.Module, inputs: Tensor) -> Tensor:
        """Run the module or its head, in the network's precision."""
        if not self._autocast:
            output: Tensor = module(inputs)
            return output
        with torch.autocast(inputs.device.type, torch.bfloat16):
            output = module(inputs)
        return output.to(self._dtype)

    def enter_head(self, module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        self._features = arguments[0]

    def leave(self, name: str) -> Any:
        def keep(module: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor:
            # A module that is used twice in one pass has two outputs, and both count.
            twice = sum(seen == name or seen.startswith(f"{name}#") for seen in self._activations)
            key = f"{name}#{twice + 1}" if twice else name
            self._activations[key], self._squares[key] = Watched.apply(output)  # type: ignore[no-untyped-call]
            return self._activations[key]

        return keep


def _activation_modules(module: nn.Module, attention: bool) -> list[tuple[str, nn.Module]]:
    kinds = (*ACTIVATIONS, AttentionOutput) if attention else ACTIVATIONS
    found: list[tuple[str, nn.Module]] = [(n, m) for n, m in module.named_modules() if isinstance(m, kinds)]
    if attention and not any(isinstance(m, AttentionOutput) for _, m in found):
        raise RecipeError(
            "model: no attention to look at; a network of your own marks it by fedflat.models.AttentionOutput"
        )
    if not found:
        known = ", ".join(kind.__name__ for kind in ACTIVATIONS)
        raise RecipeError(
            f"model: no activation module to look at; use modules such as nn.ReLU ({known}), not functions"
        )
    return found


def _revived(module: nn.Module, dtype: torch.dtype, device: str, autocast: bool, head: str) -> Network:
    network = Network(module, dtype, device, autocast)
    network._use_head(head)
    return network


def _keep_output(outputs: dict[str, Tensor], name: str, module: nn.Module, arguments: Any, output: Tensor) -> None:
    outputs[name] = output


def _joined(tensors: Mapping[str, Tensor], layout: Layout, like: Tensor) -> Tensor:
    return layout.flatten(tensors) if layout.shapes else like.new_zeros(0)


def unit(vector: Tensor) -> Tensor:
    """Return x/‖x‖, or zero if x is zero."""
    return normalize(vector, dim=0, eps=torch.finfo(vector.dtype).tiny)
