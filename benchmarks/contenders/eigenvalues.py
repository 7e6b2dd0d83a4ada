"""The five largest eigenvalues and the trace by fedflat, curvlinops and PyHessian, for benchmarks/curvature.py.

    python benchmarks/contenders/eigenvalues.py PROBLEM.pt LIMIT NAME…

Prints a Markdown table of CPU time, a line as soon as it is measured. Each of the named others (curvlinops, PyHessian)
is compared with the mean of ours just before and just after it. One that takes more than LIMIT times our time is
stopped, and its ratio is a lower bound. Exits 1 if ours is not 3 times faster than PyHessian and 1.5 times faster than
curvlinops, or if eigenvalues disagree.
"""

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from curvlinops import HessianLinearOperator
from pyhessian import hessian
from scipy.sparse.linalg import LinearOperator, eigsh
from torch import Tensor, nn

from fedflat import models
from fedflat.flatness import Hessian, Objective, top_eigenvalues, trace

K, TOLERANCE, PROBES = 5, 1e-3, 12
FASTER = {"PyHessian": 3.0, "curvlinops": 1.5}
# PyHessian stops when an eigenvalue changes by less than the tolerance, which is no bound on its error.
AGREED = {"PyHessian": 10 * TOLERANCE, "curvlinops": TOLERANCE}
Batches = Sequence[tuple[Tensor, Tensor]]


class TooLongError(Exception):
    """A contender has used the CPU time that it was given."""


class Counter:
    """Counts products, and stops the contender that makes them after some CPU time."""

    def __init__(self, limit: float = float("inf")) -> None:
        self.products, self._end = 0, time.process_time() + limit

    def around(self, product: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def counted(vector: Any) -> Any:
            if time.process_time() > self._end:
                raise TooLongError
            self.products += 1
            return product(vector)

        return counted


class Found(NamedTuple):
    """The eigenvalues (none if it was stopped), and what they cost."""

    values: list[float]
    products: int
    seconds: float


def timed(name: str, job: Callable[[Counter], list[float]], limit: float = float("inf")) -> Found:
    begun, counter = time.process_time(), Counter(limit)
    try:
        values = job(counter)
    except TooLongError:
        values = []
    found = Found(values, counter.products, time.process_time() - begun)
    told = ", ".join(f"{value:.3f}" for value in values) or "stopped"
    print(f"| {name} | {found.seconds:.1f} | {found.products} | {told} |", flush=True)
    return found


def by_fedflat(objective: Objective, counter: Counter) -> list[float]:
    found = top_eigenvalues(Hessian(objective), K, TOLERANCE)
    counter.products = found.products
    return found.values.tolist()


def by_curvlinops(module: nn.Module, batches: Batches, counter: Counter) -> list[float]:
    parameters = list(module.parameters())
    operator = HessianLinearOperator(module, nn.CrossEntropyLoss(), parameters, batches, check_deterministic=False)
    inner = operator.to_scipy()
    counting = LinearOperator(inner.shape, matvec=counter.around(lambda v: inner @ v), dtype=inner.dtype)
    values = eigsh(counting, k=K, which="LA", tol=TOLERANCE, return_eigenvectors=False)
    return sorted(values.tolist(), reverse=True)


def by_pyhessian(computer: hessian, counter: Counter) -> list[float]:
    product = computer.dataloader_hv_product
    computer.dataloader_hv_product = counter.around(product)
    try:
        return computer.eigenvalues(tol=TOLERANCE, top_n=K)[0]
    finally:
        computer.dataloader_hv_product = product


def main() -> int:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    place, limit, *names = sys.argv[1:]
    state, batches = torch.load(place)
    module = models.build("fedavg-cnn", (3, 32, 32), 10)
    module.load_state_dict(state)
    objective = Objective(module, F.cross_entropy, batches)
    computer = hessian(module, nn.CrossEntropyLoss(), dataloader=batches, cuda=False)
    jobs = {
        "fedflat": lambda counter: by_fedflat(objective, counter),
        "curvlinops": lambda counter: by_curvlinops(module, batches, counter),
        "PyHessian": lambda counter: by_pyhessian(computer, counter),
    }
    print(f"\n{objective.samples} images.\n\n| | seconds | products | eigenvalues |\n|---|---|---|---|", flush=True)
    ours = [timed("fedflat", jobs["fedflat"])]
    others = []
    for name in names:
        others.append(timed(name, jobs[name], float(limit) * ours[-1].seconds))
        ours.append(timed("fedflat", jobs["fedflat"]))
    print()
    kept = [
        compared(name, other, before, after)
        for name, other, before, after in zip(names, others, ours, ours[1:], strict=False)
    ]
    if "PyHessian" in names:
        estimate = trace(Hessian(objective), PROBES)
        other = computer.trace(maxIter=PROBES, tol=0)
        print(f"trace: fedflat {estimate.mean:.1f} ± {estimate.error:.1f}, PyHessian {sum(other) / len(other):.1f}")
    return 0 if all(kept) else 1


def compared(name: str, other: Found, before: Found, after: Found) -> bool:
    """Print how much faster ours is, in all and for a product, and by how much the eigenvalues differ."""
    mean = (before.seconds + after.seconds) / 2
    faster = other.seconds / mean
    product = faster * after.products / other.products
    apart = max((abs(a / b - 1) for a, b in zip(other.values, after.values, strict=False)), default=0.0)
    least = "" if other.values else "at least "
    print(f"{name} ÷ fedflat: {least}{faster:.2f}, a product {product:.2f}; eigenvalues differ by at most {apart:.0e}")
    return faster >= FASTER[name] and apart < AGREED[name]


if __name__ == "__main__":
    sys.exit(main())
