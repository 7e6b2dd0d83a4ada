"""How fast matrix products of ten rows are, the limit of the MLP (J3) and of the LSTM (J6) with batches of ten.

    python benchmarks/products.py

For each layer, in one thread: the product as torch computes it, the same with weights that MKL or oneDNN has packed
beforehand, the packing itself (a step of training changes the weights, so each would have to pack them again), and the
product of many rows at once. Prints GFLOP/s with ranges, and all times in units of the first.
"""

from collections.abc import Callable
from statistics import median

import torch
from timing import milliseconds

from fedflat.engine import keep_freed_memory

ROWS, MANY = 10, 800
LAYERS = {"MLP, 784 → 200": (784, 200), "MLP, 200 → 200": (200, 200), "LSTM, 256 → 1,024": (256, 1024)}


def products(inputs: int, outputs: int) -> dict[str, tuple[int, Callable[[], object]]]:
    """The ways to multiply by a layer's weights, by name: the rows, and the call."""
    x, many, weight = torch.rand(ROWS, inputs), torch.rand(MANY, inputs), torch.rand(outputs, inputs)
    mkl, onednn = torch.ops.mkl, torch.ops.mkldnn
    by_mkl, by_onednn = mkl._mkl_reorder_linear_weight(weight, ROWS), onednn._reorder_linear_weight(weight, ROWS)
    return {
        "as it is": (ROWS, lambda: x @ weight.t()),
        "packed by MKL": (ROWS, lambda: mkl._mkl_linear(x, by_mkl, weight, None, ROWS)),
        "packed by oneDNN": (ROWS, lambda: onednn._linear_pointwise(x, by_onednn, None, "none", [], "")),
        "packing by MKL": (0, lambda: mkl._mkl_reorder_linear_weight(weight, ROWS)),
        "packing by oneDNN": (0, lambda: onednn._reorder_linear_weight(weight, ROWS)),
        f"{MANY} rows": (MANY, lambda: many @ weight.t()),
    }


def main() -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    print("| layer | product | GFLOP/s | time ÷ that of the product as it is |\n|---|---|---|---|")
    for layer, (inputs, outputs) in LAYERS.items():
        usual = 0.0
        for name, (rows, call) in products(inputs, outputs).items():
            taken = milliseconds(call, calls=200)
            usual = usual or median(taken)
            mflop = 2e-6 * rows * inputs * outputs
            rate = f"{mflop / median(taken):.0f} ({mflop / taken[-1]:.0f}–{mflop / taken[0]:.0f})" if rows else ""
            print(f"| {layer} | {name} | {rate} | {median(taken) / usual:.2f} |")


if __name__ == "__main__":
    main()
