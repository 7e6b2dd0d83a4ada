"""A model as one flat vector: its parameters are views into it.

All of the mathematics of the methods happens on these vectors of size d; the module only runs the network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from fedflat.errors import RecipeError
from fedflat.kernels.chain import Chain

ACTIVATIONS = (nn.ReLU, nn.GELU, nn.Tanh, nn.SiLU, nn.ELU, nn.LeakyReLU, nn.Sigmoid)


@dataclass(frozen=True)
class Layout:
    """Which slice of the flat vector each named tensor is: in model order, C order, without gaps.

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
        """The named tensors inside a vector; they share its memory."""
        return {name: vector[part].view(self.shapes[name]) for name, part in self.slices.items()}

    def mask(self, chosen: Callable[[str], bool]) -> Tensor:
        """A boolean vector that is true in the tensors whose names are chosen."""
        return torch.cat([torch.full((shape.numel(),), chosen(name)) for name, shape in self.shapes.items()])

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The vector that holds the named tensors, copied."""
        return torch.cat([tensors[name].detach().reshape(-1) for name in self.shapes])


@dataclass(frozen=True)
class Forward:
    """What one pass over one batch showed: the logits, what entered the head, the hidden activations a and mean(a²)."""

    logits: Tensor
    features: Tensor | None
    activations: dict[str, Tensor]
    squares: dict[str, Tensor]


class Watched(torch.autograd.Function):
    """a ↦ (a, mean(a²)), whose gradient g + 2a/n · s is made in one pass over a.

    `a.square().mean()` beside the further use of a costs several times as much, in copies of a.
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
    """A module whose parameters live in the vector `weights`.

    With `autocast` its passes compute in bfloat16 where torch deems that safe; weights, gradients and logits stay as
    they are.

    `head` is the slice of the linear layer whose output is the module's; the rest is the body. Floating
    buffers (batch-norm statistics) live in the vector `buffers`; integer ones are counters and stay with the module.
    """

    def __init__(
        self, module: nn.Module, dtype: torch.dtype = torch.float32, device: str = "cpu", autocast: bool = False
    ) -> None:
        self.autocast = autocast
        self.module = module.to(device=device, dtype=dtype)
        self.layout = Layout.of(self.module.named_parameters())
        self.buffer_layout = Layout.of((n, b) for n, b in self.module.named_buffers() if b.is_floating_point())
        if not self.layout.shapes:
            raise RecipeError("model: it has no parameters, so there is nothing to train")
        fixed = {name for name, parameter in self.module.named_parameters() if not parameter.requires_grad}
        self.fixed = self.layout.mask(fixed.__contains__).to(device) if fixed else None
        self.choose_head(None)
        self.weights = self.layout.flatten(dict(self.module.named_parameters()))
        self.buffers = _joined(dict(self.module.named_buffers()), self.buffer_layout, self.weights)
        self.bind(self.weights)
        views = self.buffer_layout.views(self.buffers)
        for name, buffer in self.module.named_buffers():
            buffer.data = views[name] if name in views else buffer.clone()

    @property
    def size(self) -> int:
        """d, the number of parameters."""
        return self.layout.size

    @property
    def chain(self) -> Chain | None:
        """What computes the cross-entropy's gradient without autograd, while the module is plain enough for that."""
        return None if self.autocast else Chain.of(self.module)

    @torch.no_grad()
    def choose_head(self, sample: Tensor | None) -> None:
        """Take as the head the linear layer whose output is the model's for this sample; without one, the last."""
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
            linear = [entry for entry in linear if outputs.get(entry[0]) is logits] or linear
        self._use_head(linear[-1][0])

    def _use_head(self, name: str) -> None:
        self._head_name, self.head_module, self.head = name, self.module.get_submodule(name), self._span(name)

    def __reduce__(self) -> Any:
        """Another process gets vectors of its own: torch would hand it the same memory to write to."""
        device = str(self.weights.device)
        return _revived, (self.module, self.weights.dtype, device, self.autocast, self._head_name)

    def reset_counters(self) -> None:
        """Integer buffers count the batches of one client's round; they are neither sent nor kept."""
        for buffer in self.module.buffers():
            if not buffer.is_floating_point():
                buffer.zero_()

    def bind(self, weights: Tensor) -> None:
        """Let the module's parameters be views into `weights` from now on."""
        self.weights = weights
        for parameter, view in zip(self.module.parameters(), self.layout.views(weights).values(), strict=True):
            parameter.data = view

    @contextmanager
    def standing_at(self, weights: Tensor, buffers: Tensor) -> Iterator[None]:
        """Within this context the module is a frozen model: other weights and statistics, in evaluation mode."""
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
        """The gradient of a scalar with respect to the weights, in a vector of its own."""
        gradient = torch.zeros_like(self.weights)
        parameters = list(self.module.parameters())
        for parameter, view in zip(parameters, self.layout.views(gradient).values(), strict=True):
            parameter.grad = view
        objective.backward()
        for parameter in parameters:
            parameter.grad = None
        return gradient

    def partials(self, objective: Tensor) -> list[Tensor]:
        """The gradient as autograd makes it, a tensor for each parameter; zeros for one that has no part in it.

        By `backward`, because `autograd.grad` refuses modules that checkpoint their activations by re-entering it.
        """
        parameters = list(self.module.parameters())
        objective.backward()
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for p in parameters]
        for parameter in parameters:
            parameter.grad = None
        return [gradient.contiguous() for gradient in gradients]

    def differentiate_head(self, objective: Tensor) -> Tensor:
        """The gradient with respect to the head alone; the graph stays, so that the pass can be used again."""
        parameters = list(self.head_module.parameters())
        grads = torch.autograd.grad(objective, parameters, retain_graph=True, allow_unused=True)
        # What enters the head does not depend on it, so a term of the features alone has no gradient here.
        pairs = zip(parameters, grads, strict=True)
        return torch.cat([p.new_zeros(p.numel()) if g is None else g.reshape(-1) for p, g in pairs])

    def _span(self, module_name: str) -> slice:
        slices = [s for n, s in self.layout.slices.items() if n.startswith(f"{module_name}." if module_name else "")]
        return slice(slices[0].start, slices[-1].stop)

    @contextmanager
    def listening(self, features: bool = False, activations: bool = False) -> Iterator[Tap]:
        """Within this context a pass also shows what enters the head, or what leaves each activation module."""
        tap = Tap(self.module, self.weights.dtype, self.autocast)
        with ExitStack() as hooks:
            if features:
                hooks.callback(self.head_module.register_forward_pre_hook(tap.enter_head).remove)
            if activations:
                for name, module in _activation_modules(self.module):
                    hooks.callback(module.register_forward_hook(tap.leave(name)).remove)
            yield tap


class Tap:
    """Runs a module and keeps what its hooks saw in that pass."""

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
        """A pass through the module or its head, in the network's precision."""
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


def _activation_modules(module: nn.Module) -> list[tuple[str, nn.Module]]:
    found: list[tuple[str, nn.Module]] = [(n, m) for n, m in module.named_modules() if isinstance(m, ACTIVATIONS)]
    if not found:
        kinds = ", ".join(kind.__name__ for kind in ACTIVATIONS)
        raise RecipeError(
            f"model: no activation module to look at; use modules such as nn.ReLU ({kinds}), not functions"
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
