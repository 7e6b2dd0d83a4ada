"""The whole step as a CUDA graph: recorded once for each shape of a batch, then repeated by one call.

On a GPU, a small model waits for Python, which launches one kernel after another. A graph launches all kernels of a
step at once. It reads and writes the same places in memory every time: the batch is copied to them, and the weights
are the network's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fedflat.local.kernels.sgd import DirectStep, FusedUpdate
from fedflat.local.rule import LocalRule, Loss
from fedflat.models import Network
from fedflat.randomness import forked

if TYPE_CHECKING:
    from fedflat.local.slope import Slope

DEVICES = ("cuda",)
WARM_UPS = 3  # steps before the recording, in which cuDNN and cuBLAS make their permanent allocations
MOST = 4  # recorded shapes of batches; batches of further shapes take their steps directly


def record(step: Callable[[], None]) -> Callable[[], None]:
    """Return a function that repeats the kernels which a step launches. The step itself is run a few times."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(WARM_UPS):
            step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


class Recording(NamedTuple):
    """A recorded step: `repeat` reads the batch, moves weights and velocity, and writes the loss."""

    inputs: Tensor
    labels: Tensor
    loss: Tensor
    repeat: Callable[[], None]


class Recordings:
    """The recorded steps of a network, which share their constants and the velocity."""

    def __init__(self, network: Network, rule: LocalRule, constants: tuple[object, ...]) -> None:
        self.constants = constants
        self.velocity = torch.zeros_like(network.weights) if rule.momentum else None
        self.direct = DirectStep(network, rule)
        self._network, self._lr = network, rule.lr
        self._by_shape: dict[tuple[torch.Size, torch.dtype], Recording] = {}

    def of(self, slope: Slope) -> Recording | None:
        """Return the recorded step for a batch like the current one; None if there are too many shapes."""
        inputs = slope.batch[0]
        kind = (inputs.shape, inputs.dtype)
        if kind not in self._by_shape and len(self._by_shape) < MOST:
            self._by_shape[kind] = self._recorded(slope)
        return self._by_shape.get(kind)

    def _recorded(self, slope: Slope) -> Recording:
        """Record a step. Weights, velocity, statistics, counters and the generator stay as they were."""
        network, velocity = self._network, self.velocity
        inputs, labels = (tensor.clone() for tensor in slope.batch)
        loss = network.weights.new_zeros(())
        own = slope.beside((inputs, labels))

        def step() -> None:
            objective = own.at((inputs, labels)).objective(at_w=False)
            loss.copy_(objective.detach())
            self.direct.descend_from(objective, velocity, self._lr)

        touched = [network.weights, *network.module.buffers(), *([] if velocity is None else [velocity])]
        before = [tensor.clone() for tensor in touched]
        with forked(network.weights.device):
            repeat = record(step)
        for tensor, value in zip(touched, before, strict=True):
            tensor.copy_(value)
        return Recording(inputs, labels, loss, repeat)


class GraphedStep:
    """Computes the whole step of a rule that uses the gradient of the cross-entropy unchanged, by a CUDA graph.

    The graphs of a network are kept from client to client, until a constant of the step changes.
    """

    own_velocity = True  # a graph moves the one that it has recorded

    def __init__(self, network: Network, rule: LocalRule) -> None:
        decay = rule.decay + rule.weight_decay
        constants = (network.weights.data_ptr(), rule.lr, rule.momentum, rule.nesterov, decay)
        known = network.recordings
        if not isinstance(known, Recordings) or known.constants != constants:
            known = network.recordings = Recordings(network, rule, constants)
        self._recordings = known

    @classmethod
    def fits(cls, network: Network, rule: LocalRule, loss: Loss, labels: Tensor) -> bool:
        classes = loss is F.cross_entropy and labels.ndim == 1 and not labels.is_floating_point()
        same = rule.direct and not rule.terms and rule.lr_floor == 1.0
        there = network.weights.device.type in DEVICES
        return rule.graph and there and classes and same and FusedUpdate.fits(network, rule, loss, labels)

    def __call__(self, slope: Slope, _: Tensor | None, k: int) -> None:
        own = self._recordings.velocity
        if k == 0 and own is not None:
            own.zero_()
        recording = self._recordings.of(slope)
        if recording is None:
            self._recordings.direct(slope, own, k)
            return
        inputs, labels = slope.batch
        recording.inputs.copy_(inputs)
        recording.labels.copy_(labels)
        recording.repeat()
        slope.note_loss(recording.loss)
