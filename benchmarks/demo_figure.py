"""The figure of the README: three methods on the digits with twenty very different clients, over five seeds.

python benchmarks/demo_figure.py
"""

from pathlib import Path

from fedflat.recipe import load
from fedflat.report.picture import draw_curves, draw_split
from fedflat.runs.build import gather, prepare
from fedflat.runs.experiment import execute

FIGURES = Path(__file__).parents[1] / "docs" / "figures"
METHODS = ("fedavg", "fedsam", "feddyn + man(0.15)")


def accuracy(method: str, seed: int) -> list[tuple[int, float]]:
    problem = prepare(load(None, [f'method="{method}"', f"seed={seed}"]))
    return execute(problem).curve("accuracy")


if __name__ == "__main__":
    curves = {method: [accuracy(method, seed) for seed in range(5)] for method in METHODS}
    for method, runs in curves.items():
        print(method, [round(run[-1][1], 4) for run in runs])
    draw_curves(curves, FIGURES / "demo.png", "test accuracy", "digits, 20 clients, Dirichlet 0.1, 10 a round")
    draw_split(gather(load(None)).counts().tolist(), FIGURES / "split.png", "digits, Dirichlet 0.1")
