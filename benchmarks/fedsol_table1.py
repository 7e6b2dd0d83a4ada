"""FedSoL's Table 1 on CIFAR-10, LDA α = 0.1: our learning curves and the final accuracies of the paper.

    FEDFLAT_DATA=… python benchmarks/fedsol_table1.py [--rounds 100] [--precision bf16] [--out DIR]

Six methods, one seed, and the paper's settings except the rounds and the precision; it takes more than two hours on two
cores, and continues where it was stopped. Prints a Markdown table and writes docs/figures/fedsol-table1.png.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import mean

from fedflat.drawing import new_figure, save_figure
from fedflat.report.picture import Curve
from fedflat.report.tables import published

ROOT = Path(__file__).parents[1]
SETTING = "CIFAR-10 α=0.1"
# What to choose of the sweep for each method.
RUNS = {
    "FedAvg": [f"setting={SETTING}", "method=fedavg"],
    "FedProx": [f"setting={SETTING}", "method=fedprox(1.0)"],
    "FedNTD": [f"setting={SETTING}", "method=fedntd"],
    "FedSAM": [f"setting={SETTING}", "method=fedsam(0.1)"],
    "FedASAM": [f"setting={SETTING}", "method=fedasam(1.0, eta=0.0, biases=True)"],
    "FedSoL": [f"setting={SETTING}", "method=fedsol(rho=2.0, radius='dim0')"],
}
LAST = 5  # evaluations that the mean is taken over


def learn(name: str, rounds: int, precision: str, out: Path) -> Curve:
    """The accuracy over the rounds of one method, trained as far as it is not there yet."""
    settings = [f"server.rounds={rounds}", f"precision={precision}", "evaluation.every=5"]
    command = [sys.executable, "-m", "fedflat.cli", "sweep", str(ROOT / "recipes" / "fedsol-table1.toml")]
    command += [part for each in [*RUNS[name], "seed=0"] for part in ("--only", each)]
    command += [part for each in settings for part in ("--set", each)]
    subprocess.run([*command, "--jobs", "1", "--out", str(out / name)], check=True)
    (metrics,) = (out / name).glob("*/metrics.jsonl")
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [(record["round"], 100 * record["accuracy"]) for record in records if "accuracy" in record]


def papers() -> dict[str, tuple[float, float]]:
    """The published mean and standard deviation of each method."""
    table = published("fedsol-table1")
    column = next(i for i, each in enumerate(table.columns) if each.match == {"setting": SETTING})
    texts = {row.heads[0]: value[column].text for row, value in zip(table.rows, table.values, strict=True)}
    pairs = {name: texts[name].rstrip(" ↑↓").split("±") for name in RUNS}
    return {name: (float(middle), float(spread)) for name, (middle, spread) in pairs.items()}


def draw(curves: dict[str, Curve], ends: dict[str, tuple[float, float]], path: Path) -> None:
    figure = new_figure(8, 4.5)
    ours, theirs = figure.subplots(1, 2, sharey=True, width_ratios=[4, 1])
    for place, (name, points) in enumerate(curves.items()):
        ours.plot(*zip(*points, strict=True), label=name, color=f"C{place}")
        theirs.errorbar(place, ends[name][0], yerr=ends[name][1], fmt="o", color=f"C{place}", capsize=3)
    ours.set(xlabel="round", ylabel="test accuracy (%)", title="ours, one seed")
    theirs.set(title="paper, round 300", xticks=range(len(curves)), xlim=(-1, len(curves)))
    theirs.set_xticklabels(curves, rotation=90)
    for axes in ours, theirs:
        axes.grid(alpha=0.3)
    ours.legend(frameon=False)
    save_figure(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--out", type=Path, default=Path("sweeps/fedsol-table1-curves"))
    options = parser.parse_args()
    curves, ends = {name: learn(name, options.rounds, options.precision, options.out) for name in RUNS}, papers()
    print(f"| method | round {options.rounds} | mean of the last {LAST} evaluations | best | paper, round 300 |")
    print("|---|---|---|---|---|")
    for name, points in curves.items():
        values, (middle, spread) = [value for _, value in points], ends[name]
        ours = f"{values[-1]:.2f} | {mean(values[-LAST:]):.2f} | {max(values):.2f}"
        print(f"| {name} | {ours} | {middle:.2f} ± {spread:.2f} |")
    draw(curves, ends, ROOT / "docs" / "figures" / "fedsol-table1.png")


if __name__ == "__main__":
    main()
