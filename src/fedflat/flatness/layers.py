"""Flatness layer by layer: the diagonal blocks of the Hessian, and bounds on them from the layers' inputs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedflat.errors import RecipeError
from fedflat.flatness.hessian import Hessian, top_eigenvalues
from fedflat.flatness.krylov import certified
from fedflat.flatness.objective import Objective, batch_layer
from fedflat.flatness.traces import Trace, trace
from fedflat.local import Batch
from fedflat.models import is_adapted, twice_differentiable
from fedflat.progress import track

Layer = nn.Linear | nn.Conv2d


@dataclass(frozen=True)
class Activity:
    """The inputs of a layer, and the bound that they give on the curvature in its weight.

    Z = A Wᵀ, where the rows of A are the inputs at each position: patches, tokens, or the single row a in a plain
    linear layer. If the block includes the bias, W has one more column and every row of A ends with a 1. A step D of W
    moves Z by A Dᵀ. Because Z is linear in W, its block of the Hessian is exactly

        ⟨D, H_l D⟩ = E⟨A Dᵀ, ∇²_Z ℓ · A Dᵀ⟩ ≤ E[λ⁺ ‖A Dᵀ‖²] ≤ E[λ⁺ ‖A‖²] ‖D‖²,   λ⁺ = max(0, λ_max(∇²_Z ℓ)),

    with ∇²_Z ℓ the Hessian of one sample's loss in all outputs of the layer together. This is MAN's `bound`,
    λ_max(H_l) ≤ E[λ⁺ ‖A‖²]. For a plain linear layer with its bias, ‖A‖² = ‖a‖² + 1. ‖A‖ is the Frobenius norm, a sum
    over positions (for grouped channels, of the largest group). The spectral norm would also give a bound, but needs a
    singular value decomposition for each sample.

    The bound assumes that the loss is a mean over the samples and that samples do not influence each other in
    evaluation mode. It is None if the first axis of the layer's output does not count samples, if a forward pass uses
    the weight several times, or if a layer normalises with the statistics of the batch. Each λ⁺ is an upper bound that
    holds with probability 1 − 10⁻⁶ where Lanczos stops early (`krylov.certified`).
    """

    norm: float  # E‖a‖², without the 1 of the bias
    mean_square: float  # the mean of a² over units, which MAN penalises
    patches: float  # E‖A‖²
    bound: float | None
    last: bool  # whether the layer's output is the output of the module

    @property
    def softmax_bound(self) -> float | None:
        """½ E‖A‖² ≥ λ₁ for a layer that outputs the logits of a cross-entropy, because diag(p) − ppᵀ ⪯ ½ I."""
        return self.patches / 2 if self.last else None


@dataclass(frozen=True)
class LayerFlatness:
    """One layer's diagonal block of the Hessian: its k largest eigenvalues, its trace and the layer's activity."""

    name: str
    parameters: int
    eigenvalues: list[float]
    trace: Trace
    activity: Activity
    bias: bool  # whether the bias is in the block


@dataclass(frozen=True)
class Block:
    """One layer: the objective as a function of its parameters alone, and its activity."""

    name: str
    objective: Objective
    activity: Activity
    bias: bool


def layers(
    objective: Objective,
    k: int = 1,
    tolerance: float = 1e-2,
    products: int = 32,
    steps: int = 12,
    seed: int = 0,
    bias: bool = True,
) -> list[LayerFlatness]:
    """Measures every nn.Linear and nn.Conv2d that the objective depends on and that a forward pass calls.

    For each layer the eigenvalues take tens of Hessian products.

    Args:
        objective: the mean loss.
        k: number of eigenvalues of each block.
        tolerance: relative accuracy of the eigenvalues.
        products: Hessian products for each trace.
        steps: backward passes from the loss to the layer for the bound of its activity.
        seed: seed of the start vectors and probes.
        bias: include the bias in the layer's block; otherwise the block is that of the weight alone.

    Raises:
        RecipeError: `k` or `steps` is less than 1, or no layer is found.
    """
    if min(k, steps) < 1:
        raise RecipeError(f"layers: k = {k} and steps = {steps} must be at least 1")
    found = []
    for each in track(blocks(objective, steps, seed, bias), "layers"):
        block = Hessian(each.objective)
        top = top_eigenvalues(block, k, tolerance, seed).values.tolist()
        estimate = trace(block, products, seed)
        found.append(LayerFlatness(each.name, block.size, top, estimate, each.activity, each.bias))
    return found


def blocks(objective: Objective, steps: int = 12, seed: int = 0, bias: bool = True) -> list[Block]:
    """The layers of an objective, as `layers` measures them."""
    found = []
    for name, modules in track(_sharing(objective).items(), "inputs of the layers"):
        biases = _biases(objective, modules) if bias else []
        activity = _activity(objective, modules, bool(biases), steps, seed)
        if activity is not None:
            shown = name.removesuffix("weight").removesuffix(".")
            found.append(Block(shown, objective.of([name, *biases]), activity, bool(biases)))
    if not found:
        hint = "; measure it with --parameters all, or merged" if is_adapted(objective.module) else ""
        raise RecipeError(
            f"layers: the objective does not depend on the weight of any nn.Linear or nn.Conv2d it calls{hint}"
        )
    return found


def _sharing(objective: Objective) -> dict[str, list[Layer]]:
    """The weights of the objective that belong to layers, each with the modules that share it."""
    modules = [m for m in objective.module.modules() if isinstance(m, Layer)]
    weights = {n: p for n, p in objective.module.named_parameters() if n in objective.layout.shapes}
    holders = {name: [m for m in modules if m.weight is weight] for name, weight in weights.items()}
    return {name: held for name, held in holders.items() if held}


def _biases(objective: Objective, modules: Sequence[Layer]) -> list[str]:
    """The names of the biases that belong only to these layers, if the objective depends on them."""
    others = [p for m in objective.module.modules() if m not in modules for p in m.parameters(recurse=False)]
    own = [m.bias for m in modules if not any(m.bias is p for p in others)]
    named = objective.module.named_parameters()
    return [n for n, p in named if n in objective.layout.shapes and any(p is b for b in own)]


def _activity(objective: Objective, modules: Sequence[Layer], bias: bool, steps: int, seed: int) -> Activity | None:
    """The activity of the modules that share one weight, or None if a forward pass does not call them."""
    chance = torch.Generator().manual_seed(seed)
    norm, units, patches, bounds, last = 0.0, 0, 0.0, [], True
    for batch in objective.batches:
        seen = _passed(objective, modules, batch)
        if not seen.inputs:
            return None
        reaches = [_reach(modules[0], entered, bias) for entered in seen.inputs]
        norm += sum(float(entered.square().sum()) for entered in seen.inputs)
        units += sum(entered.numel() for entered in seen.inputs)
        patches += sum(float(reach.sum()) for reach in reaches)
        last = last and seen.last
        if len(reaches) == 1 and len(seen.shifts[0]) == len(batch[1]):
            bounds.append(float(reaches[0] @ _curvature(seen.loss, seen.shifts[0], steps, chance)))
    holds = len(bounds) == len(objective.batches) and batch_layer(objective.module) is None
    total = objective.samples
    return Activity(norm / total, norm / units, patches / total, sum(bounds) / total if holds else None, last)


@dataclass(frozen=True)
class _Pass:
    """The summed loss of one batch. For each call of the layer, its input and a zero tensor added to its output."""

    inputs: list[Tensor]
    shifts: list[Tensor]
    loss: Tensor
    last: bool


def _passed(objective: Objective, modules: Sequence[Layer], batch: Batch) -> _Pass:
    inputs, shifts, outputs = [], [], []

    def shift(module: nn.Module, arguments: tuple[Tensor, ...], named: dict[str, Tensor], output: Tensor) -> Tensor:
        inputs.append((*arguments, *named.values())[0].detach())
        shifts.append(torch.zeros_like(output, requires_grad=True))
        outputs.append(output + shifts[-1])
        return outputs[-1]

    with ExitStack() as hooks:
        for module in modules:
            hooks.callback(module.register_forward_hook(shift, with_kwargs=True).remove)
        hooks.enter_context(twice_differentiable())
        result = objective.module(batch[0])
    loss = objective.mass(batch) * objective.loss(result, batch[1])
    return _Pass(inputs, shifts, loss, any(output is result for output in outputs))


@torch.no_grad()
def _reach(layer: Layer, entered: Tensor, bias: bool) -> Tensor:
    """‖A‖² of each sample, over all rows of A. For grouped channels, the largest over the groups."""
    squares = entered.square()
    if isinstance(layer, nn.Linear):
        rows = squares.shape[1:-1].numel()
        return squares.reshape(len(squares), -1).sum(dim=1) + rows * bias
    # With ones in place of W the layer sums a² over each patch, with its own stride, padding and dilation.
    ones = {"weight": torch.ones_like(layer.weight[: layer.groups])}
    if layer.bias is not None:
        ones["bias"] = torch.full_like(layer.bias[: layer.groups], float(bias))
    sums: Tensor = functional_call(layer, ones, (squares,))
    return sums.flatten(2).sum(dim=2).amax(dim=1)


def _curvature(loss: Tensor, shift: Tensor, steps: int, chance: torch.Generator) -> Tensor:
    """An upper bound on max(0, λ_max(∇²_Z ℓ)) of each sample, from a few steps of Lanczos.

    The samples are independent, so one product with the Hessian of their summed loss is a product for each of them. If
    everything after the layer is piecewise linear, ∇²_Z ℓ of a cross-entropy has rank C − 1, and C steps are exact.
    Only two vectors are kept. Loss of orthogonality repeats eigenvalues but does not change the largest one.
    """
    (slope,) = torch.autograd.grad(loss, shift, create_graph=True)
    if not slope.requires_grad:  # the loss is linear in Z
        return shift.new_zeros(len(shift))
    # Below this, squares underflow. A vector this small counts as zero, and Lanczos ends there.
    smallest = torch.finfo(shift.dtype).tiny ** 0.5
    v = torch.randn(shift.shape, generator=chance, dtype=shift.dtype).flatten(1).to(shift.device)
    v /= v.norm(dim=1, keepdim=True)
    before, beta = torch.zeros_like(v), torch.zeros_like(v[:, :1])
    alphas, betas = [], []
    for _ in range(min(steps, v.shape[1])):
        w = torch.autograd.grad(slope, shift, v.view_as(shift), retain_graph=True)[0].flatten(1) - beta * before
        alpha = (w * v).sum(dim=1, keepdim=True)
        w -= alpha * v
        beta = w.norm(dim=1, keepdim=True)
        before, v = v, w / beta.clamp_min(smallest)
        alphas.append(alpha)
        betas.append(beta)
    return certified(torch.cat(alphas, dim=1), torch.cat(betas, dim=1), v.shape[1]).clamp_min(0).to(shift.dtype)
