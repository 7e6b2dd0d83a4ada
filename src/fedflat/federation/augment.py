"""From stored bytes to what a network sees: normalisation, and random changes of whole batches.

On its way a batch of images is (batch, height, width · channels): the order of channels_last memory, with a last
dimension so long that broadcasting over it is several times faster than over three channels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

import torch
from torch import Tensor

from fedflat.errors import RecipeError

Fill = Literal["black", "mean", "reflect"]


def normalise(
    inputs: Tensor, mean: Sequence[float], std: Sequence[float], dtype: torch.dtype = torch.float32
) -> Tensor:
    """(x/255 − mean)/std of bytes, (x − mean)/std of other numbers; images (batch, C, H, W) come out channels_last.

    `mean` and `std` hold one value for each channel (without images: for each entry of the last dimension), one for
    all, or none: then bytes become [0, 1], and other numbers stay as they are.

    >>> normalise(torch.tensor([[0, 51, 255]], dtype=torch.uint8), mean=(0.5,), std=(0.5,))
    tensor([[-1.0000, -0.6000,  1.0000]])
    """
    if inputs.ndim != 4:
        return _normalised(inputs, inputs.shape[-1], mean, std, dtype)
    channels = inputs.shape[1]
    return _images(_normalised(inputs.permute(0, 2, 3, 1).flatten(2), channels, mean, std, dtype), channels)


@dataclass(frozen=True)
class Augment:
    """Random crop, horizontal flip and cutout of a batch of images, drawn anew for every sample.

    crop: side of the margin around the image, within which the crop of the image's own size moves; 0 = off
    crop_probability: how often a sample is cropped at all
    crop_fill: what the margin shows: zeros before ("black") or after ("mean") normalisation, or the image reflected
    flip: probability of a horizontal flip
    cutout: side of a square set to zero after normalisation, centred on any pixel, clipped at the borders; 0 = off

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
        """Whether a batch is changed at all."""
        return bool(self.crop or self.flip or self.cutout)

    def __call__(
        self,
        inputs: Tensor,
        mean: Sequence[float],
        std: Sequence[float],
        generator: torch.Generator,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """The batch changed, then normalised as by `normalise`.

        All draws come from `generator`, a processor's, so that they are the same on every device.
        """
        if not self.draws:
            return normalise(inputs, mean, std, dtype)
        self._check(inputs)
        _, channels, height, width = inputs.shape
        rows, columns = self._sources(inputs, generator)
        # Reflected, every source is a pixel of the image; the other fills then blank what came from outside.
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
        """Row (batch, H) and column (batch, W) of the image that each pixel of the result shows; some lie outside."""
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
        """0 inside the square of cutout, 1 elsewhere."""
        batch, channels, height, width = inputs.shape

        def covered(side: int) -> Tensor:
            centre = torch.randint(side, (batch, 1), generator=generator).to(inputs.device)
            distance = torch.arange(side, device=inputs.device) - centre + self.cutout // 2
            return ((distance >= 0) & (distance < self.cutout)).to(torch.uint8)

        rows, columns = _outer(covered(height), covered(width), channels)
        return 1 - rows * columns


def _normalised(x: Tensor, channels: int, mean: Sequence[float], std: Sequence[float], dtype: torch.dtype) -> Tensor:
    """`normalise`, with the channels running fastest in the last dimension."""
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
    """scale and shift with scale · x + shift = (x/unit − mean)/std, repeated along a row of pixels."""
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
    """Indices beyond 0 … side − 1 mirrored back at the outermost pixel, which is not repeated.

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
    """(batch, H) and (batch, W) as two factors whose product is a mask (batch, H, W · C)."""
    return rows.unsqueeze(2), columns.unsqueeze(2).expand(-1, -1, channels).flatten(1).unsqueeze(1)


def _images(x: Tensor, channels: int) -> Tensor:
    """(batch, H, W · C) seen as (batch, C, H, W)."""
    batch, height, row = x.shape
    return x.view(batch, height, row // channels, channels).permute(0, 3, 1, 2)
