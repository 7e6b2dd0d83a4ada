"""Runs two local steps of a part on the small example, to check its ascent and its optimiser."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedflat.errors import FedflatError, RecipeError
from fedflat.local import LocalRule, Vectors, train
from fedflat.methods import contract
from fedflat.models import Network


def example_network(weights: Tensor) -> Network:
    """Return the network of the small example: two linear layers with 4 inputs and 3 classes."""
    network = Network(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)))
    network.load(weights)
    return network


def rehearse(name: str, rule: LocalRule, weights: Tensor, given: tuple[Vectors, Vectors]) -> None:
    """Run two steps with the ascent and the optimiser of one part.

    Terms are left out: some of them support only one model and raise an error otherwise.

    Args:
        name: name of the part, for error messages.
        rule: the client's rule with the ingredients of this part.
        weights: the initial weights.
        given: what the client received and its memory, from which the rule was made. The steps must not write to them.

    Raises:
        RecipeError: the part writes to the client's weights or to what it was given, or does not return a vector and a
            dict.
    """
    if rule.ascent is None and rule.descent is None:
        return
    network = example_network(weights)
    watched: dict[str, Any] = {
        "ascent": rule.ascent and Watched(rule.ascent, "ascent", network),
        "descent": rule.descent and Watched(rule.descent, "optimiser", network),
    }
    rule = replace(rule, steps=2, terms=(), **watched)
    batch = weights[:8].view(2, 4), torch.tensor([0, 1])

    def steps() -> None:
        with suppress(UnsuitedError):
            train(network, weights + 0.1, rule, [batch] * (4 if rule.pairs else 2), F.cross_entropy)

    contract.called(name, steps, given)


class UnsuitedError(Exception):
    """The part does not support the small example; it may be written for one model only."""


class Watched:
    """Wraps an ascent or a descent and checks every call."""

    attention = False  # the example model has none to look at

    def __init__(self, watched: Any, what: str, network: Network) -> None:
        self._watched, self._what, self._network = watched, what, network

    def __getattr__(self, name: str) -> Any:
        return getattr(self._watched, name)  # such as `features` and `activations`

    def start(self, weights: Tensor) -> Vectors:
        """Return the optimiser's state at the beginning of a round."""
        return contract.vectors(self._watched.start(weights))

    def __call__(self, *given: Any) -> Any:
        weights = self._network.weights
        before = weights.clone()
        try:
            result = self._watched(*given)
        except (FedflatError, RuntimeError):  # from torch, if a part needs another model's sizes
            raise UnsuitedError from None
        if not torch.equal(before, weights):
            raise RecipeError(f"its {self._what} writes to the client's weights; it may only read them")
        contract.stepped(result, before, self._what)
        return result
