"""What flatness is a property of: the mean loss of fixed samples as a function of the weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.autograd.forward_ad as fwAD
from torch import Tensor, nn
from torch.func import functional_call

from fedflat.heap import keep_freed_memory
from fedflat.rule import Batch, Loss
from fedflat.vector import Layout

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class Objective:
    """f(w) = (1/N) Σ ℓ(w; x) in evaluation mode, without decay, augmentation or anything drawn.

    With `names` it is a function of these parameters alone (a layer's), the others standing still. Vectors are flat, in
    the order of the module's parameters.

    >>> x = torch.tensor([[1.0], [3.0]])
    >>> module = nn.Linear(1, 1, bias=False)
    >>> f = Objective(module, lambda z, y: 0.5 * (z - y).square().mean(), [(x, x)])   # f(w) = ½ mean(x²) (w − 1)²
    >>> with f.at(torch.tensor([3.0])):
    ...     f.value(), f.gradient().tolist()
    (10.0, [10.0])
    """

    def __init__(
        self, module: nn.Module, loss: Loss, batches: Sequence[Batch], names: Sequence[str] | None = None
    ) -> None:
        self.module, self.loss, self.batches = module.eval(), loss, batches
        chosen = {n: p for n, p in module.named_parameters() if p.requires_grad and (names is None or n in names)}
        self.parameters = list(chosen.values())
        self.layout = Layout.of(chosen.items())
        self.samples = sum(len(labels) for _, labels in batches)
        self._forward_mode = any(isinstance(layer, CONVOLUTIONS) for layer in module.modules())
        keep_freed_memory()

    def of(self, names: Sequence[str]) -> Objective:
        """The same mean loss as a function of these parameters alone."""
        return Objective(self.module, self.loss, self.batches, names)

    @property
    def size(self) -> int:
        """d, the number of the parameters that it is a function of."""
        return self.layout.size

    @property
    def dtype(self) -> torch.dtype:
        return self.parameters[0].dtype

    @property
    def weights(self) -> Tensor:
        """w, where the module stands, as a copy."""
        return flat([parameter.detach() for parameter in self.parameters])

    @contextmanager
    def at(self, weights: Tensor) -> Iterator[None]:
        """The module with other weights; afterwards its own are put back by copy, the same to the bit."""
        home = self.weights
        try:
            self._move(weights)
            yield
        finally:
            self._move(home)

    @torch.no_grad()
    def _move(self, weights: Tensor) -> None:
        views = self.layout.views(weights.to(self.dtype))
        for parameter, view in zip(self.parameters, views.values(), strict=True):
            parameter.copy_(view)

    @torch.no_grad()
    def value(self) -> float:
        """f at the module's weights, by forward passes alone."""
        return sum(float(self._mean(batch)) * self.share(batch) for batch in self.batches)

    def gradient(self) -> Tensor:
        """∇f at the module's weights."""
        total = torch.zeros_like(self.weights)
        for batch in self.batches:
            total.add_(flat(torch.autograd.grad(self._mean(batch), self.parameters)), alpha=self.share(batch))
        return total

    def product(self, vector: Tensor) -> Tensor:
        """∇²f · v at the module's weights, batch by batch: the derivative along v of each batch's gradient."""
        total = torch.zeros_like(self.weights)
        directions = list(self.layout.views(vector.to(total)).values())
        for batch in self.batches:
            total.add_(flat(self._along(batch, directions)), alpha=self.share(batch))
        return total

    def _along(self, batch: Batch, directions: list[Tensor]) -> Sequence[Tensor]:
        """By a second backward pass, or forward over reverse.

        Of convolutions torch's second backward pass computes more than is asked for, so that forward over reverse is
        a tenth faster; of matrix products it is a third slower. Some layers (attention, group norm in channels_last)
        have no forward derivative in torch.
        """
        if self._forward_mode:
            try:
                return self._dual(batch, directions)
            except RuntimeError:  # one of the module itself comes again below
                self._forward_mode = False
        slopes = torch.autograd.grad(self._mean(batch), self.parameters, create_graph=True)
        return torch.autograd.grad(slopes, self.parameters, directions)

    def _dual(self, batch: Batch, directions: list[Tensor]) -> list[Tensor]:
        inputs, labels = batch
        with fwAD.dual_level():
            pairs = zip(self.layout.shapes, self.parameters, directions, strict=True)
            duals = {name: fwAD.make_dual(p.detach().requires_grad_(), v) for name, p, v in pairs}
            loss = self.loss(functional_call(self.module, duals, (inputs,)), labels)
            slopes = torch.autograd.grad(loss, list(duals.values()))
            tangents = [fwAD.unpack_dual(slope).tangent for slope in slopes]
        return [torch.zeros_like(v) if t is None else t for t, v in zip(tangents, directions, strict=True)]

    def gauss_newton(self, vector: Tensor) -> Tensor:
        """G v with G = (1/N) Σ Jᵀ ∇²_z ℓ J, J the derivative of a sample's outputs z in the weights."""
        total = torch.zeros_like(self.weights)
        directions = list(self.layout.views(vector.to(total)).values())
        for batch in self.batches:
            total.add_(flat(self._linearised(batch, directions)), alpha=self.share(batch))
        return total

    def _linearised(self, batch: Batch, directions: list[Tensor]) -> Sequence[Tensor]:
        """Jᵀ ∇²_z ℓ J v of one batch. Jᵀu is linear in u, so that its derivative in u, applied to v, is J v."""
        inputs, labels = batch
        outputs = self.module(inputs)
        u = torch.zeros_like(outputs, requires_grad=True)
        pulled = torch.autograd.grad(outputs, self.parameters, u, create_graph=True, materialize_grads=True)
        (pushed,) = torch.autograd.grad(pulled, u, directions, retain_graph=True, materialize_grads=True)
        z = outputs.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.loss(z, labels), z, create_graph=True)
        (bent,) = torch.autograd.grad(slope, z, pushed, materialize_grads=True)
        return torch.autograd.grad(outputs, self.parameters, bent, materialize_grads=True)

    def share(self, batch: Batch) -> float:
        """n_b/N: with it a batch's mean enters the mean over all samples."""
        return len(batch[1]) / self.samples

    def _mean(self, batch: Batch) -> Tensor:
        inputs, labels = batch
        return self.loss(self.module(inputs), labels)


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors one after the other in one vector."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])
