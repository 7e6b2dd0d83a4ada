"""The positions of a model's named tensors in one flat vector."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """Maps each named tensor to a slice of the flat vector: in model order, C order, without gaps.

    >>> from torch import nn
    >>> layout = Layout.of(nn.Linear(2, 3).named_parameters())
    >>> layout.size, layout.slices["bias"]
    (9, slice(6, 9, None))
    """

    shapes: Mapping[str, torch.Size]

    @classmethod
    def of(cls, tensors: Iterable[tuple[str, Tensor]]) -> Layout:
        return cls({name: tensor.shape for name, tensor in tensors})

    @cached_property
    def slices(self) -> dict[str, slice]:
        ends, end = {}, 0
        for name, shape in self.shapes.items():
            ends[name] = slice(end, end + shape.numel())
            end += shape.numel()
        return ends

    @cached_property
    def size(self) -> int:
        return sum(shape.numel() for shape in self.shapes.values())

    def views(self, vector: Tensor) -> dict[str, Tensor]:
        """Return the named tensors inside a vector; they share its memory."""
        return {name: vector[part].view(self.shapes[name]) for name, part in self.slices.items()}

    def mask(self, chosen: Callable[[str], bool]) -> Tensor:
        """Return a boolean vector that is true for the entries of tensors whose names are chosen."""
        return torch.cat([torch.full((shape.numel(),), chosen(name)) for name, shape in self.shapes.items()])

    def means(self, vector: Tensor) -> Tensor:
        """Return the mean of each tensor's entries: one number per tensor."""
        return torch.stack([vector[part].mean() for part in self.slices.values()])

    def spread(self, numbers: Tensor) -> Tensor:
        """Return a vector in which all entries of a tensor are set to that tensor's number."""
        repeats = torch.tensor([shape.numel() for shape in self.shapes.values()], device=numbers.device)
        return numbers.repeat_interleave(repeats, output_size=self.size)

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return a vector with copies of the named tensors."""
        return torch.cat([tensors[name].detach().reshape(-1) for name in self.shapes])
