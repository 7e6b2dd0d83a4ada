"""Autograd graphs that are kept between products at the same weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import grad
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from fedflat.local import Batch

Graph = TypeVar("Graph")
Edge = GradientEdge | None

KEPT_BYTES = 2 << 30


class Graphs:
    """The graphs of the batches, each made once and kept until the weights change, up to a budget of memory.

    A Hessian product is one backward pass through the graph of the gradient. Making that graph costs a forward and a
    backward pass, which every further product at the same weights saves.

    The parameters and buffers of the module are compared with a copy before each product, so that a graph is never
    used at other weights. Graphs are kept in the order of the batches, until one does not fit. Those of the other
    batches are made again for each product.

    Args:
        budget: bytes that the graphs may hold, without the weights and the samples; 0 keeps none.
    """

    def __init__(self, budget: int = KEPT_BYTES) -> None:
        self.budget = budget
        self._weights: list[Tensor] = []
        self._forget()

    def over(
        self, module: nn.Module, batches: Iterable[Batch], make: Callable[[Batch], Graph]
    ) -> Iterator[tuple[Batch, Graph]]:
        """Every batch with its graph.

        Args:
            module: the network.
            batches: the samples.
            make: makes the graph of a batch at the module's weights. It must be the same in every call.
        """
        if self.budget:
            self._follow(module)
        for number, batch in enumerate(batches):
            if number < len(self._kept):
                yield batch, self._kept[number]
            elif self._open:
                yield batch, self._made(module, batch, make)
            else:
                yield batch, make(batch)

    def _forget(self) -> None:
        self._kept: list[Any] = []
        self.bytes = 0
        self._open = self.budget > 0

    def _follow(self, module: nn.Module) -> None:
        """Forgets all graphs if the module's state is not the one that they were made with."""
        now = [tensor.detach() for tensor in chain(module.parameters(), module.buffers())]
        if not _same(now, self._weights):
            self._forget()
            self._weights = [tensor.clone() for tensor in now]

    def _made(self, module: nn.Module, batch: Batch, make: Callable[[Batch], Graph]) -> Graph:
        """A new graph, kept if it fits into what is left of the budget."""
        storages: dict[int, int] = {}

        def count(tensor: Tensor) -> Tensor:
            storages[_address(tensor)] = tensor.untyped_storage().nbytes()
            return tensor

        with saved_tensors_hooks(count, lambda tensor: tensor):
            graph = make(batch)
        there = {_address(tensor) for tensor in chain(module.parameters(), module.buffers(), _tensors(batch))}
        held = sum(size for address, size in storages.items() if address not in there)
        self._open = self.bytes + held <= self.budget
        if self._open:
            self._kept.append(graph)
            self.bytes += held
        return graph


def edges(tensors: Iterable[Tensor]) -> list[Edge]:
    """The ends of the tensors' graphs, without the tensors' memory; None for a constant."""
    return [get_gradient_edge(tensor) if tensor.requires_grad else None for tensor in tensors]


def pullback(outputs: Sequence[Edge], inputs: Sequence[Tensor], vectors: Sequence[Tensor]) -> Sequence[Tensor]:
    """The derivative of Σ⟨output, vector⟩ in each input. The graph can be used again."""
    varying = [(edge, vector) for edge, vector in zip(outputs, vectors, strict=True) if edge is not None]
    if not varying:
        return [torch.zeros_like(tensor) for tensor in inputs]
    ends, along = zip(*varying, strict=True)
    return grad(ends, inputs, along, retain_graph=True, materialize_grads=True)


def _same(now: Sequence[Tensor], before: Sequence[Tensor]) -> bool:
    pairs = zip(now, before, strict=False)
    return len(now) == len(before) and all(a.dtype == b.dtype and a.device == b.device and a.equal(b) for a, b in pairs)


def _tensors(batch: Batch) -> Iterable[Tensor]:
    """The tensors of a batch, whose inputs may be a dictionary."""
    inputs: Any = batch[0]
    return (*inputs.values(), batch[1]) if isinstance(inputs, dict) else batch


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
