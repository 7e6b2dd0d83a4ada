"""The distribution of labels that a model's outputs describe, as a negative log-likelihood."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from fedflat.tasks import TASKS, TokenLoss
from fedflat.tokens import IGNORED

BINARY = (TASKS["multi-label"].loss, F.binary_cross_entropy_with_logits)


class Likelihood:
    """−log p(y|z) up to a constant, the mean over the predictions of a batch.

    For class labels p is softmax(z), of a sample, a token or a pixel. For real labels it is softmax(z) if the model was
    trained with cross-entropy (labels that are probabilities of classes), the sigmoid of each output if it was trained
    with binary cross-entropy, and otherwise a normal distribution of mean z and unit variance.

    A batch in which no label counts has no mean; `Objective` leaves it out.

    Args:
        loss: the loss that the model was trained with.
    """

    def __init__(self, loss: Any) -> None:
        known = getattr(loss, "loss", loss)  # a loss that wraps one of torch's
        self.tokens = isinstance(loss, TokenLoss)
        self.softmax = known is F.cross_entropy or isinstance(known, nn.CrossEntropyLoss)
        self.binary = known in BINARY or isinstance(known, nn.BCEWithLogitsLoss)

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        if not labels.is_floating_point():
            if self._classes_last(outputs, labels):
                outputs, labels = outputs.flatten(0, -2), labels.flatten()
            return F.cross_entropy(outputs, labels.long())
        if self.softmax:
            return F.cross_entropy(outputs, labels)
        outputs = outputs.reshape(labels.shape)  # labels (N,) may have outputs (N, 1)
        if self.binary:
            return F.binary_cross_entropy_with_logits(outputs, labels, reduction="sum") / len(labels)
        return 0.5 * (outputs - labels).square().sum() / len(labels)

    def counted(self, labels: Tensor) -> int:
        """The number of predictions in a batch."""
        return len(labels) if labels.is_floating_point() else int((labels != IGNORED).sum())

    def _classes_last(self, outputs: Tensor, labels: Tensor) -> bool:
        """Whether logits are (N, T, classes), as for tokens, and not (N, classes, T), as for pixels."""
        if outputs.shape[:-1] != labels.shape:
            return False
        return self.tokens or (outputs.shape[0], *outputs.shape[2:]) != tuple(labels.shape)
