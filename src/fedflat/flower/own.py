"""One side's view of a federation whose samples lie elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from fedflat.client import Problem
from fedflat.errors import DataError
from fedflat.federation.datasets import Dataset
from fedflat.federation.federation import Federation
from fedflat.methods import parse
from fedflat.prepare import assemble, augmentation, gather
from fedflat.recipe import Recipe

NOBODY = -1  # the server, which is no client


@dataclass(frozen=True)
class OwnData(Federation):
    """What one side knows: a client its own samples, the server how many each has; and both m and N.

    `shards` has the own indices only; `everyone` is N.
    """

    client: int = NOBODY
    total: int = 1
    everyone: int = 1
    sizes: Mapping[int, int] = field(default_factory=dict)

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
            raise DataError(f"client {client} was not connected when the deployment began, so its size is not known")
        return self.sizes[client] if client in self.sizes else len(self.shard(client))

    def largest_first(self, clients: Sequence[int]) -> list[int]:
        """As in a simulation, as far as the sizes are known; the other clients come last."""
        return sorted(clients, key=lambda client: (-self.sizes.get(client, 0), client))

    def empty(self) -> int | None:
        return None if self.client == NOBODY or len(self.shards[0]) else self.client


class DataHook(Protocol):
    """Where a client's samples come from: a data set whose training part is the client's own.

    The server asks with client = −1: the shape of the samples and the number of classes are taken from its answer, and
    the model is scored on the test part.
    """

    def __call__(self, client: int) -> Dataset: ...


def own_problem(
    recipe: Recipe, client: int, everyone: int, hook: DataHook | None, sizes: Mapping[int, int] | None = None
) -> Problem:
    """The recipe's problem as this side sees it; without a hook its samples are those of the recipe's own split."""
    if hook:
        dataset = hook(client)
        shard = torch.arange(len(dataset.train.labels))
    else:
        federation = gather(recipe)
        dataset, shard = federation.dataset, federation.shards[client] if client != NOBODY else torch.arange(0)
    known: dict[str, Any] = {
        "client": client,
        "total": recipe.split.clients,
        "everyone": everyone,
        "sizes": dict(sizes or {}),
    }
    own = OwnData(dataset, (shard,), augmentation(recipe), **known)
    problem = assemble(recipe, own, None, parse(recipe.method), torch.nn.functional.cross_entropy)
    return replace(problem, group=1)  # a client elsewhere shares no step with another
