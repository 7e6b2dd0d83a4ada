"""Does a cheaper ascent cost accuracy? FedSAM compared with `looksam` on Fashion-MNIST, over seeds.

    FEDFLAT_DATA=… python benchmarks/sparing_sam.py [--seeds 8] [--first 8] [--rounds 30] [--model mlp]

20 clients with 5,000 images (Dirichlet 0.3), 5 a round, two epochs, batch 20, one radius for all. Each seed has its own
split, initial weights and cohorts, the same for every method, so differences from FedSAM are paired: their mean with a
95 % interval (Student's t). FedAvg shows whether SAM matters here at all, and α = 0.7 what too much of the old
direction costs. Prints a Markdown table; exits 1 if another interval lies wholly below −1 point.
"""

import argparse
import os
import statistics
import sys

from scipy.stats import t as student

from fedflat import federate, train

METHODS = (
    "fedavg",
    "fedsam({rho})",
    "looksam({rho}, every=2)",
    "looksam({rho}, every=5)",
    "looksam({rho}, every=5, mix=0.7)",
    "looksam({rho}, every=1, fraction=0.5)",
    "looksam({rho}, every=1, fraction=0.25)",
    "looksam({rho}, every=5, fraction=0.5)",
)
SAM, LARGE = METHODS[1], METHODS[4]


def accuracy(method: str, seed: int, options: argparse.Namespace) -> float:
    """Test accuracy in per cent: the mean of the last five rounds."""
    place = os.environ["FEDFLAT_DATA"]
    federation = federate("fashion-mnist", "dirichlet", 20, alpha=0.3, seed=seed, limit=5000, directory=place)
    result = train(
        federation,
        options.model,
        method.format(rho=options.rho),
        rounds=options.rounds,
        cohort=5,
        epochs=2,
        batch=20,
        lr=0.05,
        seed=seed,
        engine="inline",
        measures=[],
        verbose=False,
    )
    return 100 * statistics.fmean(record["accuracy"] for record in result.history[-5:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--first", type=int, default=8, help="the first seed; α was chosen on those before 8")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--rho", type=float, default=0.1)
    parser.add_argument("--model", default="mlp")
    options = parser.parse_args()
    found: dict[str, list[float]] = {method: [] for method in METHODS}
    for seed in range(options.first, options.first + options.seeds):
        for method, values in found.items():
            values.append(accuracy(method, seed, options))
        print(f"seed {seed} done", file=sys.stderr, flush=True)
    worse = False
    print("| method | accuracy, % | difference from FedSAM, 95 % interval |\n|---|---|---|")
    for method, values in found.items():
        gaps = [a - b for a, b in zip(values, found[SAM], strict=True)]
        middle = statistics.fmean(gaps)
        half = float(student.ppf(0.975, len(gaps) - 1)) * statistics.stdev(gaps) / len(gaps) ** 0.5
        shown = "" if method == SAM else f"{middle:+.2f} ({middle - half:+.2f} to {middle + half:+.2f})"
        worse |= method not in ("fedavg", SAM, LARGE) and middle + half < -1
        cells = f"{statistics.fmean(values):.2f} ± {statistics.stdev(values):.2f} | {shown}"
        print(f"| `{method.format(rho=options.rho)}` | {cells} |")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
