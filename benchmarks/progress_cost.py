"""The cost of the progress display: the time of rounds with it, relative to rounds without it; bound 1.01.

    python benchmarks/progress_cost.py [--rounds 150] [--repeats 15]

The MLP 784-200-200-10 on 1,000 clients of 60 samples, 10 per round: rounds of about 15 ms, for which a display costs
most. Random images. The display is drawn in full to a fake terminal. Prints the ratio; exits 1 above the bound.
"""

import argparse
import os
import sys
from contextlib import closing, nullcontext
from functools import partial

import torch
from rich.console import Console
from timing import interleaved, ratio

from fedflat import Dataset, Federation, Samples
from fedflat.methods.parser import parse
from fedflat.recipe import Recipe, validated
from fedflat.report.display import RoundProgress
from fedflat.rounds.server import first_state
from fedflat.runs.build import assemble
from fedflat.runs.experiment import rounds
from fedflat.runs.launch import start_engine

BOUND = 1.01


def recipe(count: int) -> Recipe:
    server = {"rounds": count, "cohort": 10}
    local = {"epochs": 1, "batch": 10, "lr": 0.05}
    return validated({"split": {"name": "given", "clients": 1000}, "local": local, "server": server,
                      "evaluation": {"every": 0}})  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    chance = torch.Generator().manual_seed(0)
    images = torch.rand(60_000, 1, 28, 28, generator=chance)
    samples = Samples(images, torch.randint(0, 10, (60_000,), generator=chance))
    held = Samples(images[:100], samples.labels[:100])
    federation = Federation(Dataset("random", samples, held, 10, (), ()), torch.arange(60_000).split(60))
    plan = recipe(options.rounds)
    problem = assemble(plan, federation, None, parse("fedavg"))
    state = first_state(problem)
    with open(os.devnull, "w") as nowhere, closing(start_engine(problem, state)) as engine:
        terminal = Console(file=nowhere, force_terminal=True, width=100)

        def train(shown: bool) -> None:
            with RoundProgress("benchmark", options.rounds, terminal) if shown else nullcontext() as display:
                for _, record in rounds(problem, state, engine):
                    if display:
                        display(record)

        seconds = interleaved({"shown": partial(train, True), "silent": partial(train, False)}, options.repeats)
    middle, low, high = ratio(seconds["shown"], seconds["silent"])
    print(f"with the display ÷ without: {middle:.3f} (quartiles {low:.3f}–{high:.3f}), bound {BOUND}")
    return 0 if middle <= BOUND else 1


if __name__ == "__main__":
    sys.exit(main())
