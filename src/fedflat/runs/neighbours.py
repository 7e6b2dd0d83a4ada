"""kNN-Per: mixes a model's outputs with the labels of the client's nearest training samples in feature space."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedflat.errors import RecipeError, nearest
from fedflat.models import Network
from fedflat.randomness import generator
from fedflat.rounds import Problem

CHUNK = 500  # samples per forward pass
MIX_WITH = ("probabilities", "logits")


@dataclass(frozen=True)
class Neighbours:
    """The settings of kNN-Per. A query q has features φ(q), the input of the head, and logits z(q).

        p_knn(c) ∝ Σ exp(−‖φ(q) − φ(x)‖²/(dim φ · scale))     over those of the k nearest stored x whose label is c
        score    = λ p_knn + (1 − λ) softmax(z(q))            `probabilities`, the paper
        score    = λ p_knn + (1 − λ) z(q)                     `logits`, the FedSoL authors' code

    Args:
        k: number of neighbours; all stored samples if there are fewer.
        mix: λ, from 0 to 1.
        scale: the scale of the distances.
        capacity: maximum number of training samples that a client stores, drawn at random.
        mix_with: what p_knn is mixed with, "probabilities" or "logits".

    Raises:
        RecipeError: a value is out of range.
    """

    k: int = 5
    mix: float = 0.5
    scale: float = 1.0
    capacity: int = 500
    mix_with: str = "probabilities"

    def __post_init__(self) -> None:
        bounds = {"k": self.k >= 1, "mix": 0 <= self.mix <= 1, "scale": self.scale > 0, "capacity": self.capacity >= 1}
        for name, good in bounds.items():
            if not good:
                wanted = "from 0 to 1" if name == "mix" else "above 0"
                raise RecipeError(f"{name} = {getattr(self, name)}: must be a number {wanted}")
        if self.mix_with not in MIX_WITH:
            raise RecipeError(f"mix_with = {self.mix_with!r} is unknown; {nearest(self.mix_with, MIX_WITH)}")


class Mixture(nn.Module):
    """kNN-Per as a module, with the network's current weights and the features of the client's samples.

    The output is the score, or its logarithm for `probabilities`, so that it works with a cross-entropy loss.
    """

    def __init__(self, problem: Problem, client: int, neighbours: Neighbours) -> None:
        super().__init__()
        self.module = problem.network.module.eval()
        self._network, self._rule = problem.network, neighbours
        shard = problem.federation.shards[client]
        chosen = torch.randperm(len(shard), generator=generator(problem.seed, "personal store", client=client))
        stored = shard[chosen[: neighbours.capacity]]
        parts = [problem.federation.batch(indices, None) for indices in stored.split(CHUNK)]
        self._keys = torch.cat([features_and_logits(self._network, inputs)[0] for inputs, _ in parts])
        self._labels = torch.cat([labels for _, labels in parts])

    def forward(self, inputs: Tensor) -> Tensor:
        _, scores = self.answers(inputs)
        return scores if self._rule.mix_with == "logits" else scores.log()

    def answers(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """p_knn and the score of every class, one row for each sample."""
        features, logits = features_and_logits(self._network, inputs)
        near = nearest_labels(features, self._keys, self._labels, logits.shape[1], self._rule)
        own = logits if self._rule.mix_with == "logits" else logits.softmax(1)
        return near, torch.lerp(own, near, self._rule.mix)


@torch.no_grad()
def features_and_logits(network: Network, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """The input of the head, one row for each sample, and its output."""
    with network.listening(features=True) as tap:
        forward = tap(inputs)
    assert forward.features is not None
    return forward.features.flatten(1), forward.logits


def nearest_labels(queries: Tensor, keys: Tensor, labels: Tensor, classes: int, rule: Neighbours) -> Tensor:
    """p_knn of each query.

    Args:
        queries: the features of the queries as rows.
        keys: the features of the stored samples as rows.
        labels: the classes of the stored samples.
        classes: number of classes.
        rule: the settings of kNN-Per.

    >>> keys, labels = torch.tensor([[0.0], [1.0], [9.0]]), torch.tensor([0, 1, 2])
    >>> nearest_labels(torch.tensor([[0.5]]), keys, labels, 3, Neighbours(k=2))
    tensor([[0.5000, 0.5000, 0.0000]])
    """
    # The faster way, with a matrix product, loses precision for small distances, which have the largest weights.
    distances = torch.cdist(queries, keys, compute_mode="donot_use_mm_for_euclid_dist")
    found = distances.topk(min(rule.k, len(keys)), dim=1, largest=False)
    # The softmax is exp(−d²/…) divided by its sum. It does not underflow if all neighbours are far away.
    shares = (-found.values.square() / (keys.shape[1] * rule.scale)).softmax(1)
    return queries.new_zeros(len(queries), classes).scatter_add_(1, labels[found.indices], shares)
