"""Accuracy with bfloat16: FedAvg on CIFAR-10 in float32 and in bf16, three seeds each.

    FEDFLAT_DATA=… python benchmarks/bf16_accuracy.py [--rounds 20]

The job J2: 100 equal clients, 10 per round, the FedAvg-CNN, 5 local epochs. A seed changes the initial weights, the
cohorts and the batches, but not the split. Exits 1 if the mean accuracy in bf16 is outside the range of the float32
seeds.
"""

import argparse
import sys

from fedflat.recipe import load
from fedflat.runs.build import prepare
from fedflat.runs.experiment import execute

SEEDS = (0, 1, 2)


def accuracy(precision: str, seed: int, rounds: int) -> float:
    overrides = [
        f"seed={seed}", f"precision={precision}", "data=cifar10", "split=iid", "split.clients=100", "split.seed=0",
        "model=fedavg-cnn", "local.epochs=5", "local.batch=50", "local.lr=0.01", "local.momentum=0.9",
        "local.weight_decay=1e-5", "server.cohort=10", f"server.rounds={rounds}", "evaluation.every=0",
    ]  # fmt: skip
    found = execute(prepare(load(None, overrides))).accuracy
    print(f"{precision}, seed {seed}: {found:.4f}", file=sys.stderr, flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    found = {
        precision: [accuracy(precision, seed, options.rounds) for seed in SEEDS] for precision in ("float32", "bf16")
    }
    print(f"| precision | {' | '.join(f'seed {seed}' for seed in SEEDS)} | mean |\n{'|---' * (len(SEEDS) + 2)}|")
    for precision, values in found.items():
        print(f"| {precision} | {' | '.join(f'{v:.4f}' for v in values)} | {sum(values) / len(values):.4f} |")
    mean = sum(found["bf16"]) / len(SEEDS)
    return 0 if min(found["float32"]) <= mean <= max(found["float32"]) else 1


if __name__ == "__main__":
    sys.exit(main())
