"""Do flatness methods find flatter minima? Five methods on real images, with all flatness measures.

    FEDFLAT_DATA=… python benchmarks/flatness_of_methods.py [--data fashion-mnist cifar10] [--rounds 10]

100 clients (Dirichlet 0.3), 10 per round, the FedAvg-CNN, one local epoch, one seed. Curvature, sharpness and landscape
are those of the mean loss over 250 fixed training samples, and the duality is that of the last layer. Prints a Markdown
table for each data set, and writes figures of the landscapes to docs/figures.
"""

import argparse
from pathlib import Path

from fedflat.flatness import (
    Hessian,
    Landscape,
    Portion,
    adaptive_sharpness,
    capacity,
    decompose,
    eigen_plane,
    landscape,
    top_eigenvalues,
    trace,
)
from fedflat.flatness.terrain import draw_landscapes
from fedflat.recipe import load
from fedflat.runs.build import prepare
from fedflat.runs.experiment import execute

FIGURES = Path(__file__).parents[1] / "docs" / "figures"
METHODS = {
    "FedAvg": "fedavg",
    "FedAvg + MAN": "man(0.15)",
    "FedSAM": "fedsam(0.05)",
    "FedSMOO": "fedsmoo(rho=0.05)",
    "FedSoL": "fedsol(radius='fixed', scope='head')",
}
COLUMNS = ("accuracy", "loss", "λ₁", "λ₁/λ₅", "trace", "adaptive sharpness", "log₁₀ V_L", "gap", "of the pairs",
           "Σσ_wσ_g")  # fmt: skip
PORTION = Portion(samples=250, batch=250)


def study(method: str, data: str, rounds: int) -> tuple[dict[str, str], Landscape]:
    """One method's numbers, the last layer's duality among them, and its landscape on the top eigenvectors' plane."""
    overrides = [
        f'method="{method}"', f"data={data}", "split.clients=100", "split.alpha=0.3", "model=fedavg-cnn",
        "local.epochs=1", "local.batch=50", "local.lr=0.05", "server.cohort=10", f"server.rounds={rounds}",
        "evaluation.every=0",
    ]  # fmt: skip
    problem = prepare(load(None, overrides))
    accuracy = execute(problem).accuracy
    objective, federation = PORTION.pooled(problem), problem.federation
    hessian = Hessian(objective)
    eigen, spread = top_eigenvalues(hessian, 5), trace(hessian, products=32)
    around = landscape(objective, eigen_plane(eigen), span=0.5, points=13)
    train, test = (federation.held_out(part, 0, 1000) for part in ("train", "test"))
    dual = decompose(problem.network.module, problem.loss, train, test, "head", k=10, limit=400, samples=500)
    numbers = {
        "accuracy": f"{accuracy:.4f}",
        "loss": f"{objective.value():.3f}",
        "λ₁": f"{float(eigen.values[0]):.2f}",
        "λ₁/λ₅": f"{eigen.ratio:.2f}",
        "trace": f"{spread.mean:.0f} ± {spread.error:.0f}",
        "adaptive sharpness": f"{adaptive_sharpness(objective):.3f}",
        "log₁₀ V_L": f"{capacity(objective.module, objective.batches[0][0][:1]).log10:.2f}",
        "gap": f"{dual.gap:.4f}",
        "of the pairs": ", ".join(f"{found.paired_gap:.4f}" for found in dual.pairings.values()),
        "Σσ_wσ_g": ", ".join(f"{found.envelope:.4f}" for found in dual.pairings.values()),
    }
    return numbers, around


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", nargs="+", default=["fashion-mnist", "cifar10"])
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    for data in options.data:
        landscapes: dict[str, Landscape] = {}
        print(f"\n{data}\n\n| method | {' | '.join(COLUMNS)} |\n{'|---' * (len(COLUMNS) + 1)}|", flush=True)
        for name, method in METHODS.items():
            numbers, landscapes[name] = study(method, data, options.rounds)
            print(f"| {name} | {' | '.join(numbers[column] for column in COLUMNS)} |", flush=True)
        draw_landscapes(landscapes, FIGURES / f"landscape-{data}.png")


if __name__ == "__main__":
    main()
