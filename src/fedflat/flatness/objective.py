"""The mean loss over fixed samples as a function of the weights, with its derivatives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import grad
from torch.nn.modules.batchnorm import _BatchNorm

from fedflat.engine import keep_freed_memory
from fedflat.errors import RecipeError, TrainingError
from fedflat.flatness.graphs import Edge, Graph, Graphs, edges, pullback
from fedflat.local import Batch, Loss
from fedflat.models import Layout, plain_output, twice_differentiable
from fedflat.progress import beat
from fedflat.tasks import counted


class _Linearised(NamedTuple):
    """One batch's outputs z, the pullback Jᵀu as a function of u, and ∇_z ℓ as a function of z."""

    outputs: list[Edge]
    u: Tensor
    pulled: list[Edge]
    z: Tensor
    slope: list[Edge]


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
        self.module, self.loss, self.batches = plain_output(module.eval()), loss, batches
        chosen = {n: p for n, p in module.named_parameters() if p.requires_grad and (names is None or n in names)}
        self.parameters = list(chosen.values())
        self.layout = Layout.of(chosen.items())
        self.samples = sum(len(labels) for _, labels in batches)
        _refuse_infinite(module)
        self._counted = sum(counted(loss, labels) for _, labels in batches)
        keep_freed_memory()

    def of(self, names: Sequence[str]) -> Objective:
        """The same mean loss as a function of these parameters alone."""
        return type(self)(self.module, self.loss, self.batches, names)

    @property
    def size(self) -> int:
        """d, the number of parameters that f is a function of."""
        return self.layout.size

    @property
    def dtype(self) -> torch.dtype:
        """The floating-point type of the weights."""
        return self.parameters[0].dtype

    @property
    def weights(self) -> Tensor:
        """A copy of the module's current weights w."""
        return flat([parameter.detach() for parameter in self.parameters])

    def weights_of(self, module: nn.Module) -> Tensor:
        """The weights of another module of the same architecture, in the order of this objective.

        Raises:
            RecipeError: it is not a module of this architecture.
            TrainingError: they are not finite.
        """
        _refuse_other(module, self.layout)
        _refuse_infinite(module)
        return self.layout.flatten(dict(module.named_parameters())).to(self.parameters[0])

    @contextmanager
    def at(self, weights: Tensor) -> Iterator[None]:
        """Sets other weights inside a `with` block and restores the old ones exactly afterwards."""
        home = self.weights
        try:
            self.move(weights)
            yield
        finally:
            self.move(home)

    @torch.no_grad()
    def move(self, weights: Tensor, direction: Tensor | None = None, step: float = 0.0) -> None:
        """Set w ← weights + step · direction in place, in one pass over the memory.

        Args:
            weights: the point to start from.
            direction: a vector of the size of the model; None moves to `weights` itself.
            step: the length of the step along it.
        """
        starts = self._views(weights)
        if direction is None:
            for parameter, start in zip(self.parameters, starts, strict=True):
                parameter.copy_(start)
            return
        for parameter, start, along in zip(self.parameters, starts, self._views(direction), strict=True):
            torch.add(start, along, alpha=step, out=parameter)

    def _views(self, vector: Tensor) -> Iterable[Tensor]:
        return self.layout.views(vector.to(self.parameters[0])).values()

    @torch.no_grad()
    def value(self) -> float:
        """f at the module's weights, with forward passes only."""
        total = 0.0
        for batch in self._told():
            total += float(self._mean(batch)) * self.share(batch)
        return total

    def gradient(self) -> Tensor:
        """∇f at the module's weights."""
        total = torch.zeros(self.size, dtype=self.dtype, device=self.parameters[0].device)
        for batch in self._told():
            total.add_(flat(self._slopes(batch)), alpha=self.share(batch))
        return total

    def product(self, vector: Tensor, graphs: Graphs | None = None) -> Tensor:
        """∇²f · v = ∇⟨∇f, v⟩ at the module's weights, summed over the batches.

        Args:
            vector: the vector v.
            graphs: keeps the graphs of the gradients for further products (only for products of this objective).
        """
        return self._sum(vector, graphs, self._ends, lambda ends, v: pullback(ends, self.parameters, v))

    def _ends(self, batch: Batch) -> list[Edge]:
        return edges(self.slopes(batch))

    def slopes(self, batch: Batch) -> Sequence[Tensor]:
        """The gradient of one batch's mean loss by parameter, with its graph."""
        with twice_differentiable():
            return self._slopes(batch, create_graph=True)

    def _slopes(self, batch: Batch, create_graph: bool = False) -> Sequence[Tensor]:
        """The gradient of one batch's mean loss; zero for parameters that it does not depend on."""
        mean = self._mean(batch)
        _refuse_constant(mean)
        return grad(mean, self.parameters, create_graph=create_graph, materialize_grads=True)

    def gauss_newton(self, vector: Tensor, graphs: Graphs | None = None) -> Tensor:
        """G v with G = (1/N) Σ Jᵀ ∇²_z ℓ J, where J is the derivative of a sample's outputs z in the weights.

        Args:
            vector: the vector v.
            graphs: keeps the graphs for further products of this kind; `product` needs graphs of its own.
        """
        return self._sum(vector, graphs, self._linearised, self._bent)

    def _linearised(self, batch: Batch) -> _Linearised:
        inputs, labels = batch
        with twice_differentiable():
            outputs = self._outputs(inputs)
        _refuse_constant(outputs)
        u = torch.zeros_like(outputs, requires_grad=True)
        pulled = grad(outputs, self.parameters, u, create_graph=True, materialize_grads=True)
        z = outputs.detach().requires_grad_()
        slope = grad(self._loss(z, labels), z, create_graph=True)
        return _Linearised(edges([outputs]), u, edges(pulled), z, edges(slope))

    def _bent(self, graph: _Linearised, directions: Sequence[Tensor]) -> Sequence[Tensor]:
        """Jᵀ ∇²_z ℓ J v of one batch. Jᵀu is linear in u, so its derivative in u, applied to v, is J v."""
        pushed = pullback(graph.pulled, [graph.u], directions)
        return pullback(graph.outputs, self.parameters, pullback(graph.slope, [graph.z], pushed))

    def _sum(
        self,
        vector: Tensor,
        graphs: Graphs | None,
        make: Callable[[Batch], Graph],
        product: Callable[[Graph, Sequence[Tensor]], Sequence[Tensor]],
    ) -> Tensor:
        """Σ_b (n_b/N) product_b(v), each from the graph that `make` makes of the batch."""
        total = torch.zeros(self.size, dtype=self.dtype, device=self.parameters[0].device)
        directions = list(self.layout.views(vector.to(total)).values())
        with _second_derivatives():
            for batch, graph in (graphs or Graphs(budget=0)).over(self.module, self._told(), make):
                total.add_(flat(product(graph, directions)), alpha=self.share(batch))
        return total

    def _told(self) -> Iterator[Batch]:
        """The batches with a label that counts. Each is a sign of life, because even one pass can take long."""
        for number, batch in enumerate(self.batches, start=1):
            if self.share(batch):
                yield batch
            beat(f"batch {number} of {len(self.batches)}")

    def share(self, batch: Batch) -> float:
        """n_b/N, the weight of the batch's mean in the mean over all samples (over tokens, if the loss counts them)."""
        return counted(self.loss, batch[1]) / self._counted

    def mass(self, batch: Batch) -> float:
        """N times the share: how many samples of weight 1 the batch stands for."""
        return counted(self.loss, batch[1]) * self.samples / self._counted

    def _mean(self, batch: Batch) -> Tensor:
        inputs, labels = batch
        return self._loss(self._outputs(inputs), labels)

    def _outputs(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.module(inputs)
        return outputs

    def _loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return self.loss(outputs, labels)


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenates tensors into one flat vector."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def batch_layer(module: nn.Module) -> str | None:
    """The first layer that normalises with the statistics of the batch also in evaluation mode, if there is one.

    In such a network the loss of a sample depends on the other samples of its batch.
    """
    layers = ((name, layer) for name, layer in module.named_modules() if isinstance(layer, _BatchNorm))
    return next((name for name, layer in layers if layer.running_mean is None), None)


def _refuse_other(module: nn.Module, layout: Layout) -> None:
    """Raises an error if the module does not have the parameters of the layout."""
    if not isinstance(module, nn.Module):
        raise RecipeError(f"models: one is a {type(module).__name__}; give modules of one architecture")
    shapes = {name: parameter.shape for name, parameter in module.named_parameters()}
    for name, shape in layout.shapes.items():
        if shapes.get(name) != shape:
            there = tuple(shapes[name]) if name in shapes else "nothing"
            raise RecipeError(f"models: {name} is {tuple(shape)} in one and {there} in another; give one architecture")


def _refuse_constant(result: Tensor) -> None:
    """Raises an error if outputs or loss were computed without a graph."""
    if not result.requires_grad:
        raise TrainingError(
            "model and loss: the loss has no derivative in the weights, because an operation is not differentiable or "
            "runs without gradients (detach, argmax, no_grad, a reentrant checkpoint)"
        )


@contextmanager
def _second_derivatives() -> Iterator[None]:
    """Names the operation if torch has no second derivative of it."""
    try:
        yield
    except RuntimeError as error:  # NotImplementedError is one too
        if "not implemented" not in str(error):
            raise
        reason = str(error).splitlines()[0].rstrip(".")
        raise TrainingError(f"model: it has an operation without a second derivative in torch ({reason})") from error


def _refuse_infinite(module: nn.Module) -> None:
    """Raises an error that names a parameter that is not finite: nothing can be measured there."""
    for name, parameter in module.named_parameters():
        if not bool(parameter.isfinite().all()):
            raise TrainingError(
                f"{name}: holds weights that are not finite (NaN or infinite), so there is no flatness to measure; "
                "the model has diverged"
            )
