"""A pass of a few samples before the first round: it finds the head, and data, model, loss and metrics must fit."""

from __future__ import annotations

from contextlib import suppress
from functools import reduce
from numbers import Real
from operator import add

import torch
from torch import Tensor

from fedflat.errors import RecipeError
from fedflat.federation import Federation
from fedflat.models import Network, explained
from fedflat.tasks import Metric, Task

FEW = 4  # samples of the pass


def first_pass(network: Network, task: Task, federation: Federation) -> None:
    """Let the network find its head, and compute the loss and the metrics once.

    Args:
        network: the network with its first weights.
        task: what it is trained for.
        federation: the samples.

    Raises:
        DataError: the model cannot process the samples, or the loss or a metric not the model's outputs.
        RecipeError: the weights are not finite, the model returns something else than a tensor, or the loss or a
            metric something else than one number.
    """
    if not bool(network.weights.isfinite().all()):
        raise RecipeError("model: its weights are not finite before the first round")
    inputs, labels = federation.held_out("train", 0, FEW)
    with explained("model: it cannot process inputs of", inputs):
        outputs = network.choose_head(inputs)
    if not isinstance(outputs, Tensor):
        raise RecipeError(
            f"model: it returns a {type(outputs).__name__}; wrap it in a module that returns one tensor, or an object "
            "with `logits`"
        )
    if not labels.is_floating_point() and len(labels):
        labels = labels.clone()
        labels.view(-1)[0] = federation.dataset.train.labels.max()  # the class that needs the most outputs
    with torch.no_grad(), explained("loss: it cannot be computed from outputs and labels of", outputs, labels):
        loss: object = task.loss(outputs, labels)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"a tensor of {loss.numel()} numbers" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise RecipeError(f"loss: it returns {what}; it must return a tensor of one number, the mean loss of the batch")
    for metric in task.metrics:
        _try(metric, outputs, labels)


@torch.no_grad()
def _try(metric: type[Metric], outputs: Tensor, labels: Tensor) -> None:
    """Compute a metric of two chunks, as an evaluation does."""
    halves = [*zip(outputs.detach().split(FEW // 2), labels.split(FEW // 2), strict=True)]
    value: object = 0.0
    with explained(f"metric {metric.name}: it cannot be computed from outputs and labels of", outputs, labels):
        total = reduce(add, (metric.of(*half) for half in halves))
        with suppress(ArithmeticError):  # it may need more samples
            value = total.value
    if not isinstance(value, Real):
        raise RecipeError(f"metric {metric.name}: its value is a {type(value).__name__}; it must be one number")
