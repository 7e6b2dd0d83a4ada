"""The samples of many clients as slices of one vector."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import overload

import numpy as np
import torch
from torch import Tensor


class Packed(Sequence[Tensor]):
    """Index vectors as slices of one vector, created on access: a million tensors would take half a GB.

    >>> packed = Packed.of([torch.tensor([4, 2]), torch.tensor([7])])
    >>> len(packed), packed[1], packed.total
    (2, tensor([7]), 3)
    """

    def __init__(self, indices: Tensor, sizes: Sequence[int]) -> None:
        self._indices = indices
        self._ends = np.cumsum([0, *sizes])  # NumPy: its elements are read ten times faster than a tensor's

    @classmethod
    def of(cls, vectors: Iterable[Tensor]) -> Packed:
        """Pack these vectors."""
        listed = list(vectors)
        return cls(torch.cat(listed) if listed else torch.arange(0), [*map(len, listed)])

    @property
    def total(self) -> int:
        """The number of indices of all vectors together."""
        return len(self._indices)

    @property
    def sizes(self) -> Tensor:
        """The number of indices of each vector."""
        return torch.from_numpy(np.diff(self._ends))

    def size(self, place: int) -> int:
        """The number of indices of one vector."""
        begin, end = self._span(place)
        return end - begin

    def empty(self) -> int | None:
        """The place of the first vector without indices, or None."""
        places = (self.sizes == 0).nonzero()
        return int(places[0]) if len(places) else None

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, place: int) -> Tensor: ...
    @overload
    def __getitem__(self, place: slice) -> Packed: ...
    def __getitem__(self, place: int | slice) -> Tensor | Packed:
        if isinstance(place, slice):
            return Packed.of(self[each] for each in range(*place.indices(len(self))))
        begin, end = self._span(place)
        return self._indices[begin:end]

    def _span(self, place: int) -> tuple[int, int]:
        count = len(self)
        if not -count <= place < count:
            raise IndexError(f"there are {count} clients, and {place} is not one of them")
        place %= count
        return int(self._ends[place]), int(self._ends[place + 1])
