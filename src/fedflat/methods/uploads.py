"""The uploads of the clients in a round, and sums over them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor

from fedflat.errors import RecipeError
from fedflat.local import Vectors

Weighting = Literal["uniform", "samples"]


@dataclass(frozen=True)
class Upload:
    """The upload of one client.

    `steps` is K, and `lr` is the mean learning rate of the K steps.
    """

    client: int
    samples: int
    steps: int
    lr: float
    loss: float
    delta: Tensor
    vectors: Vectors = field(default_factory=dict)
    notes: dict[str, float] = field(default_factory=dict)

    @cached_property
    def norm(self) -> float:
        """‖Δ‖, which is not finite if any entry of Δ is not."""
        return float(torch.linalg.vector_norm(self.delta))

    @cached_property
    def norms(self) -> dict[str, float]:
        """The norms of the vectors beside Δ."""
        return {name: float(torch.linalg.vector_norm(vector)) for name, vector in self.vectors.items()}

    def __getitem__(self, name: str) -> Tensor:
        return self.delta if name == "delta" else self.vectors[name]

    def with_norm(self, norm: float) -> Upload:
        """Set ‖Δ‖, which was computed before, and return the upload."""
        vars(self)["norm"] = norm
        return self

    def spent(self) -> Upload:
        """Return the upload without its Δ, which is in the sum and not needed again; the norm stays."""
        return replace(self, delta=self.delta.new_empty(0)).with_norm(self.norm)

    def put_down(self) -> None:
        """Called when a vector has been read. Shared vectors leave this process until they are read again."""

    def update(self, delta: Tensor | None = None, **vectors: Tensor) -> Upload:
        """Return the upload with another Δ, or with additional vectors.

        Args:
            delta: the new Δ; None keeps the current one.
            vectors: additional vectors by name, of the size of the model.
        """
        return replace(self, delta=self.delta if delta is None else delta, vectors={**self.vectors, **vectors})


class Uploads(Sequence[Upload]):
    """The uploads of a round, in the order in which they are summed. `weights` are the weights of the average.

    `most` is the largest number of samples that counts for a client.
    """

    def __init__(
        self, uploads: Sequence[Upload], weights: Sequence[float], delta: Tensor, most: float = math.inf
    ) -> None:
        self._uploads, self.weights, self._delta, self._most = list(uploads), list(weights), delta, most

    def __len__(self) -> int:
        return len(self._uploads)

    def __getitem__(self, index: Any) -> Any:
        return self._uploads[index]

    def __iter__(self) -> Iterator[Upload]:
        return iter(self._uploads)

    def sum(self, name: str, weights: Sequence[float] | None = None) -> Tensor:
        """Return Σᵢ pᵢ xᵢ over the uploads.

        Args:
            name: the name of the vector x; "delta" is Δ.
            weights: the weights pᵢ; by default 1 for each upload.
        """
        total = torch.zeros_like(self._uploads[0][name])
        for upload, weight in zip(self._uploads, weights or [1.0] * len(self), strict=True):
            total.add_(upload[name], alpha=weight)
            upload.put_down()  # or the vectors of the whole cohort would be held at the end
        return total

    def average(self, name: str) -> Tensor:
        """Return Σᵢ pᵢ xᵢ with the recipe's weights, uniform or by samples."""
        return self._delta if name == "delta" else self.sum(name, self.weights)

    @property
    def paces(self) -> list[float]:
        """K η of each client: its steps times its learning rate, which the server knows from the recipe."""
        return [upload.steps * upload.lr for upload in self._uploads]

    @property
    def counted(self) -> list[float]:
        """The share of each client's samples, and of its steps, that counts: 1 unless it claims too many samples."""
        return [self._most / u.samples if u.samples > self._most else 1.0 for u in self._uploads]

    def named(self, names: dict[str, str]) -> Uploads:
        """Return the uploads as one part sees them: Δ, and the part's vectors by its own names."""
        own = [
            replace(u, vectors={name: u.vectors[key] for name, key in names.items()}).with_norm(u.norm)
            for u in self._uploads
        ]
        return Uploads(own, self.weights, self._delta, self._most)


class RobustUploads(Uploads):
    """Uploads with robust sums and averages: of Δ, of all other uploaded vectors, and of buffers.

    If loc is the robust average of n vectors,  average(x) = loc(x₁ … xₙ)  and  Σᵢ pᵢ xᵢ = n · loc(p₁ x₁ … pₙ xₙ).
    All clients have the same weight, so that a client cannot gain influence by claiming many samples.
    """

    def __init__(self, uploads: Uploads, locate: Callable[[list[Tensor], str], Tensor]) -> None:
        count = len(uploads)
        self._plain, self._locate = uploads, locate
        super().__init__([*uploads], [1 / count] * count, locate([upload.delta for upload in uploads], "delta"))

    def sum(self, name: str, weights: Sequence[float] | None = None) -> Tensor:
        if weights is None:
            return len(self) * self.average(name)
        rows = [upload[name] * weight for upload, weight in zip(self, weights, strict=True)]
        return len(self) * self._locate(rows, "")

    def average(self, name: str) -> Tensor:
        return self._delta if name == "delta" else self._locate([upload[name] for upload in self], name)

    def named(self, names: dict[str, str]) -> Uploads:
        own = object.__new__(RobustUploads)
        plain = self._plain.named(names)
        own._plain, own._locate, own._delta, own._most = plain, self._locate, self._delta, self._most
        own._uploads, own.weights = [*plain], self.weights
        return own


class Sums(Uploads):
    """Uploads for a part that needs only sums: reading a single upload raises an error."""

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


class Hidden(Uploads):
    """Uploads for a part that must not read them, because another one protects their average: any access raises."""

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
    most: float = math.inf,
    keep: bool = True,
) -> Uploads:
    """Collect the uploads of a round as they arrive, and average their Δ.

    Sums do not depend on the order of arrival. The Δᵢ are added in order while other clients still train, as soon as
    all earlier clients have arrived or are `away`.

    Args:
        arriving: the uploads.
        by: the weights of the average.
        order: the clients in the order of summation; by default they are sorted by number.
        away: clients in `order` that will not upload.
        most: the largest number of samples with which a client is weighted.
        keep: whether the single Δᵢ are needed after they have been added.

    Returns:
        The uploads in the order of summation, with their average.
    """
    waiting, due, total = dict[int, Upload](), deque(order), _Total(by, most, keep)
    for upload in arriving:
        waiting[upload.client] = upload
        while due and (due[0] in waiting or due[0] in away):
            total.add(waiting.pop(due.popleft(), None))
    for client in [*due, *sorted(waiting)]:
        total.add(waiting.pop(client, None))
    return total.uploads()


class _Total:
    """The running sum of the Δᵢ."""

    def __init__(self, by: Weighting, most: float, keep: bool) -> None:
        self._by, self._most, self._keep = by, most, keep
        self._delta = torch.zeros(0)
        self._taken: list[Upload] = []
        self._shares: list[int] = []

    def add(self, upload: Upload | None) -> None:
        if upload is None:
            return
        share = (upload.samples if upload.samples <= self._most else int(self._most)) if self._by == "samples" else 1
        if self._taken:
            self._delta.add_(upload.delta, alpha=share)
        else:
            self._delta = upload.delta * share
        self._taken.append(upload if self._keep else upload.spent())
        self._shares.append(share)

    def uploads(self) -> Uploads:
        total = sum(self._shares)
        self._delta.div_(total or 1)
        return Uploads(self._taken, [share / total for share in self._shares], self._delta, self._most)
