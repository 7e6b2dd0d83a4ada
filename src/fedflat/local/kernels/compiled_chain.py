"""The chain of linear layers of `linear.py`, computed by `compiled/chain.c`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from fedflat.compiled import library
from fedflat.models import by_onednn

# Beyond these numbers of weights and of samples in a batch, MKL is as fast where it uses whole vectors.
MOST_WEIGHTS, MOST_SAMPLES = 500_000, 100
REALS = {torch.float32: ctypes.c_float, torch.float64: ctypes.c_double}


@cache
def chain_library(dtype: torch.dtype) -> Callable[..., int] | None:
    """Return the function of `chain.c` with the types of its arguments, or None if there is no library."""
    compiled = library("chain", dtype) if dtype in REALS else None
    if compiled is None:
        return None
    count, address, real = ctypes.c_long, ctypes.c_void_p, REALS[dtype]
    function = compiled.chain
    function.argtypes = [count, address, address, count, address, address, real, real, count, *[address] * 5]
    function.restype = ctypes.c_int
    return function


class CompiledChain:
    """Gradients and plain steps of a chain, for one client or for several with their weights as rows of a matrix.

    Args:
        widths: the widths of the input and of the output of each layer.
        biased: whether each layer has a bias.
    """

    def __init__(self, widths: Sequence[int], biased: Sequence[bool]) -> None:
        self._inputs, self._layers = widths[0], len(biased)
        self._widths = (ctypes.c_long * len(widths))(*widths)
        self._biased = (ctypes.c_int64 * len(biased))(*biased)
        self._room = 2 * sum(widths[1:-1]) + widths[-1]  # of a sample's activations and their gradients
        self._size = sum(out * (inputs + has) for (inputs, out), has in zip(pairwise(widths), biased, strict=True))

    def gradient(
        self, weights: Tensor, gradients: Tensor, inputs: Tensor, labels: Tensor, shares: Tensor | None = None
    ) -> Tensor | None:
        """Write ∇ of the cross-entropy to `gradients`.

        Args:
            weights: the flat weights of a client, or those of one in each row.
            gradients: contiguous, of the shape of the weights.
            inputs: the samples, for several clients with the client as the first dimension.
            labels: the class of each sample.
            shares: the weight of each sample in its client's mean, for several clients.

        Returns:
            The loss, for several clients that of each. None if the library is not there or does not apply: torch's own
            functions then compute it, or say what is wrong with the batch.
        """
        return self._run(weights, gradients, 0.0, 1.0, inputs, labels, shares)

    def descend(
        self, weights: Tensor, lr: float, decay: float, inputs: Tensor, labels: Tensor, shares: Tensor | None = None
    ) -> Tensor | None:
        """Take the step w ← w − η (∇ + decay · w) in place; the other arguments and the result are as in `gradient`."""
        return self._run(weights, None, 1 - lr * decay, -lr, inputs, labels, shares)

    def _run(
        self,
        weights: Tensor,
        gradients: Tensor | None,
        keep: float,
        rate: float,
        inputs: Tensor,
        labels: Tensor,
        shares: Tensor | None,
    ) -> Tensor | None:
        there = weights.device.type == inputs.device.type == labels.device.type == "cpu"
        function = chain_library(weights.dtype) if there else None
        if function is None or not self._gains(labels) or not self._fits(weights, inputs, labels, shares):
            return None
        clients, count = weights.numel() // self._size, labels.shape[-1]
        losses, scratch = weights.new_empty(clients), weights.new_empty(count * self._room)
        vectors = [inputs.contiguous(), labels.contiguous(), shares, scratch, losses]
        addresses = [None if vector is None else vector.data_ptr() for vector in (weights, gradients, *vectors)]
        layers = self._layers, self._widths, self._biased
        failed = function(*layers, clients, *addresses[:2], keep, rate, count, *addresses[2:])
        return None if failed else losses if weights.dim() > 1 else losses[0]

    def _gains(self, labels: Tensor) -> bool:
        small = self._size <= MOST_WEIGHTS and labels.shape[-1] <= MOST_SAMPLES
        return small or by_onednn()  # where MKL uses half of a vector

    def _fits(self, weights: Tensor, inputs: Tensor, labels: Tensor, shares: Tensor | None) -> bool:
        """Return whether types and sizes are as announced to the library, which does not check them."""
        types = inputs.dtype == weights.dtype and labels.dtype == torch.int64
        rows = weights.shape[:-1] == labels.shape[:-1] and inputs.shape[: labels.dim()] == labels.shape
        sizes = weights.shape[-1] == self._size and inputs.numel() == labels.numel() * self._inputs > 0
        shared = shares is None or (shares.shape == labels.shape and shares.dtype == weights.dtype)
        return (
            types
            and rows
            and sizes
            and shared
            and weights.is_contiguous()
            and (shares is None or shares.is_contiguous())
        )
