"""Where the time of a local step on text goes, in one thread: LEAF's LSTM (J6), and the GPT with LoRA (J7).

    python benchmarks/text_steps.py

Prints the time of a gradient with batches of 10 windows of 80 characters, the operators that take most of it, and the
rates of the LSTM's matrix products: those of one character, with ten rows, and those of all characters at once.
"""

import time
from collections.abc import Callable
from statistics import median

import torch
import torch.nn.functional as F
from timing import shares
from torch import nn

from fedflat import models
from fedflat.engine import keep_freed_memory

ROWS, WINDOW, HIDDEN, CHARACTERS = 10, 80, 256, 80


def milliseconds(function: Callable[[], object], calls: int = 1, turns: int = 15) -> list[float]:
    """CPU time of a call, in ascending order over the turns."""
    function()
    taken = []
    for _ in range(turns):
        begun = time.process_time()
        for _ in range(calls):
            function()
        taken.append(1000 * (time.process_time() - begun) / calls)
    return sorted(taken)


def networks() -> dict[str, tuple[nn.Module, bool]]:
    """The networks of J6 and J7, and whether every character has a label."""
    chance = torch.Generator().manual_seed(0)
    lstm = models.build("char-lstm", (WINDOW,), CHARACTERS, chance, vocabulary=CHARACTERS)
    gpt = models.build("gpt", (WINDOW,), CHARACTERS, chance, vocabulary=CHARACTERS, per_token=True)
    return {"LSTM": (lstm, False), "GPT with LoRA": (models.lora(gpt, rank=8, alpha=16, generator=chance), True)}


def gradient(network: nn.Module, every: bool) -> Callable[[], None]:
    chance = torch.Generator().manual_seed(1)
    tokens = torch.randint(CHARACTERS, (ROWS, WINDOW), generator=chance)
    labels = torch.randint(CHARACTERS, (ROWS, WINDOW) if every else (ROWS,), generator=chance)
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]

    def step() -> None:
        loss = F.cross_entropy(network(tokens).reshape(-1, CHARACTERS), labels.reshape(-1))
        torch.autograd.grad(loss, trained)

    return step


def products() -> dict[str, tuple[float, Callable[[], object]]]:
    """Products of the LSTM, by name: millions of operations, and the call."""
    h, every = torch.rand(ROWS, HIDDEN), torch.rand(ROWS * WINDOW, HIDDEN)
    gates, weight = torch.rand(ROWS, 4 * HIDDEN), torch.rand(4 * HIDDEN, HIDDEN)
    mflop = 2e-6 * ROWS * HIDDEN * 4 * HIDDEN
    mkl, onednn = torch.ops.mkl, torch.ops.mkldnn
    by_mkl, by_onednn = mkl._mkl_reorder_linear_weight(weight, ROWS), onednn._reorder_linear_weight(weight, ROWS)
    square = torch.rand(1024, 1024)
    return {
        "one character, forward": (mflop, lambda: h @ weight.t()),
        "the same, packed by MKL": (mflop, lambda: mkl._mkl_linear(h, by_mkl, weight, None, ROWS)),
        "the same, packed by oneDNN": (mflop, lambda: onednn._linear_pointwise(h, by_onednn, None, "none", [], "")),
        "one character, backward": (mflop, lambda: gates @ weight),
        "all characters": (mflop * WINDOW, lambda: every @ weight.t()),
        "1024 × 1024 × 1024": (2e-6 * 1024**3, lambda: square @ square),
    }


def main() -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    for name, (network, every) in networks().items():
        step = gradient(network, every)
        taken = milliseconds(step)
        print(f"{name}: {median(taken):.1f} ms ({taken[0]:.1f}–{taken[-1]:.1f}); {shares(step)}")
    print("\n| product | GFLOP/s |\n|---|---|")
    for name, (mflop, call) in products().items():
        taken = milliseconds(call, calls=max(1, round(200 / mflop)))
        print(f"| {name} | {mflop / median(taken):.0f} ({mflop / taken[-1]:.0f}–{mflop / taken[0]:.0f}) |")


if __name__ == "__main__":
    main()
