"""The five largest eigenvalues and the trace by fedflat, curvlinops and PyHessian, for benchmarks/curvature.py.

    python benchmarks/contenders/eigenvalues.py PROBLEM.pt

Prints a Markdown table of CPU time. Each of the others is compared with the mean of ours just before and just after it.
Exits 1 if ours is not 3 times faster than PyHessian and 1.5 times faster than curvlinops, or if eigenvalues disagree.
"""

import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from curvlinops import HessianLinearOperator
from pyhessian import hessian
from scipy.sparse.linalg import eigsh
from torch import nn

from fedflat import models
from fedflat.flatness import Hessian, Objective, top_eigenvalues, trace

K, TOLERANCE, PROBES = 5, 1e-3, 12
FASTER = {"PyHessian": 3.0, "curvlinops + SciPy": 1.5}
# PyHessian stops when an eigenvalue changes by less than the tolerance, which is no bound on its error.
AGREED = {"PyHessian": 10 * TOLERANCE, "curvlinops + SciPy": TOLERANCE}


def timed(job: Callable[[], list[float]]) -> tuple[list[float], float]:
    begun = time.process_time()
    return job(), time.process_time() - begun


def main() -> int:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    state, batches = torch.load(sys.argv[1])
    module = models.build("fedavg-cnn", (3, 32, 32), 10)
    module.load_state_dict(state)
    objective = Objective(module, F.cross_entropy, batches)
    parameters = list(module.parameters())
    loss = nn.CrossEntropyLoss()

    def curvlinops() -> list[float]:
        operator = HessianLinearOperator(module, loss, parameters, batches, check_deterministic=False)
        values = eigsh(operator.to_scipy(), k=K, which="LA", tol=TOLERANCE, return_eigenvectors=False)
        return sorted(values.tolist(), reverse=True)

    pyhessian = hessian(module, loss, dataloader=batches, cuda=False)
    jobs = {
        "curvlinops + SciPy": curvlinops,
        "PyHessian": lambda: pyhessian.eigenvalues(tol=TOLERANCE, top_n=K)[0],
    }
    ours, before = timed(lambda: top_eigenvalues(Hessian(objective), K, TOLERANCE).values.tolist())
    print(f"\n{objective.samples} images.\n\n| | seconds | ÷ fedflat | largest difference | eigenvalues |")
    print(f"|---|---|---|---|---|\n| fedflat | {before:.1f} | 1 | | {told(ours)} |", flush=True)
    good = True
    for name, job in jobs.items():
        values, seconds = timed(job)
        _, after = timed(lambda: top_eigenvalues(Hessian(objective), K, TOLERANCE).values.tolist())
        faster, before = 2 * seconds / (before + after), after
        apart = max(abs(a / b - 1) for a, b in zip(values, ours, strict=True))
        print(f"| {name} | {seconds:.1f} | {faster:.2f} | {apart:.0e} | {told(values)} |", flush=True)
        good &= faster >= FASTER[name] and apart < AGREED[name]
    print(f"\nfedflat again, at the end: {before:.1f} s.")
    estimate = trace(Hessian(objective), PROBES)
    other = pyhessian.trace(maxIter=PROBES, tol=0)
    print(f"trace: fedflat {estimate.mean:.1f} ± {estimate.error:.1f}, PyHessian {sum(other) / len(other):.1f}")
    return 0 if good else 1


def told(values: list[float]) -> str:
    return ", ".join(f"{value:.3f}" for value in values)


if __name__ == "__main__":
    sys.exit(main())
