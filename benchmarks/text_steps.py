"""Where the time of a local step on text goes, in one thread: LEAF's LSTM (J6), and the GPT with LoRA (J7).

    python benchmarks/text_steps.py

Prints the time of a gradient with batches of 10 windows of 80 characters, and the operators that take most of it.
`products.py` has the rates of the LSTM's matrix products.
"""

from collections.abc import Callable
from statistics import median

import torch
import torch.nn.functional as F
from timing import milliseconds, shares
from torch import nn

from fedflat import models
from fedflat.engine import keep_freed_memory

ROWS, WINDOW, CHARACTERS = 10, 80, 80


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


def main() -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    for name, (network, every) in networks().items():
        step = gradient(network, every)
        taken = milliseconds(step)
        print(f"{name}: {median(taken):.1f} ms ({taken[0]:.1f}–{taken[-1]:.1f}); {shares(step)}")


if __name__ == "__main__":
    main()
