"""The step of a chain of linear layers by the compiled library and by torch's operators: one thread, in turns.

    python benchmarks/compiled_chain.py [--repeats 15]

Both compute the cross-entropy, all gradients and w ← w − η ∇ of a batch (`local/kernels/linear.py`). Prints a Markdown
table, and exits with 1 if the library is slower anywhere. Without a C compiler there is nothing to compare.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from statistics import median

import torch
from timing import interleaved, ratio
from torch import nn

from fedflat.local.kernels.compiled_chain import chain_library
from fedflat.local.kernels.linear import Chain
from fedflat.models import Network

STEPS = 20  # in one measurement
CASES = [
    ((784, 200, 200, 10), 10),
    ((784, 200, 200, 10), 32),
    ((784, 200, 200, 10), 100),
    ((64, 64, 10), 10),
    ((64, 200, 200, 10), 10),
    ((3072, 512, 512, 10), 50),
    ((3072, 1024, 1024, 100), 20),
]


def network(widths: tuple[int, ...]) -> Network:
    return Network(nn.Sequential(*[m for a, b in pairwise(widths) for m in (nn.Linear(a, b), nn.ReLU())][:-1]))


def sides(widths: tuple[int, ...], batch: int) -> dict[str, Callable[[], None]]:
    """Some steps by torch and by the library, each with a network of its own."""
    by_torch, compiled = (Chain(network(widths)) for _ in range(2))
    inputs, labels = torch.randn(batch, widths[0]), torch.randint(0, widths[-1], (batch,))

    def steps(step: Callable[..., torch.Tensor]) -> None:
        for _ in range(STEPS):
            step(inputs, labels, 1e-3, 0.0)

    return {"torch": partial(steps, by_torch._descend), "compiled": partial(steps, compiled.descend)}


def megaflop(widths: tuple[int, ...], batch: int) -> float:
    """Operations of a step: forward, and backward to the weights and (but for the first layer) to the inputs."""
    return 1e-6 * batch * (6 * sum(a * b for a, b in pairwise(widths)) - 2 * widths[0] * widths[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if chain_library(torch.float32) is None:
        print("there is no C compiler that works", file=sys.stderr)
        return 1
    print("| widths | batch | torch, µs | GFLOP/s | compiled, µs | GFLOP/s | torch ÷ compiled | quartiles |")
    print("|---|---|---|---|---|---|---|---|")
    slower = 0
    for widths, batch in CASES:
        seconds = interleaved(sides(widths, batch), options.repeats)
        middle, low, high = ratio(seconds["torch"], seconds["compiled"])
        slower += middle < 1
        cells = [f"{widths[0]}" + "".join(f"-{width}" for width in widths[1:]), str(batch)]
        for side in ("torch", "compiled"):
            each = median(seconds[side]) / STEPS
            cells += [f"{1e6 * each:.3g}", f"{1e-3 * megaflop(widths, batch) / each:.0f}"]
        print(f"| {' | '.join(cells)} | {middle:.2f} | {low:.2f}–{high:.2f} |", flush=True)
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
