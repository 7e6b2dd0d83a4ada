"""The five largest eigenvalues and the trace by fedflat, curvlinops and PyHessian, for benchmarks/curvature.py.

    python benchmarks/contenders/eigenvalues.py PROBLEM.pt

Prints a Markdown table. Exits 1 if ours is not 3 times faster than PyHessian and 1.5 times faster than curvlinops, or
if the eigenvalues disagree.
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
        "fedflat": lambda: top_eigenvalues(Hessian(objective), K, TOLERANCE).values.tolist(),
        "curvlinops + SciPy": curvlinops,
        "PyHessian": lambda: pyhessian.eigenvalues(tol=TOLERANCE, top_n=K)[0],
    }
    print(f"\n{objective.samples} images.\n\n| | seconds | ÷ fedflat | eigenvalues |\n|---|---|---|---|")
    found = {}
    for name, job in jobs.items():
        values, seconds = found[name] = timed(job)
        faster = seconds / found["fedflat"][1]
        print(f"| {name} | {seconds:.1f} | {faster:.2f} | {', '.join(f'{v:.3f}' for v in values)} |", flush=True)
    estimate = trace(Hessian(objective), PROBES)
    other = pyhessian.trace(maxIter=PROBES, tol=0)
    print(f"\ntrace: fedflat {estimate.mean:.1f} ± {estimate.error:.1f}, PyHessian {sum(other) / len(other):.1f}")
    apart = max(abs(a / b - 1) for a, b in zip(found["fedflat"][0], found["curvlinops + SciPy"][0], strict=True))
    print(f"eigenvalues of fedflat and curvlinops: within {apart:.0e} of each other")
    fast = all(found[name][1] >= factor * found["fedflat"][1] for name, factor in FASTER.items())
    return 0 if fast and apart < TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
