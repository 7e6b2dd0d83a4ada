"""The mean loss over fixed samples as a function of the weights, with its derivatives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.autograd.forward_ad as fwAD
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from fedflat.engine import keep_freed_memory
from fedflat.errors import TrainingError
from fedflat.local import Batch, Loss
from fedflat.models import Layout

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class Objective:
    """The mean loss f(w) = (1/N) Σ ℓ(w; x) in evaluation mode, without weight decay, augmentation or randomness.

    Vectors are flat, in the order of the module's parameters.

    Args:
        module: the network, which holds the weights w. It is put into evaluation mode.
        loss: the mean loss of a batch, given outputs and labels.
        batches: the samples.
        names: treat f as a function of these parameters alone (for example one layer) and hold the others fixed.

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
        _refuse_infinite(module)
        self._forward_mode = any(isinstance(layer, CONVOLUTIONS) for layer in module.modules())
        keep_freed_memory()

    def of(self, names: Sequence[str]) -> Objective:
        """The same mean loss as a function of these parameters alone."""
        return Objective(self.module, self.loss, self.batches, names)

    @property
    def size(self) -> int:
        """d, the number of parameters that f is a function of."""
        return self.layout.size

    @property
    def dtype(self) -> torch.dtype:
        return self.parameters[0].dtype

    @property
    def weights(self) -> Tensor:
        """A copy of the module's current weights w."""
        return flat([parameter.detach() for parameter in self.parameters])

    @contextmanager
    def at(self, weights: Tensor) -> Iterator[None]:
        """Sets other weights inside a `with` block and restores the old ones exactly afterwards."""
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
        """f at the module's weights, with forward passes only."""
        return sum(float(self._mean(batch)) * self.share(batch) for batch in self.batches)

    def gradient(self) -> Tensor:
        """∇f at the module's weights."""
        total = torch.zeros_like(self.weights)
        for batch in self.batches:
            total.add_(flat(torch.autograd.grad(self._mean(batch), self.parameters)), alpha=self.share(batch))
        return total

    def product(self, vector: Tensor) -> Tensor:
        """∇²f · v at the module's weights, summed over the batches: the derivative of each batch's gradient along v."""
        total = torch.zeros_like(self.weights)
        directions = list(self.layout.views(vector.to(total)).values())
        for batch in self.batches:
            total.add_(flat(self._along(batch, directions)), alpha=self.share(batch))
        return total

    def _along(self, batch: Batch, directions: list[Tensor]) -> Sequence[Tensor]:
        """The Hessian product of one batch, by a second backward pass or by forward-over-reverse differentiation.

        For convolutions torch's second backward pass computes more than is needed, and forward-over-reverse is a tenth
        faster. For matrix products it is a third slower. Some layers (attention, group norm in channels_last) have no
        forward derivative in torch.
        """
        if self._forward_mode:
            try:
                return self._dual(batch, directions)
            except RuntimeError:  # an error of the module itself is raised again below
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
        """G v with G = (1/N) Σ Jᵀ ∇²_z ℓ J, where J is the derivative of a sample's outputs z in the weights."""
        total = torch.zeros_like(self.weights)
        directions = list(self.layout.views(vector.to(total)).values())
        for batch in self.batches:
            total.add_(flat(self._linearised(batch, directions)), alpha=self.share(batch))
        return total

    def _linearised(self, batch: Batch, directions: list[Tensor]) -> Sequence[Tensor]:
        """Jᵀ ∇²_z ℓ J v of one batch. Jᵀu is linear in u, so its derivative in u, applied to v, is J v."""
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
        """n_b/N, the weight of the batch's mean in the mean over all samples."""
        return len(batch[1]) / self.samples

    def _mean(self, batch: Batch) -> Tensor:
        inputs, labels = batch
        return self.loss(self.module(inputs), labels)


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenates tensors into one flat vector."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def batch_layer(module: nn.Module) -> str | None:
    """The first layer that normalises with the statistics of the batch also in evaluation mode, if there is one.

    In such a network the loss of a sample depends on the other samples of its batch.
    """
    layers = ((name, layer) for name, layer in module.named_modules() if isinstance(layer, _BatchNorm))
    return next((name for name, layer in layers if layer.running_mean is None), None)


def _refuse_infinite(module: nn.Module) -> None:
    """Raises an error that names a parameter that is not finite: nothing can be measured there."""
    for name, parameter in module.named_parameters():
        if not bool(parameter.isfinite().all()):
            raise TrainingError(
                f"{name}: holds weights that are not finite (NaN or infinite), so there is no flatness to measure; "
                "the model has diverged"
            )
