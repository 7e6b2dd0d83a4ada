"""MAN's strength ζ against activation norms, top eigenvalue and trace: FedAvg on Fashion-MNIST.

    FEDFLAT_DATA=… python benchmarks/man_on_fashion.py [--rounds 20]

100 clients (Dirichlet 0.3), 10 per round, the FedAvg-CNN for 28 pixels, one local epoch; the Hessian of the mean loss
over 1,000 fixed training samples. Writes docs/figures/man.png and prints a Markdown table.
"""

import argparse
import json
from pathlib import Path

from fedflat.flatness import Hessian, Objective, top_eigenvalues, trace
from fedflat.recipe import load
from fedflat.report.picture import draw_bars
from fedflat.runs.build import prepare
from fedflat.runs.experiment import execute

FIGURES = Path(__file__).parents[1] / "docs" / "figures"
ZETAS = (0.0, 0.05, 0.15, 0.5)


def measure(zeta: float, rounds: int) -> dict[str, float]:
    overrides = [
        f'method="man({zeta})"', "data=fashion-mnist", "split.clients=100", "split.alpha=0.3", "model=fedavg-cnn",
        "local.epochs=1", "local.batch=50", "local.lr=0.05", "server.cohort=10", f"server.rounds={rounds}",
        "evaluation.every=5",
    ]  # fmt: skip
    problem = prepare(load(None, overrides))
    result = execute(problem)
    norms = [value for name, value in result.history[-1]["notes"].items() if name.startswith("activation/")]
    batches = [problem.federation.held_out("train", start, start + 500) for start in range(0, 1000, 500)]
    hessian = Hessian(Objective(problem.network.module, problem.loss, batches))
    spread = trace(hessian, products=32)
    return {
        "zeta": zeta,
        "accuracy": result.accuracy,
        "activations": sum(norms),
        "top eigenvalue": float(top_eigenvalues(hessian, k=1, tolerance=1e-2).values[0]),
        "trace": spread.mean,
        "trace error": spread.error,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    rows = []
    for zeta in ZETAS:
        rows.append(measure(zeta, options.rounds))
        print(json.dumps(rows[-1]), flush=True)
    shown = ("activations", "top eigenvalue", "trace", "accuracy")
    draw_bars({name: [row[name] for row in rows] for name in shown}, [f"ζ={z}" for z in ZETAS], FIGURES / "man.png")
    print("\n| ζ | test accuracy | Σ mean a² | λ₁ | trace |\n|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['zeta']} | {row['accuracy']:.4f} | {row['activations']:.3f} | {row['top eigenvalue']:.2f} "
            f"| {row['trace']:.1f} ± {row['trace error']:.1f} |"
        )


if __name__ == "__main__":
    main()
