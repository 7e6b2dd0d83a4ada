"""Evaluation of a model on the 10,000 test images of CIFAR-10, compared with plain inference on the same cores.

    FEDFLAT_DATA=… python benchmarks/evaluation.py [--repeats 7] [--workers 2] [--models fedavg-cnn resnet18-gn] [--cpu]

Plain inference is a loop over batches of 500: normalise the bytes, a pass in inference mode with as many threads as we
have workers, count the right answers. `--inputs ready` hands it images that are normalised already. Ours is
`Engine.score`, which also returns the loss and the accuracy of each class. Both in turns; `--cpu` takes the processor
time of one worker in place of the clock, on a busy machine. Prints a Markdown table; exits 1 above the bound of 1.05.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace

import torch
from timing import interleaved, ratio

from fedflat import federate
from fedflat.methods.parser import parse
from fedflat.recipe import validated
from fedflat.rounds import Engine, Problem, ServerState, first_state
from fedflat.runs.build import assemble
from fedflat.runs.launch import start_engine

BATCH, BOUND = 500, 1.05


def plain(problem: Problem, state: ServerState, threads: int, ready: bool) -> Callable[[], object]:
    """The usual loop; its module is the problem's own."""
    data, module = problem.federation.dataset, problem.network.module.eval()
    bytes_, labels = data.test.inputs, data.test.labels
    mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in (data.mean, data.std))

    def normalised(images: torch.Tensor) -> torch.Tensor:
        return ((images.float() / 255 - mean) / std).to(memory_format=torch.channels_last)

    batches = [normalised(images) for images in bytes_.split(BATCH)] if ready else bytes_.split(BATCH)

    @torch.inference_mode()
    def run() -> int:
        torch.set_num_threads(threads)
        problem.network.load(state.weights)
        return sum(
            int((module(batch if ready else normalised(batch)).argmax(dim=1) == label).sum())
            for batch, label in zip(batches, labels.split(BATCH), strict=True)
        )

    return run


def ours(engine: Engine, state: ServerState) -> Callable[[], object]:
    # A copy of the weights each time: an unchanged model is not scored again.
    return lambda: engine.score(replace(state, weights=state.weights.clone()), "test", BATCH)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["fedavg-cnn", "resnet18-gn"])
    parser.add_argument("--inputs", choices=("bytes", "ready"), default="bytes")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    workers = 1 if options.cpu else options.workers
    federation = federate("cifar10", "iid", 100, directory=os.environ["FEDFLAT_DATA"])
    kind = {"name": "pool" if workers > 1 else "inline", "workers": workers}
    print(
        f"| model | {workers} worker(s), s | plain, s | ours ÷ plain | quartiles |\n|---|---|---|---|---|", flush=True
    )
    worst = 0.0
    for name in options.models:
        recipe = validated({"data": "cifar10", "model": {"name": name}, "engine": kind})
        problem = assemble(recipe, federation, None, parse("fedavg"))
        state = first_state(problem)
        with closing(start_engine(problem, state)) as engine:
            jobs = {"ours": ours(engine, state), "plain": plain(problem, state, workers, options.inputs == "ready")}
            clock = time.process_time if options.cpu else time.perf_counter
            seconds = interleaved(jobs, options.repeats, clock)
        middle, low, high = ratio(seconds["ours"], seconds["plain"])
        took = {side: sorted(times)[len(times) // 2] for side, times in seconds.items()}
        cells = f"{took['ours']:.2f} | {took['plain']:.2f} | {middle:.3f} | {low:.3f}–{high:.3f}"
        print(f"| {name} | {cells} |", flush=True)
        worst = max(worst, middle)
    return 0 if worst <= BOUND else 1


if __name__ == "__main__":
    sys.exit(main())
