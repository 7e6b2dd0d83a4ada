"""Convolutions with 3×3 kernels on small maps, with fewer products (Winograd, 1980; Lavin and Gray, 2016).

    y = H [(G x) ⊙ (A w)]

for each pair of channels. G, A and H are small constant matrices. Along an axis, Winograd's algorithm computes two
outputs from four products instead of six. If the axis has only two pixels, two of the six products are zero, and three
are enough. An image has two axes, which squares these factors. Added over the input channels, the products are one
matrix product for each row of A.
"""

import torch
from torch import Tensor

from fedflat.models.products import product

# G, A and H along an axis of two pixels, and for two pixels with a neighbour on both sides.
TWO = (
    [[1, 1], [0, 1], [1, 0]],
    [[0, 1, 0], [0, -1, 1], [1, -1, 0]],
    [[1, 1, 0], [1, 0, 1]],
)
TILE = (
    [[1, 0, -1, 0], [0, 1, 1, 0], [0, -1, 1, 0], [0, 1, 0, -1]],
    [[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]],
    [[1, 1, 1, 0], [0, 1, -1, -1]],
)


def fits(height: int, width: int) -> bool:
    """Return whether the algorithm is defined for maps of this size."""
    return height % 2 == width % 2 == 0


def convolve(x: Tensor, weight: Tensor) -> Tensor:
    """Return the convolution of maps x with 3×3 kernels, of stride and padding 1.

    The result differs from that of `F.conv2d` only by rounding.

    Args:
        x: the maps, (samples, inputs, height, width).
        weight: the kernels, (outputs, inputs, 3, 3).
    """
    (samples, inputs, height, width), outputs = x.shape, len(weight)
    g, a, h = _both(_along(height, x), _along(width, x))
    count, tiles = len(a), len(g) // len(a)
    maps = (g @ x.reshape(samples * inputs, height * width).t()).view(count, tiles * samples, inputs)
    # A product of batches: that of matrices would compute the gradient of the weights in a slower order.
    kernels = torch.bmm(a[None], weight.reshape(outputs * inputs, 9).t()[None]).view(count, outputs, inputs)
    products = product(maps, kernels)
    return (products.view(count * tiles, samples * outputs).t() @ h.t()).view(samples, outputs, height, width)


def _along(side: int, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return G (products, tiles, side), A (products, 3) and H (side, products, tiles) along an axis."""
    g, a, h = (like.new_tensor(matrix) for matrix in (TWO if side == 2 else TILE))
    if side == 2:
        return g[:, None], a, h[:, :, None]
    tiles = side // 2
    inputs, outputs = g.new_zeros(4, tiles, side + 2), h.new_zeros(side, 4, tiles)
    for tile in range(tiles):
        inputs[:, tile, 2 * tile : 2 * tile + 4] = g
        outputs[2 * tile : 2 * tile + 2, :, tile] = h
    return inputs[:, :, 1:-1], a, outputs  # without the padding, which is zero


def _both(rows: tuple[Tensor, Tensor, Tensor], columns: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return G, A and H of maps: the products of those along the two axes, with the tiles after the products."""
    g = torch.einsum("ptn,qsm->pqtsnm", rows[0], columns[0]).flatten(0, 3).flatten(1)
    h = torch.einsum("npt,mqs->nmpqts", rows[2], columns[2]).flatten(0, 1).flatten(1)
    return g, torch.kron(rows[1], columns[1]), h
