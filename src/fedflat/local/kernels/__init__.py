"""Kernels: faster implementations of the computation in `step.py`.

A kernel's `fits` tells for which clients it computes the same result as the definition in `step.py`. `choose` selects
the kernels once per client, when the first batch shows the type of the labels. A kernel can replace one of four
computations:

    step       the whole step                          graph.GraphedStep, linear.ChainStep, sgd.DirectStep
    gradient   ∇loss at the current weights            linear.ChainGradient
    head       a pass that perturbs only the head      head.HeadPass
    update     v ← β v + g and w ← w − η v             sgd.FusedUpdate

In addition, `rows.py` trains several clients at once. `definition_only()` disables all kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from fedflat.local.kernels.compiled_chain import chain_library
from fedflat.local.kernels.graph import GraphedStep
from fedflat.local.kernels.head import HeadPass
from fedflat.local.kernels.linear import ChainGradient, ChainStep, linear_layers
from fedflat.local.kernels.sgd import DirectStep, FusedUpdate
from fedflat.local.rule import LocalRule, Loss
from fedflat.models import Network, pool_library

_ENABLED: ContextVar[bool] = ContextVar("kernels", default=True)


class Kernel(Protocol):
    """The interface of the kernels for one client: a test whether it applies, and a constructor.

    `choose` gives every kernel the same two arguments, of which some kernels need only one.
    """

    def __init__(self, network: Network, rule: LocalRule) -> None: ...

    @classmethod
    def fits(cls, network: Network, rule: LocalRule, loss: Loss, labels: Tensor) -> bool:
        """Return whether the kernel gives the same result as the definition for this client.

        `labels` are the labels of the client's first batch.
        """
        ...


@dataclass(frozen=True)
class Kernels:
    """The kernels of one client's round; None means that the definition is used."""

    step: GraphedStep | ChainStep | DirectStep | None = None
    gradient: ChainGradient | None = None
    head: HeadPass | None = None
    update: FusedUpdate | None = None

    @property
    def own_velocity(self) -> bool:
        """Whether the momentum is in the kernel of the step, so that the client needs no vector for it."""
        return self.step is not None and self.step.own_velocity


K = TypeVar("K", bound=Kernel)


def choose(network: Network, rule: LocalRule, loss: Loss, labels: Tensor) -> Kernels:
    """Return the fastest applicable kernels for a client."""
    if not enabled():
        return Kernels()

    def fitting(kernel: type[K]) -> K | None:
        return kernel(network, rule) if kernel.fits(network, rule, loss, labels) else None

    if step := fitting(GraphedStep) or fitting(ChainStep) or fitting(DirectStep):
        return Kernels(step=step)  # a whole step needs no other kernel
    return Kernels(gradient=fitting(ChainGradient), head=fitting(HeadPass), update=fitting(FusedUpdate))


def prepare(network: Network) -> None:
    """Compile what this network needs, before processes are forked that would all do it."""
    dtype = network.weights.dtype
    if linear_layers(network):
        chain_library(dtype)
    if any(isinstance(module, nn.MaxPool2d) for module in network.module.modules()):
        for each in {dtype, torch.bfloat16 if network.autocast else dtype}:  # an evaluation has no autocast
            pool_library(each)


def enabled() -> bool:
    """Return whether kernels are enabled."""
    return _ENABLED.get()


@contextmanager
def definition_only() -> Iterator[None]:
    """Disable all kernels in this context, so that clients train with the definition in `step.py`.

    The setting is local to this process and does not reach the workers of a pool.
    """
    token = _ENABLED.set(False)
    try:
        yield
    finally:
        _ENABLED.reset(token)
