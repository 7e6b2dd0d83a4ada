"""What clients send up in a round, and the sums that are made of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor

from fedflat.errors import RecipeError
from fedflat.rule import Vectors

Weighting = Literal["uniform", "samples"]


@dataclass(frozen=True)
class Upload:
    """What one client sends back, and what it keeps: `memory` stays with the client and never reaches a merge.

    `steps` is K, and `lr` the mean learning rate of the K steps.
    """

    client: int
    samples: int
    steps: int
    lr: float
    loss: float
    delta: Tensor
    vectors: Vectors = field(default_factory=dict)
    memory: Vectors = field(default_factory=dict)
    notes: dict[str, float] = field(default_factory=dict)

    @cached_property
    def norm(self) -> float:
        """‖Δ‖; it is not finite if any entry of Δ is not."""
        return float(torch.linalg.vector_norm(self.delta))

    def __getitem__(self, name: str) -> Tensor:
        return self.delta if name == "delta" else self.vectors[name]

    def update(self, delta: Tensor | None = None, **vectors: Tensor) -> Upload:
        """The upload with another Δ, or with more vectors beside it."""
        return replace(self, delta=self.delta if delta is None else delta, vectors={**self.vectors, **vectors})


class Uploads(Sequence[Upload]):
    """The uploads of a round in one order, in which all sums are made. `weights` are those of the average."""

    def __init__(self, uploads: Sequence[Upload], weights: Sequence[float], delta: Tensor) -> None:
        self._uploads, self.weights, self._delta = list(uploads), list(weights), delta

    def __len__(self) -> int:
        return len(self._uploads)

    def __getitem__(self, index: Any) -> Any:
        return self._uploads[index]

    def __iter__(self) -> Iterator[Upload]:
        return iter(self._uploads)

    def sum(self, name: str, weights: Sequence[float] | None = None) -> Tensor:
        """Σᵢ pᵢ xᵢ over the uploads, with pᵢ = 1 unless weights are given."""
        total = torch.zeros_like(self._uploads[0][name])
        for upload, weight in zip(self._uploads, weights or [1.0] * len(self), strict=True):
            total.add_(upload[name], alpha=weight)
        return total

    def average(self, name: str) -> Tensor:
        """Σᵢ pᵢ xᵢ with the recipe's weights, uniform or by samples."""
        return self._delta if name == "delta" else self.sum(name, self.weights)

    def named(self, names: dict[str, str]) -> Uploads:
        """The uploads as one part sees them: its own vectors by its own names, and Δ."""
        own = []
        for upload in self._uploads:
            own.append(replace(upload, vectors={name: upload.vectors[key] for name, key in names.items()}))
            vars(own[-1]).update({"norm": upload.norm} if "norm" in vars(upload) else {})
        return Uploads(own, self.weights, self._delta)


class Sums(Uploads):
    """The uploads for a part that needs only sums of them: no single one can be had."""

    def __init__(self, uploads: Uploads) -> None:
        self._all = uploads

    def __len__(self) -> int:
        return len(self._all)

    def sum(self, name: str, weights: Sequence[float] | None = None) -> Tensor:
        return self._all.sum(name) if weights is None else self._single()

    def average(self, name: str) -> Tensor:
        return self._all.average(name)

    def _single(self, *_: Any) -> NoReturn:
        raise RecipeError('its merge looks at single uploads; declare `sees = "each"` in its class')

    __iter__ = __getitem__ = _single

    def __getattr__(self, name: str) -> NoReturn:
        self._single()


class Sealed(Uploads):
    """The uploads for the parts beside a private average: whatever they ask of them is refused."""

    def __init__(self, guard: str) -> None:
        self._guard = guard

    def _refuse(self, *_: Any) -> NoReturn:
        raise RecipeError(f"method: a part looks at the updates, which {self._guard} protects; leave one of them out")

    __len__ = __iter__ = __getitem__ = _refuse
    sum = average = _refuse  # type: ignore[assignment]

    def __getattr__(self, name: str) -> NoReturn:
        self._refuse()


def collect(
    arriving: Iterable[Upload],
    by: Weighting,
    order: Sequence[int] = (),
    away: Set[int] = frozenset(),
    release: Callable[[int], None] | None = None,
) -> Uploads:
    """The uploads of a round as they come in, with the average of their Δ.

    All sums are made in one order: that of the clients given, or of their numbers. The sum of the Δᵢ grows while others
    train, as far as the clients have come without a gap but for those who are `away`. If `release` is given no Δᵢ is
    kept beyond that, and it is told whose can go.
    """
    waiting, due, total = dict[int, Upload](), deque(order), _Total(by, release)
    for upload in arriving:
        waiting[upload.client] = upload
        while due and (due[0] in waiting or due[0] in away):
            total.add(waiting.pop(due.popleft(), None))
    for client in [*due, *sorted(waiting)]:
        total.add(waiting.pop(client, None))
    return total.uploads()


class _Total:
    """The running sum of the Δᵢ."""

    def __init__(self, by: Weighting, release: Callable[[int], None] | None) -> None:
        self._by, self._release = by, release
        self._delta = torch.zeros(0)
        self._taken: list[Upload] = []
        self._shares: list[int] = []

    def add(self, upload: Upload | None) -> None:
        if upload is None:
            return
        share = upload.samples if self._by == "samples" else 1
        if self._taken:
            self._delta.add_(upload.delta, alpha=share)
        else:
            self._delta = upload.delta * share
        if self._release:
            upload = replace(upload, delta=upload.delta.new_empty(0))
            self._release(upload.client)
        self._taken.append(upload)
        self._shares.append(share)

    def uploads(self) -> Uploads:
        total = sum(self._shares)
        self._delta.div_(total or 1)
        return Uploads(self._taken, [share / total for share in self._shares], self._delta)
