"""The operations of a step of the FedAvg-CNN (J2), and what each reaches of the peak of products, in one thread.

    python benchmarks/primitives.py [--repeats 100]

Takes a step with a batch of 50 by hand, so that each operation finds its inputs in the caches as in training. After
each step comes a product of large square matrices, because a busy machine slows down both. Prints CPU time, GFLOP/s and
the share of the product's GFLOP/s: of all taps of the kernels, as `engine.py` counts them, and of those that meet the
map. The lines in brackets are not in the step: the gradients of weights and bias in one call, as autograd takes them.
"""

import argparse
from collections.abc import Callable
from statistics import median
from time import process_time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedflat.engine import keep_freed_memory
from fedflat.federation.augment import normalise
from fedflat.models import faster_operations
from fedflat.models.products import product

BATCH, SIZE = 50, 1024
FORM: tuple[list[int], list[int], list[int], bool, list[int], int] = ([1, 1], [2, 2], [1, 1], False, [0, 0], 1)
LINEAR = 2e-6 * BATCH * 4096 * 512
CONV1, CONV2 = (2e-6 * BATCH * side**2 * 25 * weights for side, weights in ((32, 3 * 32), (16, 32 * 64)))
PEAK = 2e-6 * SIZE**3
# MFLOP of all taps, and of those that meet the map.
MFLOP = {
    f"{name} {of}": (mflop, mflop * share)
    for name, mflop, share in (("conv1", CONV1, (77 / 80) ** 2), ("conv2", CONV2, (37 / 40) ** 2), ("fc1", LINEAR, 1.0))
    for of in ("forward", "inputs", "weights")
}


class Clock:
    """The CPU seconds of each operation."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def __call__(self, name: str, call: Callable[[], Any]) -> Any:
        begun = process_time()
        found = call()
        self.seconds.setdefault(name, []).append(process_time() - begun)
        return found


class Step:
    """A step of the network without its head, in the order of training."""

    def __init__(self) -> None:
        self.images = torch.randint(0, 256, (BATCH, 3, 32, 32), dtype=torch.uint8)
        self.slope = torch.randn(BATCH, 512)
        shapes = (32, 3, 5, 5), (64, 32, 5, 5), (512, 4096)
        self.conv1, self.conv2, self.fc1 = (torch.randn(shape) / 100 for shape in shapes)
        self.bias1, self.bias2 = torch.randn(32), torch.randn(64)
        self.velocity = torch.zeros(512, 4096)

    def __call__(self, clock: Clock) -> None:
        x = clock("normalisation", lambda: normalise(self.images, (0.5,) * 3, (0.25,) * 3))
        z1 = clock("conv1 forward", lambda: F.conv2d(x, self.conv1, self.bias1, padding=2))
        v1, r1, y1 = clock("pool1 and ReLU forward", lambda: pool(z1))
        z2 = clock("conv2 forward", lambda: F.conv2d(y1, self.conv2, self.bias2, padding=2))
        v2, r2, y2 = clock("pool2 and ReLU forward", lambda: pool(z2))
        flat = clock("flatten", lambda: y2.flatten(1))
        clock("fc1 forward", lambda: product(flat, self.fc1))
        g = clock("fc1 inputs", lambda: product(self.slope, self.fc1.t())).view(y2.shape)
        gradient = clock("fc1 weights", lambda: product(self.slope.t(), flat.t()))
        g2 = clock("pool2 and ReLU backward", lambda: pool_backward(g, v2, r2))
        g = clock("conv2 inputs", lambda: backward(g2, y1, self.conv2, True, False, False)[0])
        clock("conv2 weights", lambda: backward(g2, y1, self.conv2, False, True, False))
        clock("conv2 bias", lambda: g2.sum((0, 2, 3)))
        clock("(conv2 weights and bias)", lambda: backward(g2, y1, self.conv2, False, True, True))
        g1 = clock("pool1 and ReLU backward", lambda: pool_backward(g, v1, r1))
        clock("conv1 weights", lambda: backward(g1, x, self.conv1, False, True, False))
        clock("conv1 bias", lambda: g1.sum((0, 2, 3)))
        clock("(conv1 weights and bias)", lambda: backward(g1, x, self.conv1, False, True, True))
        clock("update of fc1", lambda: self.update(gradient))

    def update(self, gradient: Tensor) -> None:
        settings = {"weight_decay": 1e-5, "momentum": 0.9, "lr": 1e-6, "dampening": 0.0, "nesterov": False}
        lists = [self.fc1], [gradient], [self.velocity]
        torch._fused_sgd_(*lists, **settings, maximize=False, is_first_step=False)


def pool(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the maps as a variable, and what it becomes with and without the graph."""
    x = x.detach().requires_grad_()
    with faster_operations():
        y = F.relu_(F.max_pool2d(x, 2))
    return x, y, y.detach()


def pool_backward(slope: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return torch.autograd.grad(y, x, slope)[0]


def backward(slope: Tensor, x: Tensor, weight: Tensor, *wanted: bool) -> tuple[Tensor, Tensor, Tensor]:
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.convolution_backward(
        slope, x, weight, [len(weight)], *FORM, wanted
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=100)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    keep_freed_memory()
    step, clock, (a, b) = Step(), Clock(), torch.randn(2, SIZE, SIZE)
    for repeat in range(repeats + 3):
        if repeat == 3:  # the first ones warm up
            clock = Clock()
        step(clock)
        clock("peak", lambda: product(a, b))
    taken = {name: median(seconds) for name, seconds in clock.seconds.items()}
    best = PEAK / taken.pop("peak")
    print("| operation | ms | GFLOP/s | of the peak | without padding |\n|---|---|---|---|---|")
    for name, seconds in taken.items():
        mflop, met = MFLOP.get(name, (0.0, 0.0))
        rates = f"{mflop / seconds / 1000:.0f} | {mflop / seconds / best:.0%} | {met / seconds / best:.0%}"
        print(f"| {name} | {1000 * seconds:.2f} | {rates if mflop else '| |'} |")
    total, mflop = (sum(taken[n] for n in taken if n[0] != "("), sum(MFLOP[n][0] for n in taken if n in MFLOP))
    print(f"| the step | {1000 * total:.1f} | {mflop / total / 1000:.0f} | {mflop / total / best:.0%} | |")
    print(f"\nThe peak is {best / 1000:.0f} GFLOP/s.")


if __name__ == "__main__":
    main()
