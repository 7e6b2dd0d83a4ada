"""From stored bytes to network inputs: normalisation and random augmentation of whole batches.

Internally a batch of images has the shape (batch, height, width · channels). This is the order of channels_last
memory, and broadcasting over the long last dimension is several times faster than over three channels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

import torch
from torch import Tensor

from fedflat.errors import RecipeError
from fedflat.tokens import is_tokens

Fill = Literal["black", "mean", "reflect"]


def normalise(
    inputs: Tensor, mean: Sequence[float], std: Sequence[float], dtype: torch.dtype = torch.float32
) -> Tensor:
    """Normalises bytes to (x/255 − mean)/std and other numbers to (x − mean)/std.

    Args:
        inputs: a batch of samples. Images (batch, C, H, W) are returned in channels_last memory format, and token ids
            stay integers.
        mean: one value per channel (for other samples: per entry of the last dimension), one for all, or none. With
            neither mean nor std, bytes are scaled to [0, 1] and other numbers are unchanged.
        std: like `mean`.
        dtype: the precision of the result.

    >>> normalise(torch.tensor([[0, 51, 255]], dtype=torch.uint8), mean=(0.5,), std=(0.5,))
    tensor([[-1.0000, -0.6000,  1.0000]])
    """
    if is_tokens(inputs):
        return inputs.long()
    if inputs.ndim != 4:
        return _normalised(inputs, inputs.shape[-1], mean, std, dtype)
    channels = inputs.shape[1]
    return _images(_normalised(inputs.permute(0, 2, 3, 1).flatten(2), channels, mean, std, dtype), channels)


@dataclass(frozen=True)
class Augment:
    """Random crop, horizontal flip and cutout of a batch of images, drawn independently for every sample.

    Args:
        crop: width of the margin around the image; the crop has the image's own size. 0 turns it off.
        crop_probability: probability that a sample is cropped.
        crop_fill: content of the margin: zeros before ("black") or after ("mean") normalisation, or "reflect".
        flip: probability of a horizontal flip.
        cutout: side of a square that is set to zero after normalisation, centred on a random pixel and clipped at the
            borders. 0 turns it off.

    Raises:
        RecipeError: a value is out of range.

    >>> mirror = Augment(flip=1.0)
    >>> mirror(torch.tensor([[[[1.0, 2.0, 3.0]]]]), mean=(), std=(), generator=torch.Generator())
    tensor([[[[3., 2., 1.]]]])
    """

    crop: int = 0
    crop_probability: float = 1.0
    crop_fill: Fill = "black"
    flip: float = 0.0
    cutout: int = 0

    def __post_init__(self) -> None:
        for field in ("crop", "cutout"):
            value = getattr(self, field)
            if not isinstance(value, int) or value < 0:
                raise RecipeError(f"augment.{field} must be a whole number of pixels, 0 or more, not {value!r}.")
        for field in ("crop_probability", "flip"):
            value = getattr(self, field)
            if not isinstance(value, int | float) or not 0 <= value <= 1:
                raise RecipeError(f"augment.{field} must be a probability between 0 and 1, not {value!r}.")
        if self.crop_fill not in get_args(Fill):
            raise RecipeError(f"augment.crop_fill must be one of {', '.join(get_args(Fill))}, not {self.crop_fill!r}.")

    @property
    def draws(self) -> bool:
        """Whether the augmentation changes anything."""
        return bool(self.crop or self.flip or self.cutout)

    def __call__(
        self,
        inputs: Tensor,
        mean: Sequence[float],
        std: Sequence[float],
        generator: torch.Generator,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """Augments a batch and then normalises it as `normalise` does.

        All draws come from `generator`, which is a CPU generator, so they are the same on every device.
        """
        if not self.draws:
            return normalise(inputs, mean, std, dtype)
        self._check(inputs)
        _, channels, height, width = inputs.shape
        rows, columns = self._sources(inputs, generator)
        # With reflection every source is a pixel of the image. The other fills then blank pixels from outside.
        x = _gather(inputs, _reflected(rows, height), _reflected(columns, width))
        inside = _outer((rows >= 0) & (rows < height), (columns >= 0) & (columns < width), channels)
        if self.crop and self.crop_fill == "black":
            x.mul_(inside[0]).mul_(inside[1])
        x = _normalised(x, channels, mean, std, dtype)
        if self.crop and self.crop_fill == "mean":
            x.mul_(inside[0]).mul_(inside[1])
        if self.cutout:
            x.mul_(self._keep(inputs, generator))
        return _images(x, channels)

    def _check(self, inputs: Tensor) -> None:
        if inputs.ndim != 4:
            on = next(field for field in ("crop", "flip", "cutout") if getattr(self, field))
            raise RecipeError(f"augment.{on} needs images, but the samples have shape {tuple(inputs.shape[1:])}.")
        height, width = inputs.shape[2:]
        if self.crop >= min(height, width):
            raise RecipeError(f"augment.crop = {self.crop} must be smaller than the images of {height}×{width} pixels.")

    def _sources(self, inputs: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """The source row (batch, H) and column (batch, W) of each pixel of the result; some are outside the image."""
        batch, _, height, width = inputs.shape
        device = inputs.device
        rows = torch.arange(height, dtype=torch.int32, device=device).expand(batch, -1)
        columns = torch.arange(width, dtype=torch.int32, device=device).expand(batch, -1)
        if self.flip:
            flipped = (torch.rand(batch, 1, generator=generator) < self.flip).to(device)
            columns = torch.where(flipped, width - 1 - columns, columns)
        if self.crop:
            size = (2, batch, 1)
            move = torch.randint(-self.crop, self.crop + 1, size, generator=generator, dtype=torch.int32)
            if self.crop_probability < 1:
                move *= torch.rand(batch, 1, generator=generator) < self.crop_probability
            move = move.to(device)
            rows, columns = rows + move[0], columns + move[1]
        return rows, columns

    def _keep(self, inputs: Tensor, generator: torch.Generator) -> Tensor:
        """The cutout mask: 0 inside the square, 1 elsewhere."""
        batch, channels, height, width = inputs.shape

        def covered(side: int) -> Tensor:
            centre = torch.randint(side, (batch, 1), generator=generator).to(inputs.device)
            distance = torch.arange(side, device=inputs.device) - centre + self.cutout // 2
            return ((distance >= 0) & (distance < self.cutout)).to(torch.uint8)

        rows, columns = _outer(covered(height), covered(width), channels)
        return 1 - rows * columns


def _normalised(x: Tensor, channels: int, mean: Sequence[float], std: Sequence[float], dtype: torch.dtype) -> Tensor:
    """`normalise` for inputs whose last dimension holds the channels, which vary fastest."""
    if not mean and not std and x.is_floating_point():
        return x.to(dtype, copy=True)
    unit = 255.0 if x.dtype == torch.uint8 else 1.0
    pixels = x.shape[-1] // channels
    scale, shift = _affine(tuple(mean), tuple(std), unit, channels, pixels, dtype, x.device)
    return torch.addcmul(shift, x if x.dtype == torch.uint8 else x.to(dtype), scale)


@lru_cache(maxsize=64)
def _affine(
    mean: tuple[float, ...],
    std: tuple[float, ...],
    unit: float,
    channels: int,
    pixels: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """The scale and shift with scale · x + shift = (x/unit − mean)/std, repeated along a row of pixels."""
    for field, values in (("mean", mean), ("std", std)):
        if len(values) not in (0, 1, channels):
            raise RecipeError(f"{field} has {len(values)} values, but the samples have {channels} channels.")
    if not all(value > 0 for value in std):
        raise RecipeError(f"std must be positive in every channel, not {std}.")
    centre = torch.tensor(mean or (0.0,), dtype=torch.float64).expand(channels)
    spread = torch.tensor(std or (1.0,), dtype=torch.float64).expand(channels)
    scale, shift = 1 / (unit * spread), -centre / spread
    return scale.repeat(pixels).to(device, dtype), shift.repeat(pixels).to(device, dtype)


def _reflected(index: Tensor, side: int) -> Tensor:
    """Reflects indices outside 0 … side − 1 at the outermost pixel, which is not repeated.

    >>> _reflected(torch.arange(-2, 5), side=3)
    tensor([2, 1, 0, 1, 2, 1, 0])
    """
    last = side - 1
    return last - (last - index.abs()).abs()


def _gather(inputs: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """x[b, :, rows[b, i], columns[b, j]] as (batch, H, W · C), in one pass over flat memory."""
    if not (inputs.is_contiguous() or inputs.is_contiguous(memory_format=torch.channels_last)):
        inputs = inputs.contiguous()
    batch, channels, height, width = inputs.shape
    by_sample, by_channel, by_row, by_column = inputs.stride()
    sample = torch.arange(batch, dtype=torch.int32, device=inputs.device).unsqueeze(1) * by_sample
    channel = torch.arange(channels, dtype=torch.int32, device=inputs.device) * by_channel
    row_start = (sample + rows * by_row).unsqueeze(2)
    within_row = (columns.unsqueeze(2) * by_column + channel).view(batch, 1, width * channels)
    flat = inputs.as_strided((inputs.numel(),), (1,))
    return flat.index_select(0, (row_start + within_row).view(-1)).view(batch, height, width * channels)


def _outer(rows: Tensor, columns: Tensor, channels: int) -> tuple[Tensor, Tensor]:
    """Reshapes (batch, H) and (batch, W) into two factors whose product is a mask (batch, H, W · C)."""
    return rows.unsqueeze(2), columns.unsqueeze(2).expand(-1, -1, channels).flatten(1).unsqueeze(1)


def _images(x: Tensor, channels: int) -> Tensor:
    """Views (batch, H, W · C) as (batch, C, H, W)."""
    batch, height, row = x.shape
    return x.view(batch, height, row // channels, channels).permute(0, 3, 1, 2)
