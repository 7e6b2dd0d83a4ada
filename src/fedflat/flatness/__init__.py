"""How flat a minimum is: the Hessian of the loss, seen through its products with vectors."""

from fedflat.flatness.hessian import Eigen, Hessian, Trace, top_eigenvalues, trace

__all__ = ["Eigen", "Hessian", "Trace", "top_eigenvalues", "trace"]
