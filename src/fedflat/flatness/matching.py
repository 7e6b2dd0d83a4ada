"""Weight matching: reorders the hidden units of one network to bring its weights close to those of another."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedflat.errors import RecipeError
from fedflat.flatness.symmetry import Hidden, by_unit, hidden_layers, layer

Orders = dict[str, Tensor]


@dataclass(frozen=True)
class Matching:
    """The order of the second network's units that fits the first network best.

    Attributes:
        orders: for each hidden layer, which unit of the second network takes each place; see `permuted`.
        inner: Σ ⟨W_l, P_l W'_l P_{l−1}ᵀ⟩ over all layers and biases, which the matching maximises.
        sweeps: passes over the layers until nothing improved.
    """

    orders: Orders
    inner: float
    sweeps: int


def match(a: nn.Module, b: nn.Module, seed: int = 0, most: int = 100) -> Matching:
    """Finds permutations P_l of the hidden units of b that bring its weights close to those of a.

        min_P ‖w_a − P w_b‖²   ⇔   max_P Σ_l ⟨W_l, P_l W'_l P_{l−1}ᵀ⟩ + ⟨b_l, P_l b'_l⟩

    This is the weight matching of Ainsworth et al. (2022): given its neighbours, the best P_l is a linear assignment,
    and the layers take turns in random order until none improves. The search starts twice, from the given order and
    from assignments made layer by layer from the input, and the better result counts. The second start recovers every
    permutation of a network whose units differ.

    Args:
        a: the network to match, a chain as `hidden_layers` describes it.
        b: the network whose units are reordered. It stays unchanged: `permuted(b, match(a, b).orders)` is the result.
        seed: seed of the order in which layers take turns.
        most: largest number of sweeps over the layers.

    Raises:
        RecipeError: a network is not such a chain, or the two differ in their layers.
    """
    pairs = _Pairs(a, b)
    starts = (pairs.as_given(), pairs.from_the_input())
    found = [_improved(pairs, start, seed, most) for start in starts]
    return max(found, key=lambda each: each.inner)  # a tie goes to the given order


class _Pairs:
    """The layers of two networks of the same shape in float64, each as outputs × units before × the rest."""

    def __init__(self, a: nn.Module, b: nn.Module) -> None:
        self.hidden = hidden_layers(a)
        if self.hidden != hidden_layers(b) or _shapes(a) != _shapes(b):
            raise RecipeError("matching: the networks differ in their layers; give two networks of one architecture")
        self._layers = [_both(a, b, self.hidden, place) for place in range(len(self.hidden) + 1)] if self.hidden else []

    def as_given(self) -> Orders:
        return {each.name: torch.arange(len(self._layers[k][0])) for k, each in enumerate(self.hidden)}

    def from_the_input(self) -> Orders:
        """Assigns each layer by its own weights, after the layers before it."""
        orders: Orders = {}
        for k, each in enumerate(self.hidden):
            orders[each.name] = _assigned(self._own(k, orders))
        return orders

    def best(self, k: int, orders: Orders) -> Tensor:
        """The best order of layer k, given those of its neighbours."""
        return _assigned(self._own(k, orders) + self._reading(k, orders))

    def inner(self, orders: Orders) -> float:
        """Σ ⟨W_l, P_l W'_l P_{l−1}ᵀ⟩ + ⟨b_l, P_l b'_l⟩."""
        total = 0.0
        for k in range(len(self._layers)):
            gains = self._own(k, orders)
            rows = orders[self.hidden[k].name] if k < len(self.hidden) else torch.arange(len(gains))
            total += float(gains[torch.arange(len(gains)), rows].sum())
        return total

    def _own(self, k: int, orders: Orders) -> Tensor:
        """[i, j]: the gain if unit j of b takes place i in layer k, from the layer's own weights and bias."""
        a, b, bias_a, bias_b = self._layers[k]
        before = b[:, orders[self.hidden[k - 1].name]] if k else b
        return a.flatten(1) @ before.flatten(1).T + torch.outer(bias_a, bias_b)

    def _reading(self, k: int, orders: Orders) -> Tensor:
        """[i, j]: the same gain from the weights of the next layer."""
        a, b, *_ = self._layers[k + 1]
        after = b[orders[self.hidden[k + 1].name]] if k + 1 < len(self.hidden) else b
        return a.transpose(0, 1).flatten(1) @ after.transpose(0, 1).flatten(1).T


def _shapes(module: nn.Module) -> list[torch.Size]:
    return [parameter.shape for parameter in module.parameters()]


def _both(a: nn.Module, b: nn.Module, hidden: list[Hidden], place: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The weights of one layer of both networks, and their biases."""
    name = hidden[place].name if place < len(hidden) else hidden[-1].reader
    found = [layer(module, name) for module in (a, b)]
    units = len(layer(a, hidden[place - 1].name).weight) if place else found[0].weight.shape[1]
    weights = [by_unit(each, units).double().cpu() for each in found]
    nothing = torch.zeros(len(weights[0]), dtype=torch.float64)
    biases = [nothing if each.bias is None else each.bias.detach().double().cpu() for each in found]
    return weights[0], weights[1], biases[0], biases[1]


def _assigned(gains: Tensor) -> Tensor:
    from scipy.optimize import linear_sum_assignment

    _, columns = linear_sum_assignment(gains.numpy(), maximize=True)
    return torch.from_numpy(columns)


def _improved(pairs: _Pairs, orders: Orders, seed: int, most: int) -> Matching:
    """Lets the layers take turns until none improves."""
    chance, best = torch.Generator().manual_seed(seed), pairs.inner(orders)
    for sweep in range(1, most + 1):
        changed = dict(orders)
        for k in torch.randperm(len(pairs.hidden), generator=chance).tolist():
            changed[pairs.hidden[k].name] = pairs.best(k, changed)
        gained = pairs.inner(changed)
        if gained <= best + 1e-12 * abs(best):
            return Matching(orders, best, sweep)
        orders, best = changed, gained
    return Matching(orders, best, most)
