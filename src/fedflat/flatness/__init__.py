"""How flat a minimum is: the Hessian of the loss, seen through its products with vectors."""

from fedflat.flatness.hessian import Eigen, Hessian, Operator, Trace, top_eigenvalues, trace
from fedflat.flatness.objective import Objective

__all__ = ["Eigen", "Hessian", "Objective", "Operator", "Trace", "top_eigenvalues", "trace"]
