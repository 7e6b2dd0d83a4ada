"""The cost of curvature: a Hessian–vector product in gradients, and five eigenvalues in products.

    FEDFLAT_DATA=… python benchmarks/hessian_cost.py [--repeats 9] [--threads 2]

The ratio: FedAvg-CNN on 500 CIFAR-10 images and MLP on 500 MNIST images, in batches, at their initial weights, one
thread. The count: the five largest eigenvalues of the FedAvg-CNN on 2,000 CIFAR-10 images after three rounds in
FedSoL's setting, until ‖Hv − λv‖ ≤ 10⁻³ |λ| for each. Exits 1 if a bound is missed. Prints Markdown tables.
"""

import argparse
import sys
import time

import torch
import torch.nn.functional as F
from timing import interleaved, ratio

from fedflat import Federation, federate, models
from fedflat.flatness import Hessian, Objective, top_eigenvalues
from fedflat.recipe import load
from fedflat.runs.build import prepare
from fedflat.runs.experiment import execute

CASES = (("fedavg-cnn", "cifar10", 100), ("mlp", "mnist", 100), ("fedavg-cnn", "cifar10", 500))
GRADIENTS, PRODUCTS, RESIDUAL = 3.2, 60, 1e-3
BATCH = 100  # of the flatness commands; larger ones lose to fresh memory what they gain, and are only reported


def mean_loss(module: torch.nn.Module, federation: Federation, samples: int, batch: int) -> Objective:
    """f on the first training samples."""
    batches = [federation.held_out("train", start, start + batch) for start in range(0, samples, batch)]
    return Objective(module, F.cross_entropy, batches)


def product_in_gradients(repeats: int) -> bool:
    """Print time of ∇²f·v ÷ time of ∇f for each case; whether all keep the bound."""
    torch.set_num_threads(1)
    jobs = {}
    for name, data, batch in CASES:
        federation = federate(data, "iid", 1)
        f = mean_loss(models.build(name, federation.dataset.shape, 10), federation, 500, batch)
        v = torch.randn(f.size, generator=torch.Generator().manual_seed(0))
        jobs |= {f"∇f {name} {batch}": f.gradient, f"Hv {name} {batch}": lambda f=f, v=v: f.product(v)}
    seconds = interleaved(jobs, repeats)
    kept = True
    print("| network, data | batch | product ÷ gradient | quartiles | bound |\n|---|---|---|---|---|")
    for name, data, batch in CASES:
        middle, low, high = ratio(seconds[f"Hv {name} {batch}"], seconds[f"∇f {name} {batch}"])
        kept &= middle <= GRADIENTS or batch != BATCH
        bound = f"≤ {GRADIENTS}" if batch == BATCH else ""
        print(f"| {name}, {data} | {batch} | {middle:.2f} | {low:.2f}–{high:.2f} | {bound} |", flush=True)
    return kept


def eigenvalues_in_products(threads: int) -> bool:
    """Print the five largest eigenvalues of a trained network and what they took; whether the bounds are kept."""
    overrides = ["method=fedavg", "split.alpha=0.5", "server.rounds=3", "evaluation.every=3"]
    problem = prepare(load("sol", overrides))
    result = execute(problem)
    torch.set_num_threads(threads)
    hessian = Hessian(mean_loss(result.model, problem.federation, 2000, 100))
    begun = time.perf_counter()
    found = top_eigenvalues(hessian, k=5, tolerance=RESIDUAL)
    seconds = time.perf_counter() - begun
    print(f"\nAfter three rounds: test accuracy {result.accuracy:.3f}, d = {hessian.size:,}.\n")
    print("| eigenvalue λ | ‖Hv − λv‖ ÷ λ |\n|---|---|")
    errors = (found.residuals / found.values.abs()).tolist()
    for value, error in zip(found.values.tolist(), errors, strict=True):
        print(f"| {value:.3f} | {error:.1e} |")
    print(f"\n{found.products} products (bound: ≤ {PRODUCTS}), and 5 more for the residuals; {seconds:.0f} s.")
    return found.products <= PRODUCTS and max(errors) <= RESIDUAL


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2, help="for the eigenvalues; their count does not depend on it")
    options = parser.parse_args()
    ratios, count = product_in_gradients(options.repeats), eigenvalues_in_products(options.threads)
    return 0 if ratios and count else 1


if __name__ == "__main__":
    sys.exit(main())
