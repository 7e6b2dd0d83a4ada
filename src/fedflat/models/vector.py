"""A model as one flat vector: its trained parameters are views into it.

Methods compute with these vectors of size d; the module only runs the network.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from fedflat.errors import RecipeError
from fedflat.models.layout import Layout
from fedflat.models.outputs import plain_output, take_logits
from fedflat.models.tap import Tap, activation_modules, attention_layers


class Network:
    """A module whose trained parameters are stored in the vector `weights`.

    A parameter is trained if it has `requires_grad` when the network is created. The others are the *base*: they stay
    in the module, in the network's precision, and never change. `base_digest` identifies them.

    `head` is the slice of the linear layer whose output is the module's output; the rest is the body. The slice is
    empty if there is no such layer, or if it is frozen or shares a parameter with another one. `ends_in_head` says
    whether the output is the head's, and not computed from it. Floating-point buffers (batch-norm statistics) are
    stored in the vector `buffers`; integer buffers are counters and masks, which stay in the module.

    Args:
        module: the module; it is converted in place.
        dtype: the dtype of weights, gradients and logits.
        device: the device of the module and the vectors.
        autocast: whether passes compute in bfloat16 where torch considers it safe.

    Raises:
        RecipeError: the module has no parameters to train.

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
        self.recordings: object = None  # of the local step by `kernels/graph.py`, which go when the network goes
        self.module = plain_output(module.to(device=device, dtype=dtype))
        named = dict(self.module.named_parameters())
        trained = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
        if not trained:
            why = "all of its parameters are frozen (requires_grad = False)" if named else "it has no parameters"
            raise RecipeError(f"model: {why}, so there is nothing to train")
        if any(map(nn.parameter.is_lazy, named.values())):
            raise RecipeError("model: it has lazy layers without a shape; call it once on a sample before training")
        self.trained: list[Tensor] = list(trained.values())
        self.layout = Layout.of(trained.items())
        self.base = {name: parameter for name, parameter in named.items() if name not in trained}
        self.buffer_layout = Layout.of((n, b) for n, b in self.module.named_buffers() if b.is_floating_point())
        self.ends_in_head = True  # until a pass of `choose_head` shows that the output is made of the head's
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
    def choose_head(self, sample: Tensor | None) -> Any:
        """Set the head to the linear layer whose output is the model's output, or to the last one.

        Args:
            sample: a batch of inputs; None takes the last linear layer.

        Returns:
            The model's output for the sample.
        """
        logits: Any = None
        linear = _linear_layers(self.module)
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
            found = [entry for entry in linear if outputs.get(entry[0]) is logits]
            self.ends_in_head = bool(found)
            linear = found or linear
        self._use_head(linear[-1][0] if linear else None)
        return logits

    def _use_head(self, name: str | None) -> None:
        self._head_name = name
        self.head = slice(0, 0) if name is None else self._span(name)

    @property
    def head_module(self) -> nn.Module:
        """The linear layer whose output is the module's output.

        Raises:
            RecipeError: the module has no linear layer.
        """
        if self._head_name is None:
            raise RecipeError(
                "model: this needs a head, and the model has no nn.Linear to serve as one; "
                "end it in nn.Linear, or take a method that does not look at the head"
            )
        return self.module.get_submodule(self._head_name)

    def __reduce__(self) -> Any:
        """Rebuild the vectors in another process; torch would share memory that both processes could write to."""
        device = str(self.weights.device)
        head = self._head_name, self.ends_in_head
        return _revived, (self.module, self.weights.dtype, device, self.autocast, *head)

    def reset_counters(self) -> None:
        """Reset the integer buffers, which are neither sent nor kept.

        A scalar counts the batches of a client's round and is set to 0. Other buffers, such as masks, get the values
        that they had when the network was created.
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
        statistics, training = self.buffers.clone(), self.module.training
        self.buffers.copy_(buffers)
        self.module.eval()
        try:
            with self.moved_to(weights), torch.no_grad():
                yield
        finally:
            self.buffers.copy_(statistics)
            self.module.train(training)

    @contextmanager
    def moved_to(self, weights: Tensor) -> Iterator[None]:
        """Temporarily use other weights in place of the network's own, which stay untouched."""
        own = self.weights
        self.bind(weights)
        try:
            yield
        finally:
            self.bind(own)

    def differentiate(self, objective: Tensor) -> Tensor:
        """Return the gradient of a scalar with respect to the weights, in a new vector.

        Each part moves to its place as soon as autograd has it. To add all of them to zeros would read and write the
        vector once more.
        """
        gradient = torch.empty_like(self.weights)
        places = dict(zip(self.trained, self.layout.views(gradient).values(), strict=True))
        waiting = {*self.trained}

        def move(parameter: Tensor) -> None:
            part, parameter.grad = parameter.grad, None
            assert part is not None
            if parameter in waiting:
                waiting.remove(parameter)
                places[parameter].copy_(part.to_dense())
            else:  # activation checkpointing comes back to a parameter
                places[parameter].add_(part)

        with ExitStack() as hooks:
            for parameter in self.trained:
                parameter.grad = None
                if parameter.requires_grad:  # a module may freeze some of them when it is set to train
                    hooks.callback(parameter.register_post_accumulate_grad_hook(move).remove)
            objective.backward()
        for parameter in waiting:
            places[parameter].zero_()
        return gradient

    def partials(self, objective: Tensor) -> list[Tensor]:
        """Return the gradient as autograd computes it, one tensor per trained parameter; zeros for unused parameters.

        This uses `backward`, because `autograd.grad` does not support modules with re-entrant activation checkpointing.
        """
        for parameter in self.trained:
            parameter.grad = None  # it may hold a part of a gradient whose computation failed
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
        """Return the slice of a module's trained parameters; empty if it has none or shares one with another module."""
        inside = {*self.module.get_submodule(name).modules()}
        shared = {p for m in self.module.modules() if m not in inside for p in m.parameters(recurse=False)}
        slices = [s for n, s in self.layout.slices.items() if n.startswith(f"{name}." if name else "")]
        if not slices or not shared.isdisjoint(self.module.get_submodule(name).parameters()):
            return slice(0, 0)
        return slice(slices[0].start, slices[-1].stop)

    @contextmanager
    def listening(self, features: bool = False, activations: bool = False, attention: bool = False) -> Iterator[Tap]:
        """Within this context a pass also records the input of the head, or the output of each activation module.

        With `attention`, the combined output of each attention's heads counts as an activation: `AttentionOutput`, or
        the input of the last linear layer of an attention of `transformers`.
        """
        tap = Tap(self.module, self.weights.dtype, self.autocast)
        with ExitStack() as hooks:
            if features:
                hooks.callback(self.head_module.register_forward_pre_hook(tap.enter_head).remove)
            if activations or attention:
                for name, module in activation_modules(self.module, attention):
                    hooks.callback(module.register_forward_hook(tap.leave(name)).remove)
            for name, module in attention_layers(self.module) if attention else ():
                hooks.callback(module.register_forward_pre_hook(tap.enter(name)).remove)
            yield tap


def _revived(
    module: nn.Module, dtype: torch.dtype, device: str, autocast: bool, head: str | None, ends_in_head: bool
) -> Network:
    network = Network(module, dtype, device, autocast)
    network._use_head(head)
    network.ends_in_head = ends_in_head
    return network


def _linear_layers(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the linear layers with their names. One that peft has wrapped is one layer, with its adapters."""
    named = [*module.named_modules()]
    wrapped = tuple(f"{name}." for name, each in named if isinstance(getattr(each, "base_layer", None), nn.Linear))
    return [
        (name, each)
        for name, each in named
        if f"{name}." in wrapped or (isinstance(each, nn.Linear) and not name.startswith(wrapped))
    ]


def _keep_output(outputs: dict[str, Tensor], name: str, module: nn.Module, arguments: Any, output: Tensor) -> None:
    outputs[name] = output


def _joined(tensors: Mapping[str, Tensor], layout: Layout, like: Tensor) -> Tensor:
    return layout.flatten(tensors) if layout.shapes else like.new_zeros(0)


def unit(vector: Tensor) -> Tensor:
    """Return x/‖x‖, or zero if x is zero."""
    return normalize(vector, dim=0, eps=torch.finfo(vector.dtype).tiny)
