"""Building blocks of the networks that PyTorch does not have."""

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedflat.models.products import by_onednn
from fedflat.models.winograd import convolve, fits


def chain(**layers: nn.Module) -> nn.Sequential:
    """Return an `nn.Sequential` of named layers."""
    return nn.Sequential(OrderedDict(layers))


class Normalised(nn.Module):
    """A network that normalises its inputs: x becomes (x − mean)/std, by channel for images.

    Args:
        network: the network that gets the normalised inputs.
        mean: one value for each channel or feature, or one for all.
        std: as `mean`.
        images: whether inputs are images (channels, height, width) instead of vectors.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, network: nn.Module, mean: Sequence[float], std: Sequence[float], images: bool = True) -> None:
        super().__init__()
        self.network = network
        dtype = next((p.dtype for p in network.parameters()), torch.float32)
        for name, values in (("mean", mean), ("std", std)):
            self.register_buffer(name, torch.tensor([*values], dtype=dtype).view((-1, 1, 1) if images else (-1,)))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.network((x - self.mean) / self.std)
        return y


class Activation(nn.Identity):
    """Marks its input as a hidden activation that is not the output of an activation module (in an LSTM)."""


class AttentionOutput(nn.Identity):
    """Marks the combined output of all attention heads, which is the input of the attention's last linear layer."""


class RectifiedPool(nn.Module):
    """ReLU and max-pool in the cheaper order.

    The two commute, max(relu(x)) = relu(max(x)), also in the gradients. So the pool comes first and the ReLU works on
    the smaller output. The ReLU comes first only if a forward hook needs the activation before the pool.
    """

    def __init__(self, size: int, stride: int | None = None, padding: int = 0) -> None:
        super().__init__()
        # In place, because convolutions, norms and pools do not need their output for the gradient.
        self.relu = nn.ReLU(inplace=True)
        self.pool = nn.MaxPool2d(size, stride, padding)

    def forward(self, x: Tensor) -> Tensor:
        if self.relu._forward_hooks:
            x = self.relu(x)
        # After a ReLU this changes nothing, but it gives the pool a gradient in the pool's own memory format.
        return F.relu_(self.pool(x))


class _BiasGradient(torch.autograd.Function):
    """y, b ↦ y for maps y to which the bias b has been added: ∇b = Σ ∇y over samples and pixels."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, bias: Tensor) -> Tensor:
        ctx.mark_dirty(y)  # returned as it is; a view could not be rectified in place
        return y

    @staticmethod
    def jvp(ctx: Any, along_y: Tensor, along_bias: Tensor) -> Tensor:
        return along_y.add_(along_bias[:, None, None])

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, Tensor | None]:
        return slope, slope.sum((0, 2, 3)) if ctx.needs_input_grad[1] else None


class Convolution(nn.Conv2d):
    """A convolution that is faster for small maps and trains its bias faster. It differs only by rounding.

    With a 3×3 kernel and many channels it uses Winograd's algorithm (`winograd.py`). Otherwise, with one output
    position it is a linear layer on the kernel's window of the padded map. If the map is a single pixel, the layer uses
    only the kernel's entry at that pixel (the gradient of the others is zero). A 3×3 kernel maps 2×2 pixels to 2×2 by
    one matrix. With up to four other positions it is a linear layer on the window of each position. With more weights
    than a usual batch has inputs, it converts maps to the memory format of the weights: for channels_last, oneDNN
    reorders the weights in every pass. The gradient of the bias is a sum of its own: for channels_last, oneDNN computes
    it together with that of the weights, but without vectors.
    """

    FEW_POSITIONS = 4
    USUAL_BATCH = 50  # a choice that depends on the batch would fix the batch size of an exported network

    def __init__(
        self, inputs: int, outputs: int, size: int, stride: int = 1, padding: int = 0, bias: bool = True
    ) -> None:
        super().__init__(inputs, outputs, size, stride, padding, bias=bias)
        self._size, self._stride, self._padding = size, stride, padding
        self._weights_per_channel = outputs * size**2
        self._same = (size, stride, padding) == (3, 1, 1)
        self._channels = inputs * outputs / (inputs + outputs)

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim != 4:  # one sample without a batch
            return super().forward(x)
        height, width = x.shape[-2:]
        if self._same and self._saves_products(x, height, width):
            y = convolve(x, self.weight)
            return y if self.bias is None else y + self.bias[:, None, None]
        rows, columns = self._positions(height), self._positions(width)
        if rows == columns == 1:
            return self._at_one_position(x, height, width)
        if x.device.type == "cpu":
            if self._same and height == width == 2:
                return self._on_four_pixels(x)
            if 1 < rows * columns <= self.FEW_POSITIONS:
                return self._at_few_positions(x, rows, columns)
            if self._weights_per_channel > self.USUAL_BATCH * height * width:
                x = x.contiguous()
        bias = self.bias
        if bias is None or not bias.requires_grad or not torch.is_grad_enabled() or not _takes_own_gradients(x):
            return super().forward(x)
        y = F.conv2d(x, self.weight, bias.detach(), self._stride, self._padding)
        return cast(Tensor, _BiasGradient.apply(y, bias))  # type: ignore[no-untyped-call]

    def _saves_products(self, x: Tensor, height: int, width: int) -> bool:
        """Return whether Winograd's algorithm is faster.

        For each pixel it saves a part of inputs · outputs products, and transforms inputs + outputs maps at a cost that
        grows with the number of pixels. A pass without gradients saves less, and so does a processor on which oneDNN's
        convolutions are faster than its products.
        """
        cost = height * width * (1 if torch.is_grad_enabled() else 4) * (8 if by_onednn() else 1)
        return cost <= self._channels and fits(height, width) and _takes_own_gradients(x)

    def _positions(self, side: int) -> int:
        """Return the number of positions of the kernel along a side of the map."""
        return (side + 2 * self._padding - self._size) // self._stride + 1

    def _at_one_position(self, x: Tensor, height: int, width: int) -> Tensor:
        before, weight = self._padding, self.weight
        if height == width == 1:
            after = before + 1 - self._size
            weight = F.pad(weight, (-before, after, -before, after))
        else:
            after = self._size - before
            x = F.pad(x.contiguous(), (before, after - width, before, after - height))
        return F.linear(x.flatten(1), weight.flatten(1), self.bias)[:, :, None, None]

    def _on_four_pixels(self, x: Tensor) -> Tensor:
        """y_p = Σ_q W_{q−p} x_q for the pixels p and q, where W_t is the kernel's entry t, counted from its centre.

        Windows would be products with the padding for five of their nine entries.
        """
        half = torch.is_autocast_enabled("cpu") and self.weight.dtype == torch.float32
        weight = self.weight.to(torch.get_autocast_dtype("cpu")) if half else self.weight  # before it is copied
        entries = weight.permute(2, 3, 0, 1).flatten(0, 1).contiguous().unbind()
        pixels = [(row, column) for row in (0, 1) for column in (0, 1)]
        matrix = torch.cat(
            [torch.cat([entries[3 * (row - r + 1) + column - c + 1] for row, column in pixels], 1) for r, c in pixels]
        )
        bias = None if self.bias is None else self.bias.repeat(len(pixels))
        y = F.linear(x.permute(0, 2, 3, 1).flatten(1), matrix, bias)
        maps: Tensor = y.unflatten(1, (2, 2, -1)).permute(0, 3, 1, 2)
        return maps

    def _at_few_positions(self, x: Tensor, rows: int, columns: int) -> Tensor:
        windows = F.unfold(x, self._size, stride=self._stride, padding=self._padding).transpose(1, 2)
        # One matrix: of a batch, torch would round otherwise once the weights are frozen.
        y = F.linear(windows.flatten(0, 1), self.weight.flatten(1), self.bias)
        maps: Tensor = y.unflatten(0, (x.shape[0], rows * columns)).transpose(1, 2).unflatten(2, (rows, columns))
        return maps


def _takes_own_gradients(x: Tensor) -> bool:
    """Return whether a layer may compute with a custom gradient here.

    vmap and exporters do not support one. bfloat16 would round Winograd's maps, and integers its kernels.
    """
    exact = x.dtype in (torch.float32, torch.float64) and not torch.is_autocast_enabled("cpu")
    exported = torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None
    return x.device.type == "cpu" and exact and not exported and not torch._C._are_functorch_transforms_active()


class Colour(nn.Module):
    """Expands a grey image to three equal channels and leaves a colour image unchanged."""

    def forward(self, x: Tensor) -> Tensor:
        return x.expand(-1, 3, -1, -1) if x.shape[1] == 1 else x


class Residual(nn.Module):
    """The basic block of ResNet-18, relu(branch(x) + shortcut(x))."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.branch = chain(
            conv1=Convolution(inputs, outputs, 3, stride, padding=1, bias=False),
            norm1=norm(outputs),
            relu=nn.ReLU(),
            conv2=Convolution(outputs, outputs, 3, padding=1, bias=False),
            norm2=norm(outputs),
        )
        self.shortcut = nn.Sequential()
        if inputs != outputs:
            self.shortcut = chain(conv=Convolution(inputs, outputs, 1, stride, bias=False), norm=norm(outputs))
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.relu(self.branch(x) + self.shortcut(x))
        return y


class ShiftedPatches(nn.Module):
    """Shifted patch tokenisation: cuts the image and its four one-pixel shifts into patches, one token for each."""

    SHIFTS = ((0, 0, 0, 0), (1, -1, 0, 0), (-1, 1, 0, 0), (0, 0, 1, -1), (0, 0, -1, 1))

    def __init__(self, channels: int, patch: int, width: int) -> None:
        super().__init__()
        inputs = len(self.SHIFTS) * channels * patch**2
        self.patch = patch
        self.norm = nn.LayerNorm(inputs)
        self.linear = nn.Linear(inputs, width)

    def forward(self, x: Tensor) -> Tensor:
        shifted = torch.cat([F.pad(x, shift) for shift in self.SHIFTS], dim=1)
        patches = F.unfold(shifted, self.patch, stride=self.patch).transpose(1, 2)
        tokens: Tensor = self.linear(self.norm(patches))
        return tokens


class ClassToken(nn.Module):
    """Prepends a learnt token and adds a learnt position to each token."""

    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, width))
        self.position = nn.Parameter(torch.randn(1, patches + 1, width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((self.token.expand(x.shape[0], -1, -1), x), dim=1) + self.position


class LocalAttention(nn.Module):
    """Locality self-attention: softmax(eᵗ QKᵀ) V with a learnt temperature t. Tokens do not attend to themselves."""

    def __init__(self, width: int, heads: int, head_width: int) -> None:
        super().__init__()
        self.heads = heads
        self.temperature = nn.Parameter(torch.tensor(-math.log(head_width) / 2))
        self.qkv = nn.Linear(width, 3 * heads * head_width, bias=False)
        self.mixed = AttentionOutput()
        self.out = nn.Linear(heads * head_width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind()
        itself = torch.eye(x.shape[1], dtype=torch.bool, device=x.device)
        scores = (q @ k.transpose(-1, -2) * self.temperature.exp()).masked_fill(itself, -torch.inf)
        y: Tensor = self.out(self.mixed((scores.softmax(-1) @ v).transpose(1, 2).flatten(2)))
        return y


class TransformerBlock(nn.Module):
    """A pre-norm transformer block: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, width: int, heads: int, head_width: int, hidden: int) -> None:
        super().__init__()
        self.attention = chain(norm=nn.LayerNorm(width), attention=LocalAttention(width, heads, head_width))
        self.mlp = chain(
            norm=nn.LayerNorm(width), fc1=nn.Linear(width, hidden), gelu=nn.GELU(), fc2=nn.Linear(hidden, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        y: Tensor = x + self.mlp(x)
        return y


class FirstToken(nn.Module):
    """Selects the class token, which the head of a transformer reads."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, 0]
