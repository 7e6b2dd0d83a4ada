"""One side's view of a federation whose samples are elsewhere."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from fedflat.errors import DataError
from fedflat.federation import Dataset, Federation
from fedflat.methods import parse
from fedflat.randomness import Secret
from fedflat.recipe import Recipe
from fedflat.rounds import Problem, counted_samples
from fedflat.runs import assemble, augmentation, gather

NOBODY = -1  # the server, which is not a client


@dataclass(frozen=True)
class OwnData(Federation):
    """What one side knows: a client its own samples, the server the number of samples per client; both m and N.

    `shards` has only this side's own indices; `everyone` is N. On the server `most` is the largest number of samples
    that counts for a client: otherwise a client that claims a billion would leave the others no share of N.
    """

    client: int = NOBODY
    total: int = 1
    everyone: int = 1
    sizes: Mapping[int, int] = field(default_factory=dict)
    most: float = math.inf

    @property
    def clients(self) -> int:
        return self.total

    @property
    def _total(self) -> int:
        return self.everyone

    def shard(self, client: int) -> Tensor:
        if client != self.client:
            raise DataError(f"client {self.client} was asked for the samples of client {client}")
        return self.shards[0]

    def samples(self, client: int) -> int:
        if self.client == NOBODY and client not in self.sizes:
            raise DataError(f"client {client} was not connected at the start, so its number of samples is not known")
        return self.sizes[client] if client in self.sizes else len(self.shard(client))

    def share(self, client: int) -> float:
        return min(self.samples(client), self.most) * self.clients / self._total

    def told(self, samples: int) -> int:
        """The N that a client with this many samples is told: nᵢ m/N is then its share of the samples that count."""
        return self.everyone if samples <= self.most else -(-samples * self.everyone // int(self.most))

    def largest_first(self, clients: Sequence[int]) -> list[int]:
        """The order of a simulation, as far as the sizes are known; the other clients come last."""
        return sorted(clients, key=lambda client: (-self.sizes.get(client, 0), client))

    def empty(self) -> int | None:
        return None if self.client == NOBODY or len(self.shards[0]) else self.client


class DataHook(Protocol):
    """Provides a client's samples: a data set whose training part belongs to the client.

    The server calls it with client = −1: the answer defines the shape of the samples and the number of classes, and the
    model is scored on its test part.
    """

    def __call__(self, client: int) -> Dataset: ...


def own_problem(
    recipe: Recipe,
    client: int,
    everyone: int,
    hook: DataHook | None,
    secret: Secret | None = None,
) -> Problem:
    """Build the recipe's problem as this side sees it; without a hook, with the samples of the recipe's split.

    Args:
        recipe: this side's recipe.
        client: the client on this side; −1 is the server.
        everyone: the number N of all clients' samples.
        hook: provides the samples of this side.
        secret: seeds this side's draws; without it, as in a rehearsal, they follow the recipe's seed.
    """
    if hook:
        dataset = hook(client)
        shard = torch.arange(len(dataset.train.labels))
    else:
        federation = gather(recipe)
        dataset, shard = federation.dataset, federation.shards[client] if client != NOBODY else torch.arange(0)
    total = recipe.split.clients
    own = OwnData(dataset, (shard,), augmentation(recipe), client=client, total=total, everyone=everyone)
    # Remote clients never share steps.
    alone = recipe.model_copy(update={"engine": recipe.engine.model_copy(update={"group": 1})})
    problem = assemble(alone, own, None, parse(recipe.method))
    return replace(problem, secret=secret, deployed=True)


def with_sizes(problem: Problem, sizes: Mapping[int, int], secret: Secret | None = None) -> Problem:
    """Return the server's problem with the sizes that the clients reported; it draws with the server's secret."""
    assert isinstance(problem.federation, OwnData)
    counted = counted_samples(sizes, problem.recipe.admission)
    everyone, most = sum(counted.values()), max(counted.values(), default=math.inf)
    known = replace(problem.federation, sizes=dict(sizes), everyone=everyone, most=most)
    return replace(problem, federation=known, secret=secret)
