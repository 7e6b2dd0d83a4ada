"""The inputs of one layer, per sample, as the rows that its weight matrix multiplies."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from fedflat.errors import RecipeError, TrainingError
from fedflat.local import Batch, Loss
from fedflat.models import is_adapted
from fedflat.tokens import is_tokens

BUDGET = 2**24  # maximum number of elements in the patches and dual weights of one chunk
MOST_ROWS = 64  # larger chunks are not faster


def layers_of(module: nn.Module) -> list[str]:
    """Names of the layers that can be analysed: linear layers and ungrouped 2-d convolutions with trained weights.

    >>> layers_of(nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3, groups=4), nn.Flatten(), nn.Linear(4, 2)))
    ['0', '3']
    """
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    return [
        name
        for name, part in module.named_modules()
        if (isinstance(part, nn.Linear) or (isinstance(part, nn.Conv2d) and part.groups == 1))
        # The output of nn.MultiheadAttention, which is never called itself.
        and not isinstance(part, NonDynamicallyQuantizableLinear)
        and parameter_of(name) in trained
    ]


def parameter_of(layer: str) -> str:
    return f"{layer}.weight" if layer else "weight"


class SeenLayer:
    """Records the inputs of one layer and the loss of each sample."""

    def __init__(self, module: nn.Module, loss: Loss, name: str) -> None:
        part = dict(module.named_modules()).get(name)
        if isinstance(part, nn.Conv2d) and part.groups > 1:
            raise RecipeError(f"layer {name!r} is a grouped convolution, which is not supported; choose another layer")
        known = layers_of(module)
        if name not in known or not isinstance(part, nn.Linear | nn.Conv2d):
            adapted = part is not None and is_adapted(part)
            hint = "; only its adapter is trained: take --parameters all, or the merged model" if adapted else ""
            raise RecipeError(f"layer {name!r} cannot be analysed; choose one of: {', '.join(known) or 'none'}{hint}")
        self.module, self.loss, self.name, self.part = module.eval(), loss, name, part
        self.weight = part.weight.detach().flatten(1)

    @torch.no_grad()
    def see(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Returns the rows A of each sample (samples × positions × in) and its loss."""
        seen: list[Tensor] = []
        # Clone the input: a later layer may modify it in place.
        with self.part.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0].clone())):
            outputs = self.module(batch[0])
        if len(seen) != 1:
            raise RecipeError(f"layer {self.name!r} runs {len(seen)} times per forward pass; choose one that runs once")
        rows = patches(self.part, seen[0]) if isinstance(self.part, nn.Conv2d) else seen[0]
        if is_tokens(batch[0]) and rows.ndim == 3 and rows.shape[:2] == batch[0].shape:
            rows = rows * (batch[0] >= 0)[..., None]  # what a layer computes from padding has no effect
        losses = [self.loss(z, y) for z, y in zip(outputs.split(1), batch[1].split(1), strict=True)]
        activities, each = rows.reshape(len(losses), -1, rows.shape[-1]), torch.stack(losses)
        if not (activities.isfinite().all() and each.isfinite().all()):
            raise TrainingError(f"layer {self.name!r}: activities or losses are not finite; the model has diverged")
        return activities, each

    def room(self, samples: Batch) -> int:
        """The number of pairs whose rows and dual weights fit into the budget, found with a pass of one sample."""
        positions, inputs = self._shape(samples)
        return max(1, BUDGET // (inputs * (positions + len(self.weight))))

    def rows(self, samples: Batch, batch: int) -> int:
        """The number of directions that one backward pass can take at once, for a batch of `batch` samples."""
        positions, inputs = self._shape(samples)
        return min(MOST_ROWS, max(1, BUDGET // (batch * positions * (inputs + len(self.weight)))))

    def _shape(self, samples: Batch) -> tuple[int, int]:
        """The layer's number of positions and of inputs per position."""
        _, positions, inputs = self.see((samples[0][:1], samples[1][:1]))[0].shape
        return positions, inputs


def patches(conv: nn.Conv2d, images: Tensor) -> Tensor:
    """The im2col rows that the kernels multiply, as samples × positions × in."""
    mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
    # This attribute of the layer holds its padding for numbers, "same" and "valid" alike.
    padded = F.pad(images, conv._reversed_padding_repeated_twice, mode=mode)
    return F.unfold(padded, conv.kernel_size, conv.dilation, stride=conv.stride).mT
