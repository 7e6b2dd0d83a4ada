"""Our learning curve next to one of the FedSoL authors' code, with the authors' partition and cohorts.

    FEDFLAT_DATA=… python benchmarks/parity_curves.py curve.json [--rounds 60] [--method fedavg] [--out DIR]

The file has `algorithm`, `params`, `alpha` (LDA on CIFAR-10) and a `log` of {round, accuracy}. Ours is the preset `sol`
with split.draws = server.draws = "fedsol", so both have the same clients and the same participants; initial weights,
batches and augmentation differ. It continues where it was stopped. Prints the mean difference over the rounds that both
have, and writes docs/figures/parity-NAME.png. `--draw` only draws existing results.
"""

import argparse
import json
import sys
from pathlib import Path
from statistics import mean
from typing import Any

from fedflat.drawing import new_figure, save_figure
from fedflat.recipe import load
from fedflat.report.picture import Curve
from fedflat.runs.build import prepare
from fedflat.runs.experiment import execute

FIGURES = Path(__file__).parents[1] / "docs" / "figures"


def spelled(algorithm: str, params: dict[str, Any]) -> str:
    """The method in our words, where the authors' names for it and its options are ours too."""
    options = ", ".join(f"{name}={value!r}" for name, value in params.items())
    return f"{algorithm}({options})" if options else algorithm


def learn(method: str, alpha: float, rounds: int, seed: int, workers: int, out: Path) -> None:
    """Train in the authors' setting as far as it is not there yet."""
    settings = [f"method={method}", f"split.alpha={alpha}", f"server.rounds={rounds}", f"seed={seed}"]
    problem = prepare(load("sol", [*settings, f"engine.workers={workers}"]))
    tell = [lambda record: print(f"round {record['round']}: {record['accuracy']:.4f}", flush=True)]
    execute(problem, out, tell, resume=(out / "recipe.toml").exists())


def read(out: Path) -> Curve:
    records = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [(record["round"], record["accuracy"]) for record in records if "accuracy" in record]


def compared(ours: Curve, theirs: Curve) -> dict[str, float]:
    """Both means over the common rounds, the mean difference, and the mean of its absolute value."""
    pairs = [(dict(ours)[round], accuracy) for round, accuracy in theirs if round in dict(ours)]
    gaps = [our - their for our, their in pairs]
    return {
        "rounds": len(pairs),
        "ours": mean(our for our, _ in pairs),
        "authors": mean(their for _, their in pairs),
        "difference": mean(gaps),
        "absolute difference": mean(map(abs, gaps)),
    }


def draw(curves: dict[str, Curve], path: Path, title: str) -> None:
    figure = new_figure(7, 4)
    axes = figure.subplots()
    for (name, points), style in zip(curves.items(), ("-", "--"), strict=True):
        rounds, accuracies = zip(*points, strict=True)
        axes.plot(rounds, [100 * accuracy for accuracy in accuracies], style, marker="o", markersize=3, label=name)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set(xlabel="round", ylabel="test accuracy (%)", title=title)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    save_figure(figure, path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("curve", type=Path, help="the authors' curve, a JSON file")
    parser.add_argument("--rounds", type=int, help="how many; as many as the authors' curve has, 60 at most")
    parser.add_argument("--method", help="the method in our words, where the file's are the authors'")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("runs-parity"))
    parser.add_argument("--draw", action="store_true", help="train nothing")
    options = parser.parse_args()
    given = json.loads(options.curve.read_text())
    theirs = [(entry["round"], entry["accuracy"]) for entry in given["log"]]
    method = options.method or spelled(given["algorithm"], given["params"])
    run = options.out / f"{options.curve.stem}-{options.seed}"
    if not options.draw:
        learn(method, given["alpha"], options.rounds or min(len(theirs), 60), options.seed, options.workers, run)
    ours = read(run)
    title = f"{method}, CIFAR-10, LDA {given['alpha']}, the authors' partition and cohorts"
    draw({"fedflat": ours, "authors' code": theirs}, FIGURES / f"parity-{options.curve.stem}.png", title)
    print(json.dumps(compared(ours, theirs), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
